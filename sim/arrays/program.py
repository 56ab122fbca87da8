"""Program: the instructions of one step, the same for every rank. Script: the program of each step of a run.

A rank that is in no part of a collective's group skips that instruction. All trainers decide alike, so one
state of the strategy stands for all of them. ``CollectiveTraining.whole_step`` gives the operations of most
steps at once. The last step of an epoch or of training, and steps in which a scalar is observed, are built
event by event.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from fleetbench.plan.drive import Scalar, answers, ends_epoch, events_of
from fleetbench.plan.events import BackwardEnd, BlockBegin, BucketReady, DataEnd, EpochEnd, Event, Observed, StepBegin
from fleetbench.plan.operations import COLLECTIVES, Operation, Operations
from fleetbench.plan.replay import Decider
from fleetbench.plan.state import closed_round
from fleetbench.plan.steps import StepOperations
from fleetbench.timeline import start_name
from sim.own_work import OwnWork, holds_rank, moments_of
from sim.scenario import Scenario

Told = Sequence[tuple[Event, Operations]]
"""Events of one step, each with the operations that the strategy returned. Ids count from the step's first
operation."""


@dataclass(frozen=True, slots=True)
class Head:
    """Wait for the step's head, until the forward may start; see ``fleetbench.plan.layers.StepHead``."""


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute until the step's forward and backward have progressed to ``base_ns``, a time at X = 0."""

    name: str
    """Point that compute reaches: end of the ``forward`` or ``backward``, beginning of a ``block``, or a ready
    bucket, by its ``start_name``."""
    base_ns: int


@dataclass(frozen=True, slots=True)
class Join:
    """Work for ``takes_ns``, then join a collective. Ids count from the step's first operation."""

    operation: Operation
    takes_ns: int
    holds: bool
    """Whether the rank waits at once for the collective's end."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until the operations ``after`` have ended."""

    after: tuple[int, ...] | None
    """Ids of the operations; ``None``: all collectives in flight."""
    gates: bool = False
    """Whether the wait is a gate, which holds compute up."""


@dataclass(frozen=True, slots=True)
class Work:
    """Be busy for ``takes_ns``."""

    name: str | None
    """Name of the span in the timeline; ``None``: it is not shown."""
    takes_ns: int


@dataclass(frozen=True, slots=True)
class Share:
    """Start a bucket's update, which runs in parallel with compute once the operations ``after`` have ended."""

    takes_ns: int
    after: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """Wait until the updates that ``Share`` has started have ended."""


Instruction = Head | Compute | Join | Wait | Work | Share | Finish


@dataclass(frozen=True)
class Program:
    """The instructions of one step, in order."""

    instructions: tuple[Instruction, ...]
    num_ids: int
    """Number of the step's operations; the ids of the next step begin there."""
    lands: bool
    """Whether every collective that earlier steps left in flight has ended before this step joins one."""

    @cached_property
    def joins(self) -> tuple[Join, ...]:
        """The instructions that join a collective, in order."""
        return tuple(instruction for instruction in self.instructions if isinstance(instruction, Join))


@dataclass(frozen=True, slots=True)
class Script:
    """The programs of a run, and the program that each step runs."""

    programs: tuple[Program, ...]
    sequence: tuple[int, ...]
    """Index into ``programs`` of each step's program."""
    local_steps: tuple[int | None, ...]
    """Number of updates in the round that each step closed; ``None`` for a step that closed none."""
    blocks: tuple[tuple[tuple[int, ...], int], ...]
    """The run's steps in order, cut into blocks: the indices of a block's programs, and the number of
    consecutive blocks with these programs. Trainers can begin a block together, because they met in the step
    before it. If fragments have rounds of their own, a block ends with the last fragment's round."""


def script_of(scenario: Scenario) -> Script:
    """Return the script of a scenario's whole run.

    Raises ``ConfigError`` for a scalar without a declaration.
    """
    return _Writer(scenario).write()


