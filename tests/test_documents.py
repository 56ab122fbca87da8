"""What pages say is current, leads somewhere, and is plain English."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import pkgutil
import re
import runpy
from pathlib import Path
from types import FunctionType

import pytest

from fleetbench.fleet_names import ALIASES, NO_EFFECT
from fleetbench.strategy import BuildStrategy, DistributedStrategy

ROOT = Path(__file__).resolve().parent.parent
OF_OTHER_FORM = {
    "experiment.md": "generated",
    "cli.md": "generated",
    "scripts.md": "diffs of whole scripts",
}
"""Pages that ``test_a_page_answers_one_question_in_plain_english`` leaves out, and why."""
PRIVATE = (
    r"behind",  # of time: after
    r"in front of",  # of time: before
    r"nobody|whoever",  # name the actor
    r"(go|goes|going|went) on",  # continues
    r"anew|foretells?|meanwhile",  # again, predicts, during
    r"(is|are|was) no (?!longer|more than|less than)\w+ of",  # is not part of
    r"that there is not|that is not there",  # missing
)
"""Words that plain English does not need, as regular expressions."""


def test_generated_pages_are_current() -> None:
    """docs/experiment.md and docs/cli.md say what the code does now: ``python docs/generate.py`` writes them."""
    pages = runpy.run_path(str(ROOT / "docs" / "generate.py"))["PAGES"]
    for name, page in pages.items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == page(), f"docs/{name}: run python docs/generate.py"


def test_every_field_of_fleet_is_mapped() -> None:
    """docs/from_fleet.md names every field of a strategy, and every name of Fleet's that is read as another or has no effect."""
    text = (ROOT / "docs" / "from_fleet.md").read_text(encoding="utf-8")
    fields = {field.name for cls in (DistributedStrategy, BuildStrategy) for field in dataclasses.fields(cls)}
    old = {"recompute_checkpoints", "local_sgd_steps", "local_sgd_is_warm_steps", "collective_mode", "num_threads"}
    missing = [name for name in sorted(fields | ALIASES.keys() | NO_EFFECT | old) if not re.search(rf"\b{name}\b", text)]
    assert not missing


def test_every_page_is_on_the_map_and_every_link_leads_somewhere() -> None:
    """docs/README.md names every page once, and links between pages, to files, to reports and to headings exist."""
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    named = re.findall(r"\]\((\w+\.md)\)", (ROOT / "docs" / "README.md").read_text(encoding="utf-8"))
    assert sorted(named) == sorted(pages)
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "reports").glob("*.md")):
        for link, heading in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8")):
            target = page.parent / link if link else page
            assert target.exists(), f"{page.name} links to {link}"
            assert not heading or heading in _headings(target), f"{page.name} links to {link}#{heading}"


def _headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.stem)
def test_a_page_answers_one_question_in_plain_english(page: Path) -> None:
    """A page begins with an example, has at most 120 lines of at most 120 characters, and none of the words of a private language."""
    if page.name in OF_OTHER_FORM:
        pytest.skip(f"{page.name}: {OF_OTHER_FORM[page.name]}")
    text = page.read_text(encoding="utf-8")
    lines = text.splitlines()
    assert len(lines) <= 120
    assert any(line.startswith("```") for line in lines[:12]), "begins with a command or an example"
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    assert [line for line in prose.splitlines() if len(line) > 120 and not line.startswith("|")] == []
    assert [found[0] for word in PRIVATE for found in re.finditer(rf"\b({word})\b", prose, re.IGNORECASE)] == []


def test_every_page_says_where_its_figures_come_from() -> None:
    """reports/figures.md names each page, in its table or as one without measured figures, and each page still says what stands there."""
    text = (ROOT / "reports" / "figures.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+\.\w+) \| (.*?) \| \S.* \|$", text, re.MULTILINE)
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "notebooks").glob("*.ipynb")]
    said = {page.name: " ".join(page.read_text(encoding="utf-8").split()) for page in reversed(pages)}
    without = set(re.findall(r"[\w.]+\.md", text.partition("## Pages without measured figures")[2]))
    assert {name for name, _ in rows} | without == said.keys()
    assert {name for name, _ in rows} & without <= {"README.md"}, "the README, and that of docs"
    for name, figures in rows:
        assert [figure for figure in re.findall(r"`([^`]+)`", figures) if figure not in said[name]] == [], name


NAMED = re.compile(r"\b((?:fleetbench|sim|real|tuner|fleet|figures)(?:\.[A-Za-z_]\w*)+)")
IMPORTED = re.compile(r"^from ((?:fleetbench|sim|real|tuner)[\w.]*) import ([\w, ]+)$", re.MULTILINE)
LISTED = re.compile(r"`([\w.]+)`\s+has\s+((?:`\w+`(?:,|\s|and)*)+)")
PREFIXES = {"fleet": "fleetbench.fleet", "figures": "fleetbench.report.figures"}


