"""Sizes: the best strategy for each value of a key, such as the number of nodes: speed, time, money and efficiency.

The smallest, the largest and each doubling between them is searched whole. At the values in between, the best strategies of the
two searched neighbours compete, with the experiment's own. The best are then simulated again as for one cluster alone
(``over_seeds``), so that both answers have the same step; which of several within 0.2 % is recommended, no assumption decides here.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fleetbench.config import Config
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.strategy import DistributedStrategy
from fleetbench.utilisation import Utilisation, utilisation
from sim.many.pool import naming
from sim.many.sweep import Axis, Load
from tuner.notes import Note
from tuner.simulated import candidates, sharded

CARRIED = 5
"""Of the best strategies of a searched neighbour."""
SECONDS_PER_DAY = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class Size(Config):
    """One value of the key."""

    value: str
    trainers: int
    searched: bool
    """Whether the whole space was tried here, or what its neighbours found."""
    strategy: DistributedStrategy
    """The experiment's own, unless another is faster by more than ``tune.min_gain``."""
    step_s: float
    default_s: float
    """With the experiment's own strategy."""
    samples_per_s: float
    tokens_per_s: float | None
    per_trainer: Utilisation
    efficiency: float
    """Samples a second and trainer, over the first value's."""
    days: float | None
    """To ``tune.samples``."""
    cost: float | None
    """Of ``tune.samples``, or of a million samples where there is no such number; none without ``tune.price_per_trainer_hour``."""
    fits_in_memory: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes(Config):
    """All of them."""

    name: str
    key: str
    compute: str
    samples: float | None
    price_per_trainer_hour: float | None
    sizes: tuple[Size, ...]
    notes: tuple[str, ...]

    @property
    def priced_samples(self) -> float:
        """What ``cost`` is the cost of."""
        return self.samples or candidates.PER_SAMPLES


def tune_sizes(load: Load, axis: Axis, *, out: Path, progress: Callable[[int, int], None] | None = None) -> Sizes:
    """The best strategy at each value of the axis.

    Args:
        load: gives the experiment with overrides, as for ``sim.many.sweep``.
        axis: the key and its values.
        out: where large searches are kept.
        progress: told how many values are done.

    Raises:
        ConfigError: a value does not fit the experiment, or cannot be simulated; the message names it.
    """
    tell = progress or (lambda *_: None)
    experiments: list[Experiment] = []
    for value in axis.values:  # all, before the first is estimated
        with naming(f"the point {axis.key}={value}"):
            experiments.append(load([f"{axis.key}={value}"]))
    experiments = [candidates.with_compute(experiment, out) for experiment in experiments]
    anchors = _anchors([experiment.cluster.trainers for experiment in experiments])
    best: dict[int, candidates.Times] = {}
    times: dict[int, candidates.Times] = {}
    noted: dict[Note, list[str]] = {}
    order = [*anchors, *(index for index in range(len(experiments)) if index not in anchors)]
    for done, index in enumerate(order):
        tell(done, len(order))
        with naming(f"the point {axis.key}={axis.values[index]}"):
            if index in anchors:
                ranking = candidates.ranked(experiments[index], out=out)
                best[index] = ranking.step_s
                for note in ranking.notes:
                    noted.setdefault(note, []).append(axis.values[index])
            else:
                below, above = max(anchor for anchor in anchors if anchor < index), min(anchor for anchor in anchors if anchor > index)
                best[index] = _carried(experiments[index], [best[below], best[above]])
            times[index] = _of_best(experiments[index], best[index])
    tell(len(order), len(order))
    first = experiments[0]
    sizes: list[Size] = []
    for index, (value, experiment) in enumerate(zip(axis.values, experiments, strict=True)):
        sizes.append(_size(value, experiment, times[index], index in anchors, sizes[0] if sizes else None))
    notes = [str(note) if len(of) == len(anchors) else f"at {axis.key} = {', '.join(of)}: {note}" for note, of in noted.items()]
    notes += map(str, candidates.caveats(first))
    if first.workload.target_loss is not None:
        notes.append("a sweep trains nothing: what local steps cost in loss is not simulated; ask for one size without --sweep")
    notes.append("batch_size is a trainer's: the global batch grows with the trainers, and what that costs in loss is not simulated")
    return Sizes(
        name=first.name,
        key=axis.key,
        compute=candidates.says(first),
        samples=first.tune.samples,
        price_per_trainer_hour=first.tune.price_per_trainer_hour,
        sizes=tuple(sizes),
        notes=tuple(notes),
    )


def _anchors(trainers: Sequence[int]) -> list[int]:
    """Indices of the values that are searched whole: the first, the last, and each at least twice as large as the one before."""
    found = [0]
    for index in range(1, len(trainers)):
        if trainers[index] >= 2 * trainers[found[-1]] or index == len(trainers) - 1:
            found.append(index)
    return found if len(set(trainers)) > 1 else list(range(len(trainers)))


def _carried(experiment: Experiment, neighbours: Sequence[candidates.Times]) -> candidates.Times:
    """Seconds of a step of the neighbours' best strategies, fastest first."""
    measure, found = candidates.step_time(candidates.shortened(experiment)), {}
    for strategy in dict.fromkeys([experiment.strategy, *(strategy for near in neighbours for strategy in list(near)[:CARRIED])]):
        try:
            found[strategy] = measure(strategy)
        except ConfigError:  # such as a hierarchy that this size has not
            if strategy == experiment.strategy:
                raise
    fitting = {experiment.strategy, *sharded.fitting(experiment, found)}
    return candidates.ordered({one: step_s for one, step_s in found.items() if one in fitting})


def _of_best(experiment: Experiment, ranking: candidates.Times) -> candidates.Times:
    """The best again, as in an answer for this size alone; the experiment's own where no trial gains enough."""
    own, measures = experiment.strategy, candidates.over_seeds(experiment)
    gains = ranking[own] / next(iter(ranking.values())) - 1 > experiment.tune.min_gain - candidates.TIE
    fits = own in sharded.fitting(experiment, ranking)
    asked = candidates.finalists(own, ranking) if gains or not fits else [own]
    return {strategy: statistics.fmean(measure(strategy) for measure in measures) for strategy in asked}


def _size(value: str, experiment: Experiment, times: candidates.Times, searched: bool, first: Size | None) -> Size:
    tune, trainers = experiment.tune, experiment.cluster.trainers
    strategy = candidates.choose(experiment, times)
    step_s = times[strategy]
    memory = sharded.memory_of(experiment.replace(strategy=strategy)) or {}
    one = utilisation(experiment, step_s, sum(memory.values()) or None)
    samples_per_s = trainers * one.samples_per_s
    seconds = (tune.samples or candidates.PER_SAMPLES) / samples_per_s
    price = tune.price_per_trainer_hour
    return Size(
        value=value,
        trainers=trainers,
        searched=searched,
        strategy=strategy,
        step_s=step_s,
        default_s=times[experiment.strategy],
        samples_per_s=samples_per_s,
        tokens_per_s=None if one.tokens_per_s is None else trainers * one.tokens_per_s,
        per_trainer=one,
        efficiency=1.0 if first is None else one.samples_per_s / first.per_trainer.samples_per_s,
        days=None if tune.samples is None else seconds / SECONDS_PER_DAY,
        cost=None if price is None else price * trainers * seconds / 3600,
        fits_in_memory=sharded.fits(experiment.replace(strategy=strategy)),
    )
