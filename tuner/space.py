"""Space: which strategies the search may try.

A point is a value for each of the parameters in ``NAMES``; the experiment's own strategy with these values is a
candidate. A parameter with one admissible value is fixed. A parameter without any stays as in the experiment's
strategy. ``Space.notes`` lists what is left out.

Parameters belong to three families. *Same arithmetic*: fusion, hierarchy, communicators, update by bucket and
threads only affect the clock. *Rounded*: a 16-bit wire changes the last digits of sums. *Other training*:
local steps change what is learnt. The second needs ``tune.allow`` or a target, the third a target.

Two strategies that a simulation cannot distinguish are equivalent, and simulated once.
"""

import dataclasses
import functools
import hashlib
import itertools
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment, Tune
from fleetbench.fields import CALLED, PARAMETERS, SEARCHES, tables_of
from fleetbench.knobs import Need
from fleetbench.plan.build import Setting, build_plan
from fleetbench.plan.combination import Combination
from fleetbench.plan.groups import queue_depth
from fleetbench.plan.layers import LayerTable
from fleetbench.profile import COMPUTE_FIELDS, all_reduce_cost, compute_key, computes_locally, table_for
from fleetbench.quantities import counted
from fleetbench.strategy import DistributedStrategy
from fleetbench.workload import LAYERS
from sim.scenario import setting_of
from tuner.notes import Note, left_out

Value = int | float | str
Parameters = dict[str, Value]

NAMES = tuple(dict.fromkeys(PARAMETERS[one.name] for one in dataclasses.fields(Tune) if one.name in SEARCHES))
"""Names of the parameters. Values of ``fusion`` are sizes of ``tune.fuse_grad_size_in_MB`` and rules of
``tune.fusion``; other parameters are named as in ``[tune]``."""
OFF = "off"
MOST_UNFUSED = 64
"""Largest number of gradients for which an all-reduce per gradient is tried."""
_SWITCHES = {"local_steps": "localsgd", "hierarchy": "use_hierarchical_allreduce"}
"""Strategy field that the value 1 or ``off`` of a parameter switches off, by parameter."""
_WAYS = tables_of("virtual way") + tables_of("servers way")
"""Strategy fields that change how virtual trainers, or servers, train."""


@dataclass(frozen=True, slots=True)
class Space:
    """Search space: ``base`` with every combination of the values in ``choices``."""

    base: DistributedStrategy
    """Experiment's own strategy."""
    choices: tuple[tuple[str, tuple[Value, ...]], ...]
    """Names and values of the parameters with at least two values."""
    fixed: tuple[tuple[str, Value], ...] = ()
    """Names and values of the parameters with one value."""
    notes: tuple[Note, ...] = ()
    """Notes about parameters and values that are not searched, with reasons."""

    @property
    def size(self) -> int:
        """Number of combinations of ``choices``; ``points`` leaves out invalid and equal ones."""
        return math.prod(len(values) for _, values in self.choices)

    def points(self) -> Iterator[Parameters]:
        """Yield every valid point, as values of ``choices``, the last parameter varying fastest.

        Each strategy is yielded once.
        """
        names = [name for name, _ in self.choices]
        for values in itertools.product(*(values for _, values in self.choices)):
            point = dict(zip(names, values, strict=True))
            try:
                found = self.point_of(self.strategy(point))
            except ConfigError:  # values that exclude each other
                continue
            if found == point:  # they differ for sync_nccl_allreduce = true with several communicators, which never wait
                yield point

    def strategy(self, point: Mapping[str, Value]) -> DistributedStrategy:
        """Return the candidate at ``point``, which has a value for each of ``choices``.

        Raises ``ConfigError`` if values exclude each other.
        """
        strategy, values = self.base, {**dict(self.fixed), **point}
        for name in NAMES:  # the number of communicators comes before whether they wait
            if name in values:
                strategy = _with(strategy, name, values[name])
        return strategy

    def point_of(self, strategy: DistributedStrategy) -> Parameters | None:
        """Return the point whose candidate is ``strategy``; None if the strategy is outside the space."""
        found = parameters_of(strategy)
        point = {name: found[name] for name, _ in self.choices}
        inside = all(point[name] in values for name, values in self.choices)
        return point if inside and self.strategy(point) == strategy else None


