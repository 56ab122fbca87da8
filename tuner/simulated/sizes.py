"""Sizes: the best strategy for each value of a key, such as the number of nodes: speed, time, cost and efficiency.

Each size gets a whole search. The best are then simulated again as for a single cluster (``over_seeds``), so that both
answers have the same step time.

The samples to the target are known for some global batches, from the experiment's reference points or else
from virtual trainers. The law of ``samples_to_target`` predicts them for the others, and shows where the time
and the cost to the target are least.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fleetbench.config import Config
from fleetbench.experiment import Experiment, ReferencePoint
from fleetbench.profile import profile_of
from fleetbench.strategy import DistributedStrategy
from fleetbench.utilisation import Utilisation, utilisation
from sim.many.pool import Where, naming, started
from sim.many.sweep import Axis, Load
from tuner.learning import Learn, by_virtual_trainers, trainings
from tuner.notes import Note
from tuner.samples_to_target import Noise, samples_to_target
from tuner.simulated import candidates, sharded
from tuner.simulated.uncertainty import spread_of, ways_outside
from tuner.space import way_of
from tuner.ways import RATES, is_trainable

SECONDS_PER_DAY = 86_400
SEED_SPREAD = 0.16
"""Standard deviation between seeds of small models' samples to a target, as a share. It is assumed because
virtual trainers train one seed per batch size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size(Config):
    """Answer at one value of the swept key."""

    value: str
    trainers: int
    strategy: DistributedStrategy
    """Recommended strategy: the experiment's own, unless another is faster by more than ``tune.min_gain``."""
    step_s: float
    default_s: float
    """Seconds per step with the experiment's own strategy."""
    samples_per_s: float
    tokens_per_s: float | None
    per_trainer: Utilisation
    efficiency: float
    """Samples per second and trainer, as a share of those at the first value."""
    days: float | None
    """Days to the target if ``samples`` is known, else for ``tune.samples``; None if neither is known."""
    cost: float | None
    """Cost of these days, or of a million samples if ``days`` is None; None without
    ``tune.price_per_trainer_hour``."""
    samples: tuple[float, ...] = ()
    """Samples of one run to the target: low, median and high of a 90 % interval; empty if unknown."""
    days_interval: tuple[float, ...] = ()
    """Ends of the 90 % interval of ``days`` to the target, from seeds, the law, and the simulator's error."""
    fits_in_memory: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes(Config):
    """Answers of a sweep, in the order of its values."""

    name: str
    key: str
    compute: str
    samples: float | None
    price_per_trainer_hour: float | None
    sizes: tuple[Size, ...]
    notes: tuple[str, ...]

    @property
    def priced_samples(self) -> float:
        """Number of samples that ``cost`` pays for if the samples to the target are unknown."""
        return self.samples or candidates.PER_SAMPLES

    @property
    def least(self) -> dict[str, Size]:
        """Sizes that reach the target ``soonest`` and ``cheapest``, by medians; empty without a law."""
        told = [size for size in self.sizes if size.samples and size.fits_in_memory is not False]
        found = {"soonest": min(told, key=lambda size: size.days or 0.0)} if told else {}
        return found | ({"cheapest": min(told, key=lambda size: size.cost or 0.0)} if told and told[0].cost is not None else {})


