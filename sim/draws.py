"""Draws: X of a run's ranks and steps, drawn where an engine asks for them."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fleetbench.cluster import Cluster
from fleetbench.errors import ConfigError
from fleetbench.stragglers import LARGEST, ONE, Episode, Integers, Trace, draws


@dataclass(frozen=True, kw_only=True)
class Draws:
    """What delays the trainers of one run. X is in units of 2^-24; no straggler delays the ranks ``spared``.

    Raises ``ConfigError`` for a rank outside of the cluster.
    """

    cluster: Cluster
    seed: int
    steps: range
    spared: tuple[int, ...] = ()
    kept: bool = False
    """All are drawn at once, and kept."""

    def __post_init__(self) -> None:
        for rank in self.spared:
            if not 0 <= rank < self.cluster.trainers:
                raise ConfigError("no such rank", "spared", repr(rank), f"ranks are 0 to {self.cluster.trainers - 1}")

    def of_ranks(self) -> Integers:
        """X of all steps, shape ``(trainers, num_steps)``. Raises what ``fleetbench.stragglers.draws`` raises."""
        return self._drawn(self.steps)

    def rows(self, begin: int, end: int) -> Integers:
        """X of the steps with these indices, shape ``(end - begin, trainers)``: each step's ranks lie side by side."""
        if self.kept or any(isinstance(straggler, Episode | Trace) for straggler in self.cluster.stragglers):
            return self._rows[begin:end]
        return np.ascontiguousarray(self._drawn(self.steps[begin:end]).T)

    @functools.cached_property
    def _rows(self) -> Integers:
        """All of them, where a step follows from those before it or a file is read."""
        return np.ascontiguousarray(self.of_ranks().T)

    def _drawn(self, steps: range) -> Integers:
        cluster = self.cluster
        found = draws(cluster.stragglers, self.seed, cluster.trainers, cluster.node_by_rank, steps.start, len(steps))
        found[list(self.spared)] = 0
        factors = np.array([cluster.slowdown(node) for node in range(cluster.nodes)])
        return found if (factors == 1.0).all() else _times(found, np.repeat(factors, cluster.trainers_by_node)[:, None])


def _times(delays: Integers, factors: npt.NDArray[np.float64]) -> Integers:
    """X where 1 + X is so many times as much, rounded: a node's ``slowdown`` s makes 1 + X of it s (1 + X).

    Raises ``ConfigError`` above a million.
    """
    product = (delays + ONE) * factors
    if product.max(initial=0.0) > LARGEST * ONE:
        what = "makes a step take more than a million times its own compute"
        value = f"{product.max() / ONE:.3g} times"
        raise ConfigError(what, "cluster.node_overrides", value, "slowdown and stragglers multiply: lower the slowdown")
    return np.rint(product).astype(np.int64) - ONE
