"""Script: which program every step runs, from what the strategy decides, once for all ranks.

Trainers decide alike, so one state stands for all. Steps come at a stroke (``CollectiveTraining.segment``)
up to the end of an epoch or of training, and to where a learning rate changes; a step in which a
scalar is observed is told event by event.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from fleetbench.plan.drive import Scalar, answers, events_of
from fleetbench.plan.events import BackwardEnd, BucketReady, DataEnd, EpochEnd, StepBegin
from fleetbench.plan.replay import Decider
from fleetbench.plan.state import Shape, closed_round
from sim.arrays.program import Compiler, Program, Told, counted_from
from sim.scenario import Scenario


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
    decider: Decider = field(init=False)
    programs: dict[Program, int] = field(default_factory=dict)
    of_shape: dict[int, int] = field(default_factory=dict)
    of_told: dict[Told, int] = field(default_factory=dict)
    kept: list[Shape] = field(default_factory=list)
    """Shapes whose identities are keys."""
    sequence: list[int] = field(default_factory=list)
    local_steps: list[int | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.compiler = Compiler(self.scenario)
        self.decider = Decider.start(self.scenario.strategy, 0, first_step=self.scenario.steps.start)

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
        """Steps from ``step`` on that can be had at a stroke: nothing is told after them but their own events."""
        scenario = self.scenario
        last = scenario.steps.stop - 1
        if scenario.steps_per_epoch is not None:
            last = min(last, max(step, 1) + (-max(step, 1)) % scenario.steps_per_epoch)
        rounds = self.decider.state.rounds
        if rounds is None or rounds.lr is None:
            return last - step
        if scenario.strategy.combination.lr_counts_updates:
            return 0
        changed = (other for other in range(step, last) if scenario.scalars.scalar("lr", 0, other) != rounds.lr)
        return next(changed, last) - step

    def _at_a_stroke(self, step: int) -> int:
        """As many steps as one segment holds."""
        limit = self._limit(step)
        if limit == 0:
            return 0
        state = self.decider.state
        updates, synced = state.updates, state.origin if state.last_sync is None else state.last_sync
        self.decider.state, shapes = self.scenario.strategy.segment(state, limit)
        for shape in shapes:
            is_update = not any(operation.kind == "skip" for operation in shape.on_backward_end)
            updates += is_update
            self.sequence.append(self._program_of(shape))
            self.local_steps.append(updates - synced if shape.synchronises and is_update else None)
            synced = updates if shape.synchronises and is_update else synced
        assert updates == self.decider.state.updates, "a step ends an update unless it is skipped"
        return len(shapes)

    def _stroke(self, step: int) -> int:
        """One step, event by event."""
        before, scenario = self.decider.state, self.scenario
        events = events_of(scenario.plan, step, scenario.steps_per_epoch, scenario.steps[-1])
        found = [decided for event in events for decided in answers(self.decider, event, self._scalar)]
        told = [(one.event, one.operations) for one in found if one.operations or not isinstance(one.event, EpochEnd | DataEnd)]
        self.sequence.append(self._intern(counted_from(told, before.next_id)))
        self.local_steps.append(closed_round(before, self.decider.state))
        return 1

    def _scalar(self, name: Scalar) -> float:
        return self.scenario.scalar(name, 0, self.decider.state)

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
