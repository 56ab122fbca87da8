"""State: what a decision knows so far, while it reads its evidence from the start."""

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
"""Key of strategies that train alike; see ``learns_as``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a tuning decides about, besides its evidence."""

    experiment: Experiment
    """Experiment that is tuned."""
    arms: tuple[Arm, ...]
    """Arms, the default first."""
    others: Mapping[DistributedStrategy, float] = field(default_factory=dict)
    """Simulated time over the default's, of strategies that may become arms and of arms: to the target if
    virtual trainers trained, else per step."""
    prepare: Callable[[Arm], Arm] = lambda arm: arm
    """Completes a new arm: a function of the arm only."""
    step_s: float = 0.0
    """Expected seconds per step, until a leg has measured them."""


@dataclass(slots=True)
class State:
    """What a decision has read, and what follows from it."""

    setting: Setting
    ledger: Ledger
    arms: dict[str, Arm] = field(init=False)
    """Arms by name."""
    seeds: range = field(init=False)
    """Seeds of runs to the target, as many as may run."""
    ratios: dict[str, float] = field(default_factory=dict)
    """Mean time of each ranked arm over the default's in the same round."""
    ways: dict[Way, TargetCheck] = field(default_factory=dict)
    """Runs to the target of each way of training; ``from_arm`` names the arm that ran."""
    in_vain: set[Way] = field(default_factory=set)
    """Ways that real runs have ruled out."""
    notes: list[Note] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.arms, self.seeds = {arm.name: arm for arm in self.setting.arms}, seeds_of(self.experiment)

    @property
    def experiment(self) -> Experiment:
        """Experiment that is tuned."""
        return self.setting.experiment

    @property
    def default(self) -> Arm:
        """Arm that all others are compared with."""
        return self.arms[DEFAULT]

    @property
    def asked(self) -> bool:
        """Whether virtual trainers have priced the ways of training."""
        return self.default.virtual_updates is not None

    def way(self, name: str) -> Way:
        """Return the way of training of an arm."""
        return learns_as(self.arms[name].strategy)

    def virtual(self, arm: Arm) -> float:
        """Return updates to the target over the default's, by virtual trainers; 1 if they have none."""
        default = self.default.virtual_updates
        return 1.0 if default is None or arm.virtual_updates is None else arm.virtual_updates / default

    def add(self, strategy: DistributedStrategy) -> Arm:
        """Add a strategy of the search as an arm."""
        number = sum(name.startswith("candidate") for name in self.arms) + 1
        simulated_s = self.setting.others[strategy] * self.default.simulated_s
        arm = self.setting.prepare(Arm(name=f"candidate {number}", strategy=strategy, simulated_s=simulated_s))
        self.arms[arm.name] = arm
        return arm

    def update(self, name: str, **changes: object) -> None:
        """Change fields of an arm."""
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
    """Describe where and why a leg failed."""
    return f"failed on {failure.where}: {failure.what}"
