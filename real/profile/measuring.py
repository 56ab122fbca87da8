"""Measuring: a launch whose legs yield a profile, which is stored for commands that need layer times.

Layers are timed on all trainers of a node at once, with the compute part of the strategy (mixed precision,
recompute, fused operations), at every requested thread count. The times are then scaled to the forward and
backward of normal training, in which trainers synchronise at every step and no layer is hooked. The cost of
communication, and how much it and compute slow each other, come from runs of the strategies themselves.

There are three legs per thread count, and three or four more for communication:

- ``layers``: no exchange, every layer timed (``ProfileLeg``);
- ``whole``: synchronous training, all gradients in one bucket, so that no exchange overlaps compute;
- ``several``: synchronous training, in buckets that overlap the backward;
- ``averaged``: Local SGD of eight steps, or of two if steps are long, in one bucket: the time that averaging
  adds to an update, and how much shorter steps are if they begin without a wait;
- ``queued`` and ``queued, two in flight``: rounds of two steps, with one bucket per gradient, which queue
  without compute: the times of all-reduces of many sizes, one at a time and two at once, on one communicator
  if it carries two (``fleetbench.plan.groups``), else on two;
- ``quantised``, if the strategy sends outer differences in INT8: rounds of two steps, in one bucket, in INT8.

All except ``queued, two in flight`` keep one collective in flight (``sync_nccl_allreduce``).

A script that calls ``fully_shard`` has two legs: ``layers``, whose parameters stay gathered, and ``as it
is``, whose gathers and scatters give the cost of communication.
"""

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from fleetbench.cluster import Cluster
from fleetbench.config import encode
from fleetbench.digests import json_digest
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.fitting.lines import Hockney
from fleetbench.fitting.stragglers import fit_stragglers
from fleetbench.measurements import GradientNoise, Memory, Threads
from fleetbench.plan.groups import queue_depth
from fleetbench.plan.layers import LayerTable, scaled
from fleetbench.profile import Communication, Profile, compute_key, compute_part
from fleetbench.quantities import MIB, Nanoseconds, counted
from fleetbench.result import RunResult, step_times
from fleetbench.store import machine, versions
from fleetbench.strategy import BuildStrategy, DistributedStrategy, LocalSGDConfigs
from fleetbench.units import size
from fleetbench.workload import LAYERS, LINEAR_OPTIMIZERS
from fleetbench.workloads.models.registry import check_model
from real.job.launch import Progress
from real.job.script_session import ScriptSession
from real.job.session import LegSession, Session
from real.layer_times import LEAST_STEPS, memory_of, table_of
from real.leg import Leg
from real.profile.costs import (
    compute_times,
    fit_points,
    link_of_two,
    points_of,
    points_of_blocks,
    quantising,
    settled,
    sharing_notes,
    slowdowns_of,
    starts_of,
    typical,
    with_averaging,
)
from real.supported import is_emulated, with_compute
from real.testbed.noise import quietest

SECONDS = 10.0
"""Longest duration of a leg in seconds, unless ``LEAST_STEPS`` steps take longer."""
STRAGGLER_STEPS = 400
_METHOD = 6
"""Version of the method: profiles that an older version stored are measured again."""
STEPS = 100
"""Number of counted steps of a leg, if the time allows."""
WARMUP = 10
_PILOT = 2
SEVERAL = 8
"""Approximate number of buckets in the leg ``several``."""

T = TypeVar("T")


