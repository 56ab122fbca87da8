"""Walk: how ranks come through their programs, each at a time of its own, as far as a given moment.

Compute that collectives slow is integrated exactly, in units so small that all of it is whole numbers,
and the time of each mark is rounded once; see ``sim.progress``.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from fleetbench.stragglers import stretch
from sim.scenario import Scenario
from sim.vector.groups import NEVER, Group, Times
from sim.vector.layout import Layout
from sim.vector.program import Compute, Finish, Head, Join, Program, Share, Started, Wait, Work
from sim.vector.script import Script
from sim.vector.stretches import stretched

LATER = 2**62
"""Behind every time: the end of what has not ended."""

Index = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Busy:
    """Work before a collective is joined; only of the ranks that join it."""

    takes_ns: int
    group: str


@dataclass(frozen=True, slots=True)
class Hold:
    """Wait for one's own collective where it was joined."""

    after: tuple[int, ...]


Line = Head | Compute | Busy | Join | Hold | Wait | Work | Share | Finish


def lines_of(program: Program) -> list[Line]:
    """A program's instructions, of which each either takes time, or waits, or does neither."""
    lines: list[Line] = []
    for instruction in program.instructions:
        if isinstance(instruction, Join):
            if instruction.takes_ns:
                lines.append(Busy(instruction.takes_ns, instruction.operation.group))
            lines.append(instruction)
            if instruction.holds:
                lines.append(Hold((instruction.operation.id,)))
        elif not isinstance(instruction, Started):
            lines.append(instruction)
    return lines


@dataclass(slots=True)
class Ground:
    """What ranks walk on: their programs, their delays, and how far collectives have come."""

    script: Script
    layout: Layout
    x: Times
    """X by step and rank."""
    heads_ns: Index
    units: int
    """Units of progress in a nanosecond of undisturbed compute."""
    slow_units: int
    """The same while a collective is in flight."""
    most_ns: int
    """What a step's compute takes at most."""
    exact: Any
    """What holds them: 64 bits, or Python's integers."""
    lines: list[list[Line]]
    width: int
    """Above the number of lines of any step."""
    ends: dict[tuple[int, int], Times] = field(default_factory=dict)
    """When the collectives of a step, by their ids, ended in each part of their group."""
    _marks: dict[tuple[int, int], Any] = field(default_factory=dict)

    @classmethod
    def of(cls, scenario: Scenario, script: Script, layout: Layout, heads_ns: Index) -> Ground:
        """The ground of a scenario."""
        slow = 1 + Fraction(repr(scenario.table.contention))  # the decimal that a file writes
        x = scenario.draws.rows(0, len(scenario.steps))
        most = stretch(max(program.compute_ns for program in script.programs), int(x.max(initial=0)))
        exact = np.int64 if 4 * most * slow.numerator < LATER else object
        most_ns = math.ceil(most * slow)
        lines = [lines_of(program) for program in script.programs]
        return cls(script, layout, x, heads_ns, slow.numerator, slow.denominator, most_ns, exact, lines, 1 + max(map(len, lines)))

    def of_step(self, step: int) -> list[Line]:
        """The lines of a step."""
        return self.lines[self.script.sequence[step]]

    def mark(self, step: int, base_ns: int) -> Any:
        """Units of progress of every rank at a moment of a step's compute."""
        key = (step, base_ns)
        if key not in self._marks:
            x = self.x[step]
            self._marks[key] = stretched(base_ns, x, int(x.max(initial=0))).astype(self.exact) * self.units
        return self._marks[key]

    def ended_ns(self, key: tuple[int, int, int]) -> int:
        """When a collective ended, by step, operation and part; ``LATER`` if it has not."""
        ends = self.ends.get(key[:2])
        return LATER if ends is None else int(ends[key[2]])

    def forget(self, step: int) -> None:
        """Every rank is through with a step."""
        self._marks = {key: value for key, value in self._marks.items() if key[0] != step}
        self.ends = {key: value for key, value in self.ends.items() if key[0] != step}


_SCALARS = ("start", "head_end", "forward", "compute_end", "stall", "update", "arrival")


