"""Events: what is not max-plus, by an event loop over arrays of ranks.

Collectives meet, queue and share ports as in the reference engine, on its clock and its network. Its
trainers are not here: between two moments at which a collective may start, or its pace or that of
compute changes, nobody influences anybody, so all ranks walk there at once. Such a moment is when the
last rank of a part joins, when a collective starts or ends, and, where compute slows collectives,
when the last of their ranks stops computing or the first begins.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from simpy import Event

from fleetbench.result import uncountable
from sim.clock import LATEST_NS, Clock
from sim.collectives import Collectives
from sim.computing import Changed, Computing
from sim.network import Network
from sim.scenario import Scenario
from sim.vector.engine import Sight
from sim.vector.groups import NEVER, Group, Times
from sim.vector.heads import Heads
from sim.vector.lanes import Seen
from sim.vector.layout import Layout
from sim.vector.program import Compute, Head, Join
from sim.vector.reach import BEYOND, OutOfReach, own_ns
from sim.vector.script import Script
from sim.vector.transfers import Flight
from sim.vector.walk import LATER, Follower, Ground, Index, Walkers


class EventLoop(Follower):
    """Runs a script, shows its steps as ranks end them, and keeps no spans of ranks."""

    def __init__(self, scenario: Scenario, script: Script, layout: Layout, sights: Sequence[Sight]) -> None:
        heads = Heads(scenario.table, scenario.fetch_every, len(scenario.steps))
        self._ground = Ground.of(scenario, script, layout, heads.known(0, 1, len(scenario.steps))[:, 0])
        own = heads.most_ns + own_ns(script.programs) + self._ground.most_ns
        if own * len(scenario.steps) > LATEST_NS:  # what ranks take without each other; the clock is exact
            raise OutOfReach(BEYOND)
        self._walkers = Walkers.at_start(self._ground, layout.num_ranks)
        self._layout = layout
        self._sights = sights
        self._clock = Clock()
        self._computing = _Computing(self._walkers, self._catch_up, scenario.table.collective_contention)
        network = Network(self._clock, scenario.links, self._computing)
        self._collectives = Collectives(self._clock, network, layout.queue_depth)
        self._contends = scenario.table.contention > 0
        self._everybody = np.arange(layout.num_ranks)
        self._members = {name: [np.asarray(part) for part in layout.groups[name].parts] for name in layout.parts}
        self._missing: dict[int, Index] = {}
        """Ranks of each part that have not joined, by the line of a collective."""
        self._under_way: dict[tuple[int, int, int], Event] = {}
        """Ends of collectives, by step, operation and part."""
        self._awaited: dict[tuple[int, int, int], Event] = {}
        """Ends of those that are not complete, of which something waits already."""
        self._in_flight = np.zeros(layout.num_ranks, dtype=np.int64)
        self._changes: list[tuple[Index, int]] = []
        self._changed = self._clock.event()
        self._next_joins = _next_joins(self._ground)
        self._records: dict[int, _Record] = {}

    def run(self, done: Callable[[int], None]) -> None:
        """Run all steps; ``done`` is told how many have been."""
        self._done = done
        self._clock.run(self._clock.process(self._loop()))

    def joined(self, number: int, join: Join, who: Index) -> None:
        """See ``Follower``."""
        group = self._layout.groups[join.operation.group]
        if not len(who):
            return
        if number not in self._missing:
            self._missing[number] = group.sizes.copy()
        missing = self._missing[number]
        parts, counts = np.unique(group.part_of[who], return_counts=True)
        missing[parts] -= counts
        for part in parts[missing[parts] == 0].tolist():
            self._set_out(number // self._ground.width, join, part)
        if not missing.any():
            del self._missing[number]

    def ended(self, walkers: Walkers, step: int, who: Index) -> None:
        """See ``Follower``."""
        if walkers.time[who].max() > LATEST_NS:
            raise uncountable()
        record = self._records.setdefault(step, _Record.of(self._layout.num_ranks))
        for name, values in walkers.notes.items():
            record.notes[name][who] = values[who]
        record.notes["end"][who] = walkers.time[who]
        record.missing -= len(who)
        if record.missing == 0:
            self._show(step, self._records.pop(step))

    def _loop(self) -> Generator[Event, object, None]:
        self._catch_up()
        last = self._ground.width * len(self._ground.script.sequence)
        while (self._walkers.line < last).any():
            then = self._next_moment()
            if then >= LATER and not self._under_way:  # nobody meets anybody any more
                self._walkers.advance(self._everybody, LATER, self)
                assert (self._walkers.line >= last).all(), "ranks wait for what nobody joins"
                return
            self._changed = self._clock.event()
            waits = [self._changed] if then >= LATER else [self._changed, self._clock.until(then)]
            yield self._clock.any_of(waits)
            self._catch_up()
            if self._contends:
                for who, change in self._changes:
                    self._in_flight[who] += change
                self._walkers.slowed[:] = self._in_flight > 0
            self._changes = []
            self._catch_up()  # who waited for what has ended goes on
            self._computing.look()

    def _catch_up(self) -> None:
        """Let ranks come to where the clock is."""
        self._walkers.advance(self._everybody, self._clock.now, self)

    def _next_moment(self) -> int:
        """When something may change for others that the clock does not know of."""
        moments = [LATER]
        for name, next_join in self._next_joins.items():
            group = self._layout.groups[name]
            lines = np.where(group.members, next_join[self._walkers.line], LATER)
            moments.append(self._last_to_join(group, lines))
        if self._computing.watches:
            moments.append(self._computing.next_change())
        return min(moments)

    def _last_to_join(self, group: Group, lines: Times) -> int:
        """When the first part is complete whose ranks are to join a collective at ``lines``."""
        first = np.full(len(group.parts), LATER)
        np.minimum.at(first, group.part_of[group.members], lines[group.members])
        late = np.nonzero(group.members & (lines == first[group.part_of]) & (lines < LATER))[0]
        if not len(late):
            return LATER
        times = look_ahead(self._walkers, late, lines)
        latest = np.full(len(group.parts), NEVER)
        np.maximum.at(latest, group.part_of[late], times)
        return int(latest[latest > NEVER].min())

    def _set_out(self, step: int, join: Join, part: int) -> None:
        """The last rank of a part has joined."""
        operation = join.operation
        who = self._members[operation.group][part]
        keys = [(step, other, index) for other in operation.after for index in self._parts_of(step, other, who)]
        after = [self._end_of(key) for key in keys if self._ground.ended_ns(key) >= LATER]
        meeting = self._collectives.together(operation, self._layout.groups[operation.group].parts[part], after)
        key = (step, operation.id, part)
        self._under_way[key] = meeting.end
        if self._contends or self._computing.slows:
            meeting.start.callbacks.append(lambda _: self._change(who, 1))
        meeting.end.callbacks.append(lambda _: self._land(key, who))

    def _end_of(self, key: tuple[int, int, int]) -> Event:
        """The end of a collective that is under way, or that some of its ranks have not joined yet."""
        if key in self._under_way:
            return self._under_way[key]
        return self._awaited.setdefault(key, self._clock.event())

    def _parts_of(self, step: int, operation_id: int, who: Index) -> list[int]:
        """Parts of another operation's group that ranks are in."""
        for line in self._ground.of_step(step):
            if isinstance(line, Join) and line.operation.id == operation_id:
                parts = np.unique(self._layout.groups[line.operation.group].part_of[who])
                return [part for part in parts.tolist() if part >= 0]
        return []

    def _change(self, who: Index, change: int) -> None:
        self._changes.append((who, change))
        if not self._changed.triggered:
            self._changed.succeed()

    def _land(self, key: tuple[int, int, int], who: Index) -> None:
        del self._under_way[key]
        step, operation_id, part = key
        if self._clock.now > LATEST_NS:  # of a step that ends later still
            raise uncountable()
        ends = self._ground.ends
        if key[:2] not in ends:
            ends[key[:2]] = np.full(len(self._members[self._group_of(step, operation_id)]), LATER)
        ends[key[:2]][part] = self._clock.now
        if key in self._awaited:
            self._awaited.pop(key).succeed()
        self._change(who, -1)

    def _group_of(self, step: int, operation_id: int) -> str:
        lines = (line for line in self._ground.of_step(step) if isinstance(line, Join))
        return next(line.operation.group for line in lines if line.operation.id == operation_id)

    def _show(self, step: int, record: _Record) -> None:
        notes = {name: values[None, :] for name, values in record.notes.items()}
        joins = any(isinstance(line, Join) for line in self._ground.of_step(step))
        program = self._ground.script.programs[self._ground.script.sequence[step]]
        flights: list[Flight] = []
        seen = Seen(
            program=program,
            start=notes["start"],
            head_end=notes["head_end"],
            compute_end=notes["compute_end"],
            forward=notes["forward"],
            stall=notes["stall"],
            update=notes["update"],
            end=notes["end"],
            arrival=notes["arrival"] if joins else None,
            spans=[],
            flights=flights,
        )
        for sight in self._sights:
            sight.see(seen, np.asarray([step]), np.zeros((1, 1), dtype=np.int64))
        self._ground.forget(step)
        self._walkers.forget(step)
        self._done(step + 1)


