"""The engine: runs a scenario's steps, many blocks of them side by side if their ranks begin together."""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from fleetbench.plan.layers import StepHead
from fleetbench.quantities import LARGEST
from fleetbench.result import uncountable
from fleetbench.stragglers import stretch
from fleetbench.timeline import MOST_EVENTS
from sim.arrays.compute import Stretches
from sim.arrays.interpreter import Interpreter
from sim.arrays.layout import Layout, Times
from sim.arrays.observers import Observer, StepTable, Sums, TimelineSpans
from sim.arrays.program import Program, Script, script_of
from sim.arrays.shared_links import SharedTransfers, Wires
from sim.arrays.supported import BEYOND, SHARED, Unsupported, most_ns, overlaps, refuse_slowed, shares
from sim.arrays.transfers import Transfers
from sim.clock import LATEST_NS
from sim.execution import Execution, Wanted, too_many
from sim.network.routes import Routes
from sim.own_work import moments_of
from sim.scenario import Draws, Scenario

CELLS = 2**17
"""Number of ranks times steps that are simulated together. Arrays of this size fit in a processor's cache."""
MOST_DRAWN = 4 * MOST_EVENTS
"""Largest number of spans that are drawn, before those that take no time are left out."""


def execute(scenario: Scenario, wanted: Wanted, step_done: Callable[[int], None]) -> Execution:
    """Run all trainers to their last step. ``step_done`` is called with the number of steps done.

    Raises ``Unsupported``; see ``sim.arrays.supported``.
    """
    layout = Layout(scenario.plan, Routes(scenario.links))
    engine, steps = Engine(scenario, layout), scenario.steps
    script = engine.script
    num_spans = layout.num_ranks * sum(4 + 2 * len(script.programs[program].instructions) for program in script.sequence)
    no_spans = None if num_spans <= MOST_DRAWN or not wanted.most_spans else too_many(f"up to {num_spans:,}", wanted.most_spans)
    drawn = TimelineSpans(layout, script) if wanted.most_spans and no_spans is None else None
    first = steps.index(1)
    sent = [_bytes_sent(program, layout) for program in script.programs]
    table = StepTable(layout.num_ranks, steps) if wanted.table else None
    sums = None if wanted.table else Sums(script, [Fraction(own.sum(), len(own)) for own in sent], first, layout.num_ranks)
    engine.run([each for each in (table, sums, drawn) if each is not None], step_done, draws=drawn is not None)
    spans = () if drawn is None else tuple(sorted(drawn.spans, key=lambda span: (span.rank, span.start_ns)))
    if len(spans) > wanted.most_spans:
        spans, no_spans = (), too_many(f"{len(spans):,}", wanted.most_spans)
    begin_ns, end_ns = engine.counted_ns()
    frame = None
    if table is not None:
        losses = [scenario.scalars.declared_loss(step) for step in steps]
        of_programs = np.stack([np.broadcast_to(own.astype(np.int64), layout.num_ranks) for own in sent])
        frame = table.frame(script.local_steps, losses, of_programs[np.asarray(script.sequence)])
    return Execution(
        engine="vector",
        plan=scenario.plan,
        begin_ns=begin_ns,
        end_ns=end_ns,
        step_ends_ns=dict(zip(steps, engine.last_end[0].tolist(), strict=True)),
        table=frame,
        totals=None if sums is None else sums.totals(begin_ns, end_ns),
        spans=spans,
        no_spans=no_spans,
    )


def _bytes_sent(program: Program, layout: Layout) -> npt.NDArray[np.object_]:
    """Return the bytes that each rank sends in a step, or one number if all send the same.

    Raises ``ConfigError`` for more than 64 bits.
    """
    sent = sum((layout.bytes_sent(join.operation) for join in program.joins), np.zeros(1, dtype=object))
    if sent.max() > LARGEST:
        raise uncountable()
    return sent