def parameters_of(strategy: DistributedStrategy) -> Parameters:
    """Return the value of each parameter in a strategy, by name."""
    fusion: Value = strategy.fuse_grad_size_in_MB if strategy.fusion in ("fleet", "ddp") else strategy.fusion
    composed: Parameters = {
        "local_steps": strategy.local_steps,
        "fusion": fusion if strategy.fuse_all_reduce_ops else OFF,
        "hierarchy": strategy.hierarchical_variant if strategy.use_hierarchical_allreduce else OFF,
        "wire": "fp16" if strategy.fp16_allreduce else "bf16" if strategy.bf16_allreduce else "fp32",
        "update_by_bucket": not strategy.build_strategy.enable_backward_optimizer_op_deps,
    }
    return {name: composed[name] if name in composed else attrgetter(SEARCHES[name][0])(strategy) for name in NAMES}


def way_of(strategy: DistributedStrategy) -> tuple[object, ...]:
    """Return the fields of a strategy that change training, except for rounding on the wire."""
    return tuple(getattr(strategy, name) for name in _WAYS)


def learns_as(strategy: DistributedStrategy) -> tuple[object, ...]:
    """Return the fields of a strategy that change training, including its wire."""
    return *way_of(strategy), parameters_of(strategy)["wire"]


def name_of(strategy: DistributedStrategy) -> str:
    """Describe a strategy's way of training in words."""
    at = f" at {strategy.lr_scale:g} times the learning rate" if strategy.lr_scale != 1 else ""
    if strategy.mode == "ps":
        return _mode(strategy) + at
    local, merge, adaptive = strategy.localsgd_configs, strategy.gradient_merge_configs, strategy.adaptive_localsgd_configs
    begins = f" from step {local.begin_step}" if local.begin_step > 1 else ""
    fixed = f"K = {local.k_steps}{begins}" if strategy.localsgd else "synchronous"
    outer = "an outer optimizer" if strategy.localsgd and local.has_outer else ""
    if outer and (local.outer_lr, local.outer_momentum) != (0.7, 0.9):  # DiLoCo's
        outer += f" of rate {local.outer_lr:g} and momentum {local.outer_momentum:g}"
    words = [
        f"adaptive K from {adaptive.init_k_steps} ({adaptive.variant})" if strategy.adaptive_localsgd else fixed,
        f"{merge.k_steps} micro-batches an update" if strategy.gradient_merge else "",
        outer,
        f"{local.fragments} fragments" if local.fragments > 1 else "",
        f"exchanges beside {counted(local.overlap_steps, 'step')}" if local.overlap_steps else "",
    ]
    return " and ".join(filter(None, words)) + at


def _mode(strategy: DistributedStrategy) -> str:
    """Describe a strategy's mode of parameter servers in words."""
    configs = strategy.a_sync_configs
    if not strategy.a_sync:
        return "synchronous servers"
    if configs.k_steps < 0:
        return "servers in the mode that Fleet chooses"
    several = f", sums of {configs.max_merge_var_num} gradients" if configs.max_merge_var_num > 1 else ""
    return f"GeoSGD with K = {configs.k_steps}" if configs.k_steps else f"asynchronous servers{several}"


