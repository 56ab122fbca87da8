"""Learning: numbers of steps to the target by virtual trainers, and the learning rates with the fewest steps.

Virtual trainers train a registry workload like real ones, from the parameters and on the data of a seed. The
experiment's study stores their results, so that a resumed tuning has the same finalists.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

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
Reached = tuple[float, ...]
"""Result of a training run: the fields of its ``Arrival``. If it did not arrive: the number of steps after which it was
cut short, or an empty tuple if it made all steps."""
_LEARNT = "trainings to the target"
"""Name of the study attribute that stores the result of each training run, by its key."""
_OVER = "no time is left for trainings to the target"
"""Prefix of the study attribute that is true if a stage's time ran out. A resumed tuning then trains no more in that
stage, so that it has the same finalists."""
_FLAT = ("use_hierarchical_allreduce", "hierarchical_inner_ranks", "hierarchical_variant")


class Arrival(NamedTuple):
    """A training run that reaches its target."""

    steps: float
    """Number of steps per trainer to the target."""
    k: float = 1.0
    """Mean number of steps per round until the target is reached."""


Learn = Callable[[Experiment, float], Arrival | None]
"""Function that trains an experiment with virtual trainers, for at most a number of seconds.

It returns the arrival at the target, or None, and raises ``TimeoutError`` if the time is over.
"""


def by_virtual_trainers(experiment: Experiment, limit_s: float, at_least: int = 0) -> Arrival | None:
    """Train an experiment with virtual trainers and return its arrival at the target; see ``Learn``.

    The run makes ``at_least`` steps, and does not arrive if its last evaluations are then above the target, as
    at a too high learning rate. Raises ``ConfigError`` for what virtual trainers do not execute.
    """
    from sim.learning.virtual_training import train  # torch, which a search without a target does not need

    target, end = experiment.workload.target_loss, time.process_time() + limit_s

    def look() -> None:
        if time.process_time() > end:
            raise TimeoutError

    learnt = train(experiment, until=target, at_least=at_least, look=look)
    if (reached := learnt.crossing(target)) is None or target is None:
        return None
    if statistics.median(loss for _, loss in learnt.held_out[-HITS_IN_A_ROW:]) > target:
        return None
    counted_steps = learnt.local_steps[1 - learnt.first_step :][: reached.step]
    return Arrival(reached.smooth, reached.step / max(1, sum(length is not None for length in counted_steps)))


def and_stays(learn: Learn, steps: int) -> Learn:
    """Return ``learn`` with a further condition for arriving: the loss is at the target after ``steps``, too.

    A ``learn`` other than ``by_virtual_trainers`` is returned unchanged.
    """
    return partial(by_virtual_trainers, at_least=steps) if learn is by_virtual_trainers else learn


@dataclass(slots=True)
class Trainings:
    """Training runs with one seed, until the process has used ``end`` seconds of CPU time; see ``trainings``."""

    seeded: Experiment
    """Experiment with the seed of these runs."""
    learn: Learn
    """Function that trains."""
    end: float
    """Limit on the process's CPU time (``time.process_time``), in seconds."""
    kept: dict[str, Reached]
    """Known results of training runs, by key."""
    tell: Progress
    """Progress callback."""
    strategies: dict[Way, DistributedStrategy] = field(default_factory=dict)
    """First requested strategy of each way of training."""
    arrivals: dict[Way, Arrival | None] = field(default_factory=dict)
    """Arrival of each trained way; None if it does not arrive. Ways that are refused, or for which there was
    no time, are missing."""
    ends: dict[Way, int] = field(default_factory=dict)
    """Number of steps after which the run of each way ends if it has not arrived."""
    refused: dict[Way, Note] = field(default_factory=dict)
    """Note about each way that virtual trainers cannot execute."""
    whose: str = ""
    """End of the keys in ``kept``, which identifies ``learn``."""

    def steps(self, strategy: DistributedStrategy, most: float = math.inf) -> float | None:
        """Return the number of steps to the target; None if the strategy does not arrive or was not trained.

        The run may end after ``most`` steps.
        """
        self.strategies.setdefault(way := way_of(strategy), strategy)
        if way not in self.arrivals:
            self.tell(len(self.arrivals), len(self.strategies))
            if (reached := self._reached(way, strategy, most)) is not None:
                self.arrivals[way] = Arrival(*reached) if len(reached) > 1 else None
        arrival = self.arrivals.get(way)
        return arrival and arrival.steps

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
                if way_of(scaled) not in self.arrivals:  # no time
                    return found
                found += [scaled] if steps is not None else []
                if least is not None and (steps is None or steps >= least):
                    break
                least = steps
        return found

    def _reached(self, way: Way, strategy: DistributedStrategy, most: float) -> Reached | None:
        """Return the result of a training run, known or new; None if it is refused or no time is left.

        The run has the experiment's wire type, and no hierarchy, which would only change the order of sums.
        """
        base, workload = self.seeded.strategy, self.seeded.workload
        served = strategy.mode == "ps"  # with servers, shorter training is not the beginning of longer training
        self.ends[way] = workload.steps if served else round(min(workload.steps, most + HITS_IN_A_ROW * workload.eval_every))
        wire = {"fp16_allreduce": base.fp16_allreduce, "bf16_allreduce": base.bf16_allreduce}
        try:
            whole = self.seeded.replace(strategy=strategy.replace(**wire).without(*_FLAT))
            learnt = key_of(whole) if not served else whole.digest()  # with servers the clock matters
            key, left_s = f"{learnt} to {workload.target_loss}{self.whose}", self.end - time.process_time()
            known = self.kept.get(key)
            if known is not None and (len(known) != 1 or known[0] >= self.ends[way]):
                self.ends[way] = round(known[0]) if len(known) == 1 else workload.steps
                return known
            if left_s <= 0:
                return None
            ends_early = self.ends[way] < workload.steps
            arrival = self.learn(whole.replace(workload=dataclasses.replace(workload, steps=self.ends[way])), left_s)
            self.kept[key] = arrival or ((float(self.ends[way]),) if ends_early else ())
        except ConfigError as error:
            self.refused[way] = left_out(name_of(strategy), "is not trained by virtual trainers", error)
            return None
        except TimeoutError:
            self.end = 0.0
            return None
        return self.kept[key]


@contextmanager
def trainings(
    experiment: Experiment,
    out: Path,
    learn: Learn,
    known: Mapping[str, Reached],
    limit_s: float,
    stage: str,
    progress: Progress | None = None,
) -> Iterator[Trainings]:
    """Yield training runs that may take ``limit_s`` seconds of CPU time together.

    Runs with a result in ``known``, by key, are not repeated. Each ``stage`` of a tuning has its own limit.
    """
    with open_study(experiment, out) as study:
        end = 0.0 if study.user_attrs.get(over := f"{_OVER}: {stage}") else time.process_time() + limit_s
        kept = {**known, **{key: tuple(reached) for key, reached in study.user_attrs.get(_LEARNT, {}).items()}}
        found = Trainings(experiment, learn, end, kept, progress or (lambda *_: None))
        try:
            yield found
        finally:
            study.set_user_attr(_LEARNT, found.kept)
            study.set_user_attr(over, time.process_time() >= found.end)
    found.tell(len(found.strategies), len(found.strategies))
