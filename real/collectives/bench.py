"""Collective benchmark: which collectives are timed at which sizes, and what their bandwidths mean.

Columns and definitions are those of NVIDIA's nccl-tests (doc/PERFORMANCE.md and ``GetBw`` of each
test): ``size`` is in bytes and, of a collective that scatters or gathers, of all ranks' pieces
together, of which ``count`` elements belong to one rank. Bandwidths count 10^9 bytes as one GB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fleetbench.config import Config
from fleetbench.errors import ConfigError
from fleetbench.quantities import Bytes

CollectiveName = Literal["all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather"]
TypeName = Literal["float32", "float16", "bfloat16"]

LARGEST_BYTES = 2**40
NUM_BUFFERS = 4
"""Tensors of the size that a rank holds at most: what is sent and received, a result, and what it should be."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What is particular to one collective."""

    reduces: bool
    splits: bool
    """Each rank sends or gets one piece of the whole."""
    bus_factor: Callable[[int], float]
    """busbw / algbw for so many ranks."""


KINDS: dict[str, Kind] = {
    "all_reduce": Kind(reduces=True, splits=False, bus_factor=lambda ranks: 2 * (ranks - 1) / ranks),
    "reduce": Kind(reduces=True, splits=False, bus_factor=lambda _: 1.0),
    "broadcast": Kind(reduces=False, splits=False, bus_factor=lambda _: 1.0),
    "reduce_scatter": Kind(reduces=True, splits=True, bus_factor=lambda ranks: (ranks - 1) / ranks),
    "all_gather": Kind(reduces=False, splits=True, bus_factor=lambda ranks: (ranks - 1) / ranks),
}
ELEMENT_BYTES: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the table."""

    collective: str
    type: str
    count: int
    """Elements of one rank's piece, or of the whole where nothing is split."""
    ranks: int

    @property
    def redop(self) -> str:
        """How it reduces; ``none`` where it moves and does not reduce."""
        return "sum" if KINDS[self.collective].reduces else "none"

    @property
    def numel(self) -> int:
        """Elements of the largest tensor of a rank."""
        return self.count * (self.ranks if KINDS[self.collective].splits else 1)

    @property
    def size_bytes(self) -> int:
        """``size``: bytes of the whole."""
        return self.numel * ELEMENT_BYTES[self.type]

    def algbw(self, time_s: float, communicators: int = 1) -> float:
        """Bytes per second: ``size`` over time, of as many collectives as are in flight at once."""
        return communicators * self.size_bytes / time_s

    def busbw(self, time_s: float, communicators: int = 1) -> float:
        """Bytes per second of the busiest link, whatever the algorithm: comparable with the hardware's."""
        return self.algbw(time_s, communicators) * KINDS[self.collective].bus_factor(self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark(Config):
    """What to time. Every collective at every type and size, each with a warm-up of its own."""

    kinds: tuple[CollectiveName, ...] = ("all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather")
    types: tuple[TypeName, ...] = ("float32",)
    min_bytes: Bytes = Bytes(1024)
    max_bytes: Bytes = Bytes(4 * 2**20)
    factor: int = 4
    """From one size to the next."""
    warmup: int = 5
    iterations: int = 20
    communicators: int = 1
    """Collectives in flight at once, each on a communicator and of the size of its own."""

    def _validate(self) -> None:
        for name in ("kinds", "types"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ConfigError("needs at least one value, and none twice", name, repr(", ".join(values)), f"drop {name} for the default")
        for name, least in (("factor", 2), ("warmup", 0), ("iterations", 1), ("communicators", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"must be at least {least}", name, repr(getattr(self, name)), "drop it for the default")
        least = max(ELEMENT_BYTES[name] for name in self.types)
        if self.min_bytes < least:
            raise ConfigError("holds no element", "min_bytes", f"{self.min_bytes} B", f"{least} bytes or more for {', '.join(self.types)}")
        if self.max_bytes < self.min_bytes:
            raise ConfigError(
                f"is below min_bytes, which is {self.min_bytes} B", "max_bytes", f"{self.max_bytes} B", "choose a range from small to large"
            )
        if self.max_bytes > LARGEST_BYTES:
            raise ConfigError("is more than a tebibyte", "max_bytes", f"{self.max_bytes} B", "256 MiB is past every latency")

    def cases(self, ranks: int) -> tuple[Case, ...]:
        """All rows: by collective and type, and then from small to large."""
        return tuple(
            Case(collective=collective, type=type_, count=count, ranks=ranks)
            for collective in self.kinds
            for type_ in self.types
            for count in self._counts(collective, type_, ranks)
        )

    def _counts(self, collective: str, type_: str, ranks: int) -> Iterator[int]:
        """Elements at every size, rounded down to whole pieces, one at least; none twice."""
        pieces = ranks if KINDS[collective].splits else 1
        size, last = int(self.min_bytes), 0
        while size <= self.max_bytes:
            count = max(1, size // (ELEMENT_BYTES[type_] * pieces))
            if count != last:
                yield count
            size, last = size * self.factor, count


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a launch says of a benchmark."""

    ranks: list[list[dict[str, Any]]]
    """Of every rank every case's ``times_ns`` and ``wrong``, as ``Row.of`` takes them."""
    skipped: list[dict[str, str]]
    """Lines of the experiment that the launch did not realise."""
    testbed: dict[str, Any] | None
    """What its links and the machine's other load did in the meantime; none elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A case with its measurement. ``samples_s``: the iterations of the slowest rank, in their order."""

    case: Case
    communicators: int
    num_wrong: int
    """Elements of the results, over all ranks and communicators, that are not what they must be."""
    rank_mean_s: tuple[float, ...]
    slowest: int
    samples_s: tuple[float, ...]

    @classmethod
    def of(cls, case: Case, communicators: int, parts: Sequence[dict[str, Any]]) -> Row:
        """From what every rank measured, in rank order: ``times_ns`` of its iterations, and the elements found ``wrong``."""
        means = [float(np.mean(part["times_ns"])) * 1e-9 for part in parts]
        slowest = max(range(len(parts)), key=means.__getitem__)
        return cls(
            case=case,
            communicators=communicators,
            num_wrong=sum(part["wrong"] for part in parts),
            rank_mean_s=tuple(means),
            slowest=slowest,
            samples_s=tuple(time * 1e-9 for time in parts[slowest]["times_ns"]),
        )

    @property
    def time_s(self) -> float:
        """Mean over the iterations, of the rank with the largest: ``-a 3`` of nccl-tests, whose default is the ranks' mean."""
        return self.rank_mean_s[self.slowest]

    @property
    def p99_s(self) -> float:
        """99th percentile of the iterations, between neighbours where it falls between them."""
        return float(np.quantile(self.samples_s, 0.99))

    @property
    def cv(self) -> float | None:
        """Standard deviation of the iterations over their mean; none of a single one."""
        return float(np.std(self.samples_s, ddof=1) / np.mean(self.samples_s)) if len(self.samples_s) > 1 else None

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON's data, with units in the names."""
        case = self.case
        return {
            "collective": case.collective,
            "size_bytes": case.size_bytes,
            "count": case.count,
            "type": case.type,
            "redop": case.redop,
            "time_us": self.time_s * 1e6,
            "algbw_gb_per_s": case.algbw(self.time_s, self.communicators) * 1e-9,
            "busbw_gb_per_s": case.busbw(self.time_s, self.communicators) * 1e-9,
            "num_wrong": self.num_wrong,
            "min_us": min(self.samples_s) * 1e6,
            "max_us": max(self.samples_s) * 1e6,
            "p99_us": self.p99_s * 1e6,
            "cv": self.cv,
            "rank_mean_us": [mean * 1e6 for mean in self.rank_mean_s],
            "slowest_rank": self.slowest,
            "samples_us": [sample * 1e6 for sample in self.samples_s],
        }
