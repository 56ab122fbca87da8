"""Model of a calibration: simulated seconds of every cell for values of an experiment's declared quantities."""

from __future__ import annotations

import copy
import dataclasses
import functools
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fleetbench.cluster import Cluster
from fleetbench.config import Config, encode, field_types
from fleetbench.cores import on_cores
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment, apply_override
from fleetbench.plan.layers import LayerTable
from fleetbench.profile import Profile, profile_of, table_for
from fleetbench.quantities import BitsPerSecond, Nanoseconds
from fleetbench.stragglers import Floats
from fleetbench.workload import LAYERS
from sim.many.objective import StepTime, table_key
from sim.network.links import Links
from sim.network.routes import way
from sim.scenario import Scenario
from tuner.calibrate.cells import GLOBAL_BATCH, GPUS, Cell
from tuner.simulated.assumptions import scaled

COMPUTE = "compute"
"""Key of the parameter that scales all times of the layer table: forward, backward, update."""
RATES = ("bandwidth", "flow_limit")
"""Last parts of the keys of rates. Times grow with the reciprocals of these parameters."""
_LARGEST = 2.0**62
"""Largest value of a parameter in bit/s or ns."""
_DRAWN_STEPS = 48
"""Approximate number of steps to simulate if stragglers make them differ. Without stragglers, two periods of the
strategy are enough."""

Settings = tuple[tuple[str, str], ...]
"""Settings of a cell, as pairs of key and value."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """Fitted parameter: a declared quantity times a factor."""

    key: str
    declared: float
    unit: str
    """Unit of the values: ``bit/s``, ``ns``, or empty for none."""

    @classmethod
    def of(cls, experiment: Experiment, key: str) -> Parameter:
        """Return a key's parameter. Raises ``ConfigError`` if it names no declared quantity above zero."""
        if key == COMPUTE:
            return cls(key, 1.0, "")
        value: Any = experiment
        hint: Any = None
        for part in key.split("."):
            known = field_types(type(value)) if isinstance(value, Config) else {}  # type: ignore[arg-type]  # classes are hashable
            hint, value = known.get(part), getattr(value, part, None)
        kinds = {option for option in (hint, *typing.get_args(hint)) if option in (Nanoseconds, BitsPerSecond, float)}
        if not kinds:
            mend = f'a bandwidth, a duration or a number, such as cluster.inter.latency; or "{COMPUTE}"'
            raise ConfigError("is no quantity of the experiment", "--fit", repr(key), mend)
        if not value or value < 0:
            raise ConfigError("has no declared value above zero to start from", "--fit", repr(key), f"declare it: --set {key}=...")
        return cls(key, float(value), "bit/s" if BitsPerSecond in kinds else "ns" if Nanoseconds in kinds else "")

    def value(self, log: float) -> float:
        """Return the declared value times e^``log``, rounded to a whole number of bit/s or ns."""
        value = self.declared * float(np.exp(log))
        return min(max(1.0, float(round(value))), _LARGEST) if self.unit else value

    def applied(self, experiment: Experiment, value: float) -> Experiment:
        """Return the experiment with this value; unchanged if the parameter is ``COMPUTE``."""
        if self.key == COMPUTE:
            return experiment
        changed: Experiment = _with(experiment, self.key.split("."), int(value) if self.unit else value)
        return changed


def _with(config: Any, parts: Sequence[str], value: float) -> Any:
    first, *rest = parts
    return dataclasses.replace(config, **{first: _with(getattr(config, first), rest, value) if rest else value})


@dataclass(frozen=True, slots=True)
class _Simulated:
    """A cell in the form that the simulator needs."""

    experiment: Experiment
    table: LayerTable | None
    """Layer table; None for a bare all-reduce."""
    nbytes: int | None
    measured_s: float


class Model:
    """Simulated seconds of cells. Raises ``ConfigError`` for a cell that the simulator refuses."""

    def __init__(self, experiment: Experiment, cells: Sequence[Cell], keys: Sequence[str]) -> None:
        self.parameters = tuple(Parameter.of(experiment, key) for key in keys)
        self._has_table_keys = any(not key.startswith("cluster.") and key != COMPUTE for key in keys)
        data = encode(experiment)
        settled = functools.cache(lambda settings: _settled(experiment, data, settings))
        table_of = functools.cache(lambda settings: Scenario.of(settled(settings)).table)
        self._cells = [_simulated(settled, table_of, cell, keys) for cell in cells]
        self.measured_s = np.array([cell.measured_s for cell in self._cells])

    def seconds(self, values: Sequence[float], only: Sequence[int] | None = None) -> Floats:
        """Return the seconds of all cells, or of those with indices ``only``, for values of the parameters."""
        indices = range(len(self._cells)) if only is None else only
        return np.array([self._seconds(self._cells[index], values) for index in indices])

    def _seconds(self, cell: _Simulated, values: Sequence[float]) -> float:
        experiment, strategy = self._applied(cell.experiment, values), cell.experiment.strategy
        if cell.nbytes is not None:
            cost = way("all_reduce", range(experiment.cluster.trainers), Links.of(experiment)).route(cell.nbytes).cost
            return float(cost.latency_ns + cost.transfer_ns) * 1e-9
        table = cell.table
        if self._has_table_keys:
            table = on_cores(experiment, table_for(experiment))
        step_s = StepTime(experiment)
        step_s.tables[table_key(strategy)] = _scaled(table, self._factor(values))
        return step_s(strategy)

    def _applied(self, experiment: Experiment, values: Sequence[float]) -> Experiment:
        for parameter, value in zip(self.parameters, values, strict=True):
            experiment = parameter.applied(experiment, value)
        return experiment

    def calibrated(self, experiment: Experiment, values: Sequence[float]) -> tuple[Experiment, Profile | None]:
        """Return the experiment with these values, and its profile, or None if that did not change."""
        experiment = self._applied(experiment, values)
        factor = self._factor(values)
        if factor == 1.0:
            return experiment, None
        if experiment.workload.model == LAYERS:
            return experiment.replace(workload=scaled(experiment.workload, COMPUTE, factor)), None
        profile = profile_of(experiment)
        assert profile is not None, "a table was found in it"
        return experiment, scaled(profile, COMPUTE, factor)

    def _factor(self, values: Sequence[float]) -> float:
        """Return the factor on compute; 1 if it is not fitted."""
        return next((value for parameter, value in zip(self.parameters, values, strict=True) if parameter.key == COMPUTE), 1.0)


