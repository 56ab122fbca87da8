"""Optimizers of a server: torch's, on its part of the dense parameters and on the pushed rows of its tables.

Rows that a push does not hold keep their parameters and their state (torch calls this lazy): for
SGD and Adagrad that is the dense update with zeros in them, for momentum and Adam it is not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.sgd import sgd

Array = np.ndarray[Any, np.dtype[Any]]

SLOTS: Mapping[str, tuple[str, ...]] = {
    "sgd": (),
    "momentum": ("momentum_buffer",),
    "adagrad": ("sum",),
    "adam": ("exp_avg", "exp_avg_sq"),
    "sparse_adam": ("exp_avg", "exp_avg_sq"),
}
"""Names of the arrays of state that each parameter has."""


class Updates:
    """One optimizer over a list of arrays, each with the state that it keeps for it. ``name`` is a key of ``SLOTS``."""

    def __init__(self, name: str, options: Mapping[str, float], arrays: Sequence[Array]) -> None:
        self.options = options
        self._name = name
        self._arrays = arrays
        start = options.get("initial_accumulator_value", 0.0)
        self.state: list[dict[str, Array]] = [{slot: np.full_like(array, start) for slot in SLOTS[name]} for array in arrays]
        self.steps = [0] * len(arrays)
        """Updates that each has seen."""

    def update(self, number: int, gradient: Array, rate: float, rows: Array | None = None) -> None:
        """One step of array ``number``, or of distinct ``rows`` of it.

        A step without rows counts: the whole table has made it, on other servers.
        """
        self.steps[number] += 1
        if not len(gradient):
            return
        held = [self._arrays[number], *self.state[number].values()]
        parts = held if rows is None else [array[rows] for array in held]
        # What comes off the network may be read-only, of which torch warns.
        given = torch.from_numpy(np.require(gradient, requirements="W"))
        self._step(given, *map(torch.from_numpy, parts), step=self.steps[number], rate=rate)
        for array, part in zip(held, parts, strict=True) if rows is not None else ():
            array[rows] = part

    def _step(self, gradient: torch.Tensor, parameter: torch.Tensor, *state: torch.Tensor, step: int, rate: float) -> None:
        options: dict[str, Any] = {"lr": rate, "foreach": False, "fused": True, "maximize": False, **self.options}
        before = torch.tensor(step - 1, dtype=torch.float64)  # which counts beyond 2^24
        if self._name in ("sgd", "momentum"):
            options = {"momentum": 0.0, **options, "nesterov": bool(options.get("nesterov"))}
            sgd([parameter], [gradient], [state[0] if state else None], dampening=0.0, **options)
        elif self._name == "adagrad":
            del options["initial_accumulator_value"]
            adagrad([parameter], [gradient], [state[0]], [before], **options)
        else:
            if self._name == "sparse_adam":  # which adds eps before the correction
                options["eps"] /= math.sqrt(1 - options["beta2"] ** step)
            adam([parameter], [gradient], [state[0]], [state[1]], [], [before], amsgrad=False, **options)
