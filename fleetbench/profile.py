"""Profile: measured layer tables and the measured cost of communication, as a file.

A profile holds layer tables for one model on one machine. The key of a table covers all settings that change
compute. A profile without the right table is refused, never scaled.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Literal

import tomli_w

from fleetbench import units
from fleetbench.cluster import Link
from fleetbench.config import Config, decode, encode
from fleetbench.digests import json_digest, read_text, read_toml, write_whole
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.fields import named, tables_of
from fleetbench.measurements import CollectivePoint, GradientNoise, Memory, ModelFlops, StragglerFit, Threads, is_busy
from fleetbench.plan.fusion import Cost
from fleetbench.plan.layers import LayerTable, declared_table, scaled
from fleetbench.plan.longest_chain import Pace, around_ring, envelope
from fleetbench.quantities import Nanoseconds
from fleetbench.strategy import DistributedStrategy
from fleetbench.workload import LAYERS

SCHEMA = 2
"""Version of the file's schema. Version 2 added start times of collectives, both slowdowns, the points that
the link is fitted to, threads, memory and stragglers."""
EMULATED = "emulated"
"""Name of the device on which trainers sleep for the times of a layer table instead of computing."""
COMPUTE_ONLY = named("time") | named("memory")
"""Strategy fields whose whole effect on time is in the layer table."""
COMPUTE_FIELDS = tables_of("time")
"""Names of the strategy's fields and tables whose values distinguish the layer tables of a profile."""
_COMPUTE_WORKLOAD = ("model", "model_options", "data", "data_options", "dtype", "batch_size", "optimizer", "weight_decay")
_PLANNED_STEPS = 32
"""Number of steps over which the slowest trainer's delay is averaged."""
_COMPUTE_ENVIRONMENT = ("OMP_", "MKL_", "KMP_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication(Config):
    """Cost of a collective in the training loop, as the link that would give a ring all-reduce this cost.

    ``T(S) = 2 (P - 1) latency + 2 ((P - 1) / P) S / bandwidth`` among ``trainers`` P.
    """

    backend: str
    trainers: int
    link: Link
    between: Literal["trainers", "nodes"] = "trainers"
    """Place of the link: inside a node (``trainers``) or between nodes (``nodes``)."""
    points: tuple[CollectivePoint, ...] = ()
    """Measured times to which the link was fitted."""
    largest_residual: float = 0.0
    """Largest relative difference between a point and the fitted link."""
    in_flight: tuple[Link, ...] = ()
    """Link that each collective sees when two, three, ... are in flight at once."""
    quantise: Nanoseconds = Nanoseconds(0)
    """Compute time of a rank per 10^6 bytes that it sends in INT8: to quantise, add and convert back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile(Config):
    """Measurements of one model on one machine."""

    schema: int = SCHEMA
    """Version of the file's schema."""
    machine: str
    """Processor, cores and operating system of the machine."""
    cores: int | None = None
    """Number of cores that the trainers shared; None if not recorded."""
    created: str
    """Date and time of the measurement, UTC."""
    foreign_cores: float | None = None
    """Mean number of cores that other programs used during the busiest leg; None if not measured."""
    tables: tuple[LayerTable, ...]
    """Layer tables, each with the key of its settings."""
    communication: Communication | None = None
    """Cost of communication; None if not measured."""
    threads: tuple[Threads, ...] = ()
    """Step times at several thread counts."""
    memory: Memory | None = None
    """Memory of one trainer."""
    flops: ModelFlops | None = None
    """FLOPs counted by an estimate; None if the step was measured."""
    sample_tokens: int | None = None
    """Number of tokens in a sample; None if the step was measured, or if samples are not text."""
    gradient_noise: GradientNoise | None = None
    """Gradient noise. None if it was not measured: with sparse gradients or mixed precision, if the loss
    diverged, or in profiles of older versions."""
    stragglers: StragglerFit | None = None
    """Fitted stragglers. If present, the tables hold times at X = 0, to be used with its entries. Otherwise
    the tables hold medians."""
    estimated: float | None = None
    """Half-width of the 90 % interval of times estimated from FLOPs and bytes, as a share; None if times were
    measured."""
    notes: tuple[str, ...] = ()
    """Sentences about the limits of the measurements, and about those that do not count."""

    @property
    def busy(self) -> str | None:
        """Warning about the machine's other load during the measurement; None if the machine was quiet."""
        if not is_busy(self.foreign_cores):
            return None
        return f"the profile was measured on a busy machine: other programs used {self.foreign_cores:.2g} cores"

    def short_of(self, experiment: Experiment) -> str | None:
        """Return a warning if layer times exclude delays but the experiment declares no stragglers, else None."""
        if self.stragglers is None or not self.stragglers.entries or experiment.cluster.stragglers:
            return None
        what = "the profile's layer times exclude stragglers' delays, but the experiment declares no stragglers"
        return f"{what}: simulated steps are too short; sim reads both from measured.toml, and without workload.profile times are means"

    @property
    def experiment_file(self) -> str:
        """Name of the file in the profile's folder that ``fleetbench sim`` reads."""
        return "measured.toml" if self.estimated is None else "estimated.toml"

    @property
    def compute(self) -> str:
        """Source of the layer times, in words."""
        if self.estimated is None:
            return "measured compute"
        return f"estimated compute (within {100 * self.estimated:.0f} % in 90 % of cases)"

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read ``profile.toml``."""
        text = read_text(path, "workload.profile names this file")
        data = read_toml(text, str(path), "take the profile again, by dropping workload.profile")
        if (schema := data.get("schema", SCHEMA)) != SCHEMA:  # before its keys, which another schema may name otherwise
            hint = "take the profile again: `fleetbench profile`, or drop workload.profile"
            raise ConfigError(f"this version reads schema {SCHEMA} of a profile", f"{path}: schema", repr(schema), hint)
        return decode(data, cls, str(path))

    def save(self, path: Path) -> None:
        """Write ``profile.toml``, whole or not at all."""
        write_whole(path, tomli_w.dumps(encode(self)))


def profile_of(experiment: Experiment) -> Profile | None:
    """Return the profile that the experiment names; None if it names none. An unchanged file is read once."""
    if (path := experiment.workload.profile) is None:
        return None
    file = Path(path).absolute()
    return _read(file, file.stat().st_mtime_ns) if file.is_file() else Profile.load(path)


@functools.lru_cache(maxsize=8)
def _read(path: Path, _changed_ns: int) -> Profile:
    return Profile.load(path)


def name_profile(experiment: Experiment, profile: Profile, path: Path) -> Experiment:
    """Save a profile to ``path``, and return the experiment with that path as ``workload.profile``."""
    profile.save(path)
    return experiment.replace(workload=dataclasses.replace(experiment.workload, profile=str(path)))


def compute_key(experiment: Experiment, strategy: DistributedStrategy | None = None, *, device: str | None = None) -> str:
    """Return a key of 16 hexadecimal digits over all settings that change compute, such as device, model and batch.

    The number of trainers per machine is one of them, because they share its cores. ``device`` is the device
    on which compute was measured; the default is the run's device, or the CPU for an emulated one.
    """
    strategy, workload, cluster, run = strategy or experiment.strategy, experiment.workload, experiment.cluster, experiment.run
    is_one_machine = run.launcher == "testbed" and run.device != EMULATED  # trainers that sleep share nothing
    what = {
        "device": device or _measured_on(experiment)[0],
        "trainers_per_machine": cluster.trainers if is_one_machine else cluster.trainers_per_node,
        "environment": {name: value for name, value in run.environment.items() if name.startswith(_COMPUTE_ENVIRONMENT)},
    }
    what |= {name: getattr(workload, name) for name in _COMPUTE_WORKLOAD}
    what |= {name: encode(getattr(strategy, name)) for name in COMPUTE_FIELDS}
    return json_digest(what)[:16]


@functools.lru_cache(maxsize=64)
def compute_part(strategy: DistributedStrategy) -> DistributedStrategy:
    """Return the strategy reduced to its compute fields: equal for strategies that share a layer table."""
    return DistributedStrategy(**{name: getattr(strategy, name) for name in COMPUTE_FIELDS})


def table_for(experiment: Experiment) -> LayerTable:
    """Return the experiment's layer table: the declared one, or the one of its profile with the right key.

    An emulated device uses times measured on a CPU or a CUDA device, without the slowdown by communication
    there. Raises ``ConfigError`` if the profile is missing or has no such table.
    """
    if experiment.workload.model == LAYERS:
        return declared_table(experiment.workload)
    profile = profile_of(experiment)
    if profile is None:
        hint = "the command line takes a short profile by itself; name a file here"
        raise ConfigError("the model's layer times are not known", "workload.profile", hint=hint)
    for device in _measured_on(experiment):
        key = compute_key(experiment, device=device)
        for table in profile.tables:
            if table.key == key:
                return _emulated(table) if experiment.run.device == EMULATED else as_used(table, experiment.strategy)
    workload, changed = experiment.workload, units.changes(compute_part(experiment.strategy).changes())
    place = f"{experiment.cluster.trainers_per_node} trainers a node on {experiment.run.device}"
    settings = f"{workload.model}, {workload.dtype}, batch {workload.batch_size}, {workload.optimizer}, {place}, {changed}"
    hint = "drop workload.profile, so that a short profile is taken"
    raise ConfigError(f"the profile holds no layer table of {settings}", "workload.profile", str(workload.profile), hint)


def _measured_on(experiment: Experiment) -> tuple[str, ...]:
    """Return the devices on which layer times may have been measured: both if the run is emulated."""
    return ("cpu", "cuda") if experiment.run.device == EMULATED else (experiment.run.device,)


def computes_locally(strategy: DistributedStrategy) -> bool:
    """Whether trainers compute several steps without waiting for others: Local SGD, adaptive K, GeoSGD."""
    is_geo = strategy.mode == "ps" and strategy.a_sync and strategy.a_sync_configs.k_steps > 1
    return is_geo or strategy.adaptive_localsgd or strategy.local_steps > 1


def as_used(table: LayerTable, strategy: DistributedStrategy) -> LayerTable:
    """Return the table with compute times of local steps if the strategy has them, else of synchronous ones."""
    if table.local_compute == 1.0:
        return table
    if not computes_locally(strategy):
        return dataclasses.replace(table, local_compute=1.0, resume=Nanoseconds(0))
    return dataclasses.replace(scaled(table, table.local_compute, table.local_compute), local_compute=1.0)


def _emulated(table: LayerTable) -> LayerTable:
    """Return ``table`` for trainers that sleep: collectives do not slow them, and cost no host time."""
    nothing = Nanoseconds(0)
    return dataclasses.replace(
        table,
        contention=0.0,
        collective_contention=0.0,
        host_per_collective=nothing,
        pack=nothing,
        local_update=None,
        local_compute=1.0,
        resume=nothing,
    )


def all_reduce_cost(experiment: Experiment, table: LayerTable) -> Cost:
    """Return T(S) of a ring all-reduce over all trainers; zero for one trainer.

    T(S) is the sum of the latencies of the 2 (P - 1) hops that a chunk passes, plus 2 ((P - 1) / P) S over the
    bandwidth of the slower of the two links. Both executors plan ``fusion = "merged_gradient"`` by this rule, whatever
    ``cluster.collective`` is. For ``"optimal"``, the result also has the lines of the ring's message chains,
    the longest of which is the time of a simulated ring (``plan.longest_chain``), the mean factor by which
    declared stragglers delay the slowest trainer, and how collectives and compute slow each other down
    according to ``table``.

    ``node_overrides``, racks, sites, loss and shared interfaces are ignored. Raises ``ConfigError`` for a link that
    trainers use and that is neither declared nor measured.
    """
    cluster = experiment.cluster
    if cluster.trainers == 1:
        return Cost(latency_ns=0.0, ns_per_byte=0.0)
    intra, inter = links_for(experiment)
    between = 1 if cluster.nodes > 1 else 0
    nodes = [[intra] * (count - between) + [inter] * between for count in cluster.trainers_by_node]
    hops = [link for node in nodes for link in node if link is not None]  # no link that is used is None
    latencies = [link.latency for link in hops]
    left_out = min(map(sum, pairwise([*latencies, latencies[0]])))  # a chunk passes every hop twice, except two adjacent ones, once
    rates = [min(link.bandwidth, link.flow_limit or link.bandwidth) for link in hops]
    steps = 2 * (cluster.trainers - 1)
    chains: tuple[Pace, ...] = ()
    slowest, disturbances = 1.0, dict[str, float]()
    if experiment.strategy.fusion == "optimal":
        slowest = _slowest(experiment)
        paces = [Pace(latency, Fraction(8 * 10**9, cluster.trainers * rate)) for latency, rate in zip(latencies, rates, strict=True)]
        chains = envelope(around_ring(steps, paces))
        disturbances = {
            "start_ns": float(table.host_per_collective),
            "compute_slowdown": table.contention,
            "own_slowdown": table.collective_contention,
        }
    return Cost(
        latency_ns=float(2 * sum(latencies) - left_out),
        ns_per_byte=steps * 8e9 / (cluster.trainers * min(rates)),
        lines=tuple((float(chain.latency_ns), float(chain.ns_per_byte)) for chain in chains),
        slowest=slowest,
        **disturbances,
    )


def _slowest(experiment: Experiment) -> float:
    """Return the factor on the slowest trainer's compute, on average over the first counted steps."""
    from fleetbench.stragglers import ONE, draws

    cluster = experiment.cluster
    steps = min(experiment.workload.steps, _PLANNED_STEPS)
    x = draws(cluster.stragglers, experiment.run.seed, cluster.trainers, cluster.node_by_rank, 1, steps)
    slowdowns = [cluster.slowdown(node) for node in cluster.node_by_rank]
    return float(((1 + (x.T / ONE)) * slowdowns).max(axis=1).mean())


def communication_of(experiment: Experiment) -> Communication | None:
    """Return the measured costs of communication from the experiment's profile; None without a profile."""
    profile = profile_of(experiment)
    return None if profile is None else profile.communication


def links_for(experiment: Experiment) -> tuple[Link | None, Link | None]:
    """Return the links inside and between nodes at payload rates: as declared, or else as measured.

    A profile has only the link over which it was measured, inside a node or between nodes. A link that no
    trainer uses may be None. Raises ``ConfigError`` for a link that is used and unknown.
    """
    cluster = experiment.cluster
    measured = communication_of(experiment)
    known = {} if measured is None else {measured.between: measured.link}
    intra = _carried(experiment, cluster.intra, known.get("trainers"), between_nodes=False)
    inter = _carried(experiment, cluster.inter, known.get("nodes"), between_nodes=True)
    for link, used, name in ((intra, max(cluster.trainers_by_node) > 1, "intra"), (inter, cluster.nodes > 1, "inter")):
        if used and link is None:
            hint = f'add {name} = {{ bandwidth = "25 Gbit/s", latency = "20 us" }}'
            raise ConfigError("trainers use this link, and it is neither declared nor measured", f"cluster.{name}", hint=hint)
    return intra, inter


def _carried(experiment: Experiment, declared: Link | None, measured: Link | None, *, between_nodes: bool) -> Link | None:
    """Return the link at its payload rate.

    A declared link that equals the measured one was copied from it, so headers are already subtracted.
    """
    if declared is None or declared == measured:
        return measured
    return declared.carried(experiment.transport, between_nodes=between_nodes)
