"""The reference engine: every trainer, collective and transfer is an event on SimPy's clock.

The slow and readable one, whose decisions are the strategy's own ``on``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fleetbench.plan.operations import Operation
from fleetbench.plan.replay import Decider, Recording
from fleetbench.result import StepRecord
from fleetbench.timeline import COMMUNICATION, Span
from sim.clock import Clock
from sim.collectives import Carried, Collectives
from sim.computing import Computing
from sim.network import Network
from sim.scenario import Scenario
from sim.trainer import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """What an engine saw."""

    records: tuple[StepRecord, ...]
    spans: tuple[Span, ...]
    recordings: tuple[Recording, ...]


def execute(scenario: Scenario, *, record: bool, step_done: Callable[[], None]) -> Execution:
    """Run all trainers to their last step; ``step_done`` is called at every end of a step of rank 0."""
    plan = scenario.plan
    clock = Clock()
    computing = Computing(scenario.table.collective_contention)
    collectives = Collectives(clock, Network(clock, scenario.links, computing), plan.queue_depth)
    deciders = [Decider.start(scenario.strategy, rank, record=record, first_step=scenario.steps.start) for rank in range(plan.trainers)]
    initial = [decider.state for decider in deciders]
    trainers = [Trainer(clock, rank, decider, collectives, computing, scenario) for rank, decider in enumerate(deciders)]
    processes = [
        clock.process(trainer.run(scenario.draws[trainer.rank], step_done if trainer.rank == 0 else _ignore)) for trainer in trainers
    ]
    clock.run(clock.all_of(processes))
    return Execution(
        records=tuple(record for trainer in trainers for record in trainer.records),
        spans=(*(span for trainer in trainers for span in trainer.spans), *_communication(collectives.carried)),
        recordings=tuple(
            Recording(plan, rank, initial[rank], tuple(decider.log)) for rank, decider in enumerate(deciders) if decider.log is not None
        ),
    )


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
