"""One rank of the collective benchmark's tests: ``collectives_rank.py RANK RANKS STORE OUTPUT``.

Times every collective at every type, again with each collective
broken in two ways; on a clock that counts; and on the process group with NCCL's semantics.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from deferred import FakeStreams, StreamOrder, register

from fleetbench.quantities import Bytes
from real.communication.benchmark import Benchmark, Case, Trial, run_benchmark
from real.communication.clocks import Clock
from real.communication.communicators import Communicators
from real.communication.lanes import StreamLane

TIMEOUT = timedelta(seconds=60)
FUNCTIONS = {
    "all_reduce": "all_reduce",
    "reduce": "reduce",
    "broadcast": "broadcast",
    "reduce_scatter": "reduce_scatter_single",
    "all_gather": "all_gather_single",
}
BROKEN_RANK, BROKEN_ELEMENT = 0, 3


class CountingClock:
    """Marks are 0, 1, 2, ...; they are microseconds once they are resolved, all at once."""

    def __init__(self) -> None:
        self.marks = 0
        self.resolved = 0

    def mark(self) -> int:
        """The next number."""
        self.marks += 1
        return self.marks - 1

    def passed(self, mark: int) -> bool:  # noqa: ARG002  # the protocol's
        """Nothing has, until it is resolved."""
        return False

    def resolve(self, marks: Sequence[int]) -> list[int]:
        """Microseconds."""
        self.resolved += 1
        return [1000 * mark for mark in marks]


@contextmanager
def replaced(kind: str, change: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
    """Let ``change`` do what the collective would."""
    name = FUNCTIONS[kind]
    intact = getattr(dist, name)
    setattr(dist, name, lambda *arguments, **options: change(intact, arguments, options))
    try:
        yield
    finally:
        setattr(dist, name, intact)


def is_left_out(_intact: Callable[..., Any], _arguments: tuple[Any, ...], _options: dict[str, Any]) -> None:
    """Nothing is sent."""


def has_one_wrong_element(intact: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """One element of one rank's result is 1 too large."""
    intact(*arguments, **options).wait()
    if dist.get_rank() == BROKEN_RANK:
        arguments[0][BROKEN_ELEMENT] += 1


def main() -> None:
    """Save times and numbers of wrong elements."""
    rank, ranks, store, output = sys.argv[1:]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks), timeout=TIMEOUT)
    torch.set_num_threads(1)
    communicators = Communicators("gloo", TIMEOUT)
    saved: dict[str, Any] = {}
    heard: list[int] = []
    sizes: dict[str, Any] = {"min_bytes": Bytes(40), "max_bytes": Bytes(20_000), "factor": 20, "warmup": 1, "iterations": 3}
    benchmark = Benchmark(**sizes)
    measured = run_benchmark(benchmark, communicators, heard.append)
    for case, found in zip(benchmark.cases(int(ranks)), measured, strict=True):
        name = f"{case.collective} {case.count}"
        saved[f"wrong/{name}"], saved[f"times/{name}"] = found["wrong"], found["times_ns"]
    saved["heard"] = heard
    for kind in FUNCTIONS:
        case = _case(kind, int(ranks))
        trial = Trial(case, communicators, Clock())
        trial.count_wrong()  # what is left of a right result is no result
        for change in (is_left_out, has_one_wrong_element):
            with replaced(kind, change):
                saved[f"{change.__name__}/{kind}"] = trial.count_wrong()
        saved[f"mended/{kind}"] = trial.count_wrong()
    saved |= _counted(communicators, int(ranks)) | _deferred(int(ranks))
    np.savez(output, **saved)
    communicators.barrier()
    communicators.close()
    dist.destroy_process_group()


def _case(kind: str, ranks: int) -> Case:
    return Case(collective=kind, count=1000, ranks=ranks)


def _counted(communicators: Communicators, ranks: int) -> dict[str, Any]:
    clock = CountingClock()
    times = Trial(_case("all_reduce", ranks), communicators, clock).repeat(5)
    return {"clock/times": times, "clock/resolved": clock.resolved}


def _deferred(ranks: int) -> dict[str, Any]:
    """Every collective where results are poison until an operation ordered after their wait touches them."""
    streams = FakeStreams()
    register(streams)
    communicators = Communicators("deferred", TIMEOUT, lane=lambda _name: StreamLane(streams))
    communicators.require(1)
    saved: dict[str, Any] = {}
    for kind in FUNCTIONS:
        with StreamOrder(streams):
            trial = Trial(_case(kind, ranks), communicators, Clock())
            trial.repeat(2)
            saved[f"deferred/{kind}"] = trial.count_wrong()
    communicators.close()
    return saved


if __name__ == "__main__":
    main()
