"""Observed: what the ranks of a job have seen of their own steps, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from fleetbench.config import Config, decode
from fleetbench.why.shares import Kind

Library = Literal["", "Trainer", "Accelerate", "Lightning", "fleet"]
"""Library that has wrapped a script's model; empty: the script itself did."""


class Event(NamedTuple):
    """What the main thread of a rank did for a while; events of a rank lie beside or inside each other."""

    kind: Kind
    start_ns: int
    """Nanoseconds of rank 0's clock, as all times here."""
    end_ns: int
    computed_ns: int = 0
    """Of a backward that exchanges gradients: when the last of them was computed. 0: it exchanges nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model(Config):
    """A model of DistributedDataParallel, or of ``fully_shard``, and its own settings."""

    nbytes: int
    """Bytes of all gradients."""
    bucket_nbytes: tuple[int, ...] = ()
    """Bytes of each bucket, in the order of their exchange, after the first step; or of each unit of ``fully_shard``, the model first."""
    gathered_nbytes: int = 0
    """Bytes of the parameters that ``fully_shard`` gathers for a forward; 0: the model is DDP's."""
    regathered_nbytes: int = 0
    """Bytes of those among them that are gathered again for the backward."""
    shard_ranks: int = 1
    """Ranks that share out the parameters."""
    bucket_cap_mb: float | None = None
    """MiB; none: torch's default, with a first bucket of 1 MiB."""
    find_unused_parameters: bool = False
    comm_hook: str = ""
    """Name of the communication hook; empty: none."""
    buffers_nbytes: int = 0
    """Bytes of the buffers that are broadcast before each forward."""
    buffers_change: bool = True
    """Whether a forward changes any of them."""
    dtype: str = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader(Config):
    """A DataLoader that the script draws batches from."""

    num_workers: int
    cpu_share: float = 0.0
    """Share of the time inside of it in which this process's main thread computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLog:
    """What a rank has seen; ``of`` reads what ``dataclasses.asdict`` gives, as it comes back from JSON."""

    rank: int
    host: str
    device: str
    backend: str
    threads: int
    """Threads of torch for one operation."""
    cores: int
    """Cores that this process may use."""
    cpu_cores: float
    """Cores that this process was computing on, in the mean."""
    step_ends_ns: tuple[int, ...]
    """Ends of optimizer steps: the first one begins the first step, so that there is one more than steps."""
    events: tuple[tuple[str, int, int, int], ...]
    """The fields of ``Event``, in order of their ends."""
    samples: tuple[tuple[int, str], ...] = ()
    """Moments, in order, and the line of the script that the main thread was in: ``file:line function``."""
    batches: tuple[int, ...] = ()
    """Numbers in the first input of each forward, 0 where the model gets no tensor."""
    model: Model = Model(nbytes=0)
    loader: Loader | None = None
    can_change: bool = True
    """Whether the model may be made anew with other settings: without a communication hook, mixed precision and such."""
    num_models: int = 1
    """DDP models whose forward has run."""
    scales_loss: bool = False
    """Whether a GradScaler steps, which may skip a step on one rank alone."""
    wrapper: Library = ""
    """Library that has wrapped the model."""

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> RankLog:
        """The log of a rank's part."""
        known: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
        known |= {name: tuple(map(tuple, data[name])) for name in ("events", "samples")}
        known["model"] = decode(data["model"], Model, "model")
        known["loader"] = None if data["loader"] is None else decode(data["loader"], Loader, "loader")
        return cls(**known)

    def aligned(self, first: tuple[int, int], last: tuple[int, int]) -> RankLog:
        """The log on rank 0's clock. Each pair: a time of this host's clock, and by how much it was ahead of rank 0's then."""
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
        """Whole steps."""
        return max(0, len(self.step_ends_ns) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness(Config):
    """When gradients are ready, and what a step's compute takes, where nothing is exchanged: medians over steps of one rank."""

    names: tuple[str, ...]
    """Parameters, in order of registration."""
    nbytes: tuple[int, ...]
    """Bytes of each gradient."""
    ready_ns: tuple[int, ...]
    """Nanoseconds from the start of the step's last backward until each gradient is ready."""
    forward_ns: int
    """Nanoseconds of forwards in a step, and of all backwards but the last."""
    backward_ns: int
    """Nanoseconds of the last backward."""
    unused: tuple[str, ...] = ()
    """Parameters that got no gradient in at least one of the backwards."""