def _exists(name: str) -> bool:
    first, _, rest = name.partition(".")
    try:
        pkgutil.resolve_name(f"{PREFIXES.get(first, first)}.{rest}")
    except (ImportError, AttributeError):
        return False
    return True


def _named_on(page: str) -> set[str]:
    """The modules, functions and classes of ours that a page names in code, and those that it lists after ``MODULE has``."""
    code = "\n".join([*re.findall(r"`([^`\n]+)`", page), *re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)])
    names = {name for name in NAMED.findall(code) if not name.endswith((".toml", ".json", ".py"))}
    names |= {f"{module}.{name.strip()}" for module, listed in IMPORTED.findall(code) for name in listed.split(",")}
    lists = [(module, listed) for module, listed in LISTED.findall(page) if NAMED.fullmatch(module)]
    return names | {f"{module}.{name}" for module, listed in lists for name in re.findall(r"`(\w+)`", listed)}


def test_every_function_that_a_page_names_exists() -> None:
    """In code, in imports, and in a list of what a module has; the pattern finds the kind that it looks for."""
    sample = "`fleetbench.report.figures` has `scaling` and `nothing`.\n```python\nfrom fleetbench import nobody\n```\n`fleet.nowhere()`"
    missing = {"fleetbench.report.figures.nothing", "fleetbench.nobody", "fleet.nowhere"}
    assert {name for name in _named_on(sample) if not _exists(name)} == missing
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        names = _named_on(page.read_text(encoding="utf-8"))
        assert [name for name in sorted(names) if not _exists(name)] == [], page.name


def _stale(source: str) -> list[str]:
    """The names that a source imports from our packages and that are missing, and its calls of the others that they do not take."""
    tree, ours, out = ast.parse(source), {}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in {"fleetbench", "sim", "real", "tuner"}:
            for alias in node.names:
                try:
                    ours[alias.asname or alias.name] = pkgutil.resolve_name(f"{node.module}.{alias.name}")
                except (ImportError, AttributeError):
                    out.append(f"{node.module}.{alias.name}")
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and isinstance(ours.get(node.func.id), type | FunctionType)):
            continue
        named = {keyword.arg: None for keyword in node.keywords if keyword.arg}
        unknown = len(named) < len(node.keywords) or any(isinstance(argument, ast.Starred) for argument in node.args)
        bind = getattr(inspect.signature(ours[node.func.id]), "bind_partial" if unknown else "bind")
        try:
            bind(*(None for argument in node.args if not isinstance(argument, ast.Starred)), **named)
        except TypeError as wrong:
            out.append(f"line {node.lineno}: {node.func.id}: {wrong}")
    return out


def test_scripts_of_reports_call_what_exists() -> None:
    """No name of ours that a script imports has gone, and none is called with arguments that it has lost: mypy does not read reports/."""
    sample = "from sim.run import simulate, simulated\nfrom real.job.session import Session\nsimulate(x, speed=2)\nSession(x, y)"
    missing, lost, surplus = _stale(sample)
    assert missing == "sim.run.simulated"
    assert "'speed'" in lost
    assert surplus.startswith("line 4: Session: too many")
    for path in (ROOT / "reports").rglob("*.py"):
        assert _stale(path.read_text(encoding="utf-8")) == [], path


def _texts(source: str) -> list[str]:
    """What a source says while it runs: its strings, those in formatted ones too, without docstrings."""
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in docstrings]
    return [node.value for node in constants if isinstance(node.value, str)]


def test_no_message_names_a_page() -> None:
    """An installed package has no docs/: a message says it itself, or names the command that does."""
    page = re.compile(r"docs/|\b(?!recommended\.md)\w+\.md\b")  # that page is written beside a recommendation
    assert [text for text in _texts('"""see a.md"""\nraise E(f"{x}: see docs/a.md")') if page.search(text)] == [": see docs/a.md"]
    for package in ("fleetbench", "sim", "real", "tuner"):
        for path in (ROOT / package).rglob("*.py"):
            assert [text for text in _texts(path.read_text(encoding="utf-8")) if page.search(text)] == [], path
        for path in (path for kind in ("*.toml", "*.sh", "*.yaml", "*.html") for path in (ROOT / package).rglob(kind)):
            assert page.findall(path.read_text(encoding="utf-8")) == [], path


def test_figures_that_moved_are_named() -> None:
    """``make reports``: rows are told by their words, whatever their spaces; a number beyond the spread has moved, a new row has not."""
    again = runpy.run_path(str(ROOT / "reports" / "again.py"))
    committed = again["rows"](["| 4 GPUs | 3.1 %, **missed** |", "| 8 GPUs | 1,200 ms |"])
    now = again["rows"](["| 4 GPUs | 3.2%, missed |", "| 8 GPUs | 1200 ms |", "| 16 nodes | 7 |"])
    compared, moved = again["moved"](now, committed, 0.0)
    assert compared == 2
    assert len(moved) == 1
    assert "committed [4.0, 3.1], now [4.0, 3.2]" in moved[0]
    assert again["moved"](now, committed, 0.05) == (2, [])
