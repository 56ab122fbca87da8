"""Script: which program every step runs, from what the strategy decides, once for all ranks.

Trainers decide alike, so one state stands for all. Most steps come at a stroke (``CollectiveTraining.whole_step``). The last one of an
epoch or of training, and those in which a scalar is observed, are told event by event.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fleetbench.plan.drive import Scalar, answers, ends_epoch, events_of
from fleetbench.plan.events import BackwardEnd, BucketReady, DataEnd, EpochEnd, StepBegin
from fleetbench.plan.replay import Decider
from fleetbench.plan.state import closed_round
from fleetbench.plan.steps import StepOperations
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
    """Of the blocks of steps in order. Trainers can begin a block together, because they have met in the step before.

    One whose rounds are of fragments ends with that of the last.
    """

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
    """The script of a scenario's whole run. Raises ``ConfigError`` for a scalar without a declaration."""
    return _Writer(scenario).write()


class _Writer:
    """Runs the strategy once through all steps, and gives each kind of step its program."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._compiler = Compiler(scenario)
        self._decider = Decider.start(scenario.strategy, 0, first_step=scenario.steps.start)
        self._programs: dict[Program, int] = {}
        self._of_step: dict[StepOperations, int] = {}
        self._of_told: dict[tuple[Told, int], int] = {}

    def write(self) -> Script:
        """Step by step to the last."""
        sequence, local_steps, is_open = [], [], []
        for step in self._scenario.steps:
            before = self._decider.state
            sequence.append(self._whole(step) if self._is_quiet(step) else self._told(step))
            after = self._decider.state
            local_steps.append(closed_round(before, after))
            is_open.append(after.flight is not None or after.fragment > 0)
        found = tuple(self._programs)
        meets = [bool(found[program].joins) or length is not None for program, length in zip(sequence, local_steps, strict=True)]
        ends = [index + 1 for index in range(len(sequence)) if meets[index] and not is_open[index]]
        if not ends or ends[-1] != len(sequence):
            ends.append(len(sequence))
        lengths = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
        return Script(found, tuple(sequence), tuple(local_steps), tuple(lengths))

    def _is_quiet(self, step: int) -> bool:
        """Whether nothing is told after a step but its own events, and no learning rate that is new."""
        scenario, rounds = self._scenario, self._decider.state.rounds
        if step == scenario.steps[-1] or ends_epoch(step, scenario.steps_per_epoch):
            return False
        if rounds is None or rounds.lr is None:
            return True
        return not scenario.strategy.combination.lr_counts_updates and scenario.scalars.scalar("lr", 0, step) == rounds.lr

    def _whole(self, step: int) -> int:
        """The program of a step at a stroke; where a scalar is observed in it, event by event."""
        state, whole = self._scenario.strategy.whole_step(self._decider.state)
        if whole is None:
            return self._told(step)
        self._decider.state = state
        if whole not in self._of_step:
            ready = [(BucketReady(bucket.id), whole.on_bucket[bucket.id]) for bucket in self._scenario.plan.buckets]
            told: Told = ((StepBegin(0), whole.on_begin), *ready, (BackwardEnd(), whole.on_backward_end))
            self._of_step[whole] = self._program_of(told, whole.num_operations)
        return self._of_step[whole]

    def _told(self, step: int) -> int:
        """The program of a step, event by event."""
        before, scenario = self._decider.state, self._scenario
        events = events_of(scenario.plan, step, scenario.steps_per_epoch, scenario.steps[-1])
        found = [decided for event in events for decided in answers(self._decider, event, self._scalar)]
        told = [(one.event, one.operations) for one in found if one.operations or not isinstance(one.event, EpochEnd | DataEnd)]
        return self._program_of(counted_from(told, before.next_id), self._decider.state.next_id - before.next_id)

    def _scalar(self, name: Scalar) -> float:
        return self._scenario.scalar(name, 0, self._decider.state)

    def _program_of(self, told: Told, num_ids: int) -> int:
        if (told, num_ids) not in self._of_told:
            program = self._compiler.program(told, num_ids)
            self._of_told[told, num_ids] = self._programs.setdefault(program, len(self._programs))
        return self._of_told[told, num_ids]
