"""One rank of a collective benchmark: starts the collectives, times them, and checks one result of each case.

Iterations follow each other without a barrier, as in nccl-tests; a mark of the clock lies between
them. On a device the collectives are enqueued, and marks are read when all have run.

Inputs are such that there is one right answer, to the last bit: every rank brings whole numbers so small that each
partial sum, in whatever order, is one that the type holds. They repeat with a prime period, so that pieces that change
places show.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from real.collectives.bench import KINDS, Benchmark, Case
from real.communication.clocks import Clock, clock_of
from real.communication.communicators import Communicators, collective_errors
from real.communication.streams import host_reads

ROOT = 0
PERIOD = 251
EXACT_UP_TO: dict[str, int] = {"float32": 2**24, "float16": 2**11, "bfloat16": 2**8}
"""Up to here a type holds every whole number."""
_SIGN_OF_LIFE_S = 1.0
_NEVER_RIGHT = -1

Integers = npt.NDArray[np.int64]


def run_benchmark(benchmark: Benchmark, communicators: Communicators, on_case: Callable[[int], None]) -> list[dict[str, Any]]:
    """Time every case; every rank calls this at the same place.

    ``times_ns`` of the iterations and the number of ``wrong`` elements, a case. ``on_case`` hears of
    every case by its number from 1, and again at least every second or iteration, whichever is longer.
    """
    communicators.require(benchmark.communicators)
    communicators.prove(benchmark.communicators)
    clock = clock_of(communicators.device)
    measured = []
    for number, case in enumerate(benchmark.cases(communicators.trainers), start=1):
        on_case(number)
        trial = Trial(case, benchmark.communicators, communicators, clock)
        trial.repeat(benchmark.warmup)
        communicators.barrier()
        times_ns = trial.repeat(benchmark.iterations, partial(on_case, number))
        measured.append({"times_ns": times_ns, "wrong": trial.count_wrong()})
    return measured


class Trial:
    """One case on this rank, on several communicators at once: buffers, and what runs on them."""

    def __init__(self, case: Case, communicators: int, groups: Communicators, clock: Clock) -> None:
        self._clock = clock
        self._flights = [Flight(case, groups, number) for number in range(communicators)]

    def repeat(self, iterations: int, alive: Callable[[], None] = lambda: None) -> list[int]:
        """Run it so many times, on zeros: sums in place would grow. Nanoseconds of each."""
        for flight in self._flights:
            flight.clear()
        marks = [self._clock.mark()]
        said_s = time.monotonic()
        for _ in range(iterations):
            self._run()
            marks.append(self._clock.mark())
            if time.monotonic() - said_s > _SIGN_OF_LIFE_S:
                alive()
                said_s = time.monotonic()
        times = self._clock.resolve(marks)
        return [end - begin for begin, end in itertools.pairwise(times)]

    def count_wrong(self) -> int:
        """Run it once on known inputs: elements of this rank's results that are not as they must be."""
        for flight in self._flights:
            flight.fill()
        self._run()
        with host_reads():
            return sum(flight.count_wrong() for flight in self._flights)

    def _run(self) -> None:
        with collective_errors():
            works = [flight.start() for flight in self._flights]
            for work in works:
                if work is not None:
                    work.wait()


class Flight:
    """One collective on one communicator: what is sent, and what is received, which may be one tensor."""

    def __init__(self, case: Case, groups: Communicators, communicator: int) -> None:
        self._case = case
        self._rank = groups.rank
        self._group = groups.world(communicator)
        self._shift = 31 * communicator  # what one communicator carries is wrong on another
        empty = partial(torch.empty, dtype=getattr(torch, case.type), device=groups.device)
        gathers = case.collective == "all_gather"
        self._sent = empty(case.count if gathers else case.numel)
        self._received = empty(case.numel if gathers else case.count) if KINDS[case.collective].splits else self._sent

    def start(self) -> dist.Work | None:
        """Begin it."""
        kind = self._case.collective
        options: dict[str, Any] = {"group": self._group, "async_op": True}
        work: dist.Work | None
        if kind == "all_reduce":
            work = dist.all_reduce(self._sent, **options)
        elif kind == "reduce":
            work = dist.reduce(self._sent, dst=ROOT, **options)
        elif kind == "broadcast":
            work = dist.broadcast(self._sent, src=ROOT, **options)
        elif kind == "reduce_scatter":
            work = dist.reduce_scatter_single(self._received, self._sent, **options)
        else:
            work = dist.all_gather_single(self._received, self._sent, **options)
        return work

    def clear(self) -> None:
        """Zeros, written to every page: memory that was never written costs nothing to read."""
        self._sent.fill_(0)
        self._received.fill_(0)

    def fill(self) -> None:
        """This rank's inputs, and a result that is none."""
        self._received.fill_(_NEVER_RIGHT)
        self._sent.copy_(self._repeated(inputs(self._case)[self._rank], self._sent.numel()))

    def count_wrong(self) -> int:
        """Elements of the result that differ from what they must be; 0 where this rank gets none."""
        if self._case.collective == "reduce" and self._rank != ROOT:
            return 0
        return int((self._received != self._expected()).sum())

    def _expected(self) -> torch.Tensor:
        kind, count, brought = self._case.collective, self._case.count, inputs(self._case)
        if kind == "all_gather":
            return torch.cat([self._repeated(row, count) for row in brought])
        period = brought[ROOT] if kind == "broadcast" else brought.sum(axis=0)
        return self._repeated(period, self._received.numel(), self._rank * count if kind == "reduce_scatter" else 0)

    def _repeated(self, period: Integers, numel: int, begin: int = 0) -> torch.Tensor:
        """``period``, shifted by the communicator, over and over from element ``begin`` on."""
        once = torch.from_numpy(np.roll(period, -((begin + self._shift) % PERIOD))).to(self._sent)
        return once.repeat(-(-numel // PERIOD))[:numel]


def inputs(case: Case) -> Integers:
    """What the ranks bring: a row a rank, of one period."""
    ranks, most = case.ranks, EXACT_UP_TO[case.type]
    if not KINDS[case.collective].reduces:
        return _mixed(ranks) % (most + 1)
    if ranks <= most:
        return _mixed(ranks) % (most // ranks + 1)
    # The type does not hold the sum of as many ones: only every so many ranks bring anything, others at every element.
    stride = -(-ranks // most)
    turn = (np.arange(ranks)[:, None] + np.arange(PERIOD)) % stride
    return np.where(turn == 0, 1, 0)


def _mixed(ranks: int) -> Integers:
    """Numbers below 2^24 that look random, the same in every process: Knuth's multiplicative hash."""
    index = np.arange(1, ranks * PERIOD + 1, dtype=np.uint64).reshape(ranks, PERIOD)
    return ((index * np.uint64(2654435761) % np.uint64(2**32)) >> np.uint64(8)).astype(np.int64)
