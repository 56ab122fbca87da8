"""Errors: predictions beside what was measured, by cell and by pair of strategies."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from files import Entry, Files, read, sealed
from rivals import RIVALS

Floats = npt.NDArray[np.float64]

WHO = ("sim", *RIVALS)
_SAMPLES = 5_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One strategy in one environment: predicted and measured seconds of a step, and of its part that is no compute."""

    environment: str
    strategy: str
    calibrated: bool
    steps: int
    predicted_s: dict[str, float]
    """By who says so."""
    predicted_rest_s: dict[str, float]
    legs_s: tuple[float, ...]
    """Of every leg that counts."""
    legs_rest_s: tuple[float, ...]
    """Wait and exposed communication."""
    num_void: int
    """Measurements that do not count, repeated ones among them."""
    same_plan: bool
    sim: Entry
    """The simulated phases."""
    legs: tuple[Entry, ...]

    @property
    def real_s(self) -> float:
        """Mean over the legs."""
        return statistics.mean(self.legs_s)

    @property
    def real_rest_s(self) -> float:
        """Mean over the legs."""
        return statistics.mean(self.legs_rest_s)

    def error(self, who: str = "sim") -> float:
        """Of the run time: predicted over measured, minus one."""
        return self.predicted_s[who] / self.real_s - 1.0

    def rest_error(self, who: str = "sim") -> float:
        """Of the part that is no compute."""
        return self.predicted_rest_s[who] / self.real_rest_s - 1.0

    @property
    def noise(self) -> float | None:
        """A/A: by which share the two legs' run times differ; none without two."""
        return None if len(self.legs_s) < 2 else abs(self.legs_s[1] / self.legs_s[0] - 1.0)

    @property
    def rest_noise(self) -> float | None:
        """A/A of the part that is no compute."""
        return None if len(self.legs_s) < 2 else abs(self.legs_rest_s[1] - self.legs_rest_s[0]) / self.real_rest_s

    def phase_s(self, name: str) -> tuple[float, float]:
        """Simulated and measured seconds of a phase."""
        return float(self.sim[name]), statistics.mean(float(leg[name]) for leg in self.legs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two strategies of one environment: the logarithm of how many times as long one's step is as the other's."""

    environment: str
    strategies: tuple[str, str]
    predicted: dict[str, float]
    real: float
    noise: float | None
    """Between the first legs of both and the second ones."""

    def error(self, who: str = "sim") -> float:
        """Predicted minus measured log-ratio."""
        return self.predicted[who] - self.real


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Errors over many cells."""

    count: int
    mean_absolute: float
    low: float
    """Bootstrap over cells: 95 % of the means lie between this and ``high``."""
    high: float
    bias: float
    p95: float
    largest: float

    @classmethod
    def of(cls, errors: Sequence[float]) -> Spread:
        """Of at least one error."""
        values = np.array(errors, dtype=float)
        size = np.abs(values)
        chosen = np.random.default_rng(0).integers(0, len(size), (_SAMPLES, len(size)))
        low, high = np.quantile(size[chosen].mean(axis=1), (0.025, 0.975))
        return cls(
            count=len(size),
            mean_absolute=float(size.mean()),
            low=float(low),
            high=float(high),
            bias=float(values.mean()),
            p95=float(np.quantile(size, 0.95)),
            largest=float(size.max()),
        )


def difference(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """By how much their absolute errors are larger on average, cell by cell: 95 % by bootstrap."""
    extra = np.abs(np.array(theirs, dtype=float)) - np.abs(np.array(ours, dtype=float))
    chosen = np.random.default_rng(0).integers(0, len(extra), (_SAMPLES, len(extra)))
    low, high = np.quantile(extra[chosen].mean(axis=1), (0.025, 0.975))
    return float(low), float(high)


def cells_of(files: Files) -> tuple[list[Cell], list[str]]:
    """All cells with a leg that counts, and the names of those without.

    Raises ``SystemExit`` where a leg was measured against other predictions, or before they were sealed.
    """
    digest, predictions = sealed(files)
    lines = read(files.raw)
    legs = [line for line in lines if line["kind"] == "leg"]
    moments = [line["at"] for line in lines if line["kind"] == "predicted" and line["sha256"] == digest]
    if not moments or any(leg["predictions"] != digest or leg["at"] < moments[0] for leg in legs):
        raise SystemExit(f"{files.raw} holds runs that were not measured behind these predictions")
    cells, missing = [], []
    for environment, known in predictions["environments"].items():
        for strategy, said in known["cells"].items():
            own = [leg for leg in legs if (leg["environment"], leg["strategy"]) == (environment, strategy)]
            counted = {leg["leg"]: leg for leg in own if leg["counts"]}
            if counted:
                cells.append(_cell(environment, strategy, said, tuple(counted[index] for index in sorted(counted)), own))
            else:
                missing.append(f"{environment} | {strategy}")
    return cells, missing


def _cell(environment: str, strategy: str, said: Entry, legs: tuple[Entry, ...], own: Sequence[Entry]) -> Cell:
    steps, sim = said["steps"], said["sim"]
    assert all(leg["steps"] == steps for leg in legs), "a leg has other steps than were predicted"
    return Cell(
        environment=environment,
        strategy=strategy,
        calibrated=said["calibrated"],
        steps=steps,
        predicted_s={"sim": sim["wall_s"] / steps} | {name: said["rivals"][name]["wall_s"] / steps for name in RIVALS},
        predicted_rest_s={"sim": rest_s(sim)} | {name: said["rivals"][name]["not_compute_s"] for name in RIVALS},
        legs_s=tuple(leg["wall_s"] / steps for leg in legs),
        legs_rest_s=tuple(rest_s(leg) for leg in legs),
        num_void=sum(len(leg["void"]) for leg in own),
        same_plan=all(leg["plan"] == said["plan"] for leg in legs),
        sim=sim,
        legs=legs,
    )


def rest_s(measured: Entry) -> float:
    """Wait and exposed communication of a step."""
    return float(measured["wait_s"] + measured["exposed_comm_s"])


def pairs_of(cells: Sequence[Cell]) -> list[Pair]:
    """Every two strategies of one environment."""
    found = []
    for name in dict.fromkeys(cell.environment for cell in cells):
        own = [cell for cell in cells if cell.environment == name]
        for a, b in itertools.combinations(own, 2):
            both = len(a.legs_s) > 1 and len(b.legs_s) > 1
            ratios = [math.log(left / right) for left, right in zip(a.legs_s, b.legs_s, strict=False)]
            found.append(
                Pair(
                    environment=name,
                    strategies=(a.strategy, b.strategy),
                    predicted={who: math.log(a.predicted_s[who] / b.predicted_s[who]) for who in WHO},
                    real=math.log(a.real_s / b.real_s),
                    noise=abs(ratios[1] - ratios[0]) if both else None,
                )
            )
    return found
