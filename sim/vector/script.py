"""Script: which program every step runs, from what the strategy decides, once for all ranks.

Trainers decide alike, so one state stands for all. Steps come at a stroke (``Strategy.segment``)
up to the end of an epoch or of training, and to where a learning rate changes; a step in which a
scalar is observed is told event by event.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from fleetbench.plan.events import BackwardEnd, BucketReady, DataEnd, EpochEnd, Event, Observed, StepBegin
from fleetbench.plan.operations import Operations
from fleetbench.plan.protocol import Shape, State, closed_round
from sim.scenario import Scenario
from sim.vector.program import Compiler, Program, Told, counted_from


@dataclass(frozen=True, slots=True)
class Script:
    """The programs of a run, and which of them each step runs."""

    programs: tuple[Program, ...]
    sequence: tuple[int, ...]
    """Index into ``programs`` for every step."""
    local_steps: tuple[int | None, ...]
    """Length of the round that each step closed; none where it closed none."""
    lengths: tuple[int, ...]
    """Of the blocks of steps in order. Trainers can begin a block together, because they have met in the step before."""

    def blocks(self) -> Iterator[tuple[int, tuple[int, ...], int]]:
        """Runs of blocks that do the same: the first step of the first, the programs of each, and how many they are."""
        begin = 0
        found: list[tuple[int, tuple[int, ...], int]] = []
        for length in self.lengths:
            pattern = self.sequence[begin : begin + length]
            if found and found[-1][1] == pattern:
                found[-1] = (*found[-1][:2], found[-1][2] + 1)
            else:
                found.append((begin, pattern, 1))
            begin += length
        yield from found


def script_of(scenario: Scenario) -> Script:
    """The script of a scenario's whole run. Raises ``ConfigError`` for a scalar that nobody declares."""
    return _Writer(scenario).write()


@dataclass(slots=True)
class _Writer:
    scenario: Scenario
    compiler: Compiler = field(init=False)
    state: State = field(init=False)
    told_lr: float | None = None
    programs: dict[Program, int] = field(default_factory=dict)
    of_shape: dict[int, int] = field(default_factory=dict)
    of_told: dict[Told, int] = field(default_factory=dict)
    kept: list[Shape] = field(default_factory=list)
    """Shapes whose identities are keys."""
    sequence: list[int] = field(default_factory=list)
    local_steps: list[int | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.compiler = Compiler(self.scenario)
        self.state = self.scenario.strategy.init("trainer", 0, self.scenario.steps.start)

    def write(self) -> Script:
        """Step by step to the last."""
        steps = self.scenario.steps
        step = steps.start
        while step < steps.stop:
            step += self._at_a_stroke(step) or self._stroke(step)
        found = tuple(self.programs)
        meets = [bool(program.joins) for program in found]
        ends = [index + 1 for index, program in enumerate(self.sequence) if meets[program]]
        if not ends or ends[-1] != len(self.sequence):
            ends.append(len(self.sequence))
        lengths = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
        return Script(found, tuple(self.sequence), tuple(self.local_steps), tuple(lengths))

    def _limit(self, step: int) -> int:
        """Steps from ``step`` on that can be had at a stroke: nothing is told behind them but their own events."""
        scenario = self.scenario
        last = scenario.steps.stop - 1
        if scenario.steps_per_epoch is not None:
            last = min(last, max(step, 1) + (-max(step, 1)) % scenario.steps_per_epoch)
        if "lr" not in scenario.strategy.observes or self.told_lr is None:
            return last - step
        if scenario.lr_counts_updates:
            return 0
        changed = (other for other in range(step, last) if scenario.scalars.scalar("lr", 0, other) != self.told_lr)
        return next(changed, last) - step

    def _at_a_stroke(self, step: int) -> int:
        """As many steps as one segment holds."""
        limit = self._limit(step)
        if limit == 0:
            return 0
        updates, synced = self.state.updates, self.state.origin if self.state.last_sync is None else self.state.last_sync
        self.state, segment = self.scenario.strategy.segment(self.state, limit)
        for index in segment.sequence:
            shape = segment.shapes[index]
            is_update = not any(operation.kind == "skip" for operation in shape.on_backward_end)
            updates += is_update
            self.sequence.append(self._program_of(shape))
            self.local_steps.append(updates - synced if shape.synchronises and is_update else None)
            synced = updates if shape.synchronises and is_update else synced
        assert updates == self.state.updates, "a step ends an update unless it is skipped"
        return len(segment.sequence)

    def _stroke(self, step: int) -> int:
        """One step, event by event."""
        before, base = self.state, self.state.next_id
        told: list[tuple[Event, Operations]] = []
        self._tell(StepBegin(step), told)
        for bucket in self.scenario.plan.buckets:
            self._tell(BucketReady(bucket.id), told)
        self._tell(BackwardEnd(), told)
        told += self._between(step)
        self.sequence.append(self._intern(counted_from(told, base)))
        self.local_steps.append(closed_round(before, self.state))
        return 1

    def _between(self, step: int) -> list[tuple[Event, Operations]]:
        """What is decided behind a step's own events."""
        told: list[tuple[Event, Operations]] = []
        if self.scenario.ends_epoch(step):
            self._tell(EpochEnd(), told)
        if step == self.scenario.steps[-1]:
            self._tell(DataEnd(), told)
        return told if any(operations for _, operations in told) else []

    def _tell(self, event: Event, told: list[tuple[Event, Operations]]) -> None:
        """As ``sim.trainer`` does."""
        strategy = self.scenario.strategy
        self.state, operations = strategy.on(self.state, 0, event)
        told.append((event, operations))
        kinds = {operation.kind for operation in operations}
        if isinstance(event, BackwardEnd) and "found_inf" in strategy.observes and not kinds & {"update", "skip"}:
            self._tell(Observed("found_inf", self._scalar("found_inf")), told)
        if "merge" in kinds:
            if "lr" in strategy.observes and (lr := self._scalar("lr")) != self.told_lr:
                self.told_lr = lr
                self._tell(Observed("lr", lr), told)
            if "loss" in strategy.observes and any(operation.payload == "loss" for operation in operations):
                self._tell(Observed("loss", self._scalar("loss")), told)

    def _scalar(self, name: str) -> float:
        return self.scenario.scalar(name, 0, self.state)

    def _program_of(self, shape: Shape) -> int:
        if id(shape) not in self.of_shape:
            self.kept.append(shape)
            self.of_shape[id(shape)] = self._intern(_told(shape, self.scenario))
        return self.of_shape[id(shape)]

    def _intern(self, told: Told) -> int:
        if told not in self.of_told:
            program = self.compiler.program(told)
            self.of_told[told] = self.programs.setdefault(program, len(self.programs))
        return self.of_told[told]


def _told(shape: Shape, scenario: Scenario) -> Told:
    """A shape's events with their operations."""
    ready = [(BucketReady(bucket.id), shape.on_bucket[bucket.id]) for bucket in scenario.plan.buckets]
    return ((StepBegin(0), shape.on_begin), *ready, (BackwardEnd(), shape.on_backward_end))