class Engine:
    """Runs a scenario from 0 ns to its end. Raises ``Unsupported`` for one that the reference engine must run.

    A block of steps that all trainers begin together, with nothing in flight, does not depend on earlier
    blocks. So blocks with the same programs are run side by side, each from 0 ns, and then put one after the
    other. If the ranks of a block do not end together, the block is run by itself, and so are those after it
    until ranks end together.

    Runs that differ only in their random draws, such as several seeds, also run side by side. The rows of
    arrays are the blocks of the first run, then those of the second. If one run's block must run by itself,
    it does so in all runs.
    """

    def __init__(self, scenario: Scenario, layout: Layout, draws: Sequence[Draws] = ()) -> None:
        """``draws``: the delays of each run; by default there is one run, with the scenario's delays."""
        self.script: Script = script_of(scenario)
        self._draws = draws or (scenario.draws,)
        self._runs = len(self._draws)
        self.first_start, self.last_end = (np.zeros((self._runs, len(scenario.steps)), dtype=np.int64) for _ in range(2))
        """First start and last end of each step over all ranks, in ns; shape ``(num_runs, num_steps)``."""
        self._first_counted = scenario.steps.index(1)
        self._layout = layout
        self._carrier, contention = _carrier(scenario, layout, self.script.programs)
        self._contention = contention
        table, programs = scenario.table, self.script.programs
        step = np.arange(len(scenario.steps))
        fetch_ns = np.where((step > 0) & (step % scenario.fetch_every == 0), int(table.fetch), 0)
        self._heads_ns = fetch_ns + int(table.load) + int(table.read)
        """Time in ns from each step's start to its forward, without loaders."""
        self._last_read_ns = int(table.fetch) if len(step) % scenario.fetch_every == 0 else 0
        """Time to read back results at the end of the last step, in ns; 0 if none are due then."""
        self._loaders = StepHead(table, scenario.fetch_every, 0, np.maximum) if table.loaders else None
        """Heads of steps with loaders, which depend on earlier steps; ``None`` without loaders."""
        self._slowest = math.ceil(1 + max(table.contention, table.collective_contention))
        head_ns = table.fetch + table.read + table.load * (2 if table.loaders else 1)
        self._most_ns = head_ns + most_ns(layout, programs)
        self._compute_ns = max([table.forward_ns + table.backward_ns, *(moment_ns for _, moment_ns in moments_of(scenario.plan, table))])
        self._reached_ns = 0
        self._begin_ns = np.zeros(self._runs, dtype=np.int64)
        """By run: time in ns at which the next block begins, or at which the unfinished interpreter was at
        0."""
        self._under_way: Interpreter | None = None
        """Interpreter of a block whose ranks did not end together."""
        self._most_blocks = CELLS

    def run(self, observers: Sequence[Observer], done: Callable[[int], None], *, looks: bool = True, draws: bool = False) -> None:
        """Run all steps.

        ``done`` is called with the number of steps done. ``looks`` and ``draws`` are those of
        ``Interpreter``. Observers see only the first run. Raises ``Unsupported`` if times may leave 64 bits.
        """
        first = 0
        for pattern, count in self.script.blocks:
            end = first + count * len(pattern)
            while first < end:
                blocks = self._run(first, pattern, (end - first) // len(pattern), observers, (looks, draws))
                for _ in range(blocks * len(pattern)):
                    done(first := first + 1)

    def counted_ns(self, run: int = 0) -> tuple[int, int]:
        """Return the first start and the last end in ns of a run's counted steps, after all have been run."""
        return int(self.first_start[run, self._first_counted :].min()), int(self.last_end[run, self._first_counted :].max())

    def _run(self, first: int, pattern: tuple[int, ...], count: int, observers: Sequence[Observer], keeps: tuple[bool, bool]) -> int:
        """Run up to ``count`` blocks side by side from step ``first`` on, and return the number of blocks done."""
        stride, blocks, runs, ranks = len(pattern), 1, self._runs, self._under_way
        if ranks is None:
            if self._loaders is None:
                blocks = min(count, max(1, CELLS // (stride * self._layout.num_ranks * runs)), self._most_blocks)
            rows = runs * blocks
            ranks = Interpreter(self._layout, self._carrier(rows), np.zeros((rows, 1), dtype=np.int64), *keeps, self._contention)
        seen = []
        for step, program in enumerate(pattern, start=first):
            steps = slice(step, step + stride * (blocks - 1) + 1, stride)
            head_ns = np.tile(self._heads_ns[steps], runs)[:, None]
            if self._loaders is not None:
                start_ns: Any = self._begin_ns[:, None] + ranks.offset
                head_ns = np.asarray(self._loaders.forward_begins(start_ns)) - start_ns
            seen.append(ranks.step(self.script.programs[program], Stretches(self._x(steps)), head_ns))
            if self._last_read_ns and range(*steps.indices(len(self._heads_ns)))[-1] == len(self._heads_ns) - 1:
                ranks.offset = seen[-1].end = ranks.offset + self._last_read_ns * np.tile(np.arange(blocks) == blocks - 1, runs)[:, None]
        even = ranks.is_even().reshape(runs, blocks).all(axis=0)
        good = blocks if even.all() else int(np.argmin(even))
        if not good and blocks > 1:
            self._most_blocks = 1
            return 0
        is_uneven, good = not good, max(good, 1)
        took = ranks.offset[:, 0].reshape(runs, blocks)[:, :good]  # where blocks end evenly
        begins = self._begin_ns[:, None] + np.cumsum(np.pad(took[:, :-1], ((0, 0), (1, 0))), axis=1)
        for step, found in enumerate(seen, start=first):
            steps_seen = np.arange(step, first + good * stride, stride)
            self.first_start[:, steps_seen] = found.start.min(axis=1).reshape(runs, blocks)[:, :good] + begins
            self.last_end[:, steps_seen] = found.end.max(axis=1).reshape(runs, blocks)[:, :good] + begins
            for observer in observers:
                observer.see(found, steps_seen, begins[0, :, None])
        self._most_blocks = 1 if is_uneven or good < blocks else min(2 * self._most_blocks, CELLS)
        self._under_way = ranks if is_uneven else None
        if not is_uneven:
            self._begin_ns = begins[:, -1] + took[:, -1]
        return good

    def _x(self, steps: slice) -> Times:
        """Return X of these steps, shape ``(num_runs * num_steps, num_ranks)``.

        Raises ``Unsupported`` if times may leave 64 bits.
        """
        drawn = np.concatenate([draws.rows(steps.start, steps.stop)[:: steps.step] for draws in self._draws])
        num_steps = len(drawn) // self._runs
        self._reached_ns += num_steps * self._slowest * (self._most_ns + stretch(self._compute_ns, int(drawn.max(initial=0))))
        if self._reached_ns > LATEST_NS:
            raise Unsupported(BEYOND)
        return drawn


def _carrier(scenario: Scenario, layout: Layout, programs: Sequence[Program]) -> tuple[Callable[[int], Transfers], Fraction]:
    """Return a function that makes the ``Transfers`` of a number of blocks, and compute's slowdown factor.

    The factor applies while collectives of the rank are in flight. Raises ``Unsupported`` for a scenario that
    the reference engine must run.
    """
    is_slowed = overlaps(scenario, programs)
    if shares(layout, programs):
        if is_slowed:
            raise Unsupported(SHARED)
        wires = cache(partial(Wires, layout))
        return lambda blocks: SharedTransfers(layout, blocks, wires), Fraction(1)
    if not is_slowed:
        return lambda blocks: Transfers(layout, blocks), Fraction(1)
    declared = (scenario.table.contention, scenario.table.collective_contention)
    compute, collectives = (1 + Fraction(repr(value)) for value in declared)  # the decimals that a file writes
    if collectives > 1:
        refuse_slowed(programs)
    return lambda blocks: Transfers(layout, blocks, 1 / collectives), compute
