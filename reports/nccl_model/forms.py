"""Forms of an all-reduce's time over its size, and fits of them by least squared relative errors."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

Floats = npt.NDArray[np.float64]

DATA = Path(__file__).parent / "data"
MIB = 2**20
LAST_FITTED = 64 * MIB
FIRST_PREDICTED = 128 * MIB
HORIZON = 8 * MIB
GENERATIONS = ("v100", "a100")
GPUS = (2, 4, 8)
WINDOWS_MIB = (1, 2, 4, 8, 12, 16, 24, 32)
"""Smallest size that a form is fitted to."""
TERMS = ("line", "line + root", "line + loops", "line + root + loops")


@dataclass(frozen=True, slots=True)
class Form:
    """T(S) = alpha + S beta, with what ``terms`` adds, fitted to ``window`` to 64 MiB. No coefficient is below zero.

    ``root`` adds gamma sqrt(S). ``loops`` adds lambda ceil(S / L): NCCL sends a buffer in loops of so many bytes, each of which pays its
    hops' latency; L is the number of MiB, up to half the largest size, with the least residual.
    """

    terms: str
    window: int
    from_switch: bool = False
    """Start no earlier than the first size that takes no longer than one 1.2 times smaller: there NCCL changed its way."""

    def __str__(self) -> str:
        switch = " and the last switch" if self.from_switch else ""
        return f"{self.terms}, from {self.window // MIB} MiB{switch}"


@dataclass(frozen=True, slots=True)
class Fit:
    """A form's coefficients for one table."""

    form: Form
    coefficients: Floats
    loop: float
    residual: float

    def ns(self, sizes: Floats) -> Floats:
        """T of each size."""
        return np.asarray(_columns(self.form, sizes, self.loop) @ self.coefficients)


def forms() -> Iterator[Form]:
    """All that are tried."""
    for terms in TERMS:
        for window in WINDOWS_MIB:
            yield Form(terms, window * MIB)


def table(generation: str, gpus: int) -> tuple[Floats, Floats]:
    """Sizes in bytes, and times in ns: the mean of out of place and in place."""
    with (DATA / f"{generation}_{gpus}gpu.csv").open(encoding="utf-8") as file:
        lines = list(csv.reader(file))[1:]
    return np.array([float(line[0]) for line in lines]), np.array([(float(line[3]) + float(line[5])) / 2 for line in lines])


def fit(form: Form, sizes: Floats, times: Floats, last: int = LAST_FITTED) -> Fit:
    """The form's best coefficients for what of a table it may see, up to ``last`` bytes."""
    smallest = max(form.window, last_switch(sizes[sizes <= last], times[sizes <= last]) if form.from_switch else 0)
    seen = (sizes >= smallest) & (sizes <= last)
    sizes, times = sizes[seen], times[seen]
    loops = [float(number * MIB) for number in range(1, last // MIB // 2 + 1)] if "loops" in form.terms else [1.0]
    found = []
    for loop in loops:
        columns = _columns(form, sizes, loop)
        scale = np.abs(columns).max(axis=0)
        coefficients, residual = nnls(columns / scale / times[:, None], np.ones(len(times)))
        found.append(Fit(form, coefficients / scale, loop, residual))
    return min(found, key=lambda one: one.residual)


def errors(form: Form, generation: str, gpus: int) -> tuple[Floats, Floats]:
    """Of one table: the predicted sizes, and the relative error of each."""
    sizes, times = table(generation, gpus)
    predicted = sizes >= FIRST_PREDICTED
    return sizes[predicted], fit(form, sizes, times).ns(sizes[predicted]) / times[predicted] - 1


def score(form: Form, generation: str, gpus: int) -> float:
    """What a form is chosen by, of sizes up to 64 MiB alone: fitted to 40, 48 and 56 MiB, its mean error on the next 8 MiB each."""
    sizes, times = table(generation, gpus)
    found = []
    for last in range(LAST_FITTED - 3 * HORIZON, LAST_FITTED, HORIZON):
        following = (sizes > last) & (sizes <= last + HORIZON)
        found.append(np.abs(fit(form, sizes, times, last).ns(sizes[following]) / times[following] - 1).mean())
    return float(np.mean(found))


def last_switch(sizes: Floats, times: Floats, ratio: float = 1.2) -> float:
    """The last size at which NCCL changed its way, or 0."""
    for index in reversed(range(len(sizes))):
        later = (sizes >= ratio * sizes[index]) & (times <= times[index])
        if later.any():
            return float(sizes[later][0])
    return 0.0


def _columns(form: Form, sizes: Floats, loop: float) -> Floats:
    columns = [np.ones_like(sizes), sizes]
    if "root" in form.terms:
        columns.append(np.sqrt(sizes))
    if "loops" in form.terms:
        columns.append(np.ceil(sizes / loop))
    return np.stack(columns, axis=1)
