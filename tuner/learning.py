"""Learning: steps to the target by virtual trainers, and the learning rate that needs the fewest.

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
"""Result of a training: the fields of its ``Arrival``; or, if it did not arrive, the number of steps after which it
was cut short; empty if it made all steps."""
_LEARNT = "trainings to the target"
"""Name of the study attribute that stores the result of each training, by its key."""
_OVER = "no time is left for trainings to the target"
"""Start of the name of the study attribute that is true if a stage's time ran out. A resumed tuning then trains no more
in that stage, so that it has the same finalists."""
_FLAT = ("use_hierarchical_allreduce", "hierarchical_inner_ranks", "hierarchical_variant")


class Arrival(NamedTuple):
    """A training run that reaches its target."""

    steps: float
    """Number of a trainer's steps."""
    k: float = 1.0
    """Mean number of steps per round until then."""


Learn = Callable[[Experiment, float], Arrival | None]
"""Function of virtual trainers: how an experiment reaches its target within a number of seconds.

It returns none if it does not reach it, and raises ``TimeoutError`` if it takes longer.
"""


def by_virtual_trainers(experiment: Experiment, limit_s: float, at_least: int = 0) -> Arrival | None:
    """Return how an experiment reaches the target; see ``Learn``.

    Raises ``ConfigError`` for what virtual trainers do not execute. ``at_least``: the run also fails if its
    last evaluations after this many steps are above the target, as at a too high learning rate.
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
    """Return virtual trainers that also require being at the target after ``steps``.

    A ``learn`` of another kind is returned unchanged.
    """
    return partial(by_virtual_trainers, at_least=steps) if learn is by_virtual_trainers else learn


@dataclass(slots=True)
class Trainings:
    """Training runs with one seed, until the process has computed for ``end`` seconds; see ``trainings``."""

    seeded: Experiment
    """Experiment with this seed."""
    learn: Learn
    """Function that trains."""
    end: float
    """Limit of the process's compute time, in seconds."""
    kept: dict[str, Reached]
    """Results by key."""
    tell: Progress
    """Progress callback."""
    strategies: dict[Way, DistributedStrategy] = field(default_factory=dict)
    """First strategy of each way that should be trained."""
    arrivals: dict[Way, Arrival | None] = field(default_factory=dict)
    """Arrival of each trained way; none if it does not arrive. Ways that are refused, or for which there was
    no time, are missing."""
    ends: dict[Way, int] = field(default_factory=dict)
    """Steps after which each way that did not arrive ended."""
    refused: dict[Way, Note] = field(default_factory=dict)
    """Note about each refused way."""
    whose: str = ""
    """Part of the keys that identifies ``learn``."""

    def steps(self, strategy: DistributedStrategy, most: float = math.inf) -> float | None:
        """Return the steps to the target; none if it does not arrive, or is not known to.

        The training may end after ``most`` steps.
        """
        self.strategies.setdefault(way := way_of(strategy), strategy)
        if way not in self.arrivals:
            self.tell(len(self.arrivals), len(self.strategies))
            if (reached := self._reached(way, strategy, most)) is not None:
                self.arrivals[way] = Arrival(*reached) if len(reached) > 1 else None
        arrival = self.arrivals.get(way)
        return arrival and arrival.steps

    def climb(self, strategy: DistributedStrategy, rates: Sequence[float]) -> list[DistributedStrategy]:
        """Return the strategy at other values of ``lr_scale`` with which it arrives.

        Values are tried increasingly far from its own as long as each needs fewer steps than the one before:
        first larger ones, and if that does not help, smaller ones. While nothing has arrived, the next one is
        tried in any case.
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
        """Return a training's result, known or new; None if it is refused or no time is left.

        It trains on the experiment's wire, and without a hierarchy, which only changes the order of sums.
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
    """Yield training runs for ``limit_s`` seconds of compute; results in ``known``, by key, are not repeated.

    Each ``stage`` of a tuning has its own.
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
