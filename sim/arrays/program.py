"""Program: what one step does, spelled out; the same for every rank.

A rank that is in no part of a collective's group leaves that instruction out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fleetbench.plan.events import BackwardEnd, BucketReady, Event, Observed, StepBegin
from fleetbench.plan.operations import COLLECTIVES, Operation, Operations
from sim.own_work import OwnWork, bucket_readiness
from sim.scenario import Scenario

Told = tuple[tuple[Event, Operations], ...]
"""What a strategy was told in one step, and what it answered."""


@dataclass(frozen=True, slots=True)
class Head:
    """Up to the start of the forward."""


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute until so much of the step's is done, at X = 0."""

    name: str
    """``forward``, ``backward``, or ``ready`` where a bucket is."""
    base_ns: int


@dataclass(frozen=True, slots=True)
class Started:
    """What a bucket's readiness asked for has been started."""

    bucket: int


@dataclass(frozen=True, slots=True)
class Join:
    """Work for ``takes_ns``, then join a collective; ids count from the step's first operation."""

    operation: Operation
    takes_ns: int
    holds: bool
    """Wait for its end at once."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for operations to end; none named: for all."""

    after: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Work:
    """Be busy."""

    name: str | None
    takes_ns: int


@dataclass(frozen=True, slots=True)
class Share:
    """Start a bucket's update, which runs beside compute."""

    takes_ns: int
    after: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """Wait for the updates beside compute."""


Instruction = Head | Compute | Started | Join | Wait | Work | Share | Finish


@dataclass(frozen=True, slots=True)
class Program:
    """A step's instructions in order."""

    instructions: tuple[Instruction, ...]
    num_ids: int
    """Operations of the step: by so many, ids of the next step count further on."""
    lands: bool
    """What earlier steps left in flight has ended before a collective is joined."""

    @property
    def compute_ns(self) -> int:
        """All of its compute, at X = 0."""
        return max((instruction.base_ns for instruction in self.instructions if isinstance(instruction, Compute)), default=0)

    @property
    def joins(self) -> tuple[Join, ...]:
        """Its collectives."""
        return tuple(instruction for instruction in self.instructions if isinstance(instruction, Join))


class Compiler:
    """Spells out what a strategy was told and answered, as the reference engine's trainers execute it."""

    def __init__(self, scenario: Scenario) -> None:
        plan, table = scenario.plan, scenario.table
        self._scenario = scenario
        self._meets = {name for name, parts in plan.groups if any(len(part) > 1 for part in parts)}
        self._ready_ns = dict(zip([bucket.id for bucket in plan.buckets], bucket_readiness(plan, table), strict=True))
        self._own = OwnWork(scenario)
        self._forward_ns = table.forward_ns
        self._compute_ns = table.forward_ns + table.backward_ns

    def program(self, told: Told, num_ids: int) -> Program:
        """The program of a step of so many operations. ``Observed`` follows what it was observed for."""
        self._own.begin_step()
        found: list[Instruction] = []
        tracked = False
        for index, (event, operations) in enumerate(told):
            follower = told[index + 1][0] if index + 1 < len(told) else None
            if isinstance(event, BucketReady):
                found.append(Compute("ready", self._ready_ns[event.bucket]))
            elif isinstance(event, BackwardEnd):
                found.append(Compute("backward", self._compute_ns))
            elif isinstance(event, Observed) and event.name == "found_inf":
                found.append(Wait(None))
            found += self._spelled(operations)
            tracked = tracked or any(operation.kind == "update" and operation.bucket is not None for operation in operations)
            if isinstance(event, StepBegin):
                found += [Head(), Compute("forward", self._forward_ns)]
            elif isinstance(event, BucketReady):
                found.append(Started(event.bucket))
            elif tracked and not isinstance(follower, Observed):
                found.append(Finish())
                tracked = False
        return Program(tuple(found), num_ids, lands=self._scenario.strategy.combination.fragments is not None)

    def _spelled(self, operations: Operations) -> Iterator[Instruction]:
        for operation in operations:
            if operation.kind in COLLECTIVES:
                if operation.group in self._meets:
                    yield Join(operation, self._own.joining(operation), self._scenario.strategy.combination.is_sequential)
            elif operation.kind == "update" and operation.bucket is not None:
                yield Share(self._own.bucket_update(operation.bucket), operation.after)
            else:
                yield from self._local(operation)

    def _local(self, operation: Operation) -> Iterator[Instruction]:
        if operation.after:
            yield Wait(operation.after)
        name, takes_ns = self._own.local(operation)
        if takes_ns:
            yield Work(name, takes_ns)


def counted_from(told: Sequence[tuple[Event, Operations]], base: int) -> Told:
    """The same with ids that count from ``base`` and no step's number: equal for steps that do the same."""
    return tuple((_timeless(event), tuple(operation.shifted(-base) for operation in operations)) for event, operations in told)


def _timeless(event: Event) -> Event:
    if isinstance(event, StepBegin):
        return StepBegin(0)
    return Observed(event.name, 0.0) if isinstance(event, Observed) else event
