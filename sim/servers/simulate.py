"""Simulation of an experiment with parameter servers, event by event on SimPy's clock; and its job."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from fleetbench.cluster import Link
from fleetbench.cores import on_cores
from fleetbench.declared import LOSSES, refuse_undeclared
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.plan.build import Plan
from fleetbench.plan.events import Message
from fleetbench.plan.groups import world_of
from fleetbench.plan.replay import Recording, RoleDecider, in_order
from fleetbench.plan.servers.rules import rules_of
from fleetbench.plan.servers.states import Role
from fleetbench.plan.servers.training import ServerTraining
from fleetbench.profile import communication_of, table_for
from fleetbench.result import StepRecord, skip, steps_table
from fleetbench.staleness import ServerLoad, counts_of, load_of, quantiles_of
from fleetbench.stragglers import draws
from fleetbench.support import RUN, WORKLOAD, refuse_unexecuted
from fleetbench.timeline import Span
from sim.clock import Clock
from sim.execution import Execution, Wanted, too_many
from sim.limits import MOST_EVENTS, at_most, refuse_large
from sim.servers.actor import Actor, Carried, Costs, Job, Order, costs_of
from sim.servers.ports import Hosts, Wires
from sim.servers.server import Server
from sim.servers.traffic import Traffic, traffic_of
from sim.servers.worker import Local, Memory, Sender, Trainer

SERVER_ENGINES = ("auto", "reference")
WHO = "the simulator of parameter servers"
CLUSTER = frozenset(
    f"cluster.{name}"
    for name in ("nodes", "trainers_per_node", "servers", "server_placement", "intra", "inter", "cores_per_node", "gpu", "stragglers")
) | {"cluster.collective", "cluster.host_bandwidth", "cluster.first_exchange"}
_ROWS_ALIKE = (
    "which rows steps touch is not drawn: those of several steps are counted as if all rows were alike, which is too many where few "
    "rows are frequent, as in a text; what is sent comes out too large"
)


def simulate_servers(
    experiment: Experiment,
    wanted: Wanted,
    engine: str,
    step_done: Callable[[int], None],
    job: Job | None = None,
    order: Order | None = None,
) -> Execution:
    """Simulate an experiment with ``mode = "ps"``, or the ``job`` that was made from it; see ``sim.run.simulate``."""
    if engine not in SERVER_ENGINES:
        what = 'does not go with strategy.mode = "ps", whose servers and trainers are simulated event by event'
        raise ConfigError(what, "engine", repr(engine), f"one of {', '.join(SERVER_ENGINES)}")
    job = job or job_of(experiment)
    done = count(1)
    found = execute(job, record=wanted.recordings, step_done=lambda: step_done(next(done)), order=order)
    keeps = len(found.spans) <= wanted.most_spans
    rows_alike = job.traffic.tables and (job.rules.mode == "geo_sgd" or job.rules.max_merge > 1)
    return Execution(
        engine="reference",
        plan=Plan(trainers=len(job.draws), buckets=(), exchange=(), groups=(("world", world_of(len(job.draws))),)),
        begin_ns=min(record.start_ns for record in found.records if record.step >= 1),
        end_ns=max(record.end_ns for record in found.records),
        step_ends_ns={record.step: record.end_ns for record in sorted(found.records, key=lambda record: record.end_ns)},  # the latest stays
        table=steps_table(found.records),
        spans=found.spans if keeps else (),
        no_spans=None if keeps or not wanted.most_spans else too_many(f"{len(found.spans):,}", wanted.most_spans),
        recordings=in_order(found.recordings),
        staleness=quantiles_of(counts_of(found.loads)),
        server_load=load_of(found.loads),
        notes=(skip("workload.data", _ROWS_ALIKE),) if rows_alike else (),
    )


def job_of(experiment: Experiment, *, costs: Costs | None = None, traffic: Traffic | None = None) -> Job:
    """Return the job of an experiment with ``mode = "ps"``.

    ``costs`` and ``traffic``: by default, those of the layer table. Raises ``ConfigError`` for a field that
    is not simulated, or a missing profile or link.
    """
    refuse_large(experiment)
    rank_steps = experiment.cluster.trainers * (experiment.workload.steps + experiment.run.warmup_steps)
    at_most(rank_steps, MOST_EVENTS, "steps of ranks", "workload.steps", "fewer steps or trainers")
    strategy = experiment.strategy
    for part, executed in (("workload", WORKLOAD | LOSSES), ("cluster", CLUSTER), ("run", RUN)):
        refuse_unexecuted(getattr(experiment, part), part, executed, WHO)
    refuse_undeclared(experiment, strategy, WHO)
    measured = table_for(experiment)
    table = on_cores(experiment, measured)
    gradients = table.by_readiness()
    cluster, run = experiment.cluster, experiment.run
    rules = rules_of(
        strategy,
        cluster.trainers,
        cluster.servers,
        optimizer=experiment.workload.optimizer,
        parameter_bytes=sum(gradient.nbytes for gradient in gradients),
        has_dense=any(not gradient.sparse for gradient in gradients),
    )
    traffic = traffic or traffic_of(gradients, cluster.servers)
    step_nbytes = sum(traffic.pushed(server, [(0, 0, 1)]) for server in range(cluster.servers))
    host = 0.0 if cluster.host_bandwidth is None else 8e9 / cluster.host_bandwidth
    steps = range(1 - run.warmup_steps, experiment.workload.steps + 1)
    delays = draws(cluster.stragglers, run.seed, cluster.trainers, cluster.trainers_per_node, steps.start, len(steps))
    return Job(
        rules=rules,
        table=table,
        traffic=traffic,
        costs=costs or dataclasses.replace(costs_of(measured, step_nbytes, host), update_ns=table.update),
        hosts=hosts_of(experiment),
        steps=steps,
        draws=tuple(map(tuple, delays.tolist())),
        fetch_every=strategy.fetch_every_n_steps,
    )


def hosts_of(experiment: Experiment) -> Hosts:
    """Return the hosts of trainers, which are the nodes, and of servers, which share nodes or follow them.

    Raises ``ConfigError`` for a needed link that is neither declared nor measured.
    """
    cluster = experiment.cluster
    measured = communication_of(experiment)
    link = measured.link if measured is not None and measured.between == "nodes" else None
    if cluster.inter is not None:
        link = cluster.inter.carried(experiment.transport, between_nodes=True)
    own = cluster.server_placement == "own"
    if link is None:
        if own or cluster.nodes > 1:
            hint = (
                'add inter = { bandwidth = "25 Gbit/s", latency = "20 us" }, or server_placement = "shared", where servers run on the nodes'
            )
            raise ConfigError("trainers reach servers over this link, and it is neither declared nor measured", "cluster.inter", hint=hint)
        link = Link(bandwidth=1)  # type: ignore[arg-type]  # nothing crosses it: all are on one host
    return Hosts(
        trainers=cluster.node_by_rank,
        servers=tuple((cluster.nodes if own else 0) + server for server in range(cluster.servers)),
        link=link,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Results of a simulated job."""

    records: tuple[StepRecord, ...]
    spans: tuple[Span, ...]
    loads: tuple[ServerLoad, ...]
    """Load of every server, from the first counted step on."""
    recordings: tuple[Recording, ...]


