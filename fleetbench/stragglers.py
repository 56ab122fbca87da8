"""Stragglers: delays X of each trainer's steps, which are the same in every executor.

With a delay X >= 0, a trainer's compute (forward and backward) takes ``1 + X`` times its own time. X is a
counter-based function of (seed, entry, rank or node, step), so it does not depend on other draws, and all
executors read the same value. It is quantised to 2^-24 once, after the product over the entries in file
order, so that clocks agree to the nanosecond.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from fleetbench.config import Config, at_least
from fleetbench.errors import ConfigError
from fleetbench.quantities import PerStep, Steps

ONE = 2**24
"""X = 1 in units of 2^-24, in which X is stored as an integer."""

LARGEST = 10**6
"""Largest factor, mean and product 1 + X. With larger ones, nanoseconds would soon exceed 64 bits."""


Distribution = Literal["exponential", "gamma", "lognormal", "constant"]
Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Law(Config):
    distribution: Distribution = "lognormal"
    """Distribution of X."""
    mean: float = 0.1
    """Mean of X."""
    cv: float = 1.0
    """Coefficient of variation of X."""

    def _validate(self) -> None:
        at_least(self, 0, "mean", "cv", most=LARGEST)
        law, cv = self.distribution, self.cv
        has = {"exponential": cv == 1, "constant": cv in (0, 1)}.get(law, cv >= 1 / LARGEST)
        if not has:
            hint = "drop cv for exponential and constant; gamma and lognormal need a millionth at least"
            raise ConfigError(f"{law} has no such coefficient of variation", "cv", repr(cv), hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class Jitter(_Law):
    """Delays that are independent for every rank and step."""

    kind: ClassVar[str] = "jitter"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeShock(_Law):
    """Delays that all ranks of a node, or of the cluster, share."""

    kind: ClassVar[str] = "node_shock"
    scope: Literal["node", "cluster"] = "node"
    """Ranks that share a delay: those of a node, or all ranks of the cluster."""
    rate: PerStep = PerStep(1.0)
    """Share of steps that are delayed."""

    def _validate(self) -> None:
        _Law._validate(self)  # noqa: SLF001  # a slotted dataclass has no ``super()``
        at_least(self, 0, "rate", most=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slow(Config):
    factor: float
    """Factor on compute time."""

    def _validate(self) -> None:
        at_least(self, 1, "factor", most=LARGEST)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRank(_Slow):
    """Ranks whose compute always takes ``factor`` times as long."""

    kind: ClassVar[str] = "slow_rank"
    ranks: tuple[int, ...]
    """Numbers of the ranks, from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowNode(_Slow):
    """Nodes whose ranks always take ``factor`` times as long."""

    kind: ClassVar[str] = "slow_node"
    nodes: tuple[int, ...]
    """Numbers of the nodes, from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode(_Slow):
    """Slow episodes (Markov fail-slow): in each step, a healthy rank becomes slow with probability ``rate``.

    It recovers after ``length`` steps on average; lengths are geometrically distributed. Ranks are healthy
    before step 1.
    """

    kind: ClassVar[str] = "episode"
    rate: PerStep
    """Probability per step that a healthy rank becomes slow."""
    length: Steps
    """Mean length of an episode in steps."""

    def _validate(self) -> None:
        _Slow._validate(self)  # noqa: SLF001  # a slotted dataclass has no ``super()``
        at_least(self, 0, "rate", most=1)
        at_least(self, 1, "length")


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks(Config):
    """Delays drawn in blocks of consecutive measured steps, for all ranks: a circular block bootstrap.

    It preserves correlations between neighbouring steps, and between ranks in the same step (Politis and
    Romano 1992). Ranks beyond the R measured ones reuse the measured rows; each further group of R ranks draws
    its own blocks. With one measured rank and ``block_steps = 1``, all ranks and steps are independent.
    """

    kind: ClassVar[str] = "blocks"
    values: tuple[tuple[float, ...], ...]
    """Measured X by rank and step; all ranks have the same number of steps."""
    block_steps: int
    """Number of consecutive steps drawn at once."""

    def _validate(self) -> None:
        numbers = [value for row in self.values for value in row]
        lengths = sorted({len(row) for row in self.values})
        if not numbers or len(lengths) > 1 or min(numbers) < 0 or max(numbers) > LARGEST or self.block_steps < 1:
            what = "needs as many values of each rank, none negative or above a million, and blocks of at least 1 step"
            shown = f"{len(self.values)} ranks of {lengths} values, block_steps {self.block_steps}"
            raise ConfigError(what, "values, block_steps", shown, "values = [[0.0, 0.1], [0.2, 0.0]] has two steps of two ranks")


Straggler = Jitter | NodeShock | SlowRank | SlowNode | Episode | Blocks


def draws(
    stragglers: Sequence[Straggler], seed: int, trainers: int, nodes: int | Sequence[int], first_step: int, num_steps: int
) -> Integers:
    """Return X in units of 2^-24 for every rank and step, shape ``(trainers, num_steps)``.

    Column 0 is ``first_step``. ``nodes`` is the number of trainers per node, or the node of each rank. Raises
    ``ConfigError`` for the entry that makes a step take more than ``LARGEST`` times its own compute.
    """
    ranks = np.arange(trainers, dtype=np.int64)
    steps = np.arange(first_step, first_step + num_steps, dtype=np.int64)
    node_of = ranks // nodes if isinstance(nodes, int) else np.asarray(nodes, dtype=np.int64)
    product = np.ones((len(ranks), num_steps))
    for entry, straggler in enumerate(stragglers):
        product *= 1.0 + _delays(straggler, seed, entry, ranks, node_of, steps)
        if product.max(initial=0.0) > LARGEST:
            what = "makes a step take more than a million times its own compute"
            hint = "entries multiply: lower this one's factor or mean, or drop an entry"
            raise ConfigError(what, f"cluster.stragglers[{entry}]", f"{product.max():.3g} times", hint)
    return np.rint((product - 1.0) * ONE).astype(np.int64)


def stretch(base_ns: int, x: int) -> int:
    """Return ``(1 + X) * base_ns``, rounded half up in integer arithmetic; ``x`` is X in units of 2^-24."""
    return (int(base_ns) * (ONE + int(x)) + ONE // 2) // ONE  # numpy's integers would overflow at minutes


def _delays(straggler: Straggler, seed: int, entry: int, ranks: Integers, nodes: Integers, steps: Integers) -> Floats:  # branch per kind
    shape = (len(ranks), len(steps))
    if isinstance(straggler, SlowRank | SlowNode):
        slow = np.isin(ranks, straggler.ranks) if isinstance(straggler, SlowRank) else np.isin(nodes, straggler.nodes)
        return np.broadcast_to(np.where(slow, straggler.factor - 1.0, 0.0)[:, None], shape)
    if isinstance(straggler, Jitter):
        return quantile(straggler.distribution, uniform(seed, entry, 0, ranks, steps), straggler.mean, straggler.cv)
    if isinstance(straggler, NodeShock):
        nodes = nodes if straggler.scope == "node" else np.zeros_like(nodes)
        size = quantile(straggler.distribution, uniform(seed, entry, 0, nodes, steps), straggler.mean, straggler.cv)
        return np.where(uniform(seed, entry, 1, nodes, steps) < straggler.rate, size, 0.0)
    if isinstance(straggler, Blocks):
        values, block = np.array(straggler.values), straggler.block_steps
        group, row = np.divmod(ranks, len(values))
        number, within = np.divmod(steps - 1, block)
        first = (uniform(seed, entry, 0, group, number + 1) * values.shape[1]).astype(np.int64)
        return np.asarray(values[row[:, None], (first + within) % values.shape[1]])
    return _episodes(straggler, seed, entry, ranks, steps)


def _episodes(straggler: Episode, seed: int, entry: int, ranks: Integers, steps: Integers) -> Floats:
    """Return X by rank and step, simulated from step 1 because a state depends on all steps before it."""
    last = int(steps[-1])
    if last < 1:
        return np.zeros((len(ranks), len(steps)))
    chances = uniform(seed, entry, 0, ranks, np.arange(1, last + 1))
    ill = np.zeros(len(ranks), dtype=bool)
    history = np.zeros((len(ranks), last), dtype=bool)
    for column in range(last):
        chance = chances[:, column]
        ill = np.where(ill, chance >= 1.0 / straggler.length, chance < straggler.rate)
        history[:, column] = ill
    factors = np.where(history, straggler.factor - 1.0, 0.0)
    counted = steps >= 1
    result = np.zeros((len(ranks), len(steps)))
    result[:, counted] = factors[:, steps[counted] - 1]
    return result


def uniform(seed: int, entry: int, purpose: int, who: Integers, steps: Integers) -> Floats:
    """Return uniform draws in (0, 1), shape ``(len(who), len(steps))``: a stateless hash of the counters."""
    key = splitmix64(splitmix64(splitmix64(np.uint64(seed % 2**64)) ^ np.uint64(entry)) ^ np.uint64(purpose))
    rows = splitmix64(key ^ who.astype(np.uint64))
    return _unit_interval(splitmix64(rows[:, None] ^ steps.astype(np.uint64)[None, :]))


def _unit_interval(words: npt.NDArray[np.uint64]) -> Floats:
    """Convert 64-bit words to numbers in (0, 1): the middles of 2^52 equal cells, which exclude both ends."""
    return ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52  # 52 bits: the half is exact


def splitmix64(word: Any) -> Any:
    """Return SplitMix64's output (Steele, Lea and Flood 2014, figure 16) for each word of a uint64 array."""
    with np.errstate(over="ignore"):
        z = np.asarray(word, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def quantile(law: Distribution, u: Floats, mean: float, cv: float) -> Floats:
    """Return the quantiles of X at the probabilities ``u``, for a distribution with this mean and ``cv``."""
    from scipy import special  # scipy takes 0.2 s to import, which a cluster without jitter need not pay

    if law == "constant" or mean == 0.0:
        return np.full_like(u, mean)
    if law == "exponential":
        return np.asarray(-mean * np.log1p(-u))
    if law == "gamma":
        shape = 1.0 / cv**2
        return np.asarray(special.gammaincinv(shape, u) * (mean / shape))
    sigma = np.sqrt(np.log1p(cv**2))
    return np.asarray(mean * np.exp(sigma * special.ndtri(u) - sigma**2 / 2))
