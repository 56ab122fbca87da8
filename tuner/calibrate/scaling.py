"""Scaling: seconds per step on more GPUs, from measured steps on a few.

A step on n nodes of g GPUs, b samples on each GPU, takes::

    work     = c (fixed + (1 - fixed) b / b0)
    transfer = bytes (2 (g - 1) / g / (share inside) + 2 (n g - 1) / (n g) (1 + growth log2(n / 2)) / (share between))
               + collectives latency log2(n g)
    step     = work (1 + input log2(g) + rank_jitter m(n g) + node_jitter m(n))
               + max(transfer - overlap backward, late transfer),    backward = 2 / 3 work

c is the work at batch b0, and m(k) the mean of the largest of k standard normal variates. Only c is fitted
freely. All others have priors, which ``reports/small_to_large`` compares with measurements by others; a
parameter that the measured sizes do not determine stays as wide as its prior.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from scipy.special import expit, logit, ndtri

from fleetbench.errors import ConfigError

Draws = npt.NDArray[np.float64]

NUM_DRAWS, NUM_KEPT = 40_000, 4_000
BUCKET_BYTES = 25 * 2**20
"""Bytes of one collective: the default size of DDP's buckets."""
MISFIT, MISFIT_PER_DOUBLING = 0.02, 0.04
"""Scales of the deviation of a size's log seconds from the law: of a measured size, and, added in quadrature, for each
doubling of GPUs or batch between a size and the nearest measured one."""
TAIL = 3
"""Degrees of freedom of the Student's t distribution of unmeasured sizes' deviations. Its tails are heavy because a few
sizes are far off, for instance where a library switches to another algorithm."""
TOLD = 0.25
"""Share of the prior's standard deviation by which a parameter's posterior must be narrower, or its mean must have
moved, for the parameter to count as fitted."""
LEVELS = (0.05, 0.5, 0.95)


@dataclass(frozen=True, slots=True)
class Prior:
    """Prior of a parameter: median, and standard deviation of its logarithm, its logit or itself (``kind``)."""

    median: float
    sd: float
    kind: Literal["log", "logit", "plain"]
    words: str

    def of(self, z: Draws) -> Draws:
        """Return the parameter's values for standard normal variates ``z``."""
        if self.kind == "log":
            return self.median * np.exp(self.sd * z)
        if self.kind == "logit":
            return np.asarray(expit(logit(self.median) + self.sd * z))
        return np.maximum(self.median + self.sd * z, 0.0)


