"""simulate_servers: how long an experiment with parameter servers will take, event by event on SimPy's clock; and the job that it is."""

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import count

from fleetbench.cluster import Link
from fleetbench.cores import on_cores
from fleetbench.declared import LOSSES, refuse_undeclared
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.plan.build import Plan
from fleetbench.plan.events import Message
from fleetbench.plan.fusion import fuse
from fleetbench.plan.groups import world_of
from fleetbench.plan.layers import Gradient
from fleetbench.plan.replay import Recording, RoleDecider, in_order
from fleetbench.plan.servers.rules import rules_of
from fleetbench.plan.servers.states import Role
from fleetbench.plan.servers.training import ServerTraining
from fleetbench.profile import communication_of, table_for
from fleetbench.result import StepRecord, skip, steps_table
from fleetbench.stragglers import draws
from fleetbench.strategy import DistributedStrategy
from fleetbench.support import RUN, WORKLOAD, refuse_unexecuted
from fleetbench.timeline import Span
from sim.clock import Clock
from sim.execution import Execution, Wanted, too_many
from sim.limits import MOST_EVENTS, at_most, refuse_large
from sim.network.links import Links
from sim.network.routes import Way, way
from sim.servers.actor import Carried, Costs, Job, NodeCosts, Order, Piece, costs_of
from sim.servers.ports import Hosts, Wires
from sim.servers.server import Load, Server, load_summary, staleness_summary
from sim.servers.traffic import Traffic, traffic_of
from sim.servers.worker import Local, Memory, Node, Sender, Trainer

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
    """Execute an experiment with ``mode = "ps"``, or the ``job`` that was made of it, on a simulated clock; see ``sim.run.simulate``."""
    if engine not in SERVER_ENGINES:
        what = 'does not go with strategy.mode = "ps", whose servers and trainers are simulated event by event'
        raise ConfigError(what, "engine", repr(engine), f"one of {', '.join(SERVER_ENGINES)}")
    job = job or job_of(experiment)
    if job.pieces and wanted.recordings:
        raise ConfigError("has no recordings: each role decides of every piece", "strategy.overlap_push", "True", "leave record out")
    done = count(1)
    found = execute(job, record=wanted.recordings, step_done=lambda: step_done(next(done)), order=order)
    keeps = len(found.spans) <= wanted.most_spans
    rows_alike = job.traffic.tables and (job.rules.mode == "geo_sgd" or job.rules.max_merge > 1)
    return Execution(
        engine="reference",
        plan=Plan(trainers=len(job.draws), buckets=(), exchange=(), groups=(("world", world_of(len(job.draws))),)),
        begin_ns=min(record.start_ns for record in found.records if record.step >= 1),
        end_ns=max(record.end_ns for record in found.records),
        step_ends_ns={record.step: record.end_ns for record in sorted(found.records, key=lambda record: record.end_ns)},  # the last stays
        table=steps_table(found.records),
        spans=found.spans if keeps else (),
        no_spans=None if keeps or not wanted.most_spans else too_many(f"{len(found.spans):,}", wanted.most_spans),
        recordings=in_order(found.recordings),
        staleness=staleness_summary(found.loads),
        server_load=load_summary(found.loads),
        notes=(skip("workload.data", _ROWS_ALIKE),) if rows_alike else (),
    )