def search_space(experiment: Experiment) -> Space:
    """Return the space that ``[tune]`` describes, without values that the experiment rules out."""
    choices: list[tuple[str, tuple[Value, ...]]] = []
    fixed: list[tuple[str, Value]] = []
    notes: list[Note] = []
    needed = needs(experiment)
    is_alone = experiment.cluster.trainers == 1 and not experiment.cluster.servers
    if is_alone:
        notes.append(left_out("what changes exchanges", "is not searched", "one trainer exchanges nothing"))
    for name in filter(_computes, NAMES) if is_alone else NAMES:
        wanted = experiment.tune.values(name)
        stays = parameters_of(experiment.strategy)[name]
        has, reason = needed[SEARCHES[name][1].need]
        if not has:
            if wanted != (stays,):
                notes.append(left_out(_key(name, stays), f"stays {_text(stays)}", reason))
            continue
        refused = {value: _refusal(experiment, name, value) for value in wanted}
        notes += [left_out(f"{_key(name, value)} = {_text(value)}", "is not searched", why) for value, why in refused.items() if why]
        values = tuple(value for value in wanted if refused[value] is None)
        if len(values) == 1:
            fixed.append((name, values[0]))
        elif values:
            choices.append((name, values))
    return Space(base=experiment.strategy, choices=tuple(choices), fixed=tuple(fixed), notes=tuple(notes))


def needs(experiment: Experiment) -> Mapping[Need, tuple[bool, str]]:
    """Return whether an experiment meets each ``Need`` of a searched field, and why the field needs it."""
    cluster, run, tune, has_target = experiment.cluster, experiment.run, experiment.tune, experiment.workload.target_loss is not None
    nodes = min(cluster.nodes, cluster.trainers_per_node) > 1 and cluster.is_even
    waiting = min(tune.values("nccl_comm_num")) == 1 and queue_depth(run.backend) > 1
    return {
        "": (True, ""),
        "target": (has_target, "more of it is always faster, and without workload.target_loss nothing prices what that costs in loss"),
        "rounding": (
            has_target or "wire16" in tune.allow,
            'a 16-bit wire rounds gradients: tune.allow = ["wire16"] or workload.target_loss has it searched',
        ),
        "nodes": (nodes, "it needs several nodes with as many trainers each, two at least"),
        "loop": (
            run.launcher != "command",
            "a script may read its gradients between backward and optimizer.step(), when they have been used already",
        ),
        "waiting": (
            waiting,
            "several communicators never wait for each other, and one of NCCL carries one collective at a time anyway",
        ),
        "model": (experiment.workload.model != LAYERS, "a declared table of layers does not depend on it"),
    }


def _computes(name: str) -> bool:
    """Whether a parameter changes compute, so that its effect is in the layer table."""
    return SEARCHES[name][0].partition(".")[0] in COMPUTE_FIELDS


def _refusal(experiment: Experiment, name: str, value: Value) -> str | None:
    """Return why a value cannot be tried with everything else as in the experiment; None if it can."""
    if name == "thread_num" and experiment.run.device == "cpu" and value not in (1, experiment.strategy.thread_num):
        trainers, cores = experiment.cluster.trainers_per_node, os.cpu_count() or 1
        if (
            isinstance(value, int) and trainers * value > cores
        ):  # alone they seem faster, but next to gloo's own threads they block each other
            return f"{trainers} trainers of this machine would use more threads than its {cores} cores"
    if name == "fusion" and value == OFF and experiment.strategy.fuse_all_reduce_ops:
        gradients = len(table_for(experiment).by_readiness())
        if gradients > MOST_UNFUSED:
            return f"an all-reduce for each of {gradients} gradients costs its start so often, which no simulated network tells"
    try:
        candidate = experiment.replace(strategy=_with(experiment.strategy, name, value))
        if _computes(name):
            table_for(candidate)
    except ConfigError as error:
        return error.what
    return None


_SIZED = {"fleet": ("fuse_grad_count",), "ddp": ("fusion",)}
"""Fields that a strategy keeps when its bucket size changes, by its rule of fusion."""


@functools.lru_cache(maxsize=4096, typed=True)  # candidates share most intermediate strategies, and making one checks every field
def _with(strategy: DistributedStrategy, name: str, value: Value) -> DistributedStrategy:
    if parameters_of(strategy)[name] == value and name != "local_steps":
        return strategy
    if name in _SWITCHES and value in (1, OFF):
        return strategy.without(_SWITCHES[name])
    base = strategy.without(*CALLED["fusion"]) if name == "fusion" else strategy
    return base.replace(**_changes(strategy, name, value))


