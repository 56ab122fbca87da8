"""Learning: how trainings reach the target, by virtual trainers; and which learning rate gets there in the fewest steps.

Virtual trainers train the workload of the registry as real ones would, from the parameters and on the data of a seed. The experiment's
study keeps what they learn, so that a tuning that is taken up again has the same finalists.
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
"""An ``Arrival``; or after how many steps, one number, a training was over that had not arrived; empty: after all of them."""
_LEARNT = "trainings to the target"
"""Attribute of a study: what is reached, by training."""
_OVER = "no time is left for trainings to the target"
"""Attribute of a study: a tuning that is taken up again begins no others, and has the same finalists."""
_FLAT = ("use_hierarchical_allreduce", "hierarchical_inner_ranks", "hierarchical_variant")


class Arrival(NamedTuple):
    """A training that reaches its target."""

    steps: float
    """Of a trainer."""
    k: float = 1.0
    """Steps of a round until then, in the mean."""


Learn = Callable[[Experiment, float], Arrival | None]
"""The seam to virtual trainers: how an experiment reaches its target, none where it does not; raises ``TimeoutError`` where it takes more
than so many seconds."""


def by_virtual_trainers(experiment: Experiment, limit_s: float, at_least: int = 0) -> Arrival | None:
    """How it reaches the target; see ``Learn``. Raises ``ConfigError`` for what virtual trainers do not execute.

    ``at_least``: none, too, where the last evaluations are above it after so many steps, as happens at too high a rate.
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
    """Virtual trainers by which a way arrives only if it is at the target after so many steps, too; another ``learn`` as it is."""
    return partial(by_virtual_trainers, at_least=steps) if learn is by_virtual_trainers else learn


@dataclass(slots=True)
class Trainings:
    """Trainings of one seed, until the process has computed for ``end`` seconds; see ``trainings``."""

    seeded: Experiment
    learn: Learn
    end: float
    kept: dict[str, Reached]
    """By key."""
    tell: Progress
    strategies: dict[Way, DistributedStrategy] = field(default_factory=dict)
    """Of ways that were to be trained, the first."""
    arrivals: dict[Way, Arrival | None] = field(default_factory=dict)
    """None of one that does not arrive. Ways that are refused, or that there was no time for, are missing."""
    ends: dict[Way, int] = field(default_factory=dict)
    """After how many steps those that did not arrive were over."""
    refused: dict[Way, Note] = field(default_factory=dict)
    whose: str = ""
    """Of ``learn``, in keys."""

    def steps(self, strategy: DistributedStrategy, most: float = math.inf) -> float | None:
        """To the target; none where it does not arrive, or is not known to. It may be over after so many steps."""
        self.strategies.setdefault(way := way_of(strategy), strategy)
        if way not in self.arrivals:
            self.tell(len(self.arrivals), len(self.strategies))
            if (reached := self._reached(way, strategy, most)) is not None:
                self.arrivals[way] = Arrival(*reached) if len(reached) > 1 else None
        arrival = self.arrivals.get(way)
        return arrival and arrival.steps

    def climb(self, strategy: DistributedStrategy, rates: Sequence[float]) -> list[DistributedStrategy]:
        """The strategy at other values of ``lr_scale`` with which it arrives.

        They are tried further and further from its own, as long as each takes fewer steps than the one before: first above it, and if that
        does not help, below. Where nothing arrives yet, the next one is tried in any case.
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
        """On the experiment's wire, and without a hierarchy, in which sums have another order and ways no other name."""
        base, workload = self.seeded.strategy, self.seeded.workload
        served = strategy.mode == "ps"  # whose shorter training is not the beginning of a longer one
        self.ends[way] = workload.steps if served else round(min(workload.steps, most + HITS_IN_A_ROW * workload.eval_every))
        wire = {"fp16_allreduce": base.fp16_allreduce, "bf16_allreduce": base.bf16_allreduce}
        try:
            whole = self.seeded.replace(strategy=strategy.replace(**wire).without(*_FLAT))
            learnt = key_of(whole) if not served else whole.digest()  # with servers the clock is part of it
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
    """For as many seconds of compute; ``known``, by key, is not trained again. A ``stage`` of a tuning has them for itself."""
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