def job_of(experiment: Experiment, *, costs: Costs | None = None, traffic: Traffic | None = None) -> Job:
    """Resolve an experiment with ``mode = "ps"``.

    ``costs`` and ``traffic`` are the layer table's, where no profile has better ones. Raises
    ``ConfigError`` for a field that is not simulated, or a missing profile or link.
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
    for name in ("overlap_push", "reduce_in_node"):
        if getattr(strategy, name) and any(gradient.sparse for gradient in gradients):
            what = f"is not simulated with sparse gradients, and this model has {sum(gradient.sparse for gradient in gradients)}"
            raise ConfigError(what, f"strategy.{name}", "True", "leave it out, or use dense gradients")
    inner = cluster.trainers_per_node if strategy.reduce_in_node else 1
    rules = rules_of(
        strategy,
        cluster.trainers // inner,
        cluster.servers,
        optimizer=experiment.workload.optimizer,
        parameter_bytes=sum(gradient.nbytes for gradient in gradients),
        has_dense=any(not gradient.sparse for gradient in gradients),
        simulated=True,
    )
    pieces = pieces_of(strategy, gradients, cluster.servers) if strategy.overlap_push else ()
    at_most(rank_steps * len(pieces), MOST_EVENTS, "pieces of ranks", "workload.steps", "fewer steps, or larger buckets")
    traffic = traffic or traffic_of(gradients, cluster.servers)
    step_nbytes = sum(traffic.pushed(server, [(0, 0, 1)]) for server in range(cluster.servers))
    host = 0.0 if cluster.host_bandwidth is None else 8e9 / cluster.host_bandwidth
    steps = range(1 - run.warmup_steps, experiment.workload.steps + 1)
    delays = draws(cluster.stragglers, run.seed, cluster.trainers, cluster.trainers_per_node, steps.start, len(steps))
    return Job(
        rules=rules,
        table=table,
        traffic=traffic,
        costs=costs or dataclasses.replace(costs_of(measured, step_nbytes, max(1, len(pieces)), host), update_ns=table.update),
        hosts=hosts_of(experiment),
        steps=steps,
        draws=tuple(map(tuple, delays.tolist())),
        fetch_every=strategy.fetch_every_n_steps,
        pieces=pieces,
        node=_node_costs(experiment, [piece.traffic for piece in pieces] or [traffic]) if inner > 1 else None,
    )


def pieces_of(strategy: DistributedStrategy, gradients: Sequence[Gradient], servers: int) -> tuple[Piece, ...]:
    """The buckets of dense gradients, each ready with its last; a bucket is cut evenly over the servers."""
    ready_ns = {gradient.name: gradient.ready for gradient in gradients}
    return tuple(
        Piece(max(ready_ns[name] for name in bucket.gradients), Traffic(servers=servers, dense_bytes=bucket.nbytes))
        for bucket in fuse(gradients, strategy)
    )


def _node_costs(experiment: Experiment, traffics: Sequence[Traffic]) -> NodeCosts:
    """By the network's model, of the first node: all are alike."""
    ranks = tuple(range(experiment.cluster.trainers_per_node))
    reduce, broadcast = (way(kind, ranks, Links.of(experiment)) for kind in ("reduce", "broadcast"))

    def took_ns(found: Way) -> tuple[int, ...]:
        costs = [found.route(traffic.dense_bytes).cost for traffic in traffics]
        return tuple(cost.latency_ns + round(cost.transfer_ns) for cost in costs)

    share = Fraction(len(ranks) - 1, len(ranks))
    nbytes = tuple(int(share * traffic.dense_bytes) for traffic in traffics)
    return NodeCosts(took_ns(reduce), took_ns(broadcast), nbytes)


