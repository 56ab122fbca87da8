"""Collective benchmark: which collectives are timed at which sizes, how a rank times and checks them, and what their bandwidths mean.

Columns and definitions are those of NVIDIA's nccl-tests (doc/PERFORMANCE.md and ``GetBw`` of each
test): ``size`` is in bytes and, of a collective that scatters or gathers, of all ranks' pieces
together, of which ``count`` elements belong to one rank. Bandwidths count 10^9 bytes as one GB.

Iterations follow each other without a barrier, as in nccl-tests; a mark of the clock lies between
them. On a device the collectives are enqueued, and marks are read when all have run.

Numbers are float32. To check a result, rank r brings r + (i mod 251) at element i: whole numbers whose sums float32 holds
in whatever order, up to 5,000 ranks. The period is prime, so that pieces that change places show.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from fleetbench.config import Config
from fleetbench.errors import ConfigError
from fleetbench.quantities import Bytes
from real.communication.clocks import Clock, clock_of
from real.communication.communicators import Communicators, collective_errors
from real.communication.streams import host_reads

ROOT = 0
PERIOD = 251
ELEMENT_BYTES = 4
_SIGN_OF_LIFE_S = 1.0
_NEVER_RIGHT = -1

CollectiveName = Literal["all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather"]


@dataclass(frozen=True, slots=True)
class Kind:
    """What is particular to one collective."""

    splits: bool
    """Each rank sends or gets one piece of the whole."""
    bus_factor: Callable[[int], float]
    """busbw / algbw for so many ranks."""
    start: Callable[..., dist.Work | None]
    """Begins it, from what is sent to what is received."""


def _share_of_others(ranks: int) -> float:
    return (ranks - 1) / ranks


KINDS: dict[str, Kind] = {
    "all_reduce": Kind(False, lambda ranks: 2 * _share_of_others(ranks), lambda sent, _, **on: dist.all_reduce(sent, **on)),
    "reduce": Kind(False, lambda _: 1.0, lambda sent, _, **on: dist.reduce(sent, dst=ROOT, **on)),
    "broadcast": Kind(False, lambda _: 1.0, lambda sent, _, **on: dist.broadcast(sent, src=ROOT, **on)),
    "reduce_scatter": Kind(True, _share_of_others, lambda sent, received, **on: dist.reduce_scatter_single(received, sent, **on)),
    "all_gather": Kind(True, _share_of_others, lambda sent, received, **on: dist.all_gather_single(received, sent, **on)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the table."""

    collective: str
    count: int
    """Elements of one rank's piece, or of the whole where nothing is split."""
    ranks: int

    @property
    def numel(self) -> int:
        """Elements of the largest tensor of a rank."""
        return self.count * (self.ranks if KINDS[self.collective].splits else 1)

    @property
    def size_bytes(self) -> int:
        """``size``: bytes of the whole."""
        return self.numel * ELEMENT_BYTES

    def algbw(self, time_s: float) -> float:
        """Bytes per second: ``size`` over time."""
        return self.size_bytes / time_s

    def busbw(self, time_s: float) -> float:
        """Bytes per second of the busiest link, whatever the algorithm: comparable with the hardware's."""
        return self.algbw(time_s) * KINDS[self.collective].bus_factor(self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark(Config):
    """What to time. Every collective at every size, each with a warm-up of its own."""

    kinds: tuple[CollectiveName, ...] = ("all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather")
    min_bytes: Bytes = Bytes(1024)
    max_bytes: Bytes = Bytes(4 * 2**20)
    factor: int = 4
    """From one size to the next."""
    warmup: int = 5
    iterations: int = 20

    def _validate(self) -> None:
        if not self.kinds or len(set(self.kinds)) < len(self.kinds):
            raise ConfigError("needs at least one value, and none twice", "kinds", repr(", ".join(self.kinds)), "drop it for the default")
        for name, least in (("factor", 2), ("warmup", 0), ("iterations", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"must be at least {least}", name, repr(getattr(self, name)), "drop it for the default")
        if self.min_bytes < ELEMENT_BYTES:
            raise ConfigError("holds no element", "min_bytes", f"{self.min_bytes} B", f"{ELEMENT_BYTES} bytes or more")
        if self.max_bytes < self.min_bytes:
            raise ConfigError(
                f"is below min_bytes, which is {self.min_bytes} B", "max_bytes", f"{self.max_bytes} B", "choose a range from small to large"
            )

    def cases(self, ranks: int) -> tuple[Case, ...]:
        """All rows: by collective, and then from small to large."""
        return tuple(
            Case(collective=collective, count=count, ranks=ranks) for collective in self.kinds for count in self._counts(collective, ranks)
        )

    def _counts(self, collective: str, ranks: int) -> Iterator[int]:
        """Elements at every size, rounded down to whole pieces, one at least; none twice."""
        pieces = ranks if KINDS[collective].splits else 1
        size, last = int(self.min_bytes), 0
        while size <= self.max_bytes:
            count = max(1, size // (ELEMENT_BYTES * pieces))
            if count != last:
                yield count
            size, last = size * self.factor, count


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a launch says of a benchmark."""

    ranks: list[list[dict[str, Any]]]
    """What ``run_benchmark`` returned on every rank."""
    skipped: list[dict[str, str]]
    """Lines of the experiment that the launch did not realise."""
    testbed: dict[str, Any] | None
    """What its links and the machine's other load did in the meantime; none elsewhere."""


def row_of(case: Case, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A case with its measurement as JSON's data, from what ``run_benchmark`` returned for it on every rank, in rank order.

    Times are over the iterations of the rank with the largest mean: ``-a 3`` of nccl-tests, whose default is the ranks' mean.
    ``num_wrong`` counts over all ranks; ``cv`` of a single iteration is none.
    """
    means_us = [float(np.mean(part["times_ns"])) * 1e-3 for part in parts]
    slowest = int(np.argmax(means_us))
    samples_us, time_s = np.asarray(parts[slowest]["times_ns"]) * 1e-3, means_us[slowest] * 1e-6
    return {
        "collective": case.collective,
        "size_bytes": case.size_bytes,
        "count": case.count,
        "time_us": means_us[slowest],
        "algbw_gb_per_s": case.algbw(time_s) * 1e-9,
        "busbw_gb_per_s": case.busbw(time_s) * 1e-9,
        "num_wrong": sum(part["wrong"] for part in parts),
        "min_us": float(samples_us.min()),
        "max_us": float(samples_us.max()),
        "p99_us": float(np.quantile(samples_us, 0.99)),
        "cv": float(samples_us.std(ddof=1) / samples_us.mean()) if len(samples_us) > 1 else None,
        "rank_mean_us": means_us,
        "slowest_rank": slowest,
        "samples_us": samples_us.tolist(),
    }


def run_benchmark(benchmark: Benchmark, communicators: Communicators, on_case: Callable[[int], None]) -> list[dict[str, Any]]:
    """Time every case; every rank calls this at the same place.

    ``times_ns`` of the iterations and the number of ``wrong`` elements, a case. ``on_case`` hears of
    every case by its number from 1, and again at least every second or iteration, whichever is longer.
    """
    communicators.prove(1)
    clock = clock_of(communicators.device)
    measured = []
    for number, case in enumerate(benchmark.cases(communicators.trainers), start=1):
        on_case(number)
        trial = Trial(case, communicators, clock)
        trial.repeat(benchmark.warmup)
        communicators.barrier()
        times_ns = trial.repeat(benchmark.iterations, partial(on_case, number))
        measured.append({"times_ns": times_ns, "wrong": trial.count_wrong()})
    return measured


class Trial:
    """One case on this rank: what is sent, and what is received, which may be one tensor."""

    def __init__(self, case: Case, communicators: Communicators, clock: Clock) -> None:
        self._case, self._clock = case, clock
        self._rank, self._group = communicators.rank, communicators.world(0)
        empty = partial(torch.empty, dtype=torch.float32, device=communicators.device)
        gathers = case.collective == "all_gather"
        self._sent = empty(case.count if gathers else case.numel)
        self._received = empty(case.numel if gathers else case.count) if KINDS[case.collective].splits else self._sent

    def repeat(self, iterations: int, alive: Callable[[], None] = lambda: None) -> list[int]:
        """Run it so many times, on zeros: sums in place would grow. Nanoseconds of each."""
        self._sent.fill_(0)  # to every page: memory that was never written costs nothing to read
        self._received.fill_(0)
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
        """Run it once on known inputs: elements of this rank's result that are not as they must be; 0 where this rank gets none."""
        self._received.fill_(_NEVER_RIGHT)
        self._sent.copy_(self._numbers(self._rank, self._sent.numel()))
        self._run()
        if self._case.collective == "reduce" and self._rank != ROOT:
            return 0
        with host_reads():
            return int((self._received != self._expected()).sum())

    def _run(self) -> None:
        with collective_errors():
            work = KINDS[self._case.collective].start(self._sent, self._received, group=self._group, async_op=True)
            if work is not None:
                work.wait()

    def _expected(self) -> torch.Tensor:
        kind, count, ranks = self._case.collective, self._case.count, self._case.ranks
        if kind == "all_gather":
            return torch.cat([self._numbers(rank, count) for rank in range(ranks)])
        if kind == "broadcast":
            return self._numbers(ROOT, count)
        return self._numbers(0, count, self._rank * count if kind == "reduce_scatter" else 0) * ranks + ranks * (ranks - 1) // 2

    def _numbers(self, rank: int, numel: int, begin: int = 0) -> torch.Tensor:
        """What a rank brings, from element ``begin`` on."""
        once = torch.arange(begin, begin + PERIOD).remainder(PERIOD).add(rank).to(self._sent)
        return once.repeat(-(-numel // PERIOD))[:numel]
