"""execute: a scenario by the vector engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from fleetbench.quantities import LARGEST
from fleetbench.result import uncountable
from fleetbench.timeline import MOST_EVENTS, Span
from sim.execution import Execution, Wanted
from sim.limits import MOST_MOMENTS, MOST_REMEMBERED, at_most
from sim.routes import Routes
from sim.scenario import Scenario
from sim.spans import too_many
from sim.vector.engine import Engine, Sight
from sim.vector.events import EventLoop
from sim.vector.groups import Times
from sim.vector.heads import Heads
from sim.vector.layout import Layout
from sim.vector.program import Program
from sim.vector.reach import OutOfReach, leaves_in_flight, overlaps, shares
from sim.vector.script import Script, script_of
from sim.vector.shared import SharedWire
from sim.vector.sights import Drawn, Ends, Frame, Sums
from sim.vector.transfers import Carrier, Transfers

MOST_DRAWN = 4 * MOST_EVENTS
"""Spans that may be looked at before those that take no time are left out."""
NO_SPANS = "the event loop over arrays keeps no events: --engine reference does"
FEWEST = 32
"""Trainers that meet, below which the reference engine is faster than an event loop over arrays."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A scenario whose steps run block by block."""

    scenario: Scenario
    script: Script
    layout: Layout
    carrier: Callable[[int], Carrier]
    """Makes what carries the collectives of so many blocks."""

    @classmethod
    def of(cls, scenario: Scenario, script: Script, layout: Layout) -> Prepared:
        """Look at what a scenario's steps do. Raises ``OutOfReach`` where durations depend on what overlaps, but for a shared wire."""
        if reason := overlaps(scenario, script.programs):
            raise OutOfReach(reason)
        if reason := shares(layout, script.programs):
            wire = SharedWire.of(layout, script.programs)
            if wire is None:
                raise OutOfReach(reason)
            return cls(scenario, script, layout, wire.carrier)
        return cls(scenario, script, layout, lambda num_blocks: Transfers(layout, num_blocks))

    def run(self, sights: list[Sight], step_done: Callable[[int], None], *, looks: bool = True, draws: bool = False) -> None:
        """Show all steps to ``sights``."""
        scenario = self.scenario
        heads = Heads(scenario.table, scenario.fetch_every, len(scenario.steps))
        Engine(self.layout, self.script, heads, scenario.draws.rows, self.carrier, sights, looks=looks, draws=draws).run(step_done)


def execute(scenario: Scenario, wanted: Wanted, step_done: Callable[[int], None], *, is_free: bool) -> Execution:
    """Run all trainers to their last step; ``step_done`` is told how many are done.

    Where durations depend on what overlaps, an event loop over arrays runs them, which keeps no timeline. ``is_free``: the
    reference engine may be taken in its place. Raises ``OutOfReach`` where it should be, and for what that loop does not run, and
    ``ConfigError`` for more ranks and steps than that loop holds.
    """
    script, layout = script_of(scenario), Layout.of(scenario, Routes(scenario.links))
    num_spans = scenario.plan.trainers * sum(_num_spans(script.programs[program]) for program in script.sequence)
    ends = Ends(len(scenario.steps))
    kept = _Kept.of(scenario, script, layout, wanted)
    draws = wanted.most_spans > 0 and num_spans <= MOST_DRAWN
    no_spans = None if num_spans <= MOST_DRAWN else too_many(f"up to {num_spans:,}", wanted.most_spans)
    try:
        prepared = Prepared.of(scenario, script, layout)
    except OutOfReach as reason:
        _refuse_events(scenario, script, layout, reason, prefers_reference=is_free and (draws or _smallest(script, layout) < FEWEST))
        EventLoop(scenario, script, layout, [ends, *kept.sights]).run(step_done)
        return kept.execution(ends, f"vector, event by event: {reason}", no_spans=no_spans or NO_SPANS)
    drawn = Drawn(layout.groups, scenario.plan.trainers) if draws else None
    prepared.run([ends, *kept.sights, *([] if drawn is None else [drawn])], step_done, draws=draws)
    spans = () if drawn is None else tuple(sorted(drawn.spans(), key=lambda span: (span.rank, span.start_ns)))
    if len(spans) > wanted.most_spans:
        spans, no_spans = (), too_many(f"{len(spans):,}", wanted.most_spans)
    return kept.execution(ends, "vector", spans, no_spans)


