"""The reference engine: every trainer, collective and transfer is an event on SimPy's clock.

The slow and readable one, whose decisions are the strategy's own ``on``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count

from fleetbench.plan.operations import Operation
from fleetbench.plan.replay import Decider, Recording
from fleetbench.result import StepRecord, steps_table
from fleetbench.timeline import COMMUNICATION, Span
from sim.clock import Clock
from sim.collectives import Carried, Collectives
from sim.computing import Computing
from sim.execution import Execution, Wanted
from sim.network import Network
from sim.scenario import Scenario
from sim.trainer import Trainer


def execute(scenario: Scenario, wanted: Wanted, step_done: Callable[[int], None]) -> Execution:
    """Run all trainers to their last step; ``step_done`` is told at every end of a step of rank 0 how many it has done."""
    plan = scenario.plan
    clock = Clock()
    computing = Computing(scenario.table.collective_contention)
    collectives = Collectives(clock, Network(clock, scenario.links, computing), plan.queue_depth)
    deciders = [
        Decider.start(scenario.strategy, rank, record=wanted.recordings, first_step=scenario.steps.start) for rank in range(plan.trainers)
    ]
    initial = [decider.state for decider in deciders]
    trainers = [Trainer(clock, rank, decider, collectives, computing, scenario) for rank, decider in enumerate(deciders)]
    done = count(1)
    tell: list[Callable[[], None]] = [lambda: step_done(next(done)), *[_ignore] * (plan.trainers - 1)]
    delays = scenario.draws.of_ranks().tolist()
    clock.run(clock.all_of([clock.process(trainer.run(delays[rank], tell[rank])) for rank, trainer in enumerate(trainers)]))
    records = [record for trainer in trainers for record in trainer.records]
    spans = (*(span for trainer in trainers for span in trainer.spans), *_communication(collectives.carried)) if wanted.spans else ()
    return Execution(
        engine="reference",
        begin_ns=min(record.start_ns for record in records if record.step >= 1),
        end_ns=max(record.end_ns for record in records),
        step_ends_ns=_step_ends(records),
        table=steps_table(records),
        spans=spans,
        num_spans=len(spans),
        recordings=tuple(
            Recording(plan, rank, initial[rank], tuple(decider.log)) for rank, decider in enumerate(deciders) if decider.log is not None
        ),
    )


def _step_ends(records: Sequence[StepRecord]) -> dict[int, int]:
    ends: dict[int, int] = {}
    for record in records:
        ends[record.step] = max(ends.get(record.step, 0), record.end_ns)
    return ends


def _ignore() -> None:
    """Only one rank reports progress."""


def _communication(carried: list[Carried]) -> Iterator[Span]:
    several = any(item.operation.communicator for item in carried)
    for item in carried:
        operation = item.operation
        stream = f"{COMMUNICATION} {operation.communicator}" if several else COMMUNICATION
        for rank in item.ranks:
            yield Span(rank, stream, _name(operation), item.start_ns, item.end_ns - item.start_ns)


def _name(operation: Operation) -> str:
    """``all_reduce 3``: the kind, and the bucket or what else is carried."""
    return f"{operation.kind} {operation.payload if operation.bucket is None else operation.bucket}"
