"""An outer optimizer and fragments, as the plan decides them: carried out on plain numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from torchft_fragments import GRADIENT, INNER_LR, STEPS, configs, golden

from fleetbench.plan.build import Plan, Setting, build_plan
from fleetbench.plan.combination import Combination
from fleetbench.plan.events import DataEnd, Event, Flush
from fleetbench.plan.layers import Gradient
from fleetbench.plan.operations import COLLECTIVES, Operation, Operations
from fleetbench.plan.replay import Decider
from fleetbench.plan.training import family
from fleetbench.quantities import Nanoseconds
from fleetbench.strategy import DistributedStrategy
from plan.contract import closure, run_step

NAMES = ("first.weight", "second.weight")


def strategy_of(**changes: Any) -> DistributedStrategy:
    """Local SGD with these ``localsgd_configs``, a bucket a gradient."""
    return DistributedStrategy(fuse_all_reduce_ops=False).replace(localsgd=True, localsgd_configs=changes)


def gradients(sizes: Iterable[tuple[str, int]]) -> list[Gradient]:
    """In order of readiness: the last of the model first."""
    return [Gradient(name=name, numel=numel, ready=Nanoseconds(at)) for at, (name, numel) in enumerate(reversed(list(sizes)))]


def decider_of(strategy: DistributedStrategy, trainers: int = 2) -> Decider:
    """Before the first step, on a model of two weights."""
    plan = build_plan(strategy, gradients((name, 1) for name in NAMES), Setting(trainers=trainers))
    return Decider.start(family(strategy, plan), 0)


@dataclass
class Numbers:
    """Replicas that carry out operations on one number a gradient: what a plan means, without tensors.

    A collective has its result as soon as all have sent, and no ``outer`` or ``merge`` may use one that it does not come after.
    """

    plan: Plan
    what: Combination
    gradient: list[float]
    theta: list[dict[str, float]] = field(init=False)
    agreed: dict[str, float] = field(default_factory=lambda: dict.fromkeys(NAMES, 1.0))
    velocity: dict[str, float] = field(default_factory=lambda: dict.fromkeys(NAMES, 0.0))
    delta: dict[str, float] = field(default_factory=dict)
    sent: dict[int, str] = field(default_factory=dict)
    after: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.theta = [dict(self.agreed) for _ in self.gradient]

    def execute(self, operations: Operations) -> None:
        """One after the other, on all replicas."""
        for operation in operations:
            self._one(operation)

    def _one(self, operation: Operation) -> None:
        names = self._names(operation)
        self.after[operation.id] = operation.after
        if operation.kind == "update":
            for own, gradient in zip(self.theta, self.gradient, strict=True):
                own |= {name: value - INNER_LR * gradient for name, value in own.items()}
        elif operation.kind in COLLECTIVES or operation.kind == "difference":
            for name in names:
                self.sent[operation.id] = name
                self.delta[name] = sum(own[name] - self.agreed[name] for own in self.theta) / len(self.theta)
        elif operation.kind == "outer":
            self._came(operation, names)
            self._step(names)
        elif operation.kind == "merge":
            if self.what.outer is None:
                self._came(operation, names)
            share = self.what.fragments.mixing if self.what.fragments and operation.payload == "mixture" else 0.0
            for name in names:
                self.agreed[name] += self.delta.pop(name)
                for own in self.theta:
                    own[name] = (1 - share) * self.agreed[name] + share * own[name]

    def _step(self, names: list[str]) -> None:
        outer = self.what.outer
        assert outer is not None
        for name in names:
            self.velocity[name] = outer.momentum * self.velocity[name] + self.delta[name]
            step = self.delta[name] + outer.momentum * self.velocity[name] if outer.nesterov else self.velocity[name]
            self.delta[name] = outer.lr * step

    def _came(self, operation: Operation, names: list[str]) -> None:
        if len(self.theta) > 1:
            came = closure(operation.id, self.after) & self.sent.keys()
            assert {self.sent.pop(other) for other in came} == set(names), "it waits for all that carries its fragment, and for that alone"

    def _names(self, operation: Operation) -> list[str]:
        if operation.bucket is not None:
            buckets: Iterable[int] = (operation.bucket,)
        elif operation.fragment is not None:
            buckets = self.plan.fragments[operation.fragment]
        else:
            buckets = range(len(self.plan.buckets))
        return [name for bucket in buckets for name in self.plan.buckets[bucket].gradients]


def numbers_of(decider: Decider, gradient: list[float]) -> Numbers:
    """Replicas with these gradients, before the first step."""
    return Numbers(decider.strategy.plan, decider.strategy.combination, gradient)


@pytest.mark.parametrize(("overlap", "mixing"), golden())
def test_golden_numbers_of_torchft(overlap: int, mixing: float) -> None:
    """Every value that torchft recorded of two fragments comes out of the plan's operations alone."""
    decider = decider_of(strategy_of(**configs(overlap, mixing)))
    replicas = numbers_of(decider, [GRADIENT, GRADIENT])
    seen = {(replica, 0): (dict(own), dict(replicas.agreed)) for replica, own in enumerate(replicas.theta)}
    for step in range(1, STEPS + 1):
        for operations in run_step(decider, step):
            replicas.execute(operations)
        seen |= {(replica, step): (dict(own), dict(replicas.agreed)) for replica, own in enumerate(replicas.theta)}
    rows = golden()[overlap, mixing]
    assert len(rows) == 2 * (STEPS + 1)
    for row in rows:
        own, agreed = seen[row.replica, row.step]
        assert tuple(own[name] for name in NAMES) == row.local
        if row.agreed is not None:
            assert tuple(agreed[name] for name in NAMES) == row.agreed


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("trainers", [1, 3])
def test_outer_momentum_by_hand(nesterov: bool, trainers: int) -> None:
    """H = 2, eta 0.5, mu 0.5, gradients with a mean of 3: two rounds of the formula, also for a trainer alone."""
    decider = decider_of(
        strategy_of(k_steps=2, begin_step=2, schedule="torch", outer_lr=0.5, outer_momentum=0.5, outer_nesterov=nesterov), trainers
    )
    replicas = numbers_of(decider, [3.0] if trainers == 1 else [1.0, 2.0, 6.0])
    for step in range(1, 5):
        for operations in run_step(decider, step):
            replicas.execute(operations)
    # Delta = 6 in both rounds: v = 6, then 9. Nesterov: 0.5 (6 + 3) + 0.5 (6 + 4.5); without: 0.5 (6 + 9)
    expected = 1 - (9.75 if nesterov else 7.5)
    assert replicas.agreed == pytest.approx(dict.fromkeys(NAMES, expected), abs=1e-12)
    assert all(own == replicas.agreed for own in replicas.theta)


