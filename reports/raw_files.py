"""Which commit every raw file under ``reports`` was measured with: ``python reports/raw_files.py`` writes the table of ``README.md``.

A file of a campaign names commits itself. Of the others, the last commit that changed the content: the code that measured it is that of
this commit, which brought code and data together, or of the one before.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
README = HERE / "README.md"
MARK = "<!-- what follows is written by raw_files.py -->\n"
RAW = (".json", ".jsonl", ".csv")
NAMED = {"as_ddp_or_refused/seed2.csv": ["7fa7952"]} | {f"elastic/{name}.csv": ["417967b"] for name in ("events", "losses", "rounds")}
"""Files that name no commit, and were measured with an earlier one than that which brought them."""
OF_OTHERS = ("data", "data.csv", "published.csv")
"""Folders and files with measurements by others, whose README names their source."""


def main() -> None:
    """Write the table."""
    rows = [row(path) for path in sorted(map(Path, git("ls-files", ".").splitlines())) if path.suffix in RAW]
    text = README.read_text(encoding="utf-8").partition(MARK)[0]
    table = "| raw file | lines | measured with | date |\n|---|---|---|---|\n" + "".join(rows)
    README.write_text(text + MARK + "\n" + table, encoding="utf-8")


def row(path: Path) -> str:
    """Of one raw file."""
    num_lines = (HERE / path).read_bytes().count(b"\n")
    commit, date = git("log", "-1", "--follow", "--diff-filter=AM", "--format=%h %as", "--", str(path)).split()
    if set(OF_OTHERS) & set(path.parts):
        measured = f"by others ([source]({path.parts[0]}/README.md)); brought by {commit}"
    elif str(path) in NAMED:
        measured = ", ".join(NAMED[str(path)])
    elif named := commits_in(HERE / path):
        measured = ", ".join(named) + ", as its lines say"
        if not all(map(is_kept, named)):
            measured += f"; of a branch that {commit} brings"
    else:
        measured = f"{commit}, or the commit before"
    return f"| [{path}]({path}) | {num_lines} | {measured} | {date} |\n"


def commits_in(path: Path) -> list[str]:
    """The commits that a file's lines name, in their order."""
    if path.suffix != ".jsonl":
        found = re.findall(r'"commit": "([0-9a-f]{7,}\+?)"', path.read_text(encoding="utf-8"))
    else:
        found = [json.loads(line).get("commit") for line in path.read_text(encoding="utf-8").splitlines()]
    return list(dict.fromkeys(commit[:7] for commit in found if commit))


def is_kept(commit: str) -> bool:
    """Whether this history has a commit; that of a branch which was merged as one commit it has not."""
    command = ["git", "-C", str(HERE), "merge-base", "--is-ancestor", commit.rstrip("+"), "HEAD"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def git(*arguments: str) -> str:
    """What git says of this folder."""
    command = ["git", "-C", str(HERE), "-c", "core.abbrev=7", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
