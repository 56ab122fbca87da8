"""Fit: parameters that explain measured cells best, their intervals, and the error to expect of other cells.

A step takes as long as its longest chain of compute and messages. The time of a chain is linear in durations and in
reciprocals of bandwidths, so a cell's time, as a function of those, is the maximum of several planes. The fit is
solved on such planes instead of the simulator. Each simulation adds one plane per cell, tangent to the simulated time;
the solution on all planes is simulated next, until planes and simulator agree there (Kelley, "The Cutting-Plane Method
for Solving Convex Programs", 1960). A plane that lies above a simulated time is dropped, for instance where another
bandwidth changes which gradients are fused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
from scipy import optimize, stats

from fleetbench.digests import write_whole
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.profile import Profile, name_profile
from fleetbench.stragglers import Floats
from sim.many.pool import Where, run_all
from tuner.calibrate.cells import Cell
from tuner.calibrate.model import RATES, Model

WIDEST = math.log(4.0)
"""Largest log ratio of the ends of a 95 % interval. If it is larger, the cells do not identify the parameter."""
_FARTHEST = math.log(1e4)
"""Largest log ratio of a parameter to its declared value, which bounds the search."""
RESOLUTION = 0.002
"""Relative difference within which planes and simulator agree. Cells are assumed to be no more precise."""
_SLOPE = 0.003
"""Relative change of a parameter for measuring its slope; ``_LEAST_UNITS`` is the least change in bit/s or ns."""
_LEAST_UNITS = 20.0
_ROUNDS = 15
_LEAST_GAIN = 0.01
"""Least decrease of the sum of squares for which the fit continues, as a share of ``_Fit._floor``."""
_NEVER = -np.inf
_CONFIDENCE = 0.95

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A fitted parameter, with values in ``unit``: ``bit/s``, ``ns``, or empty for none."""

    key: str
    unit: str
    declared: float
    value: float
    low: float | None
    """Lower end of the 95 % interval; None if the cells set no lower end, or are too few. ``high`` likewise."""
    high: float | None
    held: bool
    """Whether it keeps its declared value because the cells do not identify it. The interval is that of a fit in
    which it was free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Result of a calibration. Errors are simulated / measured - 1, one per cell."""

    experiment: Experiment
    profile: Profile | None
    """The experiment's profile with scaled compute; None if it did not change."""
    parameters: tuple[Fitted, ...]
    cells: tuple[Cell, ...]
    measured_s: tuple[float, ...]
    errors_declared: tuple[float, ...]
    errors: tuple[float, ...]
    errors_left_out: tuple[float, ...]
    """Error of each cell if only the others are fitted; empty if these are fewer than the parameters."""

    def save(self, path: Path) -> None:
        """Write the experiment, below the names of fitted parameters, and beside it a changed profile."""
        experiment = self.experiment
        if self.profile is not None:
            experiment = name_profile(experiment, self.profile, path.with_name(f"{path.stem}-profile.toml").resolve())
        fitted = ", ".join(parameter.key for parameter in self.parameters if not parameter.held) or "nothing"
        write_whole(path, f"# calibrated by {len(self.cells)} measurements: {fitted}\n{experiment.to_toml()}")


def calibrate(
    experiment: Experiment, cells: Sequence[Cell], keys: Sequence[str], progress: Progress | None = None, *, on: Where = "local"
) -> Calibration:
    """Fit ``keys`` of the experiment (``compute``, or quantities such as ``cluster.inter.bandwidth``) to the cells.

    Residuals are logarithms of simulated / measured. A relative standard deviation sd gives a cell the weight
    1 / (sd^2 + 0.01^2). ``on``: where the fits without one cell run; see ``sim.many.pool``.

    Raises ``ConfigError`` for keys without a declared value, cells that the simulator
    refuses, and fewer cells than keys.
    """
    if len(set(keys)) < len(keys) or not keys:
        raise ConfigError("needs each parameter once, and at least one", "--fit", ", ".join(keys), "--fit cluster.inter.bandwidth")
    if len(cells) < len(keys):
        raise ConfigError("needs at least as many measurements as parameters", "--fit", f"{len(cells)} for {len(keys)}", "fit fewer")
    fit = _Fit(Model(experiment, cells, keys), _weights(cells))
    free, logs = list(range(len(keys))), np.zeros(len(keys))
    limits: dict[int, tuple[float, float]] = {}
    identified: set[int] = set()
    declared_s = fit.look(logs, free)
    while free:
        if progress:
            progress(len(keys) - len(free), len(keys))
        logs = fit.settle(np.where(np.isin(np.arange(len(keys)), free), logs, 0.0), free)
        found = {index: fit.interval(logs, free, index) for index in free}
        weak = [index for index, (low, high) in found.items() if high - low > WIDEST and low < 0 < high]
        # the first interval that identifies a parameter is kept: in that fit, parameters that are held later are free
        limits |= {index: ends for index, ends in found.items() if index not in identified}
        identified |= found.keys() - set(weak)
        if not weak:
            break
        free.remove(max(weak, key=lambda index: (found[index][1] - found[index][0], index)))
        logs = logs if free else np.zeros(len(keys))
    values = fit.values(logs)
    others = np.count_nonzero(fit.weights) - 1
    left_out = run_all(partial(_left_out, fit, logs, free), range(len(cells) if others >= len(free) else 0), on=on)
    measured_s = fit.model.measured_s
    calibrated, profile = fit.model.calibrated(experiment, values)
    return Calibration(
        experiment=calibrated,
        profile=profile,
        parameters=tuple(
            _fitted(fit, index, values[index], limits[index] if left_out else (-math.inf, math.inf), held=index not in free)
            for index in range(len(keys))
        ),
        cells=tuple(cells),
        measured_s=tuple(measured_s.tolist()),
        errors_declared=tuple((declared_s / measured_s - 1).tolist()),
        errors=tuple((fit.model.seconds(values) / measured_s - 1).tolist()),
        errors_left_out=tuple(left_out),
    )