def _refuse_events(scenario: Scenario, script: Script, layout: Layout, reason: OutOfReach, *, prefers_reference: bool) -> None:
    """Raise ``OutOfReach`` where the event loop should not, or cannot, run a scenario, and ``ConfigError`` where no engine had better."""
    if prefers_reference:
        raise reason
    if scenario.table.loaders:
        raise OutOfReach(f"{reason}; and batches are read ahead")
    if any(leaves_in_flight(program) for program in script.programs):
        raise OutOfReach(f"{reason}; and collectives go on into the next step")
    met = [sum(len(layout.groups[join.operation.group].parts) for join in program.joins) for program in script.programs]
    moments, hint = sum(met[program] for program in script.sequence), "fewer steps, trainers or buckets"
    at_most(moments, MOST_MOMENTS, "collectives under way together", "workload.steps", hint)
    at_most(scenario.plan.trainers * len(scenario.steps), MOST_REMEMBERED, "steps of ranks that overlap", "workload.steps", hint)


@dataclass(frozen=True, slots=True)
class _Kept:
    """What is kept of a run: a table, or sums."""

    scenario: Scenario
    script: Script
    layout: Layout
    frame: Frame | None
    sums: Sums | None

    @classmethod
    def of(cls, scenario: Scenario, script: Script, layout: Layout, wanted: Wanted) -> _Kept:
        if wanted.table:
            return cls(scenario, script, layout, Frame(layout.num_ranks, scenario.steps), None)
        sums = Sums(script, mean_bytes(script, layout), scenario.steps.index(1), np.ones(layout.num_ranks))
        return cls(scenario, script, layout, None, sums)

    @property
    def sights(self) -> list[Sight]:
        return [sight for sight in (self.frame, self.sums) if sight is not None]

    def execution(self, ends: Ends, engine: str, spans: tuple[Span, ...] = (), no_spans: str | None = None) -> Execution:
        steps = self.scenario.steps
        begin_ns, end_ns = ends.of_counted(steps.index(1))
        losses = [self.scenario.scalars.declared_loss(step) for step in steps]
        return Execution(
            engine=engine,
            begin_ns=begin_ns,
            end_ns=end_ns,
            step_ends_ns=dict(zip(steps, ends.last_end.tolist(), strict=True)),
            table=None if self.frame is None else self.frame.table(self.script.local_steps, losses, _all_bytes(self.script, self.layout)),
            totals=None if self.sums is None else self.sums.totals(begin_ns, end_ns),
            spans=spans,
            no_spans=no_spans,
        )


def _smallest(script: Script, layout: Layout) -> int:
    """Ranks of the smallest part that meets."""
    groups = {join.operation.group for program in script.programs for join in program.joins}
    return min(int(layout.groups[name].sizes.min()) for name in groups)


def _num_spans(program: Program) -> int:
    """Spans of one rank's step, at most."""
    return 4 + 2 * len(program.instructions)


def _sent(program: Program, layout: Layout) -> Times:
    """Bytes that each rank sends in a step; shape ``(num_ranks,)`` or ``(1,)``."""
    sent = [0]
    for join in program.joins:
        own = layout.bytes_sent(join.operation)
        longer, shorter = (own, sent) if len(own) >= len(sent) else (sent, own)
        sent = [number + shorter[index if len(shorter) > 1 else 0] for index, number in enumerate(longer)]
    if max(sent) > LARGEST:
        raise uncountable()
    return np.asarray(sent)


def mean_bytes(script: Script, layout: Layout) -> list[Fraction]:
    """Bytes that a rank sends in a step of each program, in the mean over ranks."""
    sent = [_sent(program, layout).tolist() for program in script.programs]
    return [Fraction(sum(own), len(own)) for own in sent]


def _all_bytes(script: Script, layout: Layout) -> Times:
    of_program = [np.broadcast_to(_sent(program, layout), layout.num_ranks) for program in script.programs]
    return np.asarray(np.stack(of_program)[np.asarray(script.sequence)])