def tune_sizes(
    load: Load,
    *axes: Axis,
    out: Path,
    progress: Callable[[int, int], None] | None = None,
    learn: Learn = by_virtual_trainers,
    on: Where = "local",
) -> Sizes:
    """Return the best strategy at each value of one axis, or at each pair of values of two axes.

    Args:
        load: loads the experiment with overrides, as in ``sim.many.sweep``.
        axes: a key and its values. A second axis repeats the first one at each of its values.
        out: folder in which large searches are kept.
        progress: called with the numbers of finished and of all points.
        learn: runs virtual trainers, as in ``tune_simulated``.
        on: see ``tuner.search``.

    Raises:
        ConfigError: a value does not fit the experiment, or cannot be simulated; the message names it.
    """
    tell = progress or (lambda *_: None)
    first_axis, *others = axes
    points = [tuple(reversed(values)) for values in itertools.product(*(axis.values for axis in (*others, first_axis)))]
    keys = [first_axis.key, *(axis.key for axis in reversed(others))]
    settings = [[f"{key}={value}" for key, value in zip(keys, point, strict=True)] for point in points]
    experiments: list[Experiment] = []
    for setting in settings:  # load all of them before the first is estimated
        with naming(f"the point {' '.join(setting)}"):
            experiments.append(load(setting))
    experiments = [candidates.with_compute(experiment, out) for experiment in experiments]
    law = _Law.of(experiments, out, learn)
    noted: dict[Note, list[str]] = {}
    sizes: list[Size] = []
    with started(on):
        for index, (point, experiment) in enumerate(zip(points, experiments, strict=True)):
            tell(index, len(points))
            with naming(f"the point {' '.join(settings[index])}"):
                ranking = candidates.ranked(experiment, out=out, on=on)
                for note in ranking.notes:
                    noted.setdefault(note, []).append(", ".join(point))
                times = _of_best(experiment, law.comparable(experiment, ranking.step_s))
                sizes.append(_size(", ".join(point), experiment, times, sizes[0] if sizes else None, law))
    tell(len(points), len(points))
    first = experiments[0]
    key = ", ".join(keys)
    notes = [str(note) if len(of) == len(points) else f"at {key} = {'; '.join(of)}: {note}" for note, of in noted.items()]
    notes += [*map(str, candidates.caveats(first)), law.note]
    if first.workload.target_loss is not None and not law.points:
        notes.append("what local steps cost in loss is not simulated in a sweep; ask for one size without --sweep")
    return Sizes(
        name=first.name,
        key=key,
        compute=candidates.says(first),
        samples=first.tune.samples,
        price_per_trainer_hour=first.tune.price_per_trainer_hour,
        sizes=tuple(sizes),
        notes=tuple(notes),
    )


def _of_best(experiment: Experiment, ranking: candidates.Times) -> candidates.Times:
    """Simulate the best strategies again, as for this size alone; only the own one if no trial gains enough."""
    own, measures = experiment.strategy, candidates.over_seeds(experiment)
    gains = ranking[own] / next(iter(ranking.values())) - 1 > experiment.tune.min_gain - candidates.TIE
    asked = candidates.finalists(own, ranking) if gains or own not in sharded.fitting(experiment, ranking) else [own]
    return {strategy: statistics.fmean(measure(strategy) for measure in measures) for strategy in asked}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Law:
    """Samples to the target by global batch, with their source in ``note``."""

    points: tuple[ReferencePoint, ...] = ()
    noise: Noise | None = None
    note: str = "batch_size is a trainer's: the global batch grows with the trainers, and what that costs in loss is not simulated"

    @classmethod
    def of(cls, experiments: Sequence[Experiment], out: Path, learn: Learn) -> "_Law":
        """Return the law from ``tune.reference_points``, or else from virtual trainers within ``tune.search_seconds``.

        Without either, it is from a profile's gradient noise scale and ``tune.samples``; without those, it has no
        points.
        """
        first = experiments[0]
        tune, profile = first.tune, profile_of(first)
        measured = None if profile is None else profile.gradient_noise
        noise = None
        if measured is not None and measured.batch_size is not None:
            scale = measured.steps if measured.scale is None else measured.scale
            noise = Noise(samples=scale * measured.batch_size, at_least=measured.scale is None)
        points, source = tune.reference_points, "tune.reference_points"
        if not points and (points := _trained(experiments, out, learn)):
            source = "virtual trainers"
        if not points and noise is not None and tune.samples is not None:
            points = (ReferencePoint(batch_size=_global_batch(first), samples=tune.samples),)
            source = "the profile's gradient noise scale, and tune.samples for the first row's batch"
        if not points:
            return cls()
        sizes = ", ".join(f"{point.batch_size:,}" for point in points)
        note = f"samples to the target are by {source}, of global batches of {sizes}; other batches by a law"
        note += " (of which one batch says little)" if len(points) == 1 and noise is None else ""
        return cls(points=points, noise=noise, note=f"{note}, for learning rates that are tuned for their batch")

    def comparable(self, experiment: Experiment, times: candidates.Times) -> candidates.Times:
        """Return those strategies of ``times`` for which the law holds: the ones that train like the experiment's own.

        Without points, return all of them.
        """
        own = way_of(experiment.strategy)
        return {one: step_s for one, step_s in times.items() if way_of(one) == own} if self.points else times

    def samples(self, experiment: Experiment) -> tuple[float, ...]:
        """Return the samples of one run to the target: low, median, high; empty without points."""
        return samples_to_target(self.points, _global_batch(experiment), self.noise) if self.points else ()