class _Writer:
    """Runs the strategy once through all steps, and writes each kind of step as the reference engine executes it."""

    def __init__(self, scenario: Scenario) -> None:
        plan, table = scenario.plan, scenario.table
        self._scenario = scenario
        self._decider = Decider.start(scenario.strategy, 0, first_step=scenario.steps.start)
        self._programs: dict[Program, int] = {}
        self._of_step: dict[StepOperations, int] = {}
        self._meets = {name for name, parts in plan.groups if any(len(part) > 1 for part in parts)}
        self._moments_ns = dict(moments_of(plan, table))
        self._own = OwnWork(scenario)
        self._forward_ns = table.forward_ns
        self._compute_ns = table.forward_ns + table.backward_ns

    def write(self) -> Script:
        """Run the strategy through all steps and return the script."""
        sequence, local_steps, is_open = list[int](), list[int | None](), list[bool]()
        for step in self._scenario.steps:
            before = self._decider.state
            sequence.append(self._whole(step) if self._is_quiet(step) else self._told(step))
            after = self._decider.state
            local_steps.append(closed_round(before, after))
            is_open.append(after.flight is not None or after.fragment > 0)
        found = tuple(self._programs)
        steps = enumerate(zip(sequence, local_steps, is_open, strict=True), start=1)
        ends = {end for end, (program, length, opens) in steps if (found[program].joins or length is not None) and not opens}
        patterns = (tuple(sequence[begin:end]) for begin, end in itertools.pairwise(sorted({0, *ends, len(sequence)})))
        blocks = ((pattern, len(list(alike))) for pattern, alike in itertools.groupby(patterns))
        return Script(found, tuple(sequence), tuple(local_steps), tuple(blocks))

    def _is_quiet(self, step: int) -> bool:
        """Whether a step has only its own events: no end of an epoch or of training, and no new learning rate."""
        scenario, rounds = self._scenario, self._decider.state.rounds
        if step == scenario.steps[-1] or ends_epoch(step, scenario.steps_per_epoch):
            return False
        if rounds is None or rounds.lr is None:
            return True
        return not scenario.strategy.combination.lr_counts_updates and scenario.scalars.scalar("lr", 0, step) == rounds.lr

    def _whole(self, step: int) -> int:
        """Return the number of a step's program, from ``whole_step`` unless the step observes a scalar."""
        state, whole = self._scenario.strategy.whole_step(self._decider.state)
        if whole is None:
            return self._told(step)
        self._decider.state = state
        if whole not in self._of_step:
            told = whole.told(self._scenario.plan, step)
            self._of_step[whole] = self._number(self._program(told, whole.num_operations))
        return self._of_step[whole]

    def _told(self, step: int) -> int:
        """Return the number of a step's program, built event by event."""
        before, scenario = self._decider.state, self._scenario
        events = events_of(scenario.plan, step, scenario.steps_per_epoch, scenario.steps[-1])
        found = [decided for event in events for decided in answers(self._decider, event, self._scalar)]
        told = [
            (one.event, tuple(operation.shifted(-before.next_id) for operation in one.operations))
            for one in found
            if one.operations or not isinstance(one.event, EpochEnd | DataEnd)
        ]
        return self._number(self._program(told, self._decider.state.next_id - before.next_id))

    def _scalar(self, name: Scalar) -> float:
        return self._scenario.scalar(name, 0, self._decider.state)

    def _number(self, program: Program) -> int:
        return self._programs.setdefault(program, len(self._programs))

    def _program(self, told: Told, num_ids: int) -> Program:
        """Return the program of a step with ``num_ids`` operations.

        In ``told``, an ``Observed`` event follows the event that caused it.
        """
        what = self._scenario.strategy.combination
        self._own.begin_step()
        found: list[Instruction] = []
        tracked, in_forward = False, True
        for index, (event, operations) in enumerate(told):
            follower = told[index + 1][0] if index + 1 < len(told) else None
            is_forward = isinstance(event, StepBegin) or (isinstance(event, BlockBegin) and event.phase == "forward")
            if in_forward and not is_forward:
                found.append(Compute("forward", self._forward_ns))
                in_forward = False
            if isinstance(event, BucketReady):
                found.append(Compute(start_name(event.bucket), self._moments_ns[event]))
            elif isinstance(event, BlockBegin):
                found.append(Compute("block", self._moments_ns[event]))
            elif isinstance(event, BackwardEnd):
                found.append(Compute("backward", self._compute_ns))
            elif isinstance(event, Observed) and event.name == "found_inf":
                found.append(Wait(None))
            found += self._spelled(operations)
            tracked = tracked or any(operation.kind == "update" and operation.bucket is not None for operation in operations)
            if isinstance(event, StepBegin):
                found.append(Head())
            elif tracked and not isinstance(event, BlockBegin | BucketReady) and not isinstance(follower, Observed):
                found.append(Finish())
                tracked = False
        return Program(tuple(found), num_ids, lands=what.fragments is not None and not what.exchanges_gradients)

    def _spelled(self, operations: Operations) -> Iterator[Instruction]:
        for operation in operations:
            if operation.kind in COLLECTIVES:
                if operation.group in self._meets:
                    holds = self._scenario.strategy.combination.is_sequential or holds_rank(operation)
                    yield Join(operation, self._own.joining(operation), holds)
            elif operation.kind == "update" and operation.bucket is not None:
                yield Share(self._own.bucket_update(operation.bucket), operation.after)
            else:
                yield from self._local(operation)

    def _local(self, operation: Operation) -> Iterator[Instruction]:
        if operation.after:
            yield Wait(operation.after, gates=operation.kind == "gate")
        name, takes_ns = self._own.local(operation)
        if takes_ns:
            yield Work(name, takes_ns)
