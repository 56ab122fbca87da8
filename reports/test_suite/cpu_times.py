"""What every test takes: a plugin of pytest, and the table of README.md.

    CPU_TIMES=/tmp/times PYTHONPATH=$PWD/reports/test_suite PYTEST_ADDOPTS="-p cpu_times" make test
    python reports/test_suite/cpu_times.py /tmp/times     # writes by_file.csv, prints the table

A line a test: its name, seconds of wall time, CPU seconds of the process that ran it, and of the processes below it, ended or not: what a
fork server and its forks compute counts with the test that asks for it.
"""

from __future__ import annotations

import csv
import json
import os
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def _now() -> tuple[float, float, float]:
    own, below = _of("self")
    return time.monotonic(), own, below + sum(sum(_of(str(pid))) for pid in _below("self"))


def _of(pid: str) -> tuple[float, float]:
    """CPU seconds of a process, and of those that it waited for."""
    try:
        fields = Path("/proc", pid, "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:  # it has ended
        return 0.0, 0.0
    user, system, user_below, system_below = (int(field) / os.sysconf("SC_CLK_TCK") for field in fields[11:15])
    return user + system, user_below + system_below


def _below(pid: str) -> list[int]:
    """The processes that live below this one."""
    found: list[int] = []
    try:
        for thread in Path("/proc", pid, "task").iterdir():
            found += map(int, (thread / "children").read_text(encoding="utf-8").split())
    except OSError:  # it has ended
        return []
    return [*found, *(one for child in found for one in _below(str(child)))]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Append a test's times to this process's file."""
    before = _now()
    result = yield
    row = [item.nodeid, *(round(after - one, 3) for one, after in zip(before, _now(), strict=True))]
    with Path(f"{os.environ['CPU_TIMES']}.{os.getpid()}").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    return result


def main(prefix: Path) -> None:
    """Sum up by file, and by folder of tests."""
    by_file: dict[str, list[float]] = {}
    for path in prefix.parent.glob(f"{prefix.name}.*"):
        for line in path.read_text(encoding="utf-8").splitlines():
            name, *times = json.loads(line)
            _add(by_file, name.partition("::")[0], [1, *times])
    with (HERE / "by_file.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(["file", "tests", "wall_s", "own_cpu_s", "children_cpu_s"])
        table.writerows([name, int(row[0]), *(round(value, 1) for value in row[1:])] for name, row in sorted(by_file.items()))
    by_folder: dict[str, list[float]] = {}
    for name, row in by_file.items():
        _add(by_folder, name.split("/")[1] if name.count("/") > 1 else "the rest", row)
    for folder, row in sorted(by_folder.items(), key=lambda one: -sum(one[1][2:])):
        print(f"| {folder} | {row[0]:,.0f} | {row[1]:.0f} | {row[2]:.0f} | {row[3]:.0f} |")


def _add(sums: dict[str, list[float]], name: str, row: list[float]) -> None:
    sums[name] = [one + other for one, other in zip(sums.get(name, [0.0] * len(row)), row, strict=True)]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