def hosts_of(experiment: Experiment) -> Hosts:
    """Nodes are hosts; servers have hosts of their own after them, or share the nodes. Raises ``ConfigError`` without a link."""
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
        trainers=tuple(range(cluster.nodes) if experiment.strategy.reduce_in_node else cluster.node_by_rank),
        servers=tuple((cluster.nodes if own else 0) + server for server in range(cluster.servers)),
        link=link,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Results of a simulated job."""

    records: tuple[StepRecord, ...]
    spans: tuple[Span, ...]
    loads: tuple[Load, ...]
    """Load of every server, from the first counted step on."""
    recordings: tuple[Recording, ...]


def execute(job: Job, *, record: bool = False, step_done: Callable[[], None] | None = None, order: Order | None = None) -> Seen:
    """Run all trainers to their last step, and the servers until all have left.

    All have joined before the clock starts. ``step_done`` is called at every end of a step of rank 0; ``order`` notes all acts.
    """
    clock = Clock()
    run = _Run(clock, job, record=record)
    for actor in (*run.servers, *run.senders, *run.trainers):
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
        server.load.count(0, max(end_ns, server.load.until_ns))
    return Seen(
        records=tuple(found for trainer in run.trainers for found in trainer.records),
        spans=tuple(span for actors in (run.trainers, run.servers) for actor in actors for span in actor.spans),
        loads=tuple(server.load for server in run.servers),
        recordings=tuple(decider.recording() for decider in run.deciders if record),
    )


class _Run:
    """The actors of a job, tied together."""

    def __init__(self, clock: Clock, job: Job, *, record: bool) -> None:
        rules = job.rules
        self._clock = clock
        self._job = job
        self._wires = Wires(clock, job.hosts)
        self._counts = False
        self.deciders: list[RoleDecider] = []
        self.servers = [Server(clock, self._roles("server", number, record), job, self._answer) for number in range(rules.servers)]
        for decider in (decider for server in self.servers for decider in server.deciders):
            for rank in range(rules.trainers):  # all are known, and the parameters there, before the clock starts; answers take no time
                decider.on(0, Message("sender", rank, "join"))
            decider.on(0, Message("sender", 0, "initial"))
        self._inner = inner = len(job.draws) // rules.trainers
        """Trainers of a sender. The first of them is on its host."""
        memories = [Memory(versions=(0,) * rules.servers, computed_from=(0,) * rules.servers) for _ in job.draws]
        self.senders = [Sender(clock, self._roles("sender", rank, record), job, memory) for rank, memory in enumerate(memories[::inner])]
        self.trainers = [Trainer(clock, self._roles("trainer", rank, record), job, memory) for rank, memory in enumerate(memories)]
        for rank, trainer in enumerate(self.trainers):
            trainer.post, trainer.step_begins = self._post, self._step_begins
            memories[rank].queue = deque(maxlen=None if rank % inner == 0 else 0)
        for rank, sender in enumerate(self.senders):
            sender.post = self._post
            if job.node is not None:
                Node(clock, job.node, self.trainers[inner * rank : inner * (rank + 1)], sender)
                continue
            self.trainers[rank].tell_sender = self._local(sender)
            sender.tell_trainer = self._local(self.trainers[rank])

    def _roles(self, role: Role, rank: int, record: bool) -> list[RoleDecider]:
        """One role of every piece."""
        training = ServerTraining(self._job.rules)
        found = [RoleDecider.start(training, rank, role, record=record) for _ in self._job.pieces or (None,)]
        self.deciders += found
        return found

    def _local(self, to: Sender | Trainer) -> Local:
        return lambda message, piece: self._wires.at_once(lambda: to.hear(message, Carried(piece=piece)))

    def _post(self, server: int, message: Message, carried: Carried) -> None:
        rank = message.rank
        if message.role == "trainer" and self._inner > 1:  # the servers know it as its node, for which the first trainer speaks
            if rank % self._inner:
                return
            rank //= self._inner
            message = dataclasses.replace(message, rank=rank)
        source, target = self._job.hosts.trainers[rank], self._job.hosts.servers[server]
        self.trainers[self._inner * rank].sent(carried.nbytes)
        self._wires.send((message.role, rank, server), source, target, carried.nbytes, lambda: self.servers[server].hear(message, carried))

    def _answer(self, role: str, rank: int, message: Message, carried: Carried) -> None:
        source, target = self._job.hosts.servers[message.rank], self._job.hosts.trainers[rank]
        to: Sender | Trainer = self.trainers[rank] if role == "trainer" else self.senders[rank]
        self._wires.send(("server", message.rank, role, rank), source, target, carried.nbytes, lambda: to.hear(message, carried))

    def _step_begins(self, step: int) -> None:
        if step >= 1 and not self._counts:
            self._counts = True
            for server in self.servers:
                server.load.restart(self._clock.now)
