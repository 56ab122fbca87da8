"""Updates to the target: how many fewer one way of training needs than another, from runs that share seeds.

Runs with one seed share initial parameters and the order of the data, so their log ratio has less spread than
a single run. It is assumed to be normal. A run that ends before it arrives is censored: only a bound of the
ratio is known, which counts as the chance of lying beyond it (Tobin 1958, Econometrica 26). The interval is
that of the profile likelihood (Meeker and Escobar 1998, Statistical Methods for Reliability Data, chapter 8),
with the threshold at which it equals Student's t for a complete sample; degrees of freedom are those of the
known ratios. Two things are not modelled: the bound of a censored ratio depends on the run that did arrive,
and seeds in which neither arrives do not count.

A script's loss is that of its batches, so its crossing of the target is itself uncertain (``on_line``).
Between seeds that is part of the spread; with one seed it is part of the interval.

With fewer than ``FEWEST_SEEDS`` seeds nothing is proved, because they do not show how far runs differ. Their
interval uses a scaled inverse chi-square prior for the ratios' variance (Gelman et al. 2013, Bayesian Data
Analysis, section 3.2): ``SPREAD`` counts as ``SPREAD_FREE`` degrees of freedom in addition to those of the
ratios.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize, special, stats

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.quantities import counted
from fleetbench.result import RunResult
from real.job.results import reported_losses
from real.processes.roles import SEED

FEWEST_SEEDS = 5
"""Least number of seeds with which runs to the target may prove a gain."""
SPREAD, SPREAD_FREE = 0.2, 4
"""Assumed standard deviation of a log ratio between seeds, and its degrees of freedom. Ratios that share
their seed have 0.09 in the runs of ``reports/``, and some 0.3 (``reports/tuner/README.md``). The runs of a
script that ignores its seed are not paired."""
_LEAST_WINDOWS = 4
"""Least number of windows of losses to which a line is fitted."""
_FARTHEST = 20.0
"""Largest end of an interval, in logarithms: no way of training takes e^20 times as many updates."""


@dataclass(frozen=True, slots=True)
class Updates:
    """Log ratios of updates to the target, default over finalist, one per seed.

    Above 0 the finalist needs fewer.
    """

    ratios: tuple[float, ...]
    known: tuple[int, ...]
    """State of each ratio: 0, exact; 1, a lower bound, because the default did not arrive; -1, an upper
    bound, because the finalist did not."""
    noise: float = 0.0
    """Standard deviation of a single ratio, from the losses of its two runs; infinite if they do not show it."""
    spread: float = 0.0
    """Assumed standard deviation between seeds, in addition to what the ratios show; 0 if none is assumed."""

    @classmethod
    def of_runs(cls, default: Sequence[float | None], own: Sequence[float | None], steps: float, own_steps: float | None = None) -> Updates:
        """Return the log ratios of the ``default`` and ``own`` steps to the target, by seed.

        None stands for a run that did not arrive within ``steps`` (or ``own_steps``). Seeds in which neither
        arrived are dropped.
        """
        pairs = [pair for pair in zip(default, own, strict=False) if pair != (None, None)]
        ratios = tuple(math.log((one or steps) / (other or own_steps or steps)) for one, other in pairs)
        return cls(ratios, tuple((one is None) - (other is None) for one, other in pairs))

    @property
    def num_known(self) -> int:
        """Number of seeds in which both arrived."""
        return self.known.count(0)

    @property
    def mean(self) -> float:
        """Most likely mean of the log ratios."""
        return _likeliest(self)[0]

    def half(self, error: float, side: int) -> float:
        """Return the distance from the mean to an end of the interval, beyond which the truth is with chance ``error``.

        ``side``: -1 for the lower, 1 for the upper end. With one seed it uses ``noise`` and ``spread``;
        infinite if too few arrived.
        """
        if len(self.ratios) == 1 and self.num_known == 1:
            of_seeds = stats.t(SPREAD_FREE) if self.spread else stats.norm
            return float(of_seeds.isf(error)) * math.hypot(self.noise, self.spread)
        return _half(self, error, side)


def arrival_of(result: RunResult, experiment: Experiment) -> tuple[float | None, float | None]:
    """Return the number of steps after which a run reaches the target, and the deviation of its logarithm.

    None stands for what is not reached or not known. A script's losses are those of batches, so a line is
    fitted to them. Raises ``ConfigError`` if the script's own strategy arrives within the first window.
    """
    workload, updates = experiment.workload, result.summary.steps_to_target
    if updates is None or workload.target_loss is None or experiment.run.launcher != "command":
        return updates, 0.0
    if updates <= workload.eval_every and result.experiment.strategy == experiment.strategy:
        hint = f"a lower target, or workload.eval_every below {workload.eval_every}: within a window nothing tells when"
        raise ConfigError("the script's first losses are at it already", "workload.target_loss", f"{workload.target_loss:g}", hint)
    ended = reported_losses(result.steps, workload.eval_every, int(result.steps["step"].max()))
    middles = [(end - (workload.eval_every - 1) / 2, loss) for end, loss in ended]
    return on_line(middles, workload.target_loss, updates) if middles else (updates, 0.0)


def on_line(windows: Sequence[tuple[float, float]], target: float, crossed: float) -> tuple[float, float | None]:
    """Return where the loss crosses the target, and the deviation of its logarithm, for noisy mean losses.

    A straight line over the logarithm of steps is fitted to the windows, ``(middle, mean loss)``, between
    half and twice ``crossed``, its approximate place, or to the four nearest. The deviation is that of
    inverse regression (Draper and Smith 1998, Applied Regression Analysis, section 3.2). The result is
    ``crossed``, without a deviation, if there are fewer windows, or if the line does not fall to the target
    between half and twice ``crossed``.
    """
    nearest = sorted(windows, key=lambda window: abs(math.log(window[0] / crossed)))
    inside = sum(crossed / 2 <= step <= 2 * crossed for step, _ in windows)
    steps, losses = np.array(nearest[: max(_LEAST_WINDOWS, inside)]).reshape(-1, 2).T
    if len(steps) < _LEAST_WINDOWS or not np.isfinite(losses).all():
        return crossed, None
    x = np.log(steps)
    fit = stats.linregress(x, losses)
    at = (target - fit.intercept) / fit.slope if fit.slope < 0 else math.nan
    if not abs(at - math.log(crossed)) <= math.log(2):
        return crossed, None
    residuals = losses - fit.intercept - fit.slope * x
    deviation = math.sqrt(float(residuals @ residuals) / (len(x) - 2)) / -fit.slope
    return math.exp(at), deviation * math.sqrt(1 / len(x) + (at - x.mean()) ** 2 / float(np.square(x - x.mean()).sum()))


@functools.lru_cache(maxsize=64)
def _half(updates: Updates, error: float, side: int) -> float:
    known, (assumed, squares) = updates.num_known, _prior(updates)
    if known == 0 or (free := known - 1 + assumed) == 0:
        return math.inf
    t = float(stats.t.ppf(1 - error, free))
    if known == len(updates.ratios):
        squares += float(np.square(np.array(updates.ratios) - updates.mean).sum())
        return t * math.sqrt(squares / free / known)
    mean, highest = _likeliest(updates)
    wanted = highest - (known + assumed) / 2 * math.log1p(t * t / free)

    def above(distance: float) -> float:
        return _profile(updates, mean + side * distance) - wanted

    return float(optimize.brentq(above, 0.0, _FARTHEST, xtol=1e-4)) if above(_FARTHEST) < 0 else math.inf


@functools.lru_cache(maxsize=64)
def _likeliest(updates: Updates) -> tuple[float, float]:
    """Return the most likely mean of the log ratios, and its log likelihood.

    They are the plain mean and NaN if all or no ratios are known.
    """
    ratios = np.array(updates.ratios)
    if updates.num_known in (0, len(ratios)):
        return float(ratios.mean()), math.nan
    span = 3 * float(np.ptp(ratios)) + 1.0
    found = optimize.minimize_scalar(
        lambda mean: -_profile(updates, mean), bounds=(ratios.min() - span, ratios.max() + span), method="bounded"
    )
    return float(found.x), -float(found.fun)


def _prior(updates: Updates) -> tuple[int, float]:
    """Return the degrees of freedom and the sum of squares of the prior."""
    return (SPREAD_FREE, SPREAD_FREE * updates.spread**2) if updates.spread else (0, 0.0)


def _profile(updates: Updates, mean: float) -> float:
    """Return the log likelihood of a mean, at the most likely deviation for it."""
    ratios, known = np.array(updates.ratios), np.array(updates.known)
    off, (assumed, squares) = ratios - mean, _prior(updates)
    num, squares = updates.num_known + assumed, squares + float(np.square(off[known == 0]).sum())
    away = math.sqrt(squares / num) + 1e-6  # most likely for the known ratios

    def lost(log_deviation: float) -> float:
        deviation = math.exp(log_deviation)
        within = special.log_ndtr(-known[known != 0] * off[known != 0] / deviation).sum()
        return float(num * log_deviation + squares / deviation**2 / 2 - within)

    widest = math.log(away + float(np.abs(off).max()) * math.sqrt(len(ratios))) + 1.0
    found = optimize.minimize_scalar(lost, bounds=(math.log(away) - 1.0, widest), method="bounded", options={"xatol": 1e-4})
    return -float(found.fun)


def too_few(ran: int, missing: int, seeds: int, asked: int, budget: str | None) -> str:
    """Describe that runs with ``ran`` seeds are too few for USE, and what to change.

    ``seeds`` of the ``asked`` seeds give different runs. ``budget``: a setting with room for the ``missing`` runs.
    """
    if seeds < asked:
        what = f"the script ignores {SEED}, from which it should take its seed"
    elif asked < FEWEST_SEEDS:
        what = f"set tune.target_seeds = {FEWEST_SEEDS}"
    else:
        runs = f"the {counted(missing, 'run')} that are missing"
        what = f"--from with {budget} has room for {runs}" if budget else f"the notes say what ended {runs}"
    return f"USE to a target takes runs of {FEWEST_SEEDS} seeds, and {ran} {'was' if ran == 1 else 'were'} run: {what}"
