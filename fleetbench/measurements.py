"""Measurements: contents of a profile besides layer tables and links, as plain data."""

from dataclasses import dataclass

from fleetbench.config import Config
from fleetbench.quantities import Bytes, Nanoseconds
from fleetbench.stragglers import Straggler

FOREIGN_LIMIT = 0.15
"""Largest mean number of cores that other programs may use during a measurement. Above it, shaped links were
observed to be late, so times are not trusted."""


def is_busy(foreign_cores: float | None) -> bool:
    """Whether other programs used so many cores that measured times do not count; False if unknown."""
    return foreign_cores is not None and foreign_cores > FOREIGN_LIMIT


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectivePoint(Config):
    """Time of a collective at one size, measured in the training loop."""

    nbytes: Bytes
    """Size in bytes."""
    took: Nanoseconds
    """Time from the last trainer's arrival: mean over steps, without the slowest."""
    mad: Nanoseconds = Nanoseconds(0)
    """Median absolute deviation over steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Threads(Config):
    """Times of a step at one thread count, with synchronous trainers and all gradients in one bucket.

    Times are means without the slowest steps.
    """

    thread_num: int
    """Number of threads per trainer."""
    step: Nanoseconds
    """Time of a step."""
    compute: Nanoseconds
    """Time of forward and backward."""
    contention: float
    """Slowdown of compute by communication; see ``LayerTable``."""
    collective_contention: float
    """Slowdown of collectives by compute; see ``LayerTable``."""
    unexplained: float
    """Share of backward and stall, in a run with several buckets, that the two slowdowns do not explain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory(Config):
    """Memory of the trainer that uses most, in bytes."""

    parameters: Bytes
    """Bytes of parameters."""
    gradients: Bytes
    """Bytes of gradients."""
    optimizer_state: Bytes
    """Bytes of the optimizer's state."""
    activations: Bytes
    """Bytes that one forward saves for its backward."""
    peak: Bytes
    """Peak memory: on a CUDA device, the most that torch allocated; on a CPU, the largest resident size of
    the process, including libraries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlops(Config):
    """FLOPs of a model, and the peak rate of a GPU."""

    per_step: float
    """FLOPs of one trainer's forward and backward: three times those of the forward."""
    peak_s: float
    """Peak FLOP/s of dense products on the GPU's data sheet, in the fastest precision of the model's
    products."""
    precision: str
    """Name of the precision that ``peak_s`` refers to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientNoise(Config):
    """Gradient noise over the first steps of a leg without exchanges; see ``real.gradient_noise``."""

    steps: int
    """Number of steps over which noise was measured."""
    batch_size: int | None = None
    """Number of samples in a joint batch of all trainers; None in older profiles."""
    scale: float | None = None
    """Gradient noise scale, in joint batches of all trainers. None if it exceeds ``steps``, which is too few
    steps to measure it."""

    @property
    def statement(self) -> str:
        """Description in words."""
        scale = self.steps if self.scale is None else self.scale
        size = f"more than {self.steps}" if self.scale is None else f"{self.scale:.2g}"
        saved = f"{'at least ' if self.scale is None else ''}{100 * scale / (2 * (1 + scale)):.0f} % fewer updates"
        return f"gradient noise scale at the start: {size} joint batches, so that one twice as large would need {saved}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerFit(Config):
    """Stragglers fitted to measured steps: factors of ranks, blocks of steps, and a description."""

    statements: tuple[str, ...]
    """Sentences about what was found, and what could not be."""
    base: Nanoseconds
    """Compute time of a step at X = 0: the shortest of a rank that is not slow. The profile's layer times add
    up to it."""
    median: Nanoseconds
    """Median compute time of a step over all ranks."""
    entries: tuple[Straggler, ...] = ()
    """Entries for ``cluster.stragglers``."""
    rank_factors: tuple[float, ...] = ()
    """Factor on each rank's compute, compared with ranks that are not slow."""
