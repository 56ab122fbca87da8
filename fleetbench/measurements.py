"""Measurements: what a profile keeps beside layer tables and links, as plain data."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fleetbench.config import Config
from fleetbench.quantities import Bytes, Nanoseconds
from fleetbench.stragglers import Straggler

FOREIGN_LIMIT = 0.15
"""Cores that other programs may compute on, on average. Above it, shaped links were seen to be late, and times are not to be trusted."""


def is_busy(foreign_cores: float | None) -> bool:
    """Whether other programs took so many cores that times measured in the meantime do not count; false where it was not measured."""
    return foreign_cores is not None and foreign_cores > FOREIGN_LIMIT


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectivePoint(Config):
    """What an all-reduce of one size took in the training loop."""

    nbytes: Bytes
    took: Nanoseconds
    """Mean over steps, the slowest left out, from the last trainer's arrival."""
    mad: Nanoseconds = Nanoseconds(0)
    """Median absolute deviation over steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Threads(Config):
    """A step at one thread count, trainers in step with each other, gradients in one bucket. Means, the slowest steps left out."""

    thread_num: int
    step: Nanoseconds
    compute: Nanoseconds
    """Forward and backward."""
    contention: float
    """See ``LayerTable``."""
    collective_contention: float
    unexplained: float
    """What the two slowdowns leave unexplained of a backward and stall with several buckets, as a share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory(Config):
    """Bytes of one trainer, the most that any has."""

    parameters: Bytes
    gradients: Bytes
    optimizer_state: Bytes
    activations: Bytes
    """Saved by one forward for its backward."""
    peak: Bytes
    """On a CUDA device, the most that torch had allocated; on a CPU, the most that the process had in memory, libraries included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlops(Config):
    """FLOPs of a model, and the most that a GPU computes."""

    per_step: float
    """FLOPs of one trainer's forward and backward: three times those of the forward."""
    peak_s: float
    """FLOP/s of dense products by the GPU's data sheet, in the fastest precision that the model's products have."""
    precision: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientNoise(Config):
    """Over the first steps of a leg that exchanges nothing; see ``real.gradient_noise``."""

    steps: int
    batch_size: int | None = None
    """Samples of a joint batch of all trainers; none in older profiles."""
    scale: float | None = None
    """Gradient noise scale, in joint batches of all trainers; none where it is more than ``steps`` of them, which these cannot tell."""
    drift: float
    """How far trainers were from their middle after these steps, as a share of how far that had gone. 0 for one trainer."""

    @property
    def statement(self) -> str:
        """In words."""
        scale = self.steps if self.scale is None else self.scale
        size = f"more than {self.steps}" if self.scale is None else f"{self.scale:.2g}"
        saved = f"{'at least ' if self.scale is None else ''}{100 * scale / (2 * (1 + scale)):.0f} % fewer updates"
        apart = f"{self.steps} steps without an exchange moved trainers apart by {self.drift:.2g} of their common way"
        found = f"gradient noise scale at the start: {size} joint batches, so that one twice as large would need {saved}"
        return f"{found}; {apart}" if self.drift else found


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerFit(Config):
    """Stragglers of measured steps: a factor per rank, blocks of consecutive steps, and a description in words."""

    statements: tuple[str, ...]
    """What was found, and what could not be."""
    base: Nanoseconds
    """Compute at X = 0, the shortest step of a rank that is not slow: the layer times of the profile add up to it."""
    median: Nanoseconds
    """Median compute of all ranks."""
    entries: tuple[Straggler, ...] = ()
    """As ``cluster.stragglers`` takes them."""
    rank_factors: tuple[float, ...] = ()
    """How much longer each rank takes than those that are not slow."""
    correlation: float | None = None
    """Between ranks, of their compute in the same step, by its order; none for one trainer."""
    quantiles: tuple[Nanoseconds, ...] = ()
    """Compute in a rank's step, at 50, 95 and 99 %."""
    slowest_quantiles: tuple[Nanoseconds, ...] = ()
    """Compute in the slowest rank's step, at 50, 95 and 99 %."""

    @classmethod
    def translate(cls, data: Mapping[str, Any]) -> dict[str, Any]:
        """Older files hold fitted laws beside the entries, which nothing reads."""
        return {name: value for name, value in data.items() if name not in ("shared", "jitter")}