_OUTER = {"outer_lr": 0.7, "outer_momentum": 0.9}


@pytest.mark.parametrize(
    ("configs", "first_step", "expected"),
    [
        ({"k_steps": 4, **_OUTER}, 1, [4, 8, 12]),
        ({"k_steps": 4, "outer_lr": 0.5}, 1, [4, 8, 12]),
        ({"k_steps": 4, "outer_momentum": 0.5}, 1, [4, 8, 12]),
        ({"k_steps": 4, "fragments": 2, **_OUTER}, 1, [2, 4, 6, 8, 10, 12]),
        ({"k_steps": 4, "overlap_steps": 1}, 1, [4, 8, 12]),
        ({"k_steps": 4, **_OUTER}, -1, [-1, 0, 4, 8, 12]),
        ({"k_steps": 1, **_OUTER}, 1, [*range(1, 13)]),
        ({"k_steps": 4, "begin_step": 3, **_OUTER}, 1, [1, 2, 3, 7, 11]),
        ({"k_steps": 4, "schedule": "torch", "begin_step": 2, **_OUTER}, 1, [2, 6, 10]),
        ({"k_steps": 4}, 1, [1, 5, 9]),
    ],
    ids=str,
)
def test_rounds_are_whole_from_the_first_update_on(configs: dict[str, Any], first_step: int, expected: list[int]) -> None:
    """With an outer optimizer or fragments, as in the papers; not where ``begin_step`` says else, nor with averaging alone."""
    strategy = strategy_of(**configs)
    plan = build_plan(strategy, gradients((name, 1) for name in NAMES), Setting(trainers=2))
    decider = Decider.start(family(strategy, plan), 0, first_step=first_step)
    found = _merges(decider, range(first_step, 13))
    assert [step for step, moves in found.items() if moves[-1][0] == "merge"] == expected


