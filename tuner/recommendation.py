"""Recommendation: a tuning's verdict with all of its evidence, as data for the report."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fleetbench import units
from fleetbench.config import Config, decode, field_types
from fleetbench.digests import read_json, reading, sealed_json, write_whole
from fleetbench.errors import ConfigError
from fleetbench.strategy import DistributedStrategy
from tuner.notes import Annotated, Noise
from tuner.pytorch import page_of

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached(Config):
    """Result of a run to the target."""

    updates: float | None = None
    """Number of steps per trainer to the target; None if the run ended before reaching it."""
    noise: float | None = None
    """Standard deviation of the logarithm of ``updates``; 0 if not estimated, None if the losses do not
    allow an estimate."""
    final_loss: float | None = None
    """Held-out loss after the last step."""
    metric: float | None = None
    """Value of ``tune.metric`` at the target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetCheck(Config):
    """Runs from the initial parameters to the workload's target, one per seed."""

    reached: bool
    """Whether any run reached the target."""
    updates: tuple[float | None, ...] = ()
    """Number of steps per trainer to the target, by seed; None if the run ended before reaching it."""
    metrics: tuple[float | None, ...] = ()
    """Value of ``tune.metric`` at the target, by seed."""
    noise: tuple[float | None, ...] = ()
    """Standard deviation of the logarithm of each of ``updates``; 0 if not estimated, None if the losses do not
    allow an estimate."""
    time_s: float | None = None
    """Median of ``updates`` times the arm's own seconds per step; None if fewer than half of the runs arrived."""
    final_loss: float | None = None
    """Final loss of the first run."""
    from_arm: str | None = None
    """Name of the arm that ran, if another arm that trains alike ran in its place."""
    runs: tuple[str, ...] = ()
    """Names of the runs' folders."""
    steps: int | None = None
    """Number of steps in the longest run; smaller than the workload's if all runs arrive, or if the script's data
    end earlier."""

    @property
    def num_reached(self) -> int:
        """Number of runs that reached the target."""
        return sum(one is not None for one in self.updates)

    def noise_beside(self, other: TargetCheck) -> float:
        """Return the standard deviation of both ``updates``' log ratio, for the first seed with which both arrive.

        Infinite if losses do not allow an estimate.
        """
        runs = zip(self.updates, other.updates, self.noise, other.noise, strict=False)
        noises = [pair for one, another, *pair in runs if one is not None and another is not None]
        return math.hypot(*(math.inf if noise is None else noise for noise in (noises[0] if noises else [])))

    def misses_beside(self, default: TargetCheck) -> bool:
        """Whether fewer runs arrived than the default's with the same seeds, or at most half if the default never does."""
        is_seldom = not default.reached and 2 * self.num_reached <= len(self.updates)
        return is_seldom or self.num_reached < default.num_beside(self)

    def num_beside(self, other: TargetCheck) -> int:
        """Number of runs that reached the target with the seeds of ``other``."""
        return sum(one is not None for one in self.updates[: len(other.updates)])

    def with_run(self, reached: Reached, steps: int, run: str | None) -> TargetCheck:
        """Return the check with the results of another run added."""
        return dataclasses.replace(
            self,
            updates=(*self.updates, reached.updates),
            reached=self.reached or reached.updates is not None,
            metrics=(*self.metrics, reached.metric),
            noise=(*self.noise, reached.noise),
            runs=(*self.runs, *filter(None, [run])),
            steps=max(steps, self.steps or 0),
            final_loss=self.final_loss if self.updates else reached.final_loss,
        )

    def __str__(self) -> str:
        """Format the result in a few words."""
        if not self.reached:
            return "not reached" + (f" (loss {self.final_loss:.3g})" if self.final_loss is not None else "")
        some = "" if self.num_reached == len(self.updates) else f" in {self.num_reached} of {len(self.updates)} runs"
        after = f" after {self.time_s:.3g} s" if self.time_s is not None else ""
        return f"reached{some}{after}{'' if self.from_arm is None else f' (runs of {self.from_arm})'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm(Config):
    """A strategy that ran for real."""

    name: str
    """Name: ``default``, ``advice`` (from Fleet's documents), ``candidate 1``, ..."""
    strategy: DistributedStrategy
    paced_by: DistributedStrategy | None = None
    """Strategy of the arm's legs if rounds vary, else None: fixed rounds that synchronise as often as a whole training
    run. Runs to the target use ``strategy``."""
    simulated_s: float
    """Simulated seconds per step."""
    measured_s: tuple[float, ...] = ()
    """Mean seconds per step of each leg."""
    virtual_updates: float | None = None
    """Number of steps per trainer to the target, by virtual trainers (``tuner.ways``); None if they did not train
    this way."""
    ratio: float | None = None
    """Ratio of the arm's step time to the default's, from the legs that ranked it; None if it was not ranked."""
    target: TargetCheck | None = None
    """Runs to the target; None if there were none."""
    expected: float | None = None
    """Time over the default's that ranked the arm: ``ratio``, times that of updates to the target if known."""
    rejected: str | None = None
    """Reason why the arm cannot be recommended; None if it can."""
    peak_bytes: int | None = None
    """Peak memory of a trainer in the arm's legs, in bytes; None if not measured."""
    simulated_run: str | None = None
    """Folder of a simulated run as long as a real leg, one of ``Recommendation.runs``."""
    measured_runs: tuple[str, ...] = ()
    """Folders of the arm's real legs (ranking, target, pairs), in order of time."""
    void_runs: tuple[str, ...] = ()
    """Names of those folders whose legs are void, as on a busy machine; pairs with a void leg are left out."""

    @property
    def timed(self) -> DistributedStrategy:
        """Strategy whose legs give the arm's seconds per step."""
        return self.paced_by or self.strategy

    @property
    def real_s(self) -> float | None:
        """Mean seconds per step over the legs; None if no leg ran."""
        return sum(self.measured_s) / len(self.measured_s) if self.measured_s else None

    @property
    def legs(self) -> str:
        """Number of real legs, and how many of them are void, as text."""
        void = f", {len(self.void_runs)} void" if self.void_runs else ""
        return f"{len(self.measured_runs)}{void}"

    @property
    def error(self) -> float | None:
        """Simulated over real step time, minus 1; None if no leg ran."""
        return None if self.real_s is None else self.simulated_s / self.real_s - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair(Config):
    """A pair of legs that counts for the verdict, in mean seconds per step."""

    default_s: float
    finalist_s: float
    default_first: bool

    @property
    def speedup(self) -> float:
        """Ratio of the default's time to the finalist's: above 1 if the finalist was faster."""
        return self.default_s / self.finalist_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation(Annotated):
    """The strategy to use, and why. ``speedup``, ``low`` and ``high`` refer to time per sample; above 1 is faster."""

    schema: int = SCHEMA
    experiment: str
    """Digest of the experiment."""
    name: str
    verdict: Literal["USE", "KEEP DEFAULT"]
    undecided: bool = False
    """Whether the default is kept because measuring ended before a gain was proved or excluded."""
    reason: str
    """Reason for the verdict."""
    strategy: DistributedStrategy
    """Strategy to train with: the finalist, or the default."""
    buckets_mb: tuple[float, ...] = ()
    """Sizes of the strategy's buckets in MiB, in order; empty if DistributedDataParallel cannot use them."""
    finalist: str | None = None
    """Name of the arm that the pairs compared with the default."""
    speedup: float | None = None
    """Mean ratio of the default's time per sample to the finalist's."""
    low: float | None = None
    """Lower end of the 90 % interval of ``speedup``, from paired log ratios. The interval holds whenever the pairs
    stop."""
    high: float | None = None
    """Upper end of the 90 % interval of ``speedup``."""
    to_target: float | None = None
    """Ratio of the times to the target, default over finalist; None if both train alike, or if the default never
    reaches the target."""
    to_target_low: float | None = None
    """Lower end of the 90 % interval of ``to_target`` (``tuner.sequential``); None if the loss is declared, or if too
    few runs arrived."""
    to_target_high: float | None = None
    """Upper end of the 90 % interval of ``to_target``."""
    seeds: int | None = None
    """Number of seeds whose runs give ``to_target``."""
    metric: str | None = None
    """Values of ``tune.metric`` at the target, for finalist and default, in words."""
    target_loss: float | None = None
    """Target loss; None without a target."""
    pairs: tuple[Pair, ...] = ()
    """Pairs of the finalist and the default."""
    arms: tuple[Arm, ...] = ()
    """Strategies that ran for real; the first is the default."""
    num_trials: int = 0
    """Number of different strategies that were simulated."""
    caveat: str | None = None
    """Note that no way is known to reach the target, or that the default reaches it sooner at another
    learning rate."""
    noise: Noise | None = None
    """Spread of the default's legs and of the pairs."""

    @property
    def runs(self) -> tuple[str, ...]:
        """Folder names of all stored runs, below ``runs`` next to ``recommendation.json``."""
        return tuple(run for arm in self.arms for run in (arm.simulated_run, *arm.measured_runs) if run is not None)

    @property
    def line(self) -> str:
        """Verdict in one line."""
        return self._verdict if self.caveat is None else f"{self._verdict}; {self.caveat}"

    @property
    def _verdict(self) -> str:
        if self.verdict == "KEEP DEFAULT":
            finalist = next((arm for arm in self.arms if arm.name == self.finalist), None)
            what = "" if finalist is None else f"; {finalist.name} is {self._changes(finalist.strategy)}"
            return f"KEEP DEFAULT{' (UNDECIDED)' if self.undecided else ''}: {self.reason}{what}"
        gain = self._gain(f"{self.speedup:.2f}x [{self.low:.2f}, {self.high:.2f}]", f"n = {len(self.pairs)} pairs")
        return f"USE {self._changes(self.strategy)}: {gain}"

    def _changes(self, strategy: DistributedStrategy) -> str:
        """Describe the strategy's changes from the default that ran, or from Fleet's defaults if none did."""
        own = self.arms[0].strategy if self.arms else None
        return units.changes(strategy.changes() and strategy.changes(own))

    def _gain(self, step: str, count: str) -> str:
        """Describe the gain in time to the target (updates times seconds per update), or per step."""
        if self.target_loss is None:
            return f"{step}, {count}"
        own = next((arm.target for arm in self.arms if arm.strategy == self.strategy), None)
        default = self.arms[0].target if self.arms else None
        if self.to_target is not None:
            whose = "" if own is None or own.from_arm is None else f", of {own.from_arm}"
            by = "one run each"
            if self.to_target_low is not None and self.seeds != 1 and own is not None and default is not None:
                missed = "" if (num := min(own.num_reached, default.num_reached)) == self.seeds else f" ({num} arrived)"
                by = f"n = {self.seeds} seeds{missed}"
            ends = "" if self.to_target_low is None else f" [{self.to_target_low:.2f}, {self.to_target_high:.2f}]"
            metric = "" if self.metric is None else f"; {self.metric}"
            return f"{self.to_target:.2f}x{ends} to loss {self.target_loss:g}, {by}{whose} ({step} a step, {count}){metric}"
        if default is not None and not default.reached:
            runs = "" if own is None or len(own.updates) < 2 else f" in {own.num_reached} of {len(own.updates)} runs"
            return f"reaches loss {self.target_loss:g}{runs}, which the default does not ({step} a step, {count})"
        return f"{step} to loss {self.target_loss:g} and a step, {count}"

    def save(self, folder: Path) -> None:
        """Write ``recommended.toml``, for USE ``recommended.md``, then ``recommendation.json``."""
        self.strategy.save(folder / "recommended.toml", self.line, f"experiment {self.name} {self.experiment}")
        if self.verdict == "USE" and self.arms:
            write_whole(folder / "recommended.md", page_of(self.strategy, self.arms[0].strategy, self.line, self.buckets_mb))
        write_whole(folder / "recommendation.json", sealed_json(self.plain()))

    @classmethod
    def load(cls, folder: str | Path) -> Recommendation:
        """Read the recommendation that ``save`` wrote.

        Raises ``ConfigError`` if the folder has none.
        """
        path = Path(folder) / "recommendation.json"
        if not path.is_file():
            raise ConfigError("no recommendation here", str(folder), hint="fleetbench tune writes one when it ends")
        with reading(path, "run fleetbench tune again"):
            data = read_json(path.read_text(encoding="utf-8"))
            known = field_types(cls)  # type: ignore[arg-type]  # classes are hashable
            return decode({key: value for key, value in data.items() if key in known}, cls, str(path))