def _global_batch(experiment: Experiment) -> int:
    """Return the number of samples per update, over all trainers."""
    strategy = experiment.strategy
    merged = strategy.gradient_merge_configs.k_steps if strategy.gradient_merge else 1
    return experiment.cluster.trainers * experiment.workload.batch_size * merged


def _trained(experiments: Sequence[Experiment], out: Path, learn: Learn) -> tuple[ReferencePoint, ...]:
    """Return the samples to the target by virtual trainers, at the global batches for which there is time.

    They use their best learning rate.
    """
    found: dict[int, ReferencePoint] = {}
    end = time.process_time() + experiments[0].tune.search_seconds
    by_batch = {_global_batch(experiment): experiment for experiment in experiments}
    smallest, *others = sorted(by_batch)
    for number, batch in enumerate([smallest, *others[-1:], *others[:-1]]):  # ends first: one batch size tells little about others
        experiment, left_s = by_batch[batch], (end - time.process_time()) / max(1, 2 - number)
        if left_s <= 0 or not is_trainable(experiment):
            continue
        with trainings(experiment, out, learn, left_s, "sizes") as trained:
            trained.climb(experiment.strategy, experiment.tune.lr_scale or RATES)
        steps = [one for one in trained.arrivals.values() if one is not None]
        if steps:
            samples = min(steps) * experiment.cluster.trainers * experiment.workload.batch_size
            found[batch] = ReferencePoint(batch_size=batch, samples=samples, sd=SEED_SPREAD * samples)
    return tuple(found.values())


def _size(value: str, experiment: Experiment, times: candidates.Times, first: Size | None, law: _Law) -> Size:
    tune, trainers = experiment.tune, experiment.cluster.trainers
    strategy = candidates.choose(experiment, times)
    step_s = times[strategy]
    memory = sharded.memory_of(experiment.replace(strategy=strategy)) or {}
    one = utilisation(experiment, step_s, sum(memory.values()) or None)
    samples_per_s = trainers * one.samples_per_s
    samples = law.samples(experiment)
    seconds = (samples[1] if samples else tune.samples or candidates.PER_SAMPLES) / samples_per_s
    price, days = tune.price_per_trainer_hour, seconds / SECONDS_PER_DAY
    ends: list[float] = []
    if samples:
        profile, half = profile_of(experiment), spread_of([1.0], ways_outside(experiment)).model
        estimated = 0.0 if profile is None else profile.estimated or 0.0
        for end, side in ((samples[0], -1), (samples[2], 1)):
            ends.append(days * math.exp(side * math.hypot(math.log(end / samples[1]), half, estimated)))
    return Size(
        value=value,
        trainers=trainers,
        strategy=strategy,
        step_s=step_s,
        default_s=times[experiment.strategy],
        samples_per_s=samples_per_s,
        tokens_per_s=None if one.tokens_per_s is None else trainers * one.tokens_per_s,
        per_trainer=one,
        efficiency=1.0 if first is None else one.samples_per_s / first.per_trainer.samples_per_s,
        days=days if samples or tune.samples is not None else None,
        cost=None if price is None else price * trainers * seconds / 3600,
        fits_in_memory=sharded.fits(experiment.replace(strategy=strategy)),
        samples=samples,
        days_interval=tuple(ends),
    )
