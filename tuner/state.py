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
    """Inputs of a tuning's decisions, besides its evidence."""

    experiment: Experiment
    """Experiment that is tuned."""
    arms: tuple[Arm, ...]
    """Arms, the default first."""
    others: Mapping[DistributedStrategy, float] = field(default_factory=dict)
    """Simulated time over the default's, by strategy, of arms and of strategies that may become arms: time to the
    target if virtual trainers trained, else time per step."""
    prepare: Callable[[Arm], Arm] = lambda arm: arm
    """Function that completes a new arm, with a result that depends only on the arm."""
    step_s: float = 0.0
    """Expected seconds per step, until a leg has measured them."""


@dataclass(slots=True)
class State:
    """Results that a decision has read, and its conclusions."""

    setting: Setting
    ledger: Ledger
    arms: dict[str, Arm] = field(init=False)
    """Arms by name."""
    seeds: range = field(init=False)
    """Seeds with which runs to the target may be made."""
    ratios: dict[str, float] = field(default_factory=dict)
    """Mean step time of each ranked arm over the default's in the same ranking, by name."""
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
        """Return the arm's updates to the target over the default's, by virtual trainers; 1 if not known."""
        default = self.default.virtual_updates
        return 1.0 if default is None or arm.virtual_updates is None else arm.virtual_updates / default

    def add(self, strategy: DistributedStrategy) -> Arm:
        """Add a strategy of ``setting.others`` as an arm, and return the arm."""
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
        """Reject an arm if a leg fails inside the ``with`` block; a failure of the default is raised."""
        try:
            yield
        except LegFailed as failure:
            if name == DEFAULT:
                raise
            self.update(name, rejected=says(failure))


def says(failure: LegFailed) -> str:
    """Describe where and why a leg failed."""
    return f"failed on {failure.where}: {failure.what}"
