"""Strike every kind of process of every command, at every moment, with every signal, and write down what comes of it.

``python reports/kill_matrix/measure.py [--for SECONDS] [--again] [--only TEXT] [--part I/N]`` appends to ``raw.jsonl`` beside it, a line a
cell, and writes the table into ``README.md``; exit code 1 where a cell is not as expected. Cells that are there are not run
again, but with ``--again`` those that were not as expected.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kill_cells import GRACE_S, MATRIX, PHASES, SIGNALS, STARTUP_S, TIMEOUT_S, Cell, Outcome, cells, expected, read, run_cell

HERE = Path(__file__).parent
MOMENTS = ("start", "middle", "save", "load", "searching", "trials", "verifying", "saving", "end")
COMMANDS = tuple(dict.fromkeys([*MATRIX, *(command for command, *_ in PHASES)]))
RAW, README = HERE / "raw.jsonl", HERE / "README.md"
MARK = "<!-- what follows is written by measure.py -->\n"


def main() -> int:
    """Run what is missing, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--for", type=float, default=float("inf"), dest="budget_s", help="begin no cell after so many seconds")
    parser.add_argument("--jobs", type=int, default=2, help="cells at a time")
    parser.add_argument("--again", action="store_true", help="run cells again that were not as expected")
    parser.add_argument("--only", default="", help="cells whose name contains this text")
    parser.add_argument("--part", default="0/1", help="I/N: every N-th cell from the I-th on, to measure in several processes")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background job ignores, and with it all that it starts
    first, parts = map(int, arguments.part.split("/"))
    known = set(cells())  # lines of earlier versions have cells that are none any more
    found = {outcome.cell: outcome for outcome in read(RAW) if outcome.cell in known} if RAW.exists() else {}
    done = {cell for cell, outcome in found.items() if not (arguments.again and outcome.faults)}
    wanted = [cell for cell in sorted(cells(), key=_order)[first::parts] if cell not in done and arguments.only in str(cell)]
    begin_s, commit = time.monotonic(), _commit()

    def run(cell: Cell) -> Outcome | None:
        return run_cell(cell) if time.monotonic() - begin_s < arguments.budget_s else None

    with ThreadPoolExecutor(arguments.jobs) as threads, RAW.open("a", encoding="utf-8") as raw:
        for outcome in threads.map(run, wanted):
            if outcome is not None:
                found[outcome.cell] = outcome
                raw.write(json.dumps(outcome.record() | {"commit": commit}) + "\n")
                raw.flush()
                print(f"{outcome.cell}: exit code {outcome.code}, {outcome.gone_s:.1f} s {outcome.faults or ''}", flush=True)
    text = README.read_text(encoding="utf-8").partition(MARK)[0] if README.exists() else ""
    README.write_text(text + MARK + _tables(found), encoding="utf-8")
    return int(any(outcome.faults for outcome in found.values()))


def _order(cell: Cell) -> tuple[int, ...]:
    """All commands early, the harshest signals first, and what takes longest later."""
    is_long = cell.command.startswith(("tune", "profile"))
    return SIGNALS.index(cell.signal) + 4 * is_long, MOMENTS.index(cell.moment), COMMANDS.index(cell.command)


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(HERE), *arguments], capture_output=True, text=True, check=True).stdout.strip()  # noqa: S607  # of the user's path

    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--", "../../real", "../../fleetbench") else "")


def _tables(found: dict[Cell, Outcome]) -> str:
    """A table of every command, and what was not as expected."""
    rows: dict[tuple[str, str, str], dict[str, str]] = defaultdict(dict)
    for cell in cells():
        outcome = found.get(cell)
        text = "not run" if outcome is None else f"{outcome.code}, {outcome.gone_s:.1f} s" + (" **!**" if outcome.faults else "")
        rows[cell.command, cell.victim, cell.moment][cell.signal] = text
    slowest = max((outcome.gone_s for outcome in found.values()), default=0.0)
    wrong = [outcome for outcome in found.values() if outcome.faults]
    limits = f"the timeout that applies + {GRACE_S:g} s; `timeout_s` is {TIMEOUT_S:g} s, the start-up timeout {STARTUP_S:g} s"
    text = f"\n{len(found)} of {len(cells())} cells were run; {len(found) - len(wrong)} are as expected. The slowest took {slowest:.1f} s"
    text += f" (limit: {limits}).\n\n| command | victim | moment | {' | '.join(SIGNALS)} | expected |\n"
    text += "|---|---|---|" + "---|" * (len(SIGNALS) + 1) + "\n"
    for (command, victim, moment), by_signal in rows.items():
        told = {which: " or ".join(map(str, expected(Cell(command, moment, victim, which)).codes)) for which in by_signal}
        each = ", ".join(f"{which} {codes}" for which, codes in told.items())
        short = next(iter(told.values())) if len(set(told.values())) == 1 else each
        text += f"| {command} | {victim} | {moment} | {' | '.join(by_signal.get(which, '') for which in SIGNALS)} | {short} |\n"
    if wrong:
        text += "\nNot as expected:\n\n" + "".join(f"- {outcome.cell}: {'; '.join(outcome.faults)}\n" for outcome in wrong)
    return text


if __name__ == "__main__":
    sys.exit(main())