def execute(job: Job, *, record: bool = False, step_done: Callable[[], None] | None = None, order: Order | None = None) -> Seen:
    """Run all trainers to their last step, and the servers until all trainers have left.

    All trainers have joined before the clock starts. ``step_done`` is called whenever rank 0 ends a step;
    ``order`` collects all acts.
    """
    clock = Clock()
    run = _Run(clock, job, record=record)
    for actor in run.actors:
        actor.order = order
    if step_done is not None:
        run.trainers[0].step_done = step_done
    for rank, trainer in enumerate(run.trainers):
        trainer.run(job.draws[rank])
    clock.run()
    waiting = [trainer.decider.rank for trainer in run.trainers if trainer.ended_ns is None]
    assert not waiting, f"trainers {waiting} wait for ever"
    end_ns = max(trainer.records[-1].end_ns for trainer in run.trainers)
    for server in run.servers:
        server.load.until_ns = max(end_ns, server.load.until_ns)
    return Seen(
        records=tuple(found for trainer in run.trainers for found in trainer.records),
        spans=tuple(span for actors in (run.trainers, run.servers) for actor in actors for span in actor.spans),
        loads=tuple(server.load for server in run.servers),
        recordings=tuple(actor.decider.recording() for actor in run.actors if record),
    )


class _Run:
    """The actors of a job, connected to each other."""

    def __init__(self, clock: Clock, job: Job, *, record: bool) -> None:
        rules = job.rules
        self._clock = clock
        self._hosts = job.hosts
        self._wires = Wires(clock, job.hosts)
        self._counts = False
        training = ServerTraining(rules)

        def role(name: Role, rank: int) -> RoleDecider:
            return RoleDecider.start(training, rank, name, record=record)

        self.servers = [Server(clock, role("server", number), job, self._answer) for number in range(rules.servers)]
        for server in self.servers:
            for rank in range(rules.trainers):  # all join, and parameters are initialised, before the clock starts; answers are not sent
                server.decider.on(0, Message("sender", rank, "join"))
            server.decider.on(0, Message("sender", 0, "initial"))
        memories = [Memory(versions=(0,) * rules.servers, computed_from=(0,) * rules.servers) for _ in job.draws]
        self.senders = [Sender(clock, role("sender", rank), job, memory, self._post) for rank, memory in enumerate(memories)]
        self.trainers = [Trainer(clock, role("trainer", rank), job, memory, self._post) for rank, memory in enumerate(memories)]
        for trainer, sender in zip(self.trainers, self.senders, strict=True):
            trainer.step_begins = self._step_begins
            trainer.tell_sender, sender.tell_trainer = self._local(sender), self._local(trainer)

    @property
    def actors(self) -> tuple[Actor, ...]:
        """Servers, senders and trainers."""
        return (*self.servers, *self.senders, *self.trainers)

    def _local(self, to: Sender | Trainer) -> Local:
        return lambda message: self._wires.at_once(lambda: to.hear(message))

    def _post(self, server: int, message: Message, carried: Carried) -> None:
        source, target = self._hosts.trainers[message.rank], self._hosts.servers[server]
        self.trainers[message.rank].sent(carried.nbytes)
        connection = (message.role, message.rank, server)
        self._wires.send(connection, source, target, carried.nbytes, lambda: self.servers[server].hear(message, carried))

    def _answer(self, role: str, rank: int, message: Message, carried: Carried) -> None:
        source, target = self._hosts.servers[message.rank], self._hosts.trainers[rank]
        to: Sender | Trainer = self.trainers[rank] if role == "trainer" else self.senders[rank]
        self._wires.send(("server", message.rank, role, rank), source, target, carried.nbytes, lambda: to.hear(message, carried))

    def _step_begins(self, step: int) -> None:
        if step >= 1 and not self._counts:
            self._counts = True
            for server in self.servers:
                server.load = ServerLoad(self._clock.now, self._clock.now)
