"""Supported settings of the real executor, on a device that computes and on an emulated one.

Every other setting is refused by name.
"""

import dataclasses

from fleetbench.declared import LOSSES, UNFOLLOWED, refuse_undeclared
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.plan.servers.rules import refuse_unserved
from fleetbench.plan.sharding import degree_of
from fleetbench.plan.training import PLANNED
from fleetbench.profile import COMPUTE_ONLY, EMULATED
from fleetbench.result import skip, skipped_by_layers
from fleetbench.strategy import DistributedStrategy
from fleetbench.support import RUN, WORKLOAD, refuse_unexecuted
from fleetbench.workload import LAYERS

WHO = "an emulated device"


def is_emulated(experiment: Experiment) -> bool:
    """Whether the experiment's trainers sleep instead of computing."""
    return experiment.run.device == EMULATED


def refuse_unemulated(experiment: Experiment, strategy: DistributedStrategy) -> None:
    """Raise ``ConfigError`` for the first setting that needs real data, losses or gradients."""
    workload = experiment.workload
    if workload.target_loss is not None and workload.loss_curve is None:
        hint = 'drop it, or declare workload.loss_curve = { start = 2.3, floor = 0.2, half_life = "150 steps" }'
        raise ConfigError(f"{WHO} trains nothing that could reach it", "workload.target_loss", repr(workload.target_loss), hint)
    refuse_undeclared(experiment, strategy, WHO)
    if strategy.scales_loss:
        hint = 'set amp_configs.dtype = "bf16", which scales nothing, or drop amp; fp16_allreduce and bf16_allreduce are executed'
        raise ConfigError(f"scales losses, and {WHO} has none whose gradients could overflow", "strategy.amp", "true", hint)


def with_compute(experiment: Experiment) -> Experiment:
    """Return the experiment, moved to this machine's CPU if its device is emulated, to measure layer times."""
    if not is_emulated(experiment):
        return experiment
    return experiment.replace(
        run=dataclasses.replace(experiment.run, device="cpu", launcher="local"),
        workload=dataclasses.replace(experiment.workload, target_loss=None, loss_curve=None),
    )


def executed_part(strategy: DistributedStrategy) -> DistributedStrategy:
    """Return the strategy without settings that only change compute.

    On an emulated device, which has no compute, their effect is in the layer table.
    """
    kept = () if strategy.sharding_configs.param_dtype == "own" else ("strategy.amp",)  # the type needs it
    return strategy.without(*(name for name in COMPUTE_ONLY if not name.startswith(kept)))


def not_emulated(experiment: Experiment, strategy: DistributedStrategy) -> list[dict[str, str]]:
    """Return an entry of ``skipped`` for each setting that an emulated run does not follow."""
    found = []
    workload = experiment.workload
    if workload.target_loss is not None and strategy.mode == "ps":
        found.append(skip("workload.target_loss", UNFOLLOWED))
    elif workload.target_loss is not None and workload.loss_curve is None:
        found.append(skip("workload.target_loss", "no workload.loss_curve is declared: final_loss and time_to_target_s are null"))
    if workload.model == LAYERS and workload.host is not None and (workload.host.per_collective or workload.host.pack):
        found.append(skip("workload.host", "starting collectives and packing take the time of this machine"))
    return found + skipped_by_layers(workload, strategy)


_EXECUTOR = "the real executor"
_UNREALISED = "intra inter racks sites nics_per_node cores_per_node collective measured host_bandwidth gpu"
UNREALISED = tuple(_UNREALISED.split())
"""Fields of a cluster that one machine cannot realise; a run lists them in ``skipped``."""
_SERVERS = frozenset({"cluster.servers", "cluster.server_placement"})
_CLUSTER = frozenset(f"cluster.{name}" for name in ("nodes", "trainers_per_node", "stragglers", "churn", *UNREALISED))