@functools.lru_cache(maxsize=64)
def _scaled(table: LayerTable, factor: float) -> LayerTable:
    return scaled(table, COMPUTE, factor)


def _simulated(
    settled: Callable[[Settings], Experiment], table_of: Callable[[Settings], LayerTable], cell: Cell, keys: Sequence[str]
) -> _Simulated:
    """Raises ``ConfigError`` for a cell that contradicts ``keys`` or the experiment."""
    settings = tuple(cell.settings.items())
    for key, _ in settings:
        if key in keys:
            raise ConfigError("is a column of the cells, and to be fitted", "--fit", repr(key), "drop the column, or do not fit it")
    try:
        own, table = settled(settings), None if cell.all_reduce_bytes is not None else table_of(settings)
    except ConfigError as error:
        raise ConfigError(error.what, f"{cell.where}{f', {error.where}' if error.where else ''}", error.value, error.hint) from None
    cluster = own.cluster
    if cell.ranks not in (None, cluster.trainers):
        hint = "set cluster.nodes and cluster.trainers_per_node to the run's, with nccl-tests built with MPI"
        raise ConfigError(f"is of {cell.ranks} ranks, and the experiment has {cluster.trainers}", cell.where, hint=hint)
    if cell.all_reduce_bytes is not None and cluster.trainers == 1:
        raise ConfigError("an all-reduce needs two trainers", cell.where, hint="set cluster.nodes and cluster.trainers_per_node")
    measured_s = cell.seconds if cell.samples_per_s is None else cluster.trainers * own.workload.batch_size / cell.samples_per_s
    assert measured_s is not None, "a cell measured something"
    return _Simulated(own, table, cell.all_reduce_bytes, measured_s)


def of_gpus(cluster: Cluster, gpus: str, *, has_nodes: bool) -> Cluster:
    """Return the cluster with ``gpus`` trainers: on one node if they fit there, else on whole nodes."""
    number, per_node = int(gpus) if gpus.isdecimal() else 0, cluster.trainers_per_node
    nodes = cluster.nodes if has_nodes else max(1, number // per_node)
    if number >= 1 and nodes == 1 and (has_nodes or number <= per_node):
        return dataclasses.replace(cluster, nodes=1, trainers_per_node=number)
    if number != nodes * per_node:
        hint = f"set cluster.trainers_per_node (now {per_node}); name a column of each node's GPUs gpus_per_node"
        raise ConfigError("must be the GPUs of all nodes together", GPUS, repr(gpus), hint)
    return dataclasses.replace(cluster, nodes=nodes)


def _settled(experiment: Experiment, data: Mapping[str, Any], settings: Settings) -> Experiment:
    """Return the experiment with a cell's settings, with only as many steps as the step time needs."""
    changed = copy.deepcopy(dict(data))
    of_file = dict(settings)
    if GLOBAL_BATCH in of_file:
        hint = "write local_batch, the samples of one trainer"
        raise ConfigError("is not taken by --fit", GLOBAL_BATCH, str(of_file[GLOBAL_BATCH]), hint)
    gpus = of_file.pop(GPUS, None)
    for key, value in of_file.items():
        apply_override(changed, f"{key}={value}")
    own = Experiment.from_dict(changed) if settings else experiment
    if gpus is not None:
        own = own.replace(cluster=of_gpus(own.cluster, gpus, has_nodes="cluster.nodes" in of_file))
    strategy, workload = own.strategy, own.workload
    if strategy.mode == "ps":
        hint = "drop rows of parameter servers, and simulate them with the links that the other rows give"
        raise ConfigError("cannot be fitted: calibration is for collective training", "strategy.mode", "'ps'", hint)
    if strategy.adaptive_localsgd:  # its period changes during training
        return own
    merged = strategy.gradient_merge_configs.k_steps if strategy.gradient_merge else 1
    period = merged * (strategy.localsgd_configs.k_steps if strategy.localsgd else 1)
    steps = period * max(2, -(-_DRAWN_STEPS // period) if own.cluster.stragglers else 0)
    return own.replace(workload=dataclasses.replace(workload, steps=min(workload.steps, steps), target_loss=None))
