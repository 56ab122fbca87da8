"""execute: a scenario by the vector engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from fleetbench.quantities import LARGEST
from fleetbench.result import uncountable
from fleetbench.timeline import MOST_EVENTS, Span
from sim.arrays.engine import Engine, Prepared, Sight
from sim.arrays.groups import Times
from sim.arrays.layout import Layout
from sim.arrays.program import Program
from sim.arrays.reach import OutOfReach
from sim.arrays.script import Script
from sim.arrays.sights import Drawn, Ends, Frame, Sums
from sim.execution import Execution, Wanted
from sim.network.routes import Routes
from sim.scenario import Scenario
from sim.spans import too_many

MOST_DRAWN = 4 * MOST_EVENTS
"""Spans that may be looked at before those that take no time are left out."""


def execute(scenario: Scenario, wanted: Wanted, step_done: Callable[[int], None]) -> Execution | str:
    """Run all trainers to their last step, or say why they are none of this engine's; ``step_done`` is told how many are done."""
    prepared = Prepared.of(scenario, Layout.of(scenario, Routes(scenario.links)))
    if isinstance(prepared, str):
        return prepared
    script, layout = prepared.script, prepared.layout
    num_spans = scenario.plan.trainers * sum(_num_spans(script.programs[program]) for program in script.sequence)
    ends = Ends(len(scenario.steps))
    kept = _Kept.of(scenario, script, layout, wanted)
    draws = wanted.most_spans > 0 and num_spans <= MOST_DRAWN
    no_spans = None if num_spans <= MOST_DRAWN else too_many(f"up to {num_spans:,}", wanted.most_spans)
    drawn = Drawn(layout.groups, scenario.plan.trainers) if draws else None
    try:
        Engine(prepared, [ends, *kept.sights, *([] if drawn is None else [drawn])], draws=draws).run(step_done)
    except OutOfReach as reason:
        return str(reason)
    spans = () if drawn is None else tuple(sorted(drawn.spans(), key=lambda span: (span.rank, span.start_ns)))
    if len(spans) > wanted.most_spans:
        spans, no_spans = (), too_many(f"{len(spans):,}", wanted.most_spans)
    return kept.execution(ends, spans, no_spans)


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
        sums = Sums(script, _mean_bytes(script, layout), scenario.steps.index(1), layout.num_ranks)
        return cls(scenario, script, layout, None, sums)

    @property
    def sights(self) -> list[Sight]:
        return [sight for sight in (self.frame, self.sums) if sight is not None]

    def execution(self, ends: Ends, spans: tuple[Span, ...], no_spans: str | None) -> Execution:
        steps = self.scenario.steps
        begin_ns, end_ns = ends.of_counted(steps.index(1))
        losses = [self.scenario.scalars.declared_loss(step) for step in steps]
        return Execution(
            engine="vector",
            begin_ns=begin_ns,
            end_ns=end_ns,
            step_ends_ns=dict(zip(steps, ends.last_end.tolist(), strict=True)),
            table=None if self.frame is None else self.frame.table(self.script.local_steps, losses, _all_bytes(self.script, self.layout)),
            totals=None if self.sums is None else self.sums.totals(begin_ns, end_ns),
            spans=spans,
            no_spans=no_spans,
        )


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


def _mean_bytes(script: Script, layout: Layout) -> list[Fraction]:
    """Bytes that a rank sends in a step of each program, in the mean over ranks."""
    sent = [_sent(program, layout).tolist() for program in script.programs]
    return [Fraction(sum(own), len(own)) for own in sent]


def _all_bytes(script: Script, layout: Layout) -> Times:
    of_program = [np.broadcast_to(_sent(program, layout), layout.num_ranks) for program in script.programs]
    return np.asarray(np.stack(of_program)[np.asarray(script.sequence)])
