"""Optimizers of a server: torch's formulas on its part of the dense parameters, and on the pushed rows of its tables.

Rows that a push does not hold keep their parameters and their state (torch calls this lazy): for
SGD and Adagrad that is the dense update with zeros in them, for momentum and Adam it is not.
Source: the algorithms in the documentation of torch.optim.SGD, Adagrad and Adam; of SparseAdam,
torch/optim/_functional.py, whose eps stands elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


class Updates:
    """One optimizer over a list of arrays, each with the state that it keeps for it."""

    slots: tuple[str, ...] = ()
    """Names of the arrays of state that each parameter has."""

    def __init__(self, options: Mapping[str, float], arrays: Sequence[Array]) -> None:
        self.options = options
        self._arrays = arrays
        start = options.get("initial_accumulator_value", 0.0)
        self.state: list[dict[str, Array]] = [{slot: np.full_like(array, start) for slot in self.slots} for array in arrays]
        self.steps = [0] * len(arrays)
        """Updates that each has seen."""

    def update(self, number: int, gradient: Array, rate: float, rows: Array | None = None) -> None:
        """One step of array ``number``, or of distinct ``rows`` of it; ``gradient`` may be overwritten.

        A step without rows counts: the whole table has made it, on other servers.
        """
        self.steps[number] += 1
        if not len(gradient):
            return
        array = self._arrays[number]
        decay = self.options["weight_decay"]
        if decay:
            gradient = gradient + decay * (array if rows is None else array[rows])
        state = {slot: held if rows is None else held[rows] for slot, held in self.state[number].items()}
        change = self._change(gradient, rate, state, self.steps[number])
        if rows is None:
            array -= change
            return
        array[rows] -= change
        for slot, held in state.items():
            self.state[number][slot][rows] = held

    def _change(self, gradient: Array, rate: float, state: dict[str, Array], step: int) -> Array:  # noqa: ARG002  # the others need them
        """What is taken from the parameters; ``state`` moves on."""
        return gradient * rate


class Momentum(Updates):
    """SGD with momentum, without dampening."""

    slots = ("momentum_buffer",)

    def _change(self, gradient: Array, rate: float, state: dict[str, Array], step: int) -> Array:  # noqa: ARG002  # it does not count
        momentum, buffer = self.options["momentum"], state["momentum_buffer"]
        buffer *= momentum
        buffer += gradient
        return rate * (gradient + momentum * buffer if self.options["nesterov"] else buffer)


class Adagrad(Updates):
    """Adagrad."""

    slots = ("sum",)

    def _change(self, gradient: Array, rate: float, state: dict[str, Array], step: int) -> Array:
        state["sum"] += gradient * gradient
        rate /= 1 + (step - 1) * self.options["lr_decay"]
        return rate * gradient / (np.sqrt(state["sum"]) + self.options["eps"])


class Adam(Updates):
    """Adam."""

    slots = ("exp_avg", "exp_avg_sq")

    def _change(self, gradient: Array, rate: float, state: dict[str, Array], step: int) -> Array:
        first, second = self.options["beta1"], self.options["beta2"]
        average, square = state["exp_avg"], state["exp_avg_sq"]
        average += (1 - first) * (gradient - average)
        square *= second
        square += (1 - second) * gradient * gradient
        correction = math.sqrt(1 - second**step)
        return np.asarray(rate / (1 - first**step) * average / self._root(square, correction), dtype=gradient.dtype)

    def _root(self, square: Array, correction: float) -> Array:
        return np.asarray(np.sqrt(square) / correction + self.options["eps"])


class SparseAdam(Adam):
    """SparseAdam: eps is added before the correction, not behind it."""

    def _root(self, square: Array, correction: float) -> Array:
        return np.asarray((np.sqrt(square) + self.options["eps"]) / correction)


OPTIMIZERS: Mapping[str, type[Updates]] = {
    "sgd": Updates,
    "momentum": Momentum,
    "adagrad": Adagrad,
    "adam": Adam,
    "sparse_adam": SparseAdam,
}
