"""Learning: how trainings reach the target, by virtual trainers, each trained once; and which learning rate gets there in the fewest steps.

Virtual trainers train the workload of the registry as real ones would, from the parameters and on the data of a seed. The experiment's
study keeps what they learn, so that a tuning that is taken up again has the same finalists.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.strategy import DistributedStrategy
from fleetbench.target import HITS_IN_A_ROW
from sim.learning.trajectory import key_of
from tuner.space import name_of, way_of
from tuner.study import open_study

Progress = Callable[[int, int], None]
Way = tuple[object, ...]
"""See ``way_of``."""
Reached = tuple[float, ...]
"""An ``Arrival``, or empty."""
_LEARNT = "trainings to the target"
"""Attribute of a study: an ``Arrival`` by training, empty where it does not arrive, none where there was no time for it."""
_FLAT: dict[str, Any] = {"use_hierarchical_allreduce": False, "hierarchical_inner_ranks": 0, "hierarchical_variant": "leader"}


class Arrival(NamedTuple):
    """A training that reaches its target."""

    steps: float
    """Of a trainer."""
    k: float = 1.0
    """Steps of a round until then, in the mean."""


Learn = Callable[[Experiment, float], Arrival | None]
"""The seam to virtual trainers: how an experiment reaches its target, none where it does not; raises ``TimeoutError`` where it takes more
than so many seconds."""


def by_virtual_trainers(experiment: Experiment, limit_s: float) -> Arrival | None:
    """How it reaches the target; see ``Learn``. Raises ``ConfigError`` for what virtual trainers do not execute."""
    from sim.learning.virtual_training import train  # torch, which a search without a target does not need

    target, end = experiment.workload.target_loss, time.process_time() + limit_s

    def look(_done: int, _all: int) -> None:
        if time.process_time() > end:
            raise TimeoutError

    learnt = train(experiment, look, until=target)
    if (reached := learnt.crossing(target)) is None:
        return None
    counted_steps = learnt.local_steps[1 - learnt.first_step :][: reached.step]
    return Arrival(reached.smooth, reached.step / max(1, sum(length is not None for length in counted_steps)))


@dataclass(slots=True)
class Trainings:
    """Trainings of one seed, until the process has computed for ``end`` seconds; see ``trainings``."""

    seeded: Experiment
    learn: Learn
    end: float
    kept: dict[str, Reached | None]
    """By key; none of one that there was no time for."""
    tell: Progress
    names: dict[Way, str] = field(default_factory=dict)
    """Of ways that were to be trained."""
    expected: int = 0
    """How many these may become."""
    arrivals: dict[Way, Arrival | None] = field(default_factory=dict)
    """None of one that does not arrive. Ways that are refused, or that there was no time for, are missing."""
    ends: dict[Way, int] = field(default_factory=dict)
    """After how many steps those that did not arrive were over."""
    refused: list[str] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """Whether there is no time left."""
        return time.process_time() >= self.end

    @property
    def learnt(self) -> dict[str, Reached]:
        """What is known, by key."""
        return {key: tuple(reached) for key, reached in self.kept.items() if reached is not None}

    def steps(self, strategy: DistributedStrategy, most: float = math.inf) -> float | None:
        """To the target; none where it does not arrive, or is not known to. It may be over after so many steps."""
        self.names.setdefault(way := way_of(strategy), name_of(strategy))
        if way not in self.arrivals:
            self.tell(len(self.arrivals), max(self.expected, len(self.names)))
            if (reached := self._reached(way, strategy, most)) is not None:
                self.arrivals[way] = Arrival(*reached) if reached else None
        arrival = self.arrivals.get(way)
        return arrival and arrival.steps

    def climb(self, strategy: DistributedStrategy, rates: Sequence[float]) -> list[DistributedStrategy]:
        """The strategy at other values of ``lr_scale`` with which it arrives.

        They are tried further and further from its own, as long as each takes fewer steps than the one before: first above it, and if that
        does not help, below. Where nothing arrives yet, the next one is tried in any case.
        """
        first = least = self.steps(strategy)
        if self.is_over:
            self.names["rates", way_of(strategy)] = f"other learning rates of {name_of(strategy)}"
            return []
        own, found = strategy.lr_scale, list[DistributedStrategy]()
        for outwards in (sorted(rate for rate in rates if rate > own), sorted((rate for rate in rates if rate < own), reverse=True)):
            for rate in outwards if least == first else ():
                steps = self.steps(scaled := strategy.replace(lr_scale=rate), math.inf if least is None else least)
                found += [scaled] if steps is not None else []
                if least is not None and (steps is None or steps >= least):
                    break
                least = steps
        return found

    def _reached(self, way: Way, strategy: DistributedStrategy, most: float) -> Reached | None:
        """On the experiment's wire, and without a hierarchy, in which sums have another order and ways no other name."""
        base, workload = self.seeded.strategy, self.seeded.workload
        self.ends[way] = round(min(workload.steps, most + HITS_IN_A_ROW * workload.eval_every))
        wire = {"fp16_allreduce": base.fp16_allreduce, "bf16_allreduce": base.bf16_allreduce}
        try:
            whole = self.seeded.replace(strategy=strategy.replace(**wire, **_FLAT))
            begun = whole.replace(workload=dataclasses.replace(workload, steps=self.ends[way]))
            key, left_s = next((key for key in map(_key, (whole, begun)) if key in self.kept), _key(begun)), self.end - time.process_time()
            if key not in self.kept:
                arrival = self.learn(begun, left_s) if left_s > 0 else None
                key = key if arrival is None else _key(whole)  # of which this is the beginning
                self.kept[key] = (arrival or ()) if left_s > 0 else None
        except ConfigError as error:
            self.refused.append(f"virtual trainers do not train {name_of(strategy)}: {error.where}: {error.what}")
            return None
        except TimeoutError:
            self.kept[key], self.end = None, 0.0
        return self.kept[key]


def _key(experiment: Experiment) -> str:
    """Of all that the steps to the target depend on, among it the seed. Raises ``ConfigError`` for what virtual trainers do not execute."""
    learnt = key_of(experiment) if experiment.strategy.mode != "ps" else experiment.digest()  # with servers the clock is part of it
    return f"{learnt} to {experiment.workload.target_loss}"


@contextmanager
def trainings(
    experiment: Experiment, out: Path, learn: Learn, known: Mapping[str, Reached], limit_s: float, progress: Progress | None
) -> Iterator[Trainings]:
    """For as many seconds of compute; ``known``, by key, is not trained again."""
    with open_study(experiment, out) as study:
        kept: dict[str, Reached | None] = {**known, **study.user_attrs.get(_LEARNT, {})}
        found = Trainings(experiment, learn, time.process_time() + limit_s, kept, progress or (lambda *_: None))
        try:
            yield found
        finally:
            study.set_user_attr(_LEARNT, found.kept)
    found.tell(len(found.names), len(found.names))