@dataclass(slots=True)
class _Record:
    """What is known of one step by the ranks that have ended it."""

    missing: int
    notes: dict[str, Index]

    @classmethod
    def of(cls, num_ranks: int) -> _Record:
        names = ("start", "head_end", "forward", "compute_end", "stall", "update", "arrival", "end")
        return cls(num_ranks, {name: np.zeros(num_ranks, dtype=np.int64) for name in names})


class _Computing(Computing):
    """Computing, of walkers: which ranks compute, as far as they have come."""

    def __init__(self, walkers: Walkers, catch_up: Callable[[], None], slowdown: float) -> None:
        super().__init__(slowdown)
        self._walkers = walkers
        self._catch_up = catch_up
        self._watches: dict[Changed, tuple[Index, Fraction]] = {}

    @property
    def watches(self) -> bool:
        """Whether anything depends on who computes."""
        return self.slows and bool(self._watches)

    def pace(self, ranks: Sequence[int]) -> Fraction:
        """See ``Computing``."""
        if self.slows:
            self._catch_up()
        return self._pace_of(np.asarray(ranks))

    @contextmanager
    def watching(self, ranks: Sequence[int], changed: Changed) -> Iterator[None]:
        """See ``Computing``."""
        who = np.asarray(ranks)
        self._watches[changed] = (who, self._pace_of(who))
        try:
            yield
        finally:
            del self._watches[changed]

    def look(self) -> None:
        """Tell whom it concerns that ranks have begun to compute, or stopped."""
        for changed, (who, before) in list(self._watches.items()):
            now = self._pace_of(who)
            if now != before:
                self._watches[changed] = (who, now)
                changed(now)

    def next_change(self) -> int:
        """When, at the earliest, ranks of a collective in flight are the last to stop computing, or the first to begin."""
        moments = [LATER]
        width = self._walkers.ground.width
        for who, _ in self._watches.values():
            computing = who[self._walkers.computing[who]]
            if len(computing):
                lines = _line_behind(self._walkers, "backward")
                moments.append(int(look_ahead(self._walkers, computing, lines, holds=True).max()))
            else:
                last = width * len(self._walkers.ground.script.sequence)
                resting = who[self._walkers.line[who] < last]
                if len(resting):
                    moments.append(int(look_ahead(self._walkers, resting, _line_behind(self._walkers, "head")).min()))
        return min(moments)

    def _pace_of(self, who: Index) -> Fraction:
        return self._slow if self.slows and self._walkers.computing[who].any() else Fraction(1)


