"""State: what a decision knows so far, while it reads its evidence from the beginning."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from fleetbench.experiment import Experiment
from fleetbench.strategy import DistributedStrategy
from real.processes.diagnosis import LegFailed
from tuner.budget import DEFAULT, seeds_of
from tuner.ledger import Ledger
from tuner.notes import Note
from tuner.recommendation import Arm, TargetCheck
from tuner.space import learns_as

Way = tuple[object, ...]
"""What trains alike; see ``learns_as``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a tuning decides about, beside its evidence."""

    experiment: Experiment
    arms: tuple[Arm, ...]
    """The first is the default."""
    others: Mapping[DistributedStrategy, float] = field(default_factory=dict)
    """Simulated time over the default's, of strategies that may become arms, and of those that are: to the target where virtual
    trainers were asked, else of a step."""
    prepare: Callable[[Arm], Arm] = lambda arm: arm
    """Completes what becomes an arm: a function of the arm alone."""
    step_s: float = 0.0
    """Expected seconds of a step, until a leg has shown what it really takes."""


@dataclass(slots=True)
class State:
    """What a decision has read, and what follows from it."""

    setting: Setting
    ledger: Ledger
    arms: dict[str, Arm] = field(init=False)
    seeds: range = field(init=False)
    """Of runs to the target: as many as may be."""
    ratios: dict[str, float] = field(default_factory=dict)
    """Of the legs that ranked an arm: its mean time over the default's in the same round."""
    ways: dict[Way, TargetCheck] = field(default_factory=dict)
    """Runs to the target of each way of training; ``from_arm`` names the arm that they were of."""
    in_vain: set[Way] = field(default_factory=set)
    """Ways that real runs have ruled out."""
    notes: list[Note] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.arms, self.seeds = {arm.name: arm for arm in self.setting.arms}, seeds_of(self.experiment)

    @property
    def experiment(self) -> Experiment:
        """What is tuned."""
        return self.setting.experiment

    @property
    def default(self) -> Arm:
        """The arm that all others are compared with."""
        return self.arms[DEFAULT]

    @property
    def asked(self) -> bool:
        """Whether virtual trainers have said what ways of training are worth."""
        return self.default.virtual_updates is not None

    def way(self, name: str) -> Way:
        """Of an arm."""
        return learns_as(self.arms[name].strategy)

    def virtual(self, arm: Arm) -> float:
        """Updates to the target over the default's, by virtual trainers; 1 where they say nothing."""
        default = self.default.virtual_updates
        return 1.0 if default is None or arm.virtual_updates is None else arm.virtual_updates / default

    def add(self, strategy: DistributedStrategy) -> Arm:
        """A strategy of the search as an arm."""
        number = sum(name.startswith("candidate") for name in self.arms) + 1
        simulated_s = self.setting.others[strategy] * self.default.simulated_s
        arm = self.setting.prepare(Arm(name=f"candidate {number}", strategy=strategy, simulated_s=simulated_s))
        self.arms[arm.name] = arm
        return arm

    def update(self, name: str, **changes: object) -> None:
        """Let an arm have other values of its fields."""
        self.arms[name] = dataclasses.replace(self.arms[name], **changes)  # type: ignore[arg-type]  # fields of Arm, by name

    @contextmanager
    def rejecting(self, name: str) -> Iterator[None]:
        """Reject an arm whose leg fails; without the default nothing can be compared."""
        try:
            yield
        except LegFailed as failure:
            if name == DEFAULT:
                raise
            self.update(name, rejected=says(failure))


def says(failure: LegFailed) -> str:
    """Where a leg failed, and of what."""
    return f"failed on {failure.where}: {failure.what}"
