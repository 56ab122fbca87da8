"""Observed: records of a job's ranks about their own steps, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from fleetbench.config import Config, decode
from fleetbench.why.shares import Kind

Library = Literal["", "Trainer", "Accelerate", "Lightning", "fleet"]
"""Library that wrapped a script's model; empty if the script did so itself."""


class Event(NamedTuple):
    """A period in which a rank's main thread did one thing. Events of a rank are disjoint or nested."""

    kind: Kind
    """Kind of work."""
    start_ns: int
    """Start in nanoseconds, on rank 0's clock like all times in this module."""
    end_ns: int
    """End in nanoseconds."""
    computed_ns: int = 0
    """Time in ns at which the last gradient was computed, for a backward that exchanges gradients; 0 for all
    other events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model(Config):
    """A model of DistributedDataParallel or ``fully_shard``, with its settings."""

    nbytes: int
    """Total size of the gradients in bytes."""
    bucket_nbytes: tuple[int, ...] = ()
    """Bytes of each bucket after the first step, in the order in which they are exchanged; or of each unit of
    ``fully_shard``, the model first."""
    gathered_nbytes: int = 0
    """Bytes of the parameters that ``fully_shard`` gathers for a forward; 0 for DDP."""
    regathered_nbytes: int = 0
    """Bytes of the parameters that ``fully_shard`` gathers again for the backward."""
    shard_ranks: int = 1
    """Number of ranks among which the parameters are sharded."""
    bucket_cap_mb: float | None = None
    """Cap of a bucket in MiB; None: torch's default, with a first bucket of 1 MiB."""
    find_unused_parameters: bool = False
    """Whether DDP searches for unused parameters."""
    buffers_nbytes: int = 0
    """Bytes of the buffers that are broadcast before each forward."""
    buffers_change: bool = True
    """Whether a forward changes any buffer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader(Config):
    """A DataLoader from which the script draws batches."""

    num_workers: int
    """Number of worker processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLog:
    """Records of one rank.

    ``of`` reads what ``dataclasses.asdict`` gives, after a round trip through JSON.
    """

    rank: int
    """Rank that recorded this."""
    host: str
    """Name of the rank's host."""
    device: str
    """Type of the rank's device, such as ``cpu``."""
    threads: int
    """Number of threads that torch uses for one operation."""
    sets_threads: bool
    """Whether the script sets this number by itself, since it is not that of OMP_NUM_THREADS."""
    cores: int
    """Number of cores that the rank's process may use."""
    cpu_cores: float
    """Mean number of cores that the rank's process and its children used."""
    step_ends_ns: tuple[int, ...]
    """Times at which optimizer steps ended. The first step begins at the first of them, so there is one more
    time than steps."""
    events: tuple[tuple[str, int, int, int], ...]
    """Fields of each ``Event``, ordered by end."""
    samples: tuple[tuple[int, str], ...] = ()
    """Samples of the main thread, in order: time in ns, and the script's line as ``file:line function``."""
    batches: tuple[int, ...] = ()
    """Number of elements in the first input tensor of each forward; 0 if the model gets no tensor."""
    model: Model = Model(nbytes=0)
    """Model that the rank trains."""
    loader: Loader | None = None
    """DataLoader that took the most time, or None."""
    can_change: bool = True
    """Whether the model can get other settings while the script runs; not with a communication hook or mixed
    precision, for example."""
    num_models: int = 1
    """Number of models of DDP or ``fully_shard`` whose forward has run."""
    wrapper: Library = ""
    """Library that wrapped the model."""

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> RankLog:
        """Return the log of a rank from plain data."""
        known: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
        known |= {name: tuple(map(tuple, data[name])) for name in ("events", "samples")}
        known["model"] = decode(data["model"], Model, "model")
        known["loader"] = None if data["loader"] is None else decode(data["loader"], Loader, "loader")
        return cls(**known)

    def aligned(self, first: tuple[int, int], last: tuple[int, int]) -> RankLog:
        """Return the log with times on rank 0's clock.

        ``first`` and ``last`` are each a time on this host's clock, and its lead over rank 0's clock, in ns.
        """
        (begin, ahead), (end, later) = first, last
        drift = (later - ahead) / max(1, end - begin)

        def moved(time_ns: int) -> int:
            return time_ns and time_ns - ahead - round(drift * (time_ns - begin))

        return replace(
            self,
            step_ends_ns=tuple(map(moved, self.step_ends_ns)),
            events=tuple((kind, moved(start), moved(end), moved(computed)) for kind, start, end, computed in self.events),
            samples=tuple((moved(time_ns), line) for time_ns, line in self.samples),
        )

    @property
    def num_steps(self) -> int:
        """Number of whole steps."""
        return max(0, len(self.step_ends_ns) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness(Config):
    """Readiness of gradients: medians over one rank's steps."""

    names: tuple[str, ...]
    """Names of the parameters, in order of registration."""
    nbytes: tuple[int, ...]
    """Bytes of each gradient."""
    ready_ns: tuple[int, ...]
    """Nanoseconds from the start of the step's last backward until each gradient is ready."""
    unused: tuple[str, ...] = ()
    """Names of the parameters that got no gradient in at least one backward."""