def look_ahead(walkers: Walkers, who: Index, lines: Times, *, holds: bool = False) -> Index:
    """When ranks come to their line in ``lines`` if nothing changes until then; ``LATER`` where they must wait for something before.

    ``holds``: where they stop to wait counts as there.
    """
    ahead = walkers.copy()
    ahead.advance(who, LATER, Follower(), lines)
    has_come = ahead.line[who] >= lines[who]
    return np.where(has_come | holds, ahead.time[who], LATER)


def _next_joins(ground: Ground) -> dict[str, Times]:
    """For every group and line of the run, the first line from there on that joins a collective of the group."""
    names = {line.operation.group for lines in ground.lines for line in lines if isinstance(line, Join)}
    total = ground.width * len(ground.script.sequence) + 1
    found = {name: np.full(total, LATER) for name in names}
    for step in range(len(ground.script.sequence)):
        for number, line in enumerate(ground.of_step(step)):
            if isinstance(line, Join):
                at = step * ground.width + number
                found[line.operation.group][at] = at
    for values in found.values():
        values[:] = np.minimum.accumulate(values[::-1])[::-1]
    return found


def _line_behind(walkers: Walkers, name: str) -> Times:
    """The line behind the next head, or the next end of a backward, from where ranks are."""
    ground = walkers.ground
    found = np.full(len(walkers.line), LATER)
    for line in np.unique(walkers.line).tolist():
        step, number = divmod(line, ground.width)
        for other in range(step, min(step + 2, len(ground.script.sequence))):
            begin = number if other == step else 0
            behind = [index for index, at in enumerate(ground.of_step(other)) if index >= begin and _is(at, name)]
            if behind:
                found[walkers.line == line] = other * ground.width + behind[0] + 1
                break
    return found


def _is(line: object, name: str) -> bool:
    return isinstance(line, Head) if name == "head" else isinstance(line, Compute) and line.name == name