def _weights(cells: Sequence[Cell]) -> Floats:
    relative = [(cell.sd or 0.0) / (cell.seconds or cell.samples_per_s or 1.0) for cell in cells]
    weights = np.array([1 / (sd**2 + 0.01**2) for sd in relative])
    return np.asarray(weights / weights.mean())


def _left_out(fit: _Fit, logs: Floats, free: Sequence[int], index: int) -> float:
    weights = fit.weights.copy()
    weights[index] = 0.0
    others = fit.values(fit.solve(logs, free, weights))
    return float(fit.model.seconds(others, [index])[0] / fit.model.measured_s[index] - 1)


def _fitted(fit: _Fit, index: int, value: float, limits: tuple[float, float], *, held: bool) -> Fitted:
    parameter = fit.model.parameters[index]
    low, high = (parameter.value(log) if math.isfinite(log) else None for log in limits)
    return Fitted(key=parameter.key, unit=parameter.unit, declared=parameter.declared, value=value, low=low, high=high, held=held)


class _Fit:
    """Planes below the simulated seconds of every cell, and least squares over them.

    ``logs`` are logarithms of the factors on declared values.
    """

    def __init__(self, model: Model, weights: Floats) -> None:
        self.model, self.weights = model, weights
        self._signs = np.array([-1.0 if parameter.key.endswith(RATES) else 1.0 for parameter in model.parameters])
        """Sign of each parameter. Planes are linear in exp(sign * log): in durations, and in reciprocals of rates."""
        num_cells, num = len(weights), len(model.parameters)
        self._constants, self._slopes = np.zeros((0, num_cells)), np.zeros((0, num_cells, num))

    def values(self, logs: Floats) -> list[float]:
        """Return the parameters' values."""
        return [parameter.value(log) for parameter, log in zip(self.model.parameters, logs, strict=True)]

    def look(self, logs: Floats, free: Sequence[int]) -> Floats:
        """Return the simulated seconds of every cell, and add a tangent plane for each."""
        values = self.values(logs)
        at, seconds = self._at(values), self.model.seconds(values)
        slopes = np.zeros((len(seconds), len(values)))
        for index in free:
            beside = values.copy()
            unit = self.model.parameters[index].unit
            beside[index] += max(round(_SLOPE * values[index]), _LEAST_UNITS) if unit else _SLOPE * values[index]
            slopes[:, index] = (self.model.seconds(beside) - seconds) / (self._at(beside)[index] - at[index])
        contradicted = self._constants + self._slopes @ at > seconds * (1 + RESOLUTION)
        self._constants = np.vstack([np.where(contradicted, _NEVER, self._constants), seconds - slopes @ at])
        self._slopes = np.concatenate([self._slopes, slopes[None]])
        return seconds

    def _at(self, values: Sequence[float]) -> Floats:
        declared = np.array([parameter.declared for parameter in self.model.parameters])
        return np.asarray((np.array(values) / declared) ** self._signs)

    def planes(self, logs: Floats) -> tuple[Floats, Floats]:
        """Return the logarithm of every cell's seconds by its highest plane, and its slopes over ``logs``."""
        at = np.exp(self._signs * logs)
        over = self._constants + self._slopes @ at
        highest, cells = over.argmax(axis=0), np.arange(over.shape[1])
        seconds = np.maximum(over[highest, cells], 1e-12)
        return np.log(seconds), self._slopes[highest, cells] * (at * self._signs) / seconds[:, None]

    def squares(self, seconds: Floats) -> float:
        """Return the weighted sum of squared residuals."""
        return float(self.weights @ np.log(seconds / self.model.measured_s) ** 2)

    def solve(self, logs: Floats, free: Sequence[int], weights: Floats | None = None) -> Floats:
        """Return the least squares on the planes, with steps up to ``WIDEST``, within ``_FARTHEST``."""
        if not free:
            return logs
        logs, farthest = np.clip(logs, -_FARTHEST, _FARTHEST), _FARTHEST + RESOLUTION
        roots = np.sqrt(self.weights if weights is None else weights)
        target = np.log(self.model.measured_s)

        def full(x: Floats) -> Floats:
            changed = logs.copy()
            changed[free] = x
            return changed

        found = optimize.least_squares(
            lambda x: roots * (self.planes(full(x))[0] - target),
            logs[free],
            jac=lambda x: roots[:, None] * self.planes(full(x))[1][:, free],
            bounds=(np.maximum(logs[free] - WIDEST, -farthest), np.minimum(logs[free] + WIDEST, farthest)),
        )
        return full(found.x)

    def _floor(self, free: Sequence[int]) -> float:
        """Return the sum of squares below which a fit is exact: as if each residual were ``RESOLUTION``."""
        return max(1, len(self.weights) - len(free)) * RESOLUTION**2

    def settle(self, logs: Floats, free: Sequence[int]) -> Floats:
        """Return the least-squares solution by the simulator.

        Solutions on the planes are simulated, which corrects the planes, until both agree.
        """
        least, reach = self.squares(self.look(logs, free)), WIDEST
        axes = np.eye(len(logs))[list(free[:3])]
        for _ in range(_ROUNDS):
            corners = product((-reach / 2, reach / 2), repeat=len(axes))
            starts = [logs, *(logs + np.array(away) @ axes for away in corners)]
            candidates = [np.clip(self.solve(start, free), logs - reach, logs + reach) for start in starts]
            chosen = min(candidates, key=lambda candidate: self.squares(np.exp(self.planes(candidate)[0])))
            expected = self.planes(chosen)[0]
            seconds = self.look(chosen, free)
            squares = self.squares(seconds)
            agree = bool(np.abs(np.log(seconds) - expected).max() < RESOLUTION)
            gained = least - squares
            if gained > 0:
                least, logs = squares, chosen
            else:
                reach /= 2
            if (agree and gained < _LEAST_GAIN * self._floor(free)) or reach < RESOLUTION:
                break
        return logs

    def interval(self, logs: Floats, free: Sequence[int], index: int) -> tuple[float, float]:
        """Return the ends of the 95 % interval of a parameter's ``log``.

        An end is infinite if it is farther away than both ``WIDEST`` and the declared value. By the profile
        likelihood (Bates and Watts, Nonlinear Regression Analysis, 1988, section 6.1.2), the fit of the other
        parameters is significantly worse beyond the ends. A slope at the fit would say little, because steps
        are bound by compute for some values, and by messages for others.
        """
        others = [other for other in free if other != index]
        spare = max(1, len(self.weights) - len(free))
        ends = []
        for sign in (-1.0, 1.0):
            for _ in range(3):
                end, there = self._end(logs, others, index, sign, spare)
                seconds = self.model.seconds(self.values(there))
                if np.abs(np.log(seconds) - self.planes(there)[0]).max() < RESOLUTION:
                    break
                self.look(there, free)
            ends.append(float(logs[index]) + sign * end)
        return ends[0], ends[1]

    def _end(self, logs: Floats, others: Sequence[int], index: int, sign: float, spare: int) -> tuple[float, Floats]:
        """Return the distance of an end from the fit, and the ``logs`` of all parameters there."""
        least = max(self.squares(np.exp(self.planes(logs)[0])), self._floor([*others, index]))
        limit = least * (1 + float(stats.f.ppf(_CONFIDENCE, 1, spare)) / spare)
        there = logs

        def excess(distance: float) -> float:
            nonlocal there
            start = there.copy()
            start[index] = logs[index] + sign * distance
            there = self.solve(start, others)
            return self.squares(np.exp(self.planes(there)[0])) - limit

        inside, outside = 0.0, RESOLUTION
        farthest = max(WIDEST, -sign * float(logs[index]) + RESOLUTION)
        while excess(outside) < 0:
            if outside >= farthest:
                return math.inf, there
            inside, outside = outside, min(2 * outside, farthest)
        while outside - inside > max(RESOLUTION / 4, 0.02 * outside):
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if excess(middle) < 0 else (inside, middle)
        return outside, there
