"""Time every strategy beside DDP, PostLocalSGDOptimizer and torchft, all in one run and in turns.

Run from the repository's root: ``python reports/strategies/measure.py --rounds 5``; ``--quick`` checks in
minutes that everything runs, and its figures mean nothing. Appends to ``raw.jsonl`` and prints the tables
of tables.md, which ``python reports/strategies/summary.py`` prints again. Each round of a model is a launch
of its own: every arm once in a drawn order, then once in its mirror image. A round during which other
programs took more than 0.15 of a core is kept, and repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from summary import QUIET_CORES, figure, foreign_cores, print_summary, read

from fleetbench.store import machine, versions

HERE = Path(__file__).parent
LAUNCH_TIMEOUT_S = 3600.0
MEMORY_ARMS = ("none", "ddp", "ddp_views", "ddp_tuned", "ours", "ours_fused", "post_local", "ours_local", "no_sync", "ours_merge")
RESIDENT_ARMS = ("ddp", "ddp_views", "ours", "ours_fused")
RESIDENT_REPEATS = 3
MMAP_THRESHOLD = "65536"
"""Larger tensors live in mappings of their own, which leave resident memory when they are freed."""

Finding = dict[str, Any]


class Raw:
    """The raw data: one JSON object a line, appended launch by launch."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: list[Finding] = read(path)

    def add(self, findings: Sequence[Finding]) -> None:
        """Append one launch's findings, all or none."""
        self.found += findings
        with self.path.open("a", encoding="utf-8") as out:
            out.writelines(json.dumps(finding) + "\n" for finding in findings)

    def of(self, kind: str, **wanted: object) -> Iterator[Finding]:
        """What was found so far."""
        wanted |= {"kind": kind}
        return (finding for finding in self.found if all(finding.get(key) == value for key, value in wanted.items()))


def launch(ranks: int, job: Finding) -> list[Finding]:
    """Run rank.py on ``ranks`` processes; what rank 0 found. Raises ``RuntimeError`` with their output where one fails."""
    begin = time.time()
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        if job["kind"] == "resident":
            environment["MALLOC_MMAP_THRESHOLD_"] = MMAP_THRESHOLD
        logs = [Path(folder) / f"log{rank}" for rank in range(ranks)]
        output = Path(folder) / "found.jsonl"
        processes = []
        for rank, log in enumerate(logs):
            command = [sys.executable, str(HERE / "rank.py"), str(rank), str(ranks), f"{folder}/store", str(output), json.dumps(job)]
            with log.open("wb") as out:
                processes.append(subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT))
        try:
            while any(process.poll() is None for process in processes):
                failed = any(process.poll() not in (None, 0) for process in processes)
                if failed or time.time() - begin > LAUNCH_TIMEOUT_S:
                    break
                time.sleep(0.2)
            if any(process.poll() not in (None, 0) for process in processes):
                time.sleep(2.0)  # the others' own ends tell who was first
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if any(process.returncode != 0 for process in processes):
            texts = "\n".join(
                f"--- rank {rank}, exit {process.returncode}\n{log.read_text(encoding='utf-8')[-3000:]}"
                for rank, (process, log) in enumerate(zip(processes, logs, strict=True))
            )
            raise RuntimeError(f"{job} failed\n{texts}")
        at = datetime.fromtimestamp(begin, UTC).isoformat(timespec="seconds")
        return [{**finding, "launched": at} for finding in read(output)]


