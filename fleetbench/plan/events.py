"""Events: what an executor reports to a strategy."""

from dataclasses import dataclass
from typing import Literal, get_args


@dataclass(frozen=True, slots=True)
class StepBegin:
    """A trainer starts ``step``. Steps are numbered from 1, and those of a warm-up up to 0."""

    step: int


@dataclass(frozen=True, slots=True)
class BlockBegin:
    """The forward or backward of a block of a sharded model is about to begin."""

    block: int
    phase: Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class BucketReady:
    """All gradients of a bucket, and all buckets before it, are ready."""

    bucket: int


@dataclass(frozen=True, slots=True)
class BackwardEnd:
    """The backward has ended. ``unused`` has the names of the parameters that the loss did not use."""

    unused: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Observed:
    """The value of a scalar that the strategy names in ``observes``; it is equal on every rank."""

    name: str
    value: float


@dataclass(frozen=True, slots=True)
class Message:
    """A message from another role; ``role`` and ``rank`` name its origin."""

    role: str
    rank: int
    kind: str
    rows: tuple[int, ...] = ()
    nbytes: int = 0
    count: int = 0
    """Number of gradients, or in GeoSGD of recorded steps, that the message concerns."""
    version: int = 0
    """Number of updates that the server has made; in a push, those in the oldest parameters from which one of
    its gradients was computed."""


@dataclass(frozen=True, slots=True)
class LookUp:
    """A trainer's model is about to read rows of its embeddings."""


@dataclass(frozen=True, slots=True)
class TimerFired:
    """A timer set by ``set_timer`` ran out."""


@dataclass(frozen=True, slots=True)
class EpochEnd:
    """The data of an epoch are used up."""


@dataclass(frozen=True, slots=True)
class DataEnd:
    """Training is over: no step follows."""


@dataclass(frozen=True, slots=True)
class Flush:
    """The model is about to be read (saved, evaluated): trainers must agree."""


Event = StepBegin | BlockBegin | BucketReady | BackwardEnd | Observed | Message | LookUp | TimerFired | EpochEnd | DataEnd | Flush
EVENTS: dict[str, type[Event]] = {kind.__name__: kind for kind in get_args(Event)}
