"""Recommendation: the verdict with all of its evidence, as data. The report draws it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fleetbench import units
from fleetbench.config import Config, decode, field_types
from fleetbench.digests import read_json, reading, sealed_json, write_whole
from fleetbench.errors import ConfigError
from fleetbench.quantities import counted
from fleetbench.strategy import DistributedStrategy
from tuner.notes import Annotated, Noise
from tuner.pytorch import page_of

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetCheck(Config):
    """Runs from the initial parameters to the workload's target, one a seed."""

    reached: bool
    """By any run."""
    updates: tuple[float | None, ...] = ()
    """Steps of a trainer to the target, by seed; none of a run that was over before it arrived."""
    metrics: tuple[float | None, ...] = ()
    """``tune.metric`` at the target, by seed."""
    noise: tuple[float | None, ...] = ()
    """Standard deviations of the logarithms of ``updates``; 0 where nothing is said of it, none where losses do not tell it."""
    time_s: float | None = None
    """The arm's own seconds for the median of these; none where fewer than half arrived."""
    final_loss: float | None = None
    """Of the first run."""
    from_arm: str | None = None
    """Whose runs they were, where they were another's that trains alike."""
    runs: tuple[str, ...] = ()
    """Folders of the runs."""
    steps: int | None = None
    """Of the longest run; fewer than the workload's where all arrive, or the script's data end earlier."""

    @property
    def num_reached(self) -> int:
        """Runs that arrived."""
        return sum(one is not None for one in self.updates)

    def noise_beside(self, other: TargetCheck) -> float:
        """Standard deviation of the log ratio of both, with the first seed with which both arrive; infinite where losses do not tell it."""
        runs = zip(self.updates, other.updates, self.noise, other.noise, strict=False)
        noises = [pair for one, another, *pair in runs if one is not None and another is not None]
        return math.hypot(*(math.inf if noise is None else noise for noise in (noises[0] if noises else [])))

    def missed_beside(self, default: TargetCheck, target: float | None) -> str | None:
        """Says so where it arrived less often than the default, with the same seeds."""
        runs, num = len(self.updates), sum(one is not None for one in default.updates[: len(self.updates)])
        if self.num_reached >= num:
            return None
        return f"reaches the target loss {target:g} in {self.num_reached} of {counted(runs, 'run')}, the default in {num}"

    def seldom_beside(self, default: TargetCheck, target: float | None) -> str | None:
        """Says so where the default never arrived, and this in no more than half of its runs."""
        if default.reached or 2 * self.num_reached > len(self.updates):
            return None
        return f"reaches the target loss {target:g} in {self.num_reached} of {len(self.updates)} runs, and the default in none"

    def lost_beside(self, default: TargetCheck, target: float | None) -> str | None:
        """Says so where its first run went on after the target, and lost it again, unlike the default's."""
        if None in (target, self.final_loss, default.final_loss) or not default.final_loss <= target < self.final_loss:  # type: ignore[operator]
            return None
        ends = f"it ends at {self.final_loss:.3g}, the default at {default.final_loss:.3g}"
        return f"reaches the target loss {target:g} and loses it again: {ends}"

    def with_run(
        self,
        updates: float | None,
        final_loss: float | None,
        steps: int,
        metric: float | None = None,
        noise: float | None = 0.0,
        run: str | None = None,
    ) -> TargetCheck:
        """With another run."""
        return dataclasses.replace(
            self,
            updates=(*self.updates, updates),
            reached=self.reached or updates is not None,
            metrics=(*self.metrics, metric),
            noise=(*self.noise, noise),
            runs=(*self.runs, *filter(None, [run])),
            steps=max(steps, self.steps or 0),
            final_loss=self.final_loss if self.updates else final_loss,
        )

    def __str__(self) -> str:
        """In a few words."""
        if not self.reached:
            return "not reached" + (f" (loss {self.final_loss:.3g})" if self.final_loss is not None else "")
        some = "" if self.num_reached == len(self.updates) else f" in {self.num_reached} of {len(self.updates)} runs"
        after = f" after {self.time_s:.3g} s" if self.time_s is not None else ""
        return f"reached{some}{after}{'' if self.from_arm is None else f' (runs of {self.from_arm})'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm(Config):
    """A strategy that ran for real."""

    name: str
    """``default``, ``advice`` (Fleet's documents), ``candidate 1``, ..."""
    strategy: DistributedStrategy
    paced_by: DistributedStrategy | None = None
    """What its legs run, where its rounds differ: fixed rounds that meet as often as a whole training's. Runs to the target are its own."""
    simulated_s: float
    """Simulated seconds of a step."""
    measured_s: tuple[float, ...] = ()
    """Mean seconds of a step, one a leg."""
    virtual_updates: float | None = None
    """Steps of a trainer to the target that virtual trainers took (``tuner.ways``); none where they were not asked, or did not arrive."""
    ratio: float | None = None
    """Of its time to the default's, in the legs that ranked it."""
    target: TargetCheck | None = None
    rejected: str | None = None
    """Why it cannot be recommended, if so."""
    peak_bytes: int | None = None
    """The most memory that a trainer took in its legs, where that was looked at."""
    simulated_run: str | None = None
    """Folder of a simulated run as long as a real leg, one of the recommendation's ``runs``."""
    measured_runs: tuple[str, ...] = ()
    """Folders of its real legs (choosing, target, pairs), in the order they ran."""
    void_runs: tuple[str, ...] = ()
    """Of these, those during which the machine was not quiet; pairs with one are left out."""

    @property
    def timed(self) -> DistributedStrategy:
        """What has its seconds of a step."""
        return self.paced_by or self.strategy

    @property
    def real_s(self) -> float | None:
        """Mean seconds of a step over the legs; none where no leg ran."""
        return sum(self.measured_s) / len(self.measured_s) if self.measured_s else None

    @property
    def legs(self) -> str:
        """How many real legs it had, and how many of them are void."""
        void = f", {len(self.void_runs)} void" if self.void_runs else ""
        return f"{len(self.measured_runs)}{void}"

    @property
    def error(self) -> float | None:
        """Simulated over real step time, minus 1."""
        return None if self.real_s is None else self.simulated_s / self.real_s - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair(Config):
    """One fresh pair of legs of the verdict, in mean seconds of a step."""

    default_s: float
    finalist_s: float
    default_first: bool

    @property
    def speedup(self) -> float:
        """Default over finalist: above 1 the finalist was faster."""
        return self.default_s / self.finalist_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial(Config):
    """One simulated trial of the search."""

    number: int
    parameters: dict[str, bool | int | float | str] = field(default_factory=dict)
    simulated_s: float
    """Simulated seconds of a step."""
    repeated: bool = False
    """Equal to an earlier trial in plan, cadence and layer table, and not simulated again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation(Annotated):
    """What to use, and why. ``speedup``, ``low`` and ``high`` are of time per sample; above 1 is faster."""

    schema: int = SCHEMA
    experiment: str
    """Digest of the experiment."""
    name: str
    verdict: Literal["USE", "KEEP DEFAULT"]
    undecided: bool = False
    """The default is kept because measuring ended before a gain was proved or excluded."""
    reason: str
    strategy: DistributedStrategy
    """What to train with: the finalist, or the default."""
    buckets_mb: tuple[float, ...] = ()
    """Sizes of its buckets in MiB, in their order; empty where DistributedDataParallel could not be given them."""
    finalist: str | None = None
    """Name of the arm that the pairs compared with the default."""
    speedup: float | None = None
    low: float | None = None
    """Lower end of a 90 % interval of the mean paired log ratio that holds whenever the pairs stop."""
    high: float | None = None
    to_target: float | None = None
    """How many times as soon as the default the finalist reaches the target; none where it trains like the default."""
    to_target_low: float | None = None
    """Lower end of its 90 % interval (``tuner.sequential``); none where the loss is declared, or too few arrived."""
    to_target_high: float | None = None
    seeds: int | None = None
    """Seeds of these runs."""
    metric: str | None = None
    """What the metric of ``tune.metric`` is at the target, for finalist and default, in words."""
    target_loss: float | None = None
    pairs: tuple[Pair, ...] = ()
    arms: tuple[Arm, ...] = ()
    trials: tuple[Trial, ...] = ()
    learnt: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """How all that virtual trainers trained arrives, by what that depends on (``tuner.learning.Arrival``); empty where it does not."""
    caveat: str | None = None
    """That no way is known to reach the target, or a learning rate with which the default itself is there sooner."""
    noise: Noise | None = None

    @property
    def runs(self) -> tuple[str, ...]:
        """Folder names of all stored runs, below ``runs`` beside ``recommendation.json``."""
        return tuple(run for arm in self.arms for run in (arm.simulated_run, *arm.measured_runs) if run is not None)

    @property
    def line(self) -> str:
        """The verdict in one line."""
        return self._verdict if self.caveat is None else f"{self._verdict}; {self.caveat}"

    @property
    def _verdict(self) -> str:
        if self.verdict == "KEEP DEFAULT":
            finalist = next((arm for arm in self.arms if arm.name == self.finalist), None)
            what = "" if finalist is None else f"; {finalist.name} is {units.changes(finalist.strategy.changes())}"
            return f"KEEP DEFAULT{' (UNDECIDED)' if self.undecided else ''}: {self.reason}{what}"
        gain = self._gain(f"{self.speedup:.2f}x [{self.low:.2f}, {self.high:.2f}]", f"n = {len(self.pairs)} pairs")
        return f"USE {units.changes(self.strategy.changes())}: {gain}"

    def _gain(self, step: str, count: str) -> str:
        """The gain under its objective: time to the target, which is updates times seconds an update, or of a step alone."""
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
        """Write ``recommended.toml``, ``recommended.md`` where it says USE, then ``recommendation.json``, each whole or not at all."""
        self.strategy.save(folder / "recommended.toml", self.line, f"experiment {self.name} {self.experiment}")
        if self.verdict == "USE" and self.arms:
            write_whole(folder / "recommended.md", page_of(self.strategy, self.arms[0].strategy, self.line, self.buckets_mb))
        write_whole(folder / "recommendation.json", sealed_json(self.plain()))

    @classmethod
    def load(cls, folder: str | Path) -> Recommendation:
        """Read what ``save`` wrote. Raises ``ConfigError`` for a folder without a recommendation."""
        path = Path(folder) / "recommendation.json"
        if not path.is_file():
            raise ConfigError("no recommendation here", str(folder), hint="fleetbench tune writes one when it ends")
        with reading(path, "run fleetbench tune again"):
            data = read_json(path.read_text(encoding="utf-8"))
            known = field_types(cls)  # type: ignore[arg-type]  # classes are hashable
            return decode({key: value for key, value in data.items() if key in known}, cls, str(path))