def test_defaults_are_todays_averaging() -> None:
    """A rate of 1, no momentum and one fragment add no operation, whatever ``outer_nesterov`` says."""
    decider = decider_of(strategy_of(k_steps=2, outer_nesterov=False))
    kinds = {operation.kind for step in range(1, 9) for operations in run_step(decider, step) for operation in operations}
    assert kinds == {"update", "all_reduce", "merge"}
    assert decider.strategy.combination.outer is decider.strategy.combination.fragments is None


def _merges(decider: Decider, steps: range) -> dict[int, list[tuple[str, int | None]]]:
    """After which steps fragments set out (``go``) and are merged (``merge``)."""
    found: dict[int, list[tuple[str, int | None]]] = {}
    plan = decider.strategy.plan
    for step in steps:
        for operation in (operation for operations in run_step(decider, step) for operation in operations):
            if operation.kind == "merge":
                found.setdefault(step, []).append(("merge", operation.fragment))
            elif operation.payload == "delta" and plan.fragments and operation.bucket is not None:
                fragment = next(index for index, own in enumerate(plan.fragments) if operation.bucket in own)
                found.setdefault(step, []).append(("go", fragment))
    return found


@pytest.mark.parametrize("event", [Flush(), DataEnd()])
@pytest.mark.parametrize(("overlap", "mixing", "stop"), [(0, 0.0, 4), (2, 0.0, 5), (2, 0.5, 5), (2, 0.5, 3), (0, 0.0, 3), (1, 1.0, 9)])
def test_a_model_that_is_read_is_the_same_on_all_trainers(event: Event, overlap: int, mixing: float, stop: int) -> None:
    """What is in flight is merged first, then what has not met since; a second reading changes nothing, and rounds begin anew."""
    decider = decider_of(strategy_of(k_steps=6, fragments=2, overlap_steps=overlap, mixing=mixing, outer_lr=0.7, outer_momentum=0.9))
    replicas = numbers_of(decider, [1.0, 2.0])
    for step in range(1, stop + 1):
        for operations in run_step(decider, step):
            replicas.execute(operations)
    flew = decider.state.flight is not None
    assert flew == (stop == 5 and overlap == 2)
    operations = decider.on(0, event)
    if flew:
        assert [(operation.kind, operation.fragment) for operation in operations[:2]] == [("outer", 1), ("merge", 1)]
    replicas.execute(operations)
    assert replicas.theta[0] == replicas.theta[1] == replicas.agreed
    merged = [operation.fragment for operation in operations if operation.kind == "merge"]
    assert sorted(merged, key=str) == ([1] if stop == 3 and not mixing else [0, 1])
    assert decider.on(0, event) == ()
    after = _merges(decider, range(stop + 1, stop + 4))
    assert after[stop + 3][-1] == ("merge", 0)


def test_fragments_are_runs_of_layers_with_equal_bytes() -> None:
    """Of 5, 1, 1, 1, 4 kB in three runs no one has more than 5; a layer's weight and bias stay together, whatever becomes ready first."""
    sizes = [("a.weight", 1000), ("a.bias", 250), ("b.weight", 250), ("c.weight", 250), ("d.weight", 250), ("e.weight", 1000)]
    strategy = strategy_of(k_steps=6, fragments=3)
    plan = build_plan(strategy, gradients(sizes), Setting(trainers=2))
    named = [sorted(name for bucket in own for name in plan.buckets[bucket].gradients) for own in plan.fragments]
    assert named == [["a.bias", "a.weight"], ["b.weight", "c.weight", "d.weight"], ["e.weight"]]
    swapped = [gradients(sizes)[index] for index in (3, 0, 5, 1, 4, 2)]
    again = build_plan(strategy, swapped, Setting(trainers=2, order=tuple(name for name, _ in sizes)))
    assert [sorted(name for bucket in own for name in again.buckets[bucket].gradients) for own in again.fragments] == named
    assert Plan.from_dict(plan.to_dict()) == plan
