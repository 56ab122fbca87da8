"""Two sets of vectors of the same samples: what was evaluated offline, and what an online service returned."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fleetbench.errors import ConfigError
from fleetbench.vectors import Values, Vectors, name_some

WORST = 10
"""Samples that a comparison names."""

_CHUNK = 2**20
"""Numbers that are laid side by side at once, in float64."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleDifference:
    """One sample's vectors side by side. Where one holds NaN or infinity, ``cosine`` is NaN and the differences are infinite."""

    id: str
    cosine: float
    """Of the angle between them: 1 where they point the same way, and where both are zero; 0 where one is."""
    difference: float
    """Largest absolute difference of a number."""
    relative: float
    """``difference`` over the largest magnitude in the offline vector; infinite where only that is zero."""
    component: int
    """Place, from 0, of the largest difference."""
    offline: float
    """The number there."""
    online: float

    def to_dict(self) -> dict[str, Any]:
        """As JSON's data: null where a number is not finite."""
        return {name: _plain(value) for name, value in dataclasses.asdict(self).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Of the finite samples; all null where there are none."""

    max: float | None
    p95: float | None
    mean: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorComparison:
    """How far an online service's vectors are from those evaluated offline."""

    offline: str
    online: str
    samples: int
    length: int
    """Numbers of a vector."""
    tolerance: float
    """Largest relative difference that passes."""
    num_past: int
    """Samples past it, those that are not finite among them."""
    num_not_finite: int
    """Samples where either vector holds NaN or infinity."""
    num_equal: int
    """Samples whose vectors are equal to the bit, but for the sign of a zero."""
    lowest_cosine: float | None
    mean_cosine: float | None
    difference: Spread
    relative: Spread
    worst: tuple[SampleDifference, ...]
    """By ``relative``, the worst first."""

    @property
    def passed(self) -> bool:
        """Whether no sample is past the tolerance."""
        return self.num_past == 0

    def to_dict(self) -> dict[str, Any]:
        """The comparison as JSON's data."""
        return dataclasses.asdict(self) | {"passed": self.passed, "worst": [item.to_dict() for item in self.worst]}


def compare_vectors(offline: Vectors, online: Vectors, tolerance: float) -> VectorComparison:
    """Lay vectors side by side by their samples' ids, in whatever order either has them.

    Raises ``ConfigError`` for vectors of another length, and for samples that only one side has.
    """
    rows = _rows(offline, online)
    step = max(1, _CHUNK // offline.length)
    parts = [
        _differences(offline.values[first : first + step], online.values[rows[first : first + step]]) for first in range(0, len(rows), step)
    ]
    cosine, difference, relative, component = (np.concatenate(column) for column in zip(*parts, strict=True))
    finite = np.isfinite(difference)
    order = np.lexsort((np.where(finite, cosine, -2.0), -relative))[:WORST]
    return VectorComparison(
        offline=offline.source,
        online=online.source,
        samples=len(rows),
        length=offline.length,
        tolerance=tolerance,
        num_past=int((~(relative <= tolerance)).sum()),
        num_not_finite=int((~finite).sum()),
        num_equal=int((difference == 0).sum()),
        lowest_cosine=float(cosine[finite].min()) if finite.any() else None,
        mean_cosine=float(cosine[finite].mean()) if finite.any() else None,
        difference=_spread(difference[finite]),
        relative=_spread(relative[finite]),
        worst=tuple(
            SampleDifference(
                id=offline.ids[row],
                cosine=float(cosine[row]),
                difference=float(difference[row]),
                relative=float(relative[row]),
                component=int(component[row]),
                offline=float(offline.values[row, component[row]]),
                online=float(online.values[rows[row], component[row]]),
            )
            for row in order
        ),
    )


def _rows(offline: Vectors, online: Vectors) -> npt.NDArray[np.int64]:
    """Of every offline sample the row of its online vector."""
    if offline.length != online.length:
        hint = f"both of one layer of one model: {offline.source} has {offline.length}; `evaluate --layer NAME` takes another layer's"
        raise ConfigError("vectors of another length", online.source, f"{online.length} numbers", hint)
    places = {name: row for row, name in enumerate(online.ids)}
    missing = [name for name in offline.ids if name not in places]
    if missing:
        hint = "ask the service for every sample, or evaluate only the first N by --samples N"
        raise ConfigError(f"{len(missing)} of {len(offline.ids)} samples have no vector", online.source, name_some(missing), hint)
    if len(places) > len(offline.ids):
        known = set(offline.ids)
        unknown = [name for name in online.ids if name not in known]
        hint = f"{offline.source} has ids such as {offline.ids[0]!r}; evaluate all that the service was sent, or drop these"
        raise ConfigError(f"{len(unknown)} samples were not evaluated", online.source, name_some(unknown), hint)
    return np.array([places[name] for name in offline.ids], np.int64)


def _differences(offline: Values, online: Values) -> tuple[Floats, Floats, Floats, npt.NDArray[np.int64]]:
    """Cosine, largest absolute and largest relative difference ``(samples,)``, and the place of the largest."""
    usable = np.isfinite(offline) & np.isfinite(online)
    finite = np.asarray(usable.all(axis=1))
    a, b = (np.where(finite[:, None], values, 0).astype(np.float64) for values in (offline, online))
    apart = np.abs(b - a)
    component = np.where(finite, apart.argmax(axis=1), usable.argmin(axis=1))
    difference = apart.max(axis=1)
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    both_zero = ~(a.any(axis=1) | b.any(axis=1))
    cosine = np.where(both_zero, 1.0, (a * b).sum(axis=1) / np.where(norms > 0, norms, 1.0)).clip(-1.0, 1.0)
    largest = np.abs(a).max(axis=1)
    relative = np.where(difference == 0, 0.0, np.where(largest > 0, difference / np.where(largest > 0, largest, 1.0), np.inf))
    infinite = np.where(finite, 0.0, np.inf)
    return np.where(finite, cosine, np.nan), difference + infinite, relative + infinite, component.astype(np.int64)


def _spread(values: Floats) -> Spread:
    finite = values[np.isfinite(values)]
    if not finite.size:
        return Spread(max=None, p95=None, mean=None)
    return Spread(max=_plain(float(values.max())), p95=float(np.quantile(finite, 0.95)), mean=float(finite.mean()))


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
