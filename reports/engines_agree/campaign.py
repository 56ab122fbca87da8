"""Whole random strategies by both engines of the simulator: equal to the nanosecond, or refused alike.

``python campaign.py [FIRST COUNT [RAW.jsonl]]`` from the repository's root adds so many experiments of ``tests/engine_cases.py`` to the raw
data; without numbers it counts what is there.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path

from fleetbench.store import commit, machine, versions

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from engine_cases import agree, case_of

RAW = Path(__file__).with_name("raw.jsonl")


def examine(seed: int) -> str:
    """How the vector engine executed an experiment that both engines agree on, or what sets them apart."""
    try:
        return agree(case_of(seed))
    except Exception as error:  # noqa: BLE001  # whatever it is, it sets them apart
        text = str(error).strip().splitlines()
        return f"DIFFERS: {type(error).__name__}: {text[0] if text else ''}"


def add(first: int, count: int, raw: Path) -> None:
    """A line for the ground, then a line an experiment."""
    with raw.open("a", encoding="utf-8") as file:
        print(json.dumps({"commit": commit(), "machine": machine(), "versions": versions()}), file=file, flush=True)
        for seed in range(first, first + count):
            began_s = time.process_time()
            way, changes = examine(seed), case_of(seed).experiment.strategy.changes()
            line = {"seed": seed, "way": way, "processor_s": round(time.process_time() - began_s, 3), "strategy": changes}
            print(json.dumps(line), file=file, flush=True)


def show(raw: Path) -> None:
    """The tables of the README."""
    lines = [json.loads(line) for line in raw.read_text(encoding="utf-8").splitlines()]
    cases = {line["seed"]: line for line in lines if "seed" in line}
    print(f"commits: {sorted({line['commit'] for line in lines if 'commit' in line})}")
    print(f"experiments: {len(cases)}, seeds {min(cases)} to {max(cases)}, {sum(line['processor_s'] for line in cases.values()):.0f} s")
    for way, number in Counter(line["way"] for line in cases.values()).most_common():
        print(f"| {way} | {number} |")
    for name, number in Counter(name for line in cases.values() for name in line["strategy"]).most_common():
        print(f"| `{name}` | {number} |")


if __name__ == "__main__":
    data = Path(sys.argv[3]) if len(sys.argv) > 3 else RAW
    if len(sys.argv) > 1:
        add(int(sys.argv[1]), int(sys.argv[2]), data)
    show(data)
