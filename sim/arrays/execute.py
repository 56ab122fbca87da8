"""execute: a scenario by the vector engine."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np

from fleetbench.quantities import LARGEST
from fleetbench.result import uncountable
from fleetbench.timeline import MOST_EVENTS
from sim.arrays.engine import Engine, Prepared
from sim.arrays.groups import Times
from sim.arrays.layout import Layout
from sim.arrays.program import Program
from sim.arrays.script import Script
from sim.arrays.sights import Drawn, Ends, Frame, Sums
from sim.execution import Execution, Wanted
from sim.network.routes import Routes
from sim.scenario import Scenario
from sim.spans import too_many

MOST_DRAWN = 4 * MOST_EVENTS
"""Spans that may be looked at before those that take no time are left out."""


def execute(scenario: Scenario, wanted: Wanted, step_done: Callable[[int], None]) -> Execution:
    """Run all trainers to their last step; ``step_done`` is told how many are done. Raises ``OutOfReach`` for what is not this engine's."""
    prepared = Prepared.of(scenario, Layout.of(scenario, Routes(scenario.links)))
    script, layout, steps = prepared.script, prepared.layout, scenario.steps
    num_spans = layout.num_ranks * sum(_num_spans(script.programs[program]) for program in script.sequence)
    no_spans = None if num_spans <= MOST_DRAWN or not wanted.most_spans else too_many(f"up to {num_spans:,}", wanted.most_spans)
    drawn = Drawn(layout, script) if wanted.most_spans and no_spans is None else None
    ends, first = Ends(len(steps)), steps.index(1)
    frame = Frame(layout.num_ranks, steps) if wanted.table else None
    sums = None if wanted.table else Sums(script, _mean_bytes(script, layout), first, layout.num_ranks)
    Engine(prepared, [sight for sight in (ends, frame, sums, drawn) if sight is not None], draws=drawn is not None).run(step_done)
    spans = () if drawn is None else tuple(sorted(drawn.spans, key=lambda span: (span.rank, span.start_ns)))
    if len(spans) > wanted.most_spans:
        spans, no_spans = (), too_many(f"{len(spans):,}", wanted.most_spans)
    begin_ns, end_ns = ends.of_counted(first)
    losses = [scenario.scalars.declared_loss(step) for step in steps]
    return Execution(
        engine="vector",
        plan=scenario.plan,
        begin_ns=begin_ns,
        end_ns=end_ns,
        step_ends_ns=dict(zip(steps, ends.last_end.tolist(), strict=True)),
        table=None if frame is None else frame.table(script.local_steps, losses, _all_bytes(script, layout)),
        totals=None if sums is None else sums.totals(begin_ns, end_ns),
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