@dataclass(slots=True)
class Walkers:
    """Where ranks are: ``line`` = step x width + line of the step, which none of them has finished at ``time``."""

    ground: Ground
    line: Index
    time: Index
    done: Any
    """Units of the step's compute."""
    left: Index
    """Nanoseconds of what a rank is busy with; below 0 where it has not begun it."""
    slowed: npt.NDArray[np.bool_]
    """Collectives of the rank are in flight."""
    behind: npt.NDArray[np.bool_]
    """The step's compute is over."""
    computing: npt.NDArray[np.bool_]
    notes: dict[str, Index]
    """What is known of the step under way, by rank."""
    told: dict[int, Index]
    """When a rank started its bucket updates, by their lines."""

    @classmethod
    def at_start(cls, ground: Ground, num_ranks: int) -> Walkers:
        """All ranks before their first step, at 0."""

        def zeros() -> Index:
            return np.zeros(num_ranks, dtype=np.int64)

        slowed, behind, computing = (np.zeros(num_ranks, dtype=bool) for _ in range(3))
        notes = {name: zeros() for name in _SCALARS}
        notes["arrival"][:] = NEVER
        done = np.zeros(num_ranks, dtype=ground.exact)
        return cls(ground, zeros(), zeros(), done, zeros() - 1, slowed, behind, computing, notes, {})

    def copy(self) -> Walkers:
        """The same ranks, to look ahead with."""
        taken = dataclasses.replace(self, line=self.line.copy(), time=self.time.copy(), done=self.done.copy(), left=self.left.copy())
        taken.behind, taken.computing = self.behind.copy(), self.computing.copy()
        taken.notes = {name: values.copy() for name, values in self.notes.items()}
        taken.told = {line: values.copy() for line, values in self.told.items()}
        return taken

    def forget(self, step: int) -> None:
        """Every rank is through with a step and those before it."""
        self.told = {line: values for line, values in self.told.items() if line >= (step + 1) * self.ground.width}

    def advance(self, who: Index, until_ns: int, follower: Follower, stop: Times | None = None) -> None:
        """Let ranks come as far as ``until_ns``, and not beyond their line in ``stop``; those who must wait stay where they are."""
        width, last = self.ground.width, self.ground.width * len(self.ground.script.sequence)
        going = np.zeros(len(self.line), dtype=bool)
        going[who] = True
        going &= self.line < last
        if stop is not None:
            going &= self.line < stop
        while going.any():
            line = int(self.line[going].min())
            here = np.nonzero(going & (self.line == line))[0]
            step, number = divmod(line, width)
            lines = self.ground.of_step(step)
            if number == len(lines):
                follower.ended(self, step, here)
                self._begin(here, step + 1)
                going[here] = (step + 1) * width < last
            else:
                gone = self._execute(lines[number], line, here, until_ns, follower)
                self.line[here[gone]] += 1
                going[here[~gone]] = False
            if stop is not None:
                going[here] &= self.line[here] < stop[here]

    def _begin(self, here: Index, step: int) -> None:
        self.line[here] = step * self.ground.width
        self.done[here] = 0
        self.behind[here] = False
        for name in ("stall", "update"):
            self.notes[name][here] = 0
        self.notes["arrival"][here] = NEVER
        self.notes["start"][here] = self.time[here]

    def _execute(self, line: Line, number: int, here: Index, until_ns: int, follower: Follower) -> npt.NDArray[np.bool_]:  # noqa: PLR0911  # one a kind of line
        """One line of some ranks; which of them have finished it."""
        step = number // self.ground.width
        everybody = np.ones(len(here), dtype=bool)
        match line:
            case Head():
                gone = self._take(here, int(self.ground.heads_ns[step]), until_ns)
                self.notes["head_end"][here[gone]] = self.time[here[gone]]
                self.computing[here[gone]] = True
                return gone
            case Compute():
                return self._compute(line, step, here, until_ns)
            case Busy(takes_ns, group):
                return self._work(here, takes_ns, until_ns, self.ground.layout.groups[group])
            case Work(_, takes_ns):
                return self._work(here, takes_ns, until_ns, None)
            case Join():
                members = here[self.ground.layout.groups[line.operation.group].members[here]]
                self.notes["arrival"][members] = self.time[members]
                follower.joined(number, line, members)
                return everybody
            case Hold(after):
                self.computing[here] = False
                gone = self._wait(here, self._ends(number, after, here))
                self.computing[here[gone]] = ~self.behind[here[gone]]
                return gone
            case Wait(after):
                return self._wait(here, self._ends(number, after, here))
            case Share():
                self.told.setdefault(number, np.zeros(len(self.line), dtype=np.int64))[here] = self.time[here]
                return everybody
            case Finish():
                return self._finish(number, here, until_ns)

    def _take(self, here: Index, takes_ns: int | Index, until_ns: int) -> npt.NDArray[np.bool_]:
        """Be busy for so long; which ranks are through by ``until_ns``."""
        left = np.where(self.left[here] < 0, takes_ns, self.left[here])
        ends = self.time[here] + left
        gone = np.asarray(ends <= until_ns)
        self.left[here] = np.where(gone, -1, ends - until_ns)
        self.time[here] = np.minimum(ends, until_ns)
        return gone

    def _work(self, here: Index, takes_ns: int, until_ns: int, group: Group | None) -> npt.NDArray[np.bool_]:
        takes: int | Index = takes_ns if group is None or group.has_all else np.where(group.members[here], takes_ns, 0)
        gone = self._take(here, takes, until_ns)
        through = gone & self.behind[here]
        self.notes["update"][here[through]] += takes if isinstance(takes, int) else takes[through]
        return gone

    def _compute(self, line: Compute, step: int, here: Index, until_ns: int) -> npt.NDArray[np.bool_]:
        ground = self.ground
        left = ground.mark(step, line.base_ns)[here] - self.done[here]
        rate = np.where(self.slowed[here], ground.slow_units, ground.units)
        takes = np.where(left > 0, np.maximum((2 * left + rate) // (2 * rate), 0), 0).astype(np.int64)
        gone = np.asarray(self.time[here] + takes <= until_ns)
        takes = np.minimum(takes, until_ns - self.time[here])
        self.done[here] += takes * rate
        self.time[here] += takes
        through = here[gone]
        if line.name == "forward":
            self.notes["forward"][through] = self.time[through] - self.notes["head_end"][through]
        elif line.name == "backward":
            self.notes["compute_end"][through] = self.time[through]
            self.behind[through] = True
            self.computing[through] = False
        return gone

    def _ends(self, number: int, after: tuple[int, ...] | None, here: Index) -> Index:
        """When the last of a step's operations before line ``number``, of those that a rank takes part in, ended."""
        found = np.full(len(here), NEVER, dtype=np.int64)
        step, last = divmod(number, self.ground.width)
        for line in self.ground.of_step(step)[:last]:
            if isinstance(line, Join) and (after is None or line.operation.id in after):
                found = np.maximum(found, self._end(step, line, here))
        return found

    def _end(self, step: int, join: Join, here: Index) -> Index:
        group = self.ground.layout.groups[join.operation.group]
        ends = self.ground.ends.get((step, join.operation.id))
        if ends is None:
            return np.where(group.members[here], LATER, NEVER)
        return np.where(group.members[here], ends[group.part_of[here]], NEVER)

    def _wait(self, here: Index, ends: Index) -> npt.NDArray[np.bool_]:
        gone = np.asarray(ends < LATER)
        through = here[gone]
        until = np.maximum(self.time[through], ends[gone])
        self.notes["stall"][through] += np.where(self.behind[through], until - self.time[through], 0)
        self.time[through] = until
        return gone

    def _finish(self, number: int, here: Index, until_ns: int) -> npt.NDArray[np.bool_]:
        """Bucket updates run one behind the other; what of them lies behind compute is update, the rest stall."""
        begun = self.left[here] >= 0
        fresh = here[~begun]
        known = self._ready_shares(number, fresh)
        if known is not None and len(fresh):
            shares, ends = known
            has_ended = np.asarray(ends < LATER).all(axis=0)
            fresh = fresh[has_ended]
            now, last = self.time[fresh].copy(), np.full(len(fresh), NEVER, dtype=np.int64)
            for (told, takes_ns), after in zip(shares, ends[:, has_ended], strict=True):
                start = np.maximum(np.maximum(told[fresh], after), last)
                last = start + takes_ns
                begin = np.maximum(now, start)
                self.notes["stall"][fresh] += begin - now
                now = np.maximum(begin, last)
                self.notes["update"][fresh] += now - begin
            self.left[fresh] = now - self.time[fresh]
        resolved = self.left[here] >= 0
        gone = np.zeros(len(here), dtype=bool)
        if resolved.any():
            gone[resolved] = self._take(here[resolved], 0, until_ns)
        return gone

    def _ready_shares(self, number: int, here: Index) -> tuple[list[tuple[Index, int]], Index] | None:
        """A step's updates up to a line since the ``Finish`` before, each with its start's time, and the ends of what they come after."""
        step, last = divmod(number, self.ground.width)
        shares: list[tuple[Index, int]] = []
        ends: list[Index] = []
        for index, line in enumerate(self.ground.of_step(step)[:last]):
            if isinstance(line, Finish):
                shares, ends = [], []
            elif isinstance(line, Share):
                shares.append((self.told[step * self.ground.width + index], line.takes_ns))
                ends.append(self._ends(number, line.after, here))
        return (shares, np.stack(ends)) if shares else None


class Follower:
    """Who follows walkers: told what concerns more than the rank itself."""

    def joined(self, number: int, join: Join, who: Index) -> None:
        """Ranks have joined a collective at line ``number``, each at its time."""

    def ended(self, walkers: Walkers, step: int, who: Index) -> None:
        """Ranks have ended a step, each at its time."""