_SHARDED_FIELDS = """
sharding sharding_configs.stage sharding_configs.sharding_degree sharding_configs.reshard_after_forward
sharding_configs.param_dtype sharding_configs.blocks fp16_allreduce bf16_allreduce lr_scale sync_batch_norm thread_num broadcast_buffers
gradient_merge gradient_merge_configs.k_steps gradient_merge_configs.avg gradient_merge_configs.lr_per
amp amp_configs.dtype amp_configs.init_loss_scaling amp_configs.incr_every_n_steps amp_configs.incr_ratio
amp_configs.decr_every_n_nan_or_inf amp_configs.decr_ratio amp_configs.use_dynamic_loss_scaling
localsgd localsgd_configs.schedule localsgd_configs.k_steps localsgd_configs.begin_step localsgd_configs.warmup_epochs
localsgd_configs.warmup localsgd_configs.outer_lr localsgd_configs.outer_momentum localsgd_configs.outer_nesterov
recompute recompute_configs.checkpoints build_strategy.fuse_all_optimizer_ops fetch_every_n_steps
cudnn_exhaustive_search conv_workspace_size_limit fraction_of_gpu_memory_to_use
"""
_SHARDED = frozenset(f"strategy.{name}" for name in _SHARDED_FIELDS.split())
"""Fields that a sharded training executes; every other one is refused by name if it is changed."""


def refuse_unshardable_strategy(strategy: DistributedStrategy, trainers: int) -> None:
    """Raise ``ConfigError`` for a strategy that a sharded training of this many trainers cannot execute."""
    hint = "leave it at its default, or leave sharding out"
    refuse_unexecuted(strategy, "strategy", _SHARDED, "a sharded training", hint)
    degree, configs = degree_of(strategy.sharding_configs, trainers), strategy.sharding_configs
    half = next((name for name in ("fp16_allreduce", "bf16_allreduce") if getattr(strategy, name)), None)
    if half and strategy.gradient_merge_configs.k_steps > 1 and (configs.stage == 1 or degree < trainers):
        why = "would add up the gradients of several micro-batches in 16 bits, which loses most of them"
        hint = "leave the 16-bit wire or gradient_merge out; or set stage = 2 or 3 and sharding_degree = 0"
        raise ConfigError(why, f"strategy.{half}", "true", hint)


def refuse_elastic(strategy: DistributedStrategy) -> None:
    """Raise ``ConfigError`` for elastic local steps where trainers are always the same."""
    if strategy.is_elastic:
        what = "is executed in scripts with fleet's four lines: what is measured here has the same trainers throughout"
        hint = "leave it out, which is the same training undisturbed; or fleetbench launch --nproc N --restarts R SCRIPT"
        raise ConfigError(what, "strategy.localsgd_configs.elastic", "true", hint)


def refuse_unsupported(experiment: Experiment, strategy: DistributedStrategy) -> None:
    """Raise ``ConfigError`` for the first setting that real runs do not support."""
    if experiment.run.launcher == "command":
        hint = "fleetbench sim simulates its profile, fleetbench tune -- COMMAND measures it"
        raise ConfigError("is a user's script, which only its own command trains", "workload.model", repr(experiment.workload.model), hint)
    served = strategy.mode == "ps"
    refuse_elastic(strategy)
    if served:
        refuse_unserved(strategy)
    else:
        refuse_unexecuted(strategy, "strategy", PLANNED, _EXECUTOR)
        if strategy.sharding:
            refuse_unshardable_strategy(strategy, experiment.cluster.trainers)
    refuse_unexecuted(experiment.run, "run", RUN, _EXECUTOR)
    on_testbed = experiment.run.launcher == "testbed"
    cluster = _CLUSTER | ({"cluster.node_overrides"} if on_testbed else set()) | (_SERVERS if served else set())
    refuse_unexecuted(experiment.cluster, "cluster", cluster, _EXECUTOR)
    emulated = is_emulated(experiment)
    if served and experiment.run.device not in ("cpu", EMULATED):
        what, hint = "trains with parameter servers only on CPUs", 'set run.device = "cpu", or "emulated"'
        raise ConfigError(f"{_EXECUTOR} {what}", "run.device", repr(experiment.run.device), hint)
    if experiment.workload.model == LAYERS and not emulated:
        hint = 'set run.device = "emulated", simulate it, or choose a registry model'
        raise ConfigError("a table of layers computes nothing", "workload.model", "'layers'", hint)
    refuse_unexecuted(experiment.workload, "workload", WORKLOAD | LOSSES if emulated else WORKLOAD, _EXECUTOR)
    if emulated:
        refuse_unemulated(experiment, strategy)
    if experiment.run.launcher in ("slurm", "torchrun"):
        hint = f"set local or testbed; fleetbench launch --print {experiment.run.launcher} prints a job of the experiment"
        raise ConfigError(f"{_EXECUTOR} starts its trainers itself", "run.launcher", repr(experiment.run.launcher), hint)