PRIORS: Mapping[str, Prior] = {
    "fixed": Prior(0.1, 1.0, "logit", "share of the work that does not shrink with the local batch"),
    "share": Prior(0.8, 1.0, "logit", "share of a link's declared rate that the exchange reaches"),
    "overlap": Prior(0.7, 1.0, "logit", "share of the backward that hides the exchange"),
    "late": Prior(0.15, 0.7, "log", "share of the exchange that nothing hides"),
    "growth": Prior(0.05, 0.1, "plain", "growth of the exchange between nodes per doubling of nodes"),
    "latency": Prior(20e-6, 0.8, "log", "seconds of a collective per doubling of GPUs"),
    "rank_jitter": Prior(0.004, 0.8, "log", "jitter of a GPU, as a share of the work"),
    "node_jitter": Prior(0.006, 0.8, "log", "jitter of a node, as a share of the work"),
    "input": Prior(0.002, 0.9, "log", "slow-down by the node's other GPUs (input, host, power) per doubling of them"),
    "noise": Prior(0.012, 0.7, "log", "spread of a step from run to run"),
    "bytes": Prior(240e6, 1.2, "log", "bytes of the gradients"),
    "inside": Prior(60e9, 1.0, "log", "bytes per second and GPU of the link inside a node"),
    "between": Prior(10e9, 1.0, "log", "bytes per second and node of the network"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A number of GPUs, with the samples per step of each."""

    nodes: int
    gpus_per_node: int
    local_batch: float

    @property
    def gpus(self) -> int:
        """Number of GPUs on all nodes."""
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Declared facts about the model and the cluster. None: not declared, so that the prior applies."""

    gradient_bytes: float | None = None
    inside: float | None = None
    """Bytes per second of a GPU inside a node, each way."""
    between: float | None = None
    """Bytes per second of a node to the others, each way."""
    work_s: float | None = None
    """Estimated seconds per sample of one GPU's work, without exchange or jitter."""
    work_sd: float = 0.4
    """Standard deviation of the logarithm of ``work_s``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Forecast for one size. Each triple holds the ends and the median of a 90 % interval: low, median, high."""

    size: Size
    step_s: tuple[float, ...]
    """Seconds of the mean step of one run."""
    samples_per_s: tuple[float, ...]
    faster: float
    """Probability that this size trains more samples per second than the fastest measured size."""
    run_to_run: float
    """Standard deviation of a run's step time around the mean over runs, as a share."""


def mean_of_largest(count: float) -> float:
    """Return the mean of the largest of ``count`` standard normal variates (Blom 1958)."""
    return 0.0 if count <= 1 else float(ndtri((count - 0.375) / (count + 0.25)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Posterior of the law's parameters: ``Scaling.of`` fits it, and ``forecast`` predicts from it."""

    measured: Mapping[Size, Sequence[float]]
    values: Mapping[str, Draws]
    """Equally likely draws of each parameter."""
    log_scale: Draws
    reference: tuple[float, float]
    """Mean seconds per step of the smallest measured size, and the geometric mean of local batches."""
    told: Mapping[str, float]
    """Share of the prior's standard deviation by which each parameter's posterior is narrower, or its mean has moved,
    whichever is larger; declared parameters are left out."""
    z: Draws
    """Deviation of an unmeasured size from the law, in units of its scale, in each draw: variates of Student's t."""

    @classmethod
    def of(cls, measured: Mapping[Size, Sequence[float]], known: Known, priors: Mapping[str, Prior] = PRIORS) -> "Scaling":
        """Fit the seconds per step of each run, by size. Raises ``ConfigError`` if nothing was measured."""
        if not measured:
            raise ConfigError("holds no step", "the table", hint="a row per run: gpus, seconds, and the batch")
        random = np.random.default_rng(0)
        declared = {"bytes": known.gradient_bytes, "inside": known.inside, "between": known.between}
        free = {name: prior for name, prior in priors.items() if declared.get(name) is None}
        z = {name: random.standard_normal(NUM_DRAWS) for name in free}
        values = {name: prior.of(z[name]) for name, prior in free.items()}
        values |= {name: np.full(NUM_DRAWS, value) for name, value in declared.items() if value is not None}
        smallest = min(measured, key=lambda size: size.gpus)
        batch = math.exp(np.mean([math.log(size.local_batch) for size in measured]))
        reference = (float(np.mean(measured[smallest])), batch)
        logs = {size: np.log(np.asarray(seconds, float)) for size, seconds in measured.items()}
        noise = values["noise"]
        rows = [(logs[size].mean() - np.log(shape(values, size, reference)), MISFIT**2 + noise**2 / len(logs[size])) for size in measured]
        if known.work_s is not None:
            rows.append((np.full(NUM_DRAWS, math.log(known.work_s * batch)), np.full(NUM_DRAWS, known.work_sd**2)))
        residuals, variances = np.stack([row[0] for row in rows]), np.stack([row[1] for row in rows])
        weights = 1 / variances
        scale = (residuals * weights).sum(0) / weights.sum(0)
        likely = -0.5 * ((residuals - scale) ** 2 * weights + np.log(variances)).sum(0) - 0.5 * np.log(weights.sum(0))
        for own in logs.values():  # spread of repeats around their mean
            likely -= (len(own) - 1) * np.log(noise) + ((own - own.mean()) ** 2).sum() / (2 * noise**2)
        chance = np.exp(likely - likely.max())
        kept = random.choice(NUM_DRAWS, NUM_KEPT, p=chance / chance.sum())
        log_scale = scale[kept] + random.standard_normal(NUM_KEPT) / np.sqrt(weights.sum(0)[kept])
        return cls(
            measured=measured,
            values={name: draws[kept] for name, draws in values.items()},
            log_scale=log_scale,
            reference=reference,
            told={name: float(max(1 - draws[kept].std(), abs(draws[kept].mean()))) for name, draws in z.items()},
            z=random.standard_t(TAIL, NUM_KEPT),
        )

    def forecast(self, size: Size) -> Forecast:
        """Return the forecast of one run at any size."""
        random = np.random.default_rng(size.gpus)
        mean = self._log_seconds(size)
        noise = self.values["noise"]
        step_s = np.quantile(np.exp(mean + noise * random.standard_normal(NUM_KEPT)), LEVELS)
        samples = size.gpus * size.local_batch
        best = np.max([np.log(one.gpus * one.local_batch) - self._log_seconds(one) for one in self.measured], axis=0)
        return Forecast(
            size=size,
            step_s=tuple(step_s.tolist()),
            samples_per_s=tuple((samples / step_s[::-1]).tolist()),
            faster=float(np.mean(math.log(samples) - mean > best)),
            run_to_run=float(np.median(noise)),
        )

    def _log_seconds(self, size: Size) -> Draws:
        """Return the logarithm of a size's mean seconds per step over runs, for each draw."""
        away = min(abs(math.log2(size.gpus / one.gpus)) + abs(math.log2(size.local_batch / one.local_batch)) for one in self.measured)
        misfit = 0.0 if size in self.measured else math.hypot(MISFIT, MISFIT_PER_DOUBLING * away)
        return self.log_scale + np.log(shape(self.values, size, self.reference)) + misfit * self.z

    def parameters(self) -> list[dict[str, Any]]:
        """Return a row for each undeclared parameter: name, meaning, interval, and whether it was fitted."""
        found = []
        for name, share in self.told.items():
            low, median, high = np.quantile(self.values[name], LEVELS).tolist()
            row = {"name": name, "words": PRIORS[name].words, "low": low, "median": median, "high": high}
            found.append(row | {"from": "fitted" if share > TOLD else "prior"})
        return found


def shape(values: Mapping[str, Draws], size: Size, reference: tuple[float, float]) -> Draws:
    """Return seconds per step over c, for each draw; ``reference``: approximate c in seconds, and b0."""
    nodes, gpus = size.nodes, size.gpus_per_node
    seconds, batch = reference
    work = values["fixed"] + (1 - values["fixed"]) * size.local_batch / batch
    nbytes, share = values["bytes"], values["share"]
    transfer = nbytes * 2 * (gpus - 1) / gpus / (share * values["inside"])
    if nodes > 1:
        grown = 1 + values["growth"] * math.log2(nodes / 2)
        transfer = transfer + nbytes * 2 * (size.gpus - 1) / size.gpus * grown / (share * values["between"])
    transfer = transfer + np.ceil(nbytes / BUCKET_BYTES) * values["latency"] * math.log2(size.gpus)
    transfer = transfer / seconds
    hidden = values["overlap"] * work * 2 / 3
    jitter = values["rank_jitter"] * mean_of_largest(size.gpus) + values["node_jitter"] * mean_of_largest(nodes)
    own = work * (1 + values["input"] * math.log2(gpus) + jitter)
    return np.asarray(own + np.maximum(transfer - hidden, values["late"] * transfer))