def _changes(strategy: DistributedStrategy, name: str, value: Any) -> dict[str, Any]:
    """Return the changes of a strategy's fields that give a parameter this value."""
    *tables, key = SEARCHES[name][0].split(".")
    changes: dict[str, Any] = {tables[0]: {key: value}} if tables else {key: value}
    match name:
        case "local_steps":
            changes["localsgd"] = True
        case "fusion" if isinstance(value, str):
            changes = {"fuse_all_reduce_ops": False} if value == OFF else {"fusion": value}
        case "fusion":
            changes = {"fuse_grad_size_in_MB": value, **{kept: getattr(strategy, kept) for kept in _SIZED.get(strategy.fusion, ())}}
        case "hierarchy":
            changes = {"use_hierarchical_allreduce": True, "hierarchical_variant": value}
        case "wire":
            changes = {"fp16_allreduce": value == "fp16", "bf16_allreduce": value == "bf16"}
        case "nccl_comm_num":  # communicators that wait for each other change nothing, so more than one implies no waiting
            alone = strategy.sync_nccl_allreduce or strategy.nccl_comm_num > 1
            changes["sync_nccl_allreduce"] = value == 1 and alone
        case "sync_nccl_allreduce":
            changes = {key: bool(value) and strategy.nccl_comm_num == 1}
        case "update_by_bucket":
            changes = {tables[0]: {key: not value}}
    return changes


def _key(name: str, value: Value) -> str:
    """Return the key of the experiment file that lists such values of a parameter."""
    return f"tune.{'fuse_grad_size_in_MB' if name == 'fusion' and not isinstance(value, str) else name}"


def _text(value: Value) -> str:
    """Format a value as in an experiment file."""
    if isinstance(value, str):
        return f'"{value}"'
    return str(value).lower() if isinstance(value, bool) else f"{value:g}"


@dataclass(slots=True)
class Equivalence:
    """Computes keys of an experiment's strategies, equal if they simulate alike; caches tables and digests."""

    experiment: Experiment
    _tables: dict[tuple[str, bool], LayerTable] = field(default_factory=dict)
    _digests: dict[tuple[DistributedStrategy, str], str] = field(default_factory=dict)
    _settings: dict[tuple[bool, str], Setting] = field(default_factory=dict)

    def key(self, strategy: DistributedStrategy) -> str:
        """Return a key of plan, decisions between steps and layer table: equal keys mean equal simulated runs."""
        table = self._table(strategy)
        decided = dataclasses.replace(Combination.of(strategy), fuses_update=False)  # the layer table has the time of the fused update
        return f"{self._digest(strategy, table)} {decided} {table.key} {strategy.fetch_every_n_steps}"

    def _table(self, strategy: DistributedStrategy) -> LayerTable:
        key = compute_key(self.experiment, strategy), computes_locally(strategy)
        if key not in self._tables:
            self._tables[key] = table_for(self.experiment.replace(strategy=strategy))
        return self._tables[key]

    def _setting(self, strategy: DistributedStrategy, table: LayerTable) -> Setting:
        """Return the setting of a strategy's plan. Of the strategy, only ``fusion = "optimal"`` changes it, by its cost."""
        key = strategy.fusion == "optimal", table.key
        if key not in self._settings:
            cost = all_reduce_cost(self.experiment.replace(strategy=strategy), table)
            self._settings[key] = dataclasses.replace(setting_of(self.experiment, table), cost=cost)
        return self._settings[key]

    def _digest(self, strategy: DistributedStrategy, table: LayerTable) -> str:
        # A plan depends on the gradients and their order, not on how often it is carried out.
        rounds = strategy.localsgd_configs.has_fragments or strategy.quantises
        planned = strategy.without("thread_num", *["localsgd"][rounds:])
        if (planned, table.key) not in self._digests:
            plan = build_plan(planned, table.by_readiness(), self._setting(planned, table))
            self._digests[planned, table.key] = hashlib.sha256(repr(plan).encode()).hexdigest()[:16]  # faster than the plan's own digest
        return self._digests[planned, table.key]
