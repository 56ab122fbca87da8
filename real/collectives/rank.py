"""One rank of a collective benchmark: starts the collectives, times them, and checks one result of each case.

Iterations follow each other without a barrier, as in nccl-tests; a mark of the clock lies between
them. On a device the collectives are enqueued, and marks are read when all have run.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from real.collectives.bench import KINDS, Benchmark, Case
from real.collectives.inputs import PERIOD, Numbers, inputs, result, tolerance
from real.communication.clocks import Clock, clock_of
from real.communication.communicators import Communicators, collective_errors
from real.communication.streams import host_reads

ROOT = 0
_SIGN_OF_LIFE_S = 1.0
_OPERATORS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX}
_NEVER_RIGHT = -1


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
        self._case = case
        self._groups = groups
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
        self._device = groups.device
        self._divides = groups.device.type == "cpu"
        self._group = groups.world(communicator)
        self._shift = 31 * communicator  # what one communicator carries is wrong on another
        self._dtype: torch.dtype = getattr(torch, case.type)
        pieces = KINDS[case.collective].splits
        gathers = case.collective == "all_gather"
        self._sent = torch.empty(case.count if gathers else case.numel, dtype=self._dtype, device=self._device)
        self._received = self._sent
        if pieces:
            self._received = torch.empty(case.numel if gathers else case.count, dtype=self._dtype, device=self._device)

    def start(self) -> dist.Work | None:
        """Begin it."""
        kind, operator = self._case.collective, _OPERATORS.get(self._case.redop)
        work: dist.Work | None
        if kind == "all_reduce":
            work = dist.all_reduce(self._sent, op=operator, group=self._group, async_op=True)
        elif kind == "reduce":
            work = dist.reduce(self._sent, dst=ROOT, op=operator, group=self._group, async_op=True)
        elif kind == "broadcast":
            work = dist.broadcast(self._sent, src=ROOT, group=self._group, async_op=True)
        elif kind == "reduce_scatter":
            work = dist.reduce_scatter_single(self._received, self._sent, op=operator, group=self._group, async_op=True)
        else:
            work = dist.all_gather_single(self._received, self._sent, group=self._group, async_op=True)
        return work

    def clear(self) -> None:
        """Zeros, written to every page: memory that was never written costs nothing to read."""
        self._sent.fill_(0)
        self._received.fill_(0)

    def fill(self) -> None:
        """This rank's inputs, and a result that is none."""
        self._received.fill_(_NEVER_RIGHT)
        self._sent.copy_(self._repeated(inputs(self._case)[self._rank].astype(np.float64), self._sent.numel()))

    def count_wrong(self) -> int:
        """Elements of the result that differ from what they must be; 0 where this rank gets none."""
        if self._case.collective == "reduce" and self._rank != ROOT:
            return 0
        brought, count, wrong = inputs(self._case), self._case.count, 0
        if self._case.collective == "all_gather":
            for rank, row in enumerate(brought):
                wrong += self._num_unlike(self._received[rank * count : (rank + 1) * count], row.astype(np.float64), 0)
            return wrong
        expected = brought[ROOT].astype(np.float64) if self._case.collective == "broadcast" else result(self._case, brought)
        begin = self._rank * count if self._case.collective == "reduce_scatter" else 0
        return self._num_unlike(self._received, expected, begin)

    def _num_unlike(self, found: torch.Tensor, period: Numbers, begin: int) -> int:
        expected = self._repeated(period, found.numel(), begin)
        allowed = tolerance(self._case, divides=self._divides)
        if allowed == 0.0:
            return int((found != expected).sum())
        near = (found.double() - expected.double()).abs() <= allowed * expected.double()
        return int((~near).sum())

    def _repeated(self, period: Numbers, numel: int, begin: int = 0) -> torch.Tensor:
        """``period``, shifted by the communicator, over and over from element ``begin`` on."""
        once = torch.from_numpy(np.roll(period, -((begin + self._shift) % PERIOD))).to(self._device, self._dtype)
        return once.repeat(-(-numel // PERIOD))[:numel]