def main() -> None:
    """Search, rounds in turns over all cells, plan's calls, memory; then the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round of few steps on 2 ranks, into a temporary file")
    parser.add_argument("--models", nargs="+", default=["deep", "wide", "conv", "resnet18"])
    parser.add_argument("--ranks", nargs="+", type=int, default=None, help="2 and 4")
    parser.add_argument("--arms", nargs="+", default=None, help="only these, besides those that they are compared with")
    parser.add_argument("--torchft", default="", help="folder that pip installed torchft into with --target")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--resume", action="store_true", help="continue the raw data that are there")
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    ranks = options.ranks or ([2] if options.quick else [2, 4])
    path = options.out or (Path(tempfile.gettempdir()) / "strategies_quick.jsonl" if options.quick else HERE / "raw.jsonl")
    if not options.resume:
        path.unlink(missing_ok=True)
    raw = Raw(path)
    if not list(raw.of("header")):
        started = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
        raw.add([{"kind": "header", "started": started, "machine": machine(), "versions": versions(), "rounds": rounds}])
    cells = [(model, number) for model in options.models for number in ranks]
    measure(raw, cells, rounds, {"quick": options.quick, "torchft": options.torchft, "tuned": {}, "ours": {}}, options.arms)
    print_summary(raw.found)
    figure(raw.found, path.with_name("speed.png") if path.parent == HERE else path.with_suffix(".png"))


def measure(raw: Raw, cells: Sequence[tuple[str, int]], rounds: int, base: Finding, arms: Sequence[str] | None) -> None:
    """Everything that the raw data do not hold yet."""
    for model, ranks in cells:
        for kind in ("search", "search_ours"):
            if not list(raw.of(kind, model=model, ranks=ranks)):
                _add(raw, ranks, {**base, "kind": kind, "model": model})
    for number in range(rounds if base["quick"] else 2 * rounds):
        for model, ranks in cells:
            done = next(raw.of("round", model=model, ranks=ranks, round=number), None) is not None
            if not done and _num_quiet(raw, model, ranks) < rounds:
                job = {**base, "kind": "round", "model": model, **_tuned(raw, model, ranks), "round": number}
                _add(raw, ranks, {**job, "order": _order(model, ranks, number, arms)})
    for model, ranks in cells:
        if not list(raw.of("plan", model=model, ranks=ranks)):
            _add(raw, ranks, {**base, "kind": "plan", "model": model})
    for model in dict.fromkeys(model for model, ranks in cells if ranks == 2):
        _measure_memory(raw, model, base)


def _measure_memory(raw: Raw, model: str, base: Finding) -> None:
    job = {**base, "model": model, **_tuned(raw, model, 2)}
    if not list(raw.of("live", model=model)):
        _add(raw, 2, {**job, "kind": "live", "arms": MEMORY_ARMS})
    for arm in RESIDENT_ARMS:
        for _ in range(len(list(raw.of("resident", model=model, arm=arm))), 1 if base["quick"] else RESIDENT_REPEATS):
            _add(raw, 2, {**job, "kind": "resident", "arms": [arm]})


def _add(raw: Raw, ranks: int, job: Finding) -> None:
    begin = time.monotonic()
    try:
        found = launch(ranks, job)
    except RuntimeError as error:
        plain = json.loads(json.dumps(job))  # as a file that is continued gives it back
        failures = list(raw.of("failure", job=plain, ranks=ranks))
        raw.add([{"kind": "failure", "job": plain, "ranks": ranks, "text": str(error)[-8000:]}])
        if failures:
            raise
        print(f"# failed, once more:\n{error}", file=sys.stderr, flush=True)
        _add(raw, ranks, job)
        return
    raw.add(found)
    busy = foreign_cores(found)
    note = "" if busy is None else f", {busy:.2f} cores taken by others"
    name = " ".join(str(job[key]) for key in ("model", "kind", "round") if key in job)
    print(f"# {name}, {ranks} ranks: {time.monotonic() - begin:.0f} s{note}", file=sys.stderr, flush=True)


def _num_quiet(raw: Raw, model: str, ranks: int) -> int:
    numbers = {finding["round"] for finding in raw.of("round", model=model, ranks=ranks)}
    busy = [foreign_cores(list(raw.of("round", model=model, ranks=ranks, round=number))) for number in numbers]
    return sum(cores is not None and cores <= QUIET_CORES for cores in busy)


def _tuned(raw: Raw, model: str, ranks: int) -> Finding:
    best = {
        kind: next(finding["options"] for finding in raw.of(kind, model=model, ranks=ranks) if finding["best"])
        for kind in ("search", "search_ours")
    }
    return {"tuned": best["search"], "ours": best["search_ours"]}


def _order(model: str, ranks: int, number: int, arms: Sequence[str] | None) -> list[str]:
    from arms import TIMED  # torch takes seconds to import, and the driver needs nothing else of it

    order = [name for name in TIMED if arms is None or name in arms]
    random.Random(f"{model} {ranks} {number // 2}").shuffle(order)  # noqa: S311  # no secret
    return order if number % 2 == 0 else order[::-1]


if __name__ == "__main__":
    main()