class Legs:
    """Runs legs in a session, each for at most ``seconds`` unless its fewest steps take longer.

    Keeps the runs by name. Repeats a leg during which the machine was busy.
    """

    def __init__(self, session: LegSession, seconds: float, done: Callable[[], None]) -> None:
        self.runs: dict[str, RunResult] = {}
        self.foreign_cores: float | None = None
        """Number of cores that other processes used during the busiest of the kept legs; ``None`` if unknown."""
        self.noise: dict[str, Any] | None = None
        """Gradient noise from the first leg ``layers``, as in ``Measured``; before later ones, trainers have
        drifted apart."""
        self._session = session
        self._seconds = seconds
        self._done = done

    def layers(self, strategy: DistributedStrategy) -> list[dict[str, Any]]:
        """Measure the layer times of every rank; return each rank's ``Measured`` as a dict."""
        leg = Leg(strategy=measured_part(strategy), steps=STEPS, warmup_steps=WARMUP, profile=True, max_s=self._seconds)

        def measure() -> list[dict[str, Any]]:
            parts = self._session.run_profile(leg)
            self.noise = self.noise or parts[0].get("gradient_noise")
            return parts

        parts = self._quietest(measure)
        self._done()
        return parts

    def run(self, name: str, strategy: DistributedStrategy, most: int = STEPS) -> RunResult:
        """Run ``strategy`` for at most ``most`` steps; a short run before finds out how many fit into the time."""
        pilot = self._session.run(Leg(strategy=strategy, steps=_PILOT, warmup_steps=_PILOT))
        step_s = float(step_times(pilot.steps).max())
        steps = max(LEAST_STEPS, min(most, int(self._seconds / step_s)))
        warmup = max(LEAST_STEPS, min(WARMUP, steps // 4))
        leg = Leg(strategy=strategy, steps=steps, warmup_steps=warmup)
        self.runs[name] = self._quietest(lambda: self._session.run(leg))
        self._done()
        return self.runs[name]

    def averaged(self, strategy: DistributedStrategy, optimizer: str, step_s: float) -> RunResult:
        """Run the leg ``averaged``: rounds of eight steps if six rounds fit at ``step_s`` per step, else of two."""
        k_steps = 8 if 6 * 8 * step_s <= self._seconds else 2
        return self.run("averaged", averaged(strategy, optimizer, k_steps), 25 * max(4, k_steps))

    def _quietest(self, measure: Callable[[], T]) -> T:
        value, cores = quietest(lambda: (measure(), self._session.foreign_cores), lambda found: found[1])
        if cores is not None:
            self.foreign_cores = max(cores, self.foreign_cores or 0.0)
        return value


def measured_part(strategy: DistributedStrategy) -> DistributedStrategy:
    """Return a strategy's compute part, with the update after the backward so that it is timed separately.

    A sharded strategy is returned unchanged.
    """
    if strategy.sharding:
        return strategy
    return _computed(strategy.without("build_strategy.enable_backward_optimizer_op_deps"))


def _computed(strategy: DistributedStrategy) -> DistributedStrategy:
    """Return a strategy's compute part, with its settings for unused parameters, which the loop may need."""
    needed = {name: getattr(strategy, name) for name in ("find_unused_parameters", "static_graph")}
    return compute_part(strategy).replace(**needed)


def whole(strategy: DistributedStrategy) -> DistributedStrategy:
    """Return the strategy's compute part with all gradients in one bucket, which is ready with the last of them."""
    return measured_part(strategy).replace(fuse_grad_size_in_MB=0.0)


def several(strategy: DistributedStrategy, table: LayerTable) -> DistributedStrategy:
    """Return the strategy's compute part with several buckets of similar size."""
    gradients = [gradient for gradient in table.by_readiness() if not gradient.sparse]
    size_in_mb = sum(gradient.nbytes for gradient in gradients) / SEVERAL / MIB
    return measured_part(strategy).replace(fuse_grad_size_in_MB=size_in_mb, fuse_grad_count=max(2, len(gradients)))


def averaged(strategy: DistributedStrategy, optimizer: str, k_steps: int) -> DistributedStrategy:
    """Return Local SGD in one bucket, with the strategy's update; it averages a nonlinear optimizer's state, too."""
    return _local(strategy, optimizer, k_steps, fuse_grad_size_in_MB=0.0)


def queued(strategy: DistributedStrategy, optimizer: str) -> DistributedStrategy:
    """Return Local SGD of two steps, with one bucket per gradient."""
    return _local(strategy, optimizer, fuse_all_reduce_ops=False)


def queued_in_twos(strategy: DistributedStrategy, optimizer: str, backend: str) -> DistributedStrategy:
    """Return Local SGD of two steps, with one bucket per gradient and two of them in flight."""
    return queued(strategy, optimizer).replace(nccl_comm_num=1 if queue_depth(backend) > 1 else 2, sync_nccl_allreduce=False)


def quantised(strategy: DistributedStrategy) -> DistributedStrategy:
    """Return Local SGD of two steps with an outer optimizer, in one bucket that is sent in INT8."""
    configs = LocalSGDConfigs(k_steps=2, outer_lr=0.7, outer_momentum=0.9, outer_wire="int8")
    return measured_part(strategy).replace(localsgd=True, localsgd_configs=configs, fuse_grad_size_in_MB=0.0)


def _local(strategy: DistributedStrategy, optimizer: str, k_steps: int = 2, **changes: Any) -> DistributedStrategy:
    return DistributedStrategy(
        localsgd=True,
        localsgd_configs=LocalSGDConfigs(k_steps=k_steps, optimizer_state="local" if optimizer in LINEAR_OPTIMIZERS else "average"),
        thread_num=strategy.thread_num,
        find_unused_parameters=strategy.find_unused_parameters,
        build_strategy=BuildStrategy(fuse_all_optimizer_ops=strategy.build_strategy.fuse_all_optimizer_ops),
        **changes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A profile and the runs from which it was computed."""

    experiment: Experiment
    """Experiment that was measured."""
    profile: Profile
    runs: dict[str, RunResult] = field(default_factory=dict)
    """Runs by the name of their leg."""


def measure_profile(
    experiment: Experiment, *, seconds: float = SECONDS, stragglers: bool = False, progress: Progress | None = None
) -> Taken:
    """Measure the profile of an experiment in one launch.

    ``seconds`` is the longest duration of a leg. With ``stragglers``, they are fitted, and the tables hold
    times without them (X = 0). Raises ``ConfigError`` if the experiment cannot be executed, ``WorkerFailed``
    with the rank that failed.
    """
    if is_emulated(experiment):
        hint = "--set run.device=cpu measures the layer times that it sleeps by"
        raise ConfigError("an emulated device has no compute to measure", "run.device", "'emulated'", hint)
    quiet = _quiet(experiment)
    with Session(quiet) as session:
        return _Measuring(session, experiment, quiet, seconds, progress).take(stragglers=stragglers)


def profile_script(
    session: ScriptSession, *, seconds: float = SECONDS, stragglers: bool = False, progress: Progress | None = None
) -> Taken:
    """Measure the profile of the session's script, as the module describes.

    With several nodes of several trainers, the profile has one link, that of a ring over all trainers. If the
    cluster declares no link inside a node, that link is assumed to be as slow, so that rings take the
    measured time.
    """
    experiment = session.experiment
    taken = _Measuring(session, experiment, _computing(experiment), seconds, progress).take(stragglers=stragglers)
    communication, cluster = taken.profile.communication, experiment.cluster
    if communication is None or communication.between != "nodes" or cluster.trainers_per_node == 1 or cluster.intra is not None:
        return taken
    inside = dataclasses.replace(communication.link, payload=True)
    return dataclasses.replace(taken, experiment=experiment.replace(cluster=dataclasses.replace(cluster, intra=inside)))


def _quiet(experiment: Experiment) -> Experiment:
    """Return the experiment to launch: without injected stragglers, servers and evaluations.

    On a testbed it has all nodes. Otherwise it has one node, which is this machine.
    """
    cluster = experiment.cluster
    if experiment.run.launcher == "testbed":
        return _computing(experiment, cluster=dataclasses.replace(cluster, stragglers=(), servers=0, server_placement="own"))
    return _computing(experiment, cluster=Cluster(trainers_per_node=cluster.trainers_per_node))


def _computing(experiment: Experiment, **changes: Any) -> Experiment:
    workload = dataclasses.replace(experiment.workload, profile=None, target_loss=None)
    return experiment.replace(strategy=_computed(experiment.strategy), workload=workload, **changes)


def _shards_itself(experiment: Experiment) -> bool:
    """Whether a script shards its model itself, which legs then leave sharded.

    Experiments are measured with the whole model, and simulated in shards.
    """
    return experiment.strategy.sharding and experiment.run.launcher == "command"


def _num_legs(experiment: Experiment, quiet: Experiment) -> int:
    counts = len(searched_threads(experiment))
    if _shards_itself(experiment):
        return 2
    return 3 * counts + 3 + experiment.strategy.quantises if quiet.cluster.trainers > 1 else 2 * counts


class _Measuring:
    """Measures the profile of ``experiment`` by legs of a running launch of ``quiet``."""

    def __init__(self, session: LegSession, experiment: Experiment, quiet: Experiment, seconds: float, progress: Progress | None) -> None:
        self._experiment = experiment
        self._quiet = quiet
        own = experiment.strategy
        self._own = _computed(own) if own.sharding and not _shards_itself(experiment) else own
        self._counts = searched_threads(experiment)
        numbers, total = count(1), _num_legs(experiment, quiet)
        self._legs = Legs(session, seconds, lambda: None if progress is None else progress(next(numbers), total))
        self._memory: Memory | None = None
        self._notes: list[str] = []

    def take(self, *, stragglers: bool) -> Taken:
        if self._own.sharding:
            return self._take_sharded(stragglers=stragglers)
        own = self._own.thread_num
        tables: dict[int, LayerTable] = {}
        threads: dict[int, Threads] = {}
        table, whole = self._settled(self._own, STRAGGLER_STEPS if stragglers else STEPS)
        hockney, communication = self._communication(whole)
        tables[own], threads[own] = self._beside(self._own, table, whole, hockney)
        for number in self._counts:
            if number != own:
                strategy = self._own.replace(thread_num=number)
                table, run = self._settled(strategy, STEPS)
                local = {name: getattr(tables[own], name) for name in ("merge", "local_update", "local_compute")}
                table = dataclasses.replace(table, **local)
                tables[number], threads[number] = self._beside(strategy, table, run, hockney)
        return self._taken(tables, threads, whole, communication, stragglers=stragglers)

    def _take_sharded(self, *, stragglers: bool) -> Taken:
        """Measure a sharded model: a gather plus a scatter stands for an all-reduce of the same size.

        Raises ``ConfigError`` unless the backend is gloo, where they do not overlap compute.
        """
        if self._quiet.run.backend != "gloo":
            hint = "fleetbench why looks at the script; tune --simulate-only chooses a sharding from the model's shape"
            what = "gathers and scatters run on their own streams and cannot be timed apart from compute yet: profile and tune need gloo"
            raise ConfigError(what, "the backend", self._quiet.run.backend, hint)
        own, trainers = self._own.thread_num, self._quiet.cluster.trainers
        parts = self._legs.layers(self._own)
        run = self._legs.run("as it is", self._own, STRAGGLER_STEPS if stragglers else STEPS)
        table = settled(table_of(compute_key(self._experiment, self._own), parts), run)
        whole = size(sum(gradient.nbytes for gradient in table.by_readiness()))
        self._notes.append(f"layers were timed with the whole model on each rank: {whole} of parameters, and as much of gradients")
        degree, points = run.plan.shard_ranks, points_of_blocks(run)
        table = dataclasses.replace(table, update=Nanoseconds(degree * table.update))  # measured for one shard only
        hockney = fit_points(points, degree)
        if hockney.line.statement is not None:
            self._notes.append(f"the link: {hockney.line.statement}")
        communication = Communication(
            backend=self._quiet.run.backend,
            trainers=trainers,
            link=hockney.link,
            between="nodes" if self._quiet.cluster.nodes > 1 else "trainers",
            points=points,
            largest_residual=round(hockney.line.largest_residual, 4),
        )
        threads = Threads(
            thread_num=own,
            step=Nanoseconds(round(typical(step_times(run.steps).to_numpy()) * 1e9)),
            compute=Nanoseconds(table.forward_ns + table.backward_ns),
            contention=0.0,
            collective_contention=0.0,
            unexplained=0.0,
        )
        return self._taken({own: table}, {own: threads}, run, communication, stragglers=stragglers)

    def _taken(
        self,
        tables: dict[int, LayerTable],
        threads: dict[int, Threads],
        whole: RunResult,
        communication: Communication | None,
        *,
        stragglers: bool,
    ) -> Taken:
        """Return the profile of these measurements; fit stragglers to the compute of the run ``whole`` if asked to."""
        fit = fit_stragglers(compute_times(whole)) if stragglers else None
        if fit is not None and fit.entries:
            share = fit.base * 1e-9 / typical(compute_times(whole))
            tables = {number: scaled(table, share, share) for number, table in tables.items()}
        void = [name for name, run in self._legs.runs.items() if run.summary.testbed is not None and not run.summary.testbed["counts"]]
        if void:
            self._notes.append(f"void, because the machine was not quiet in any repeat: {', '.join(void)}; profile again")
        host = machine()
        profile = Profile(
            machine=f"{host['processor']}, {host['cores']} cores, {host['system']}",
            cores=host["cores"],
            created=f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}",
            tables=tuple(tables[number] for number in sorted(tables)),
            communication=communication,
            threads=tuple(threads[number] for number in sorted(threads)),
            memory=self._memory,
            gradient_noise=self._noise(),
            stragglers=fit,
            foreign_cores=self._legs.foreign_cores,
            notes=tuple(self._notes),
        )
        return Taken(experiment=self._experiment, profile=profile, runs=self._legs.runs)

    def _noise(self) -> GradientNoise | None:
        batch_size = self._quiet.cluster.trainers * self._quiet.workload.batch_size
        return None if self._legs.noise is None else GradientNoise(batch_size=batch_size, **self._legs.noise)

    def _communication(self, whole: RunResult) -> tuple[Hockney | None, Communication | None]:
        """Measure the cost of communication, given the run ``whole``; both results are ``None`` for one trainer."""
        legs, quiet, trainers = self._legs, self._quiet, self._quiet.cluster.trainers
        if trainers == 1:
            return None, None
        optimizer, backend = quiet.workload.optimizer, quiet.run.backend
        points = points_of(whole, legs.run("queued", queued(quiet.strategy, optimizer)))
        hockney = fit_points(points, trainers)
        if hockney.line.statement is not None:
            self._notes.append(f"the link: {hockney.line.statement}")
        in_flight = link_of_two(legs.run("queued, two in flight", queued_in_twos(quiet.strategy, optimizer, backend)), hockney)
        self._notes += sharing_notes(in_flight, hockney.link)
        quantise = Nanoseconds(0)
        if self._own.quantises:
            quantise = quantising(legs.run("quantised", quantised(quiet.strategy)), hockney)
        return hockney, Communication(
            backend=backend,
            trainers=trainers,
            link=hockney.link,
            between="nodes" if quiet.cluster.nodes > 1 else "trainers",
            points=points,
            largest_residual=round(hockney.line.largest_residual, 4),
            in_flight=in_flight,
            quantise=quantise,
        )

    def _settled(self, strategy: DistributedStrategy, most: int) -> tuple[LayerTable, RunResult]:
        """Return the table of ``strategy``, scaled to a run of normal training of up to ``most`` steps; and the run."""
        parts = self._legs.layers(strategy)
        if self._memory is None:
            self._memory = memory_of(parts)
        table = table_of(compute_key(self._experiment, strategy), parts)
        run = self._legs.run(f"whole, {counted(strategy.thread_num, 'thread')}", whole(strategy), most)
        return settled(table, run), run

    def _beside(
        self, strategy: DistributedStrategy, table: LayerTable, whole: RunResult, hockney: Hockney | None
    ) -> tuple[LayerTable, Threads]:
        """Return the table with the costs of overlapping communication, and the entry of its thread count."""
        error, threads = 0.0, counted(strategy.thread_num, "thread")
        if hockney is not None:
            run = self._legs.run(f"several, {threads}", several(strategy, table))
            starts = starts_of(whole, run)
            found = slowdowns_of(table, run, starts, hockney)
            error = found.error
            if found.statement is not None:
                self._notes.append(f"{threads}: {found.statement}")
            table = dataclasses.replace(
                table,
                host_per_collective=Nanoseconds(round(starts.per_collective_s * 1e9)),
                pack=Nanoseconds(round(starts.pack_s * 1e9)),
                contention=found.compute,
                collective_contention=found.collective,
            )
            if strategy.thread_num == self._own.thread_num:
                step_s = typical(step_times(whole.steps))
                table = with_averaging(table, self._legs.averaged(strategy, self._quiet.workload.optimizer, step_s))
        return table, Threads(
            thread_num=strategy.thread_num,
            step=Nanoseconds(round(typical(step_times(whole.steps).to_numpy()) * 1e9)),
            compute=Nanoseconds(table.forward_ns + table.backward_ns),
            contention=table.contention,
            collective_contention=table.collective_contention,
            unexplained=round(error, 4),
        )


_BUSY: set[Path] = set()
"""Files of profiles from a busy machine. Only this process uses them, because its results are compared with
each other."""


def ensure_profile(
    experiment: Experiment, root: Path, *, progress: Progress | None = None, told: Callable[[str], object] | None = None
) -> Experiment:
    """Return the experiment with a profile in ``workload.profile``: its own, a stored one, or a new one.

    Profiles are stored below ``root / "profiles"``, named by a hash of all that changes compute. A profile
    measured on a busy machine has another name, and only this process uses it. ``told`` is called with a note before a
    new profile is measured. An experiment with a table of layers
    is returned unchanged.
    """
    if experiment.workload.model == LAYERS or experiment.workload.profile is not None:
        return experiment
    folder = root / "profiles"
    computing = with_compute(experiment)
    name = _name(computing)
    path = (folder / f"{name}.toml").resolve()
    busy = path.with_name(f"{name}.busy.toml")
    if not path.exists() and busy in _BUSY:
        path = busy
    elif not path.exists():
        check_model(computing.workload)
        if told is not None:
            told(f"note: no profile of this model is stored: one is measured now; it is stored in {folder}")
        profile = take_profile(computing, progress=progress)
        folder.mkdir(parents=True, exist_ok=True)
        if profile.busy:
            path = busy
            _BUSY.add(path)
        profile.save(path)
    return experiment.replace(workload=dataclasses.replace(experiment.workload, profile=str(path)))


def take_profile(experiment: Experiment, *, progress: Progress | None = None) -> Profile:
    """Measure a profile for the strategy's thread count and for all that ``tune`` may search."""
    return measure_profile(experiment, progress=progress).profile


def searched_threads(experiment: Experiment) -> tuple[int, ...]:
    """Return the strategy's thread count and those of ``tune.thread_num`` that the cores allow, sorted.

    With synchronised batch norm, return only the strategy's own count.
    """
    strategy = experiment.strategy
    cores = (os.cpu_count() or 1) // experiment.cluster.trainers_per_node
    searched = () if strategy.sync_batch_norm else experiment.tune.values("thread_num")
    return tuple(sorted({strategy.thread_num, *(number for number in searched if number <= cores)}))


def _name(experiment: Experiment) -> str:
    keys = [compute_key(experiment, experiment.strategy.replace(thread_num=number)) for number in searched_threads(experiment)]
    what = {"method": _METHOD, "tables": keys, "backend": experiment.run.backend, "machine": machine(), "torch": versions()["torch"]}
    if experiment.strategy.quantises:
        what["quantises"] = True
    if experiment.run.launcher == "testbed":  # a testbed has its own links
        what["links"] = encode(dataclasses.replace(experiment.cluster, stragglers=()))
    return json_digest(what)[:16]
