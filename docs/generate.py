"""Write docs/experiment.md and docs/cli.md from the code: ``python docs/generate.py``. A test compares both with the files."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import json
import re
import textwrap
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fleetbench.cli.main import build_parser
from fleetbench.config import Config, encode, field_types
from fleetbench.experiment import Experiment, Tune
from fleetbench.fields import SEARCHES
from fleetbench.quantities import Nanoseconds
from tuner.space import needs

HERE = Path(__file__).parent
EXPERIMENT = """# The experiment file

```
fleetbench sim mine.toml --set workload.steps=200
```

A TOML file with the tables below; every key may be left out. Unknown keys are errors. Quantities carry units: `"25 Gbit/s"`, `"3 us"`,
`"16 MiB"`; MB are 10^6 bytes, but Fleet's `..._MB` are MiB. This page is generated from the code by `docs/generate.py`.
"""
CLI = """# The command line

```
fleetbench COMMAND --help
```

Exit codes are in [results.md](results.md#exit-codes). This page is generated from the code by `docs/generate.py`.
"""


PLAIN = {
    "str": "text",
    "bool": "true or false",
    "int": "integer",
    "float": "number",
    "Nanoseconds": 'duration: `"3 us"`',
    "BitsPerSecond": 'bandwidth: `"25 Gbit/s"`',
    "Bytes": 'size: `"16 MiB"`',
    "Steps": 'steps: `"150 steps"`',
    "PerStep": "rate per step",
}


def experiment_page() -> str:
    """A section for each table of the file, in the order in which they are reached."""
    sections, todo, known = [EXPERIMENT], [("", Experiment)], set[type]()
    while todo:
        where, cls = todo.pop(0)
        if cls in known:
            continue
        known.add(cls)
        fields = list(_fields(cls))
        rows = [f"| `{field.name}` | {_spelt(kind)} | {_default(field, kind)} | {said} |" for field, kind, said in fields]
        heading = f"## {f'[{where}]' if where else 'Top level'}"
        kind = f'`kind = "{_kind(cls)}"`. ' if _kind(cls) else ""
        sections.append(
            "\n".join([heading, "", kind + _paragraph(cls.__doc__), "", "| key | type | default | |", "|---|---|---|---|", *rows, ""])
        )
        for field, kind, _ in fields:
            todo += [(f"{where}.{field.name}".lstrip("."), inner) for inner in _configs(kind)]
    return "\n".join(sections)


def _fields(cls: type[Config]) -> Iterator[tuple[dataclasses.Field[Any], Any, str]]:
    said = {name: text for base in reversed(cls.__mro__) if dataclasses.is_dataclass(base) for name, text in _said(base).items()}
    for field in sorted(dataclasses.fields(cls), key=lambda field: field.name not in cls.__annotations__):  # its own before a base's
        of_search = _searched(field.name) if cls is Tune and field.name in SEARCHES else ""
        yield field, field_types(cls)[field.name], said.get(field.name, of_search)


def _searched(key: str) -> str:
    """Which field such values are of, and why they may not be searched."""
    name, knob = SEARCHES[key]
    why = needs(Experiment())[knob.need][1]
    return f"Values of `strategy.{name}` that are searched" + (f"; the reason where they are not: {why}." if why else ".")


def _said(cls: type) -> dict[str, str]:
    """The docstrings below a class's attributes."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for one, following in zip(body.body, body.body[1:], strict=False):
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and isinstance(following, ast.Expr):
            value = following.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                found[one.target.id] = _paragraph(value.value).replace("|", "\\|")
    return found


def _paragraph(text: str | None) -> str:
    return re.sub(r"\s+", " ", (text or "").replace("``", "`")).strip()


def _configs(kind: Any) -> list[type[Config]]:
    """Classes of configuration within a type."""
    if isinstance(kind, type) and issubclass(kind, Config):
        return [kind]
    return [inner for part in typing.get_args(kind) for inner in _configs(part)]


def _kind(cls: type[Config]) -> str:
    """The value of ``kind`` that stands for a class among several."""
    value = getattr(cls, "kind", "")
    return value if isinstance(value, str) else ""


def _spelt(kind: Any) -> str:
    """A type, as a reader of TOML would call it."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return " or ".join(f'`"{value}"`' if isinstance(value, str) else f"`{value}`" for value in parts)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_spelt(part) for part in parts if part is not type(None))
    if origin is tuple:
        return f"list of {_spelt(parts[0])}"
    if origin is dict:
        return "table"
    if isinstance(kind, type) and issubclass(kind, Config):
        return "table"
    name = getattr(kind, "__name__", str(kind))
    return PLAIN[name]


def _default(field: dataclasses.Field[Any], kind: Any) -> str:
    if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
        return "required"
    value = field.default if field.default is not dataclasses.MISSING else None
    if value is None or dataclasses.is_dataclass(value) or value == ():
        return ""
    if kind is Nanoseconds:
        return f'`"{value / 10**9:g} s"`' if value else "`0`"
    return f"`{json.dumps(encode(value))}`"


def cli_page() -> str:
    """A section for each command."""
    parser = build_parser()
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))  # noqa: SLF001  # argparse has no public list
    sections = [CLI]
    for name, command in commands.choices.items():
        actions = (action for action in command._actions if action.dest != "help" and action.help != argparse.SUPPRESS)  # noqa: SLF001  # as above
        table = ["| option | |", "|---|---|", *(f"| {_option(action)} | {_help(command, action)} |" for action in actions)]
        sections.append("\n".join([f"## fleetbench {name}", "", _paragraph(command.description), "", *table, ""]))
    return "\n".join(sections)


def _option(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else f" {action.metavar or (action.dest.upper())}"
    if not action.option_strings:
        return f"`{action.metavar or action.dest}`"
    return ", ".join(f"`{option}{value}`" for option in action.option_strings)


def _help(command: argparse.ArgumentParser, action: argparse.Action) -> str:
    if not action.help:
        return ""
    values = {**vars(action), "prog": command.prog}
    return _paragraph(action.help % values).replace("|", "\\|")


PAGES = {"experiment.md": experiment_page, "cli.md": cli_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (HERE / name).write_text(page(), encoding="utf-8")
