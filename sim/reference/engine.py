"""Entry point of the reference engine: runs trainers on SimPy's clock, with the strategy's own decisions."""

from collections.abc import Callable

from fleetbench.plan.replay import Decider
from fleetbench.result import steps_table
from sim.clock import Clock
from sim.execution import Execution, Spans, Wanted, too_many
from sim.limits import MOST_EVENTS, at_most
from sim.reference.network import Collectives, Computing, Network
from sim.reference.trainer import Trainer
from sim.scenario import Scenario


def execute(scenario: Scenario, wanted: Wanted, step_done: Callable[[int], None]) -> Execution:
    """Run all trainers to their last step.

    ``step_done`` is called at the end of each step of rank 0, with the number of steps that it has done.
    Raises ``ConfigError`` for more events than the clock handles in minutes.
    """
    plan = scenario.plan
    events = plan.trainers * len(scenario.steps) * (1 + len(plan.exchange))
    hint = "fewer steps, trainers or buckets; --engine auto simulates most runs as arrays"
    at_most(events, MOST_EVENTS, "events", "workload.steps", hint)
    clock = Clock()
    computing = Computing(scenario.table.collective_contention)
    several = any(operation.communicator for operation in plan.exchange)
    spans = Spans(wanted.most_spans, several=several) if wanted.most_spans else None
    network, tell = Network(clock, scenario.links, computing), None if spans is None else spans.carry
    collectives = Collectives(clock, network, plan.queue_depth, tell)
    deciders = [
        Decider.start(scenario.strategy, rank, record=wanted.recordings, first_step=scenario.steps.start) for rank in range(plan.trainers)
    ]
    trainers = [Trainer(clock, rank, decider, collectives, computing, scenario, spans) for rank, decider in enumerate(deciders)]
    trainers[0].step_done = step_done
    delays = scenario.draws.of_ranks().tolist()
    clock.run(clock.all_of([clock.process(trainer.run(own)) for trainer, own in zip(trainers, delays, strict=True)]))
    records = [record for trainer in trainers for record in trainer.records]
    return Execution(
        engine="reference",
        plan=plan,
        begin_ns=min(record.start_ns for record in records if record.step >= 1),
        end_ns=max(record.end_ns for record in records),
        # sorted, so that the latest end of each step stays
        step_ends_ns={record.step: record.end_ns for record in sorted(records, key=lambda record: record.end_ns)},
        table=steps_table(records),
        spans=() if spans is None else tuple(spans.kept),
        no_spans=too_many(f"{spans.num:,}", wanted.most_spans) if spans is not None and spans.num > wanted.most_spans else None,
        recordings=tuple(decider.recording() for decider in deciders if decider.log is not None),
    )
