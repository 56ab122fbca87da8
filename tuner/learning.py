"""Learning: numbers of steps to the target by virtual trainers, and the learning rates with the fewest steps.

Virtual trainers train a registry workload like real ones, from the parameters and on the data of a seed. The
experiment's study stores their results, so that a resumed tuning has the same finalists.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.strategy import DistributedStrategy
from fleetbench.target import HITS_IN_A_ROW
from sim.learning.trajectory import key_of
from tuner.notes import Note, left_out
from tuner.space import name_of, way_of
from tuner.study import open_study

Progress = Callable[[int, int], None]
Way = tuple[object, ...]
_LEARNT = "trainings to the target"
"""Name of the study attribute that stores the steps to the target of each training run, by its key."""
_OVER = "no time is left for trainings to the target"
"""Prefix of the study attribute that is true if a stage's time ran out. A resumed tuning then trains no more in that
stage, so that it has the same finalists."""
_FLAT = ("use_hierarchical_allreduce", "hierarchical_inner_ranks", "hierarchical_variant")

Learn = Callable[[Experiment, float, int], float | None]
"""Function that trains an experiment with virtual trainers, for at most a number of seconds.

It returns the steps per trainer to the target, or None if the run does not arrive. The third argument is a number of
steps after which the loss has to be at the target, too. It raises ``TimeoutError`` if the time is over, and
``ConfigError`` for what virtual trainers do not execute.
"""


def by_virtual_trainers(experiment: Experiment, limit_s: float, at_least: int = 0) -> float | None:
    """Train an experiment with virtual trainers; see ``Learn``.

    The run makes ``at_least`` steps, and does not arrive if its last evaluations are then above the target, as
    at a too high learning rate.
    """
    from sim.learning.virtual_training import train  # torch, which a search without a target does not need

    target, end = experiment.workload.target_loss, time.process_time() + limit_s

    def look() -> None:
        if time.process_time() > end:
            raise TimeoutError

    learnt = train(experiment, until=target, at_least=at_least, look=look)
    if (reached := learnt.crossing(target)) is None or target is None:
        return None
    return reached.smooth if statistics.median(loss for _, loss in learnt.held_out[-HITS_IN_A_ROW:]) <= target else None


@dataclass(slots=True)
class Trainings:
    """Training runs with one seed, until the process has used ``end`` seconds of CPU time; see ``trainings``."""

    seeded: Experiment
    """Experiment with the seed of these runs."""
    learn: Learn
    """Function that trains."""
    end: float
    """Limit on the process's CPU time (``time.process_time``), in seconds."""
    kept: dict[str, float | None]
    """Known results of training runs, by key."""
    tell: Progress
    """Progress callback."""
    at_least: int = 0
    """Number of steps after which the loss has to be at the target, too."""
    strategies: dict[Way, DistributedStrategy] = field(default_factory=dict)
    """First requested strategy of each way of training."""
    arrivals: dict[Way, float | None] = field(default_factory=dict)
    """Steps to the target of each trained way; None if it does not arrive. Ways that are refused, or for which there was
    no time, are missing."""
    refused: dict[Way, Note] = field(default_factory=dict)
    """Note about each way that virtual trainers cannot execute."""

    def steps(self, strategy: DistributedStrategy, most: float = math.inf) -> float | None:
        """Return the number of steps to the target; None if the strategy does not arrive or was not trained.

        The run may end after ``most`` steps.
        """
        self.strategies.setdefault(way := way_of(strategy), strategy)
        if way not in self.arrivals and way not in self.refused:
            self.tell(len(self.arrivals), len(self.strategies))
            try:
                self.arrivals[way] = self._trained(strategy, most)
            except ConfigError as error:
                self.refused[way] = left_out(name_of(strategy), "is not trained by virtual trainers", error)
            except TimeoutError:
                self.end = 0.0
        return self.arrivals.get(way)

    def climb(self, strategy: DistributedStrategy, rates: Sequence[float]) -> list[DistributedStrategy]:
        """Return the strategy at each of the tried values of ``lr_scale``, besides its own, at which it arrives.

        ``rates`` are tried increasingly far from its own, as long as each needs fewer steps than the one before:
        first larger ones, then, if those do not help, smaller ones. Until a run arrives, the next rate is tried
        in any case.
        """
        first = least = self.steps(strategy)
        own, found, wanted = strategy.lr_scale, list[DistributedStrategy](), sorted(set(rates))
        for outwards in ([rate for rate in wanted if rate > own], [rate for rate in reversed(wanted) if rate < own]):
            for rate in outwards if least == first else ():
                steps = self.steps(scaled := strategy.replace(lr_scale=rate), math.inf if least is None else least)
                found += [scaled] if steps is not None else []
                if least is not None and (steps is None or steps >= least):
                    break
                least = steps
        return found

    def _trained(self, strategy: DistributedStrategy, most: float) -> float | None:
        """Return the result of a training run, known or new. Raises ``TimeoutError`` if no time is left for it.

        The run has the experiment's wire type, and no hierarchy, which would only change the order of sums.
        """
        base, workload = self.seeded.strategy, self.seeded.workload
        served = strategy.mode == "ps"  # with servers the clock matters, and shorter training is not the beginning of longer training
        steps = workload.steps if served else round(min(workload.steps, most + HITS_IN_A_ROW * workload.eval_every))
        wire = {"fp16_allreduce": base.fp16_allreduce, "bf16_allreduce": base.bf16_allreduce}
        whole = self.seeded.replace(strategy=strategy.replace(**wire).without(*_FLAT))
        key = f"{whole.digest() if served else key_of(whole)} to {workload.target_loss} in {steps}, there after {self.at_least}"
        if key not in self.kept:
            if (left_s := self.end - time.process_time()) <= 0:
                raise TimeoutError
            self.kept[key] = self.learn(whole.replace(workload=dataclasses.replace(workload, steps=steps)), left_s, self.at_least)
        return self.kept[key]


@contextmanager
def trainings(
    experiment: Experiment, out: Path, learn: Learn, limit_s: float, stage: str, progress: Progress | None = None
) -> Iterator[Trainings]:
    """Yield training runs that may take ``limit_s`` seconds of CPU time together; each ``stage`` has its own limit."""
    with open_study(experiment, out) as study:
        end = 0.0 if study.user_attrs.get(over := f"{_OVER}: {stage}") else time.process_time() + limit_s
        found = Trainings(experiment, learn, end, dict(study.user_attrs.get(_LEARNT, {})), progress or (lambda *_: None))
        try:
            yield found
        finally:
            study.set_user_attr(_LEARNT, found.kept)
            study.set_user_attr(over, time.process_time() >= found.end)
    found.tell(len(found.strategies), len(found.strategies))
