"""Exclusions: pairs of strategy settings that contradict each other, and groups that do not fit the trainers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleetbench.errors import ConfigError

if TYPE_CHECKING:
    from fleetbench.strategy import DistributedStrategy


def exclusions(own: DistributedStrategy) -> tuple[tuple[bool, str, str, str], ...]:
    """Return a row per invalid combination: whether both settings are on, their names, the reason."""
    build, merge, average = own.build_strategy, own.gradient_merge_configs, own.averaging
    half, unused, synced = (own.fp16_allreduce or own.bf16_allreduce), own.find_unused_parameters, own.sync_batch_norm
    is_static, some = own.static_graph, "static_graph" if own.static_graph else "find_unused_parameters"
    by_bucket, fuses = not build.enable_backward_optimizer_op_deps, build.fuse_all_optimizer_ops
    update, fused = "build_strategy.enable_backward_optimizer_op_deps = false", "build_strategy.fuse_all_optimizer_ops"
    sequential, hierarchy = "build_strategy.enable_sequential_execution", "use_hierarchical_allreduce"
    state, changes = 'optimizer_state = "average"', "Fleet would change it silently"
    served, local = own.mode == "ps", own.localsgd_configs
    stays, parts, rounds = "the inner optimizer's state stays local", "fragments", "fragments have their own rounds"
    resets, shares_state = average.momentum == "reset", average.optimizer_state == "average"
    in_order, feeds_back = build.enable_sequential_execution, own.localsgd and local.outer_error_feedback
    int8, fp32 = 'outer_wire = "int8"', 'outer_wire = "fp32"'
    alone = "blocks follow one another on one communicator"
    cut, averages = own.localsgd and local.has_fragments, own.is_local and not own.has_outer
    grouped, workers = own.worker_trainers > 1, "worker_trainers above 1"
    elastic, shared = own.is_elastic, average.momentum == "average" or shares_state or average.buffers == "average"
    groups, alone_each = own.use_hierarchical_allreduce or own.nccl_comm_num > 1 or grouped, "each worker is a world of its own"
    return (
        (own.localsgd and own.adaptive_localsgd, "localsgd", "adaptive_localsgd", "only one of them can decide when trainers synchronise"),
        (own.fp16_allreduce and own.bf16_allreduce, "fp16_allreduce", "bf16_allreduce", "a bucket is sent in one type"),
        (own.a_sync and own.mode == "collective", "a_sync", 'mode = "collective"', "only servers are asynchronous"),
        (served and own.localsgd, "localsgd", 'mode = "ps"', "trainers of parameter servers do not synchronise among themselves"),
        (
            served and own.adaptive_localsgd,
            "adaptive_localsgd",
            'mode = "ps"',
            "trainers of parameter servers do not synchronise among themselves",
        ),
        (served and own.use_hierarchical_allreduce, hierarchy, 'mode = "ps"', "nothing is all-reduced"),
        (averages and half, "Local SGD", "a 16-bit wire", "rounding errors of parameters on the wire would be permanent"),
        (own.quantises and not own.has_outer, int8, "averaging alone", "rounding errors of parameters on the wire would be permanent"),
        (own.quantises and half, int8, "a 16-bit wire", "a bucket is sent in one type"),
        (own.quantises and own.use_hierarchical_allreduce, int8, hierarchy, "INT8 uses one all-to-all over all trainers"),
        (own.is_local and synced, "Local SGD", "sync_batch_norm", "batch norm would synchronise in every layer of every step"),
        (own.is_local and by_bucket, "Local SGD", update, "local steps exchange no buckets"),
        (own.scales_loss and by_bucket, update, "amp", "an update cannot be undone when a later bucket overflows"),
        ((unused or is_static) and by_bucket, update, some, "unused parameters are only known after the last bucket"),
        (fuses and by_bucket, update, fused, "there is either one update of everything, or one per bucket"),
        (unused and fuses, fused, "find_unused_parameters", "a fused update cannot leave parameters out"),
        (own.scales_loss and merge.remainder == "flush", 'remainder = "flush"', "amp", "overflow is not checked at the end of an epoch"),
        (in_order and not own.sync_nccl_allreduce, sequential, "sync_nccl_allreduce = false", "sequential execution overlaps nothing"),
        (resets and shares_state, 'momentum = "reset"', state, "momentum is part of the optimizer's state"),
        (own.has_outer and average.momentum != "local", "outer_lr", "momentum other than local", stays),
        (own.has_outer and shares_state, "outer_lr", state, stays),
        (cut and local.schedule != "fleet", parts, "schedule other than fleet", rounds),
        (cut and average.buffers == "average", parts, 'buffers = "average"', "statistics belong to no fragment"),
        (cut and own.gradient_merge and merge.remainder == "flush", parts, 'remainder = "flush"', rounds),
        (cut and own.scales_loss, parts, "amp", "a skipped update would still count in a fragment's round"),
        (synced and own.nccl_comm_num > 1, "sync_batch_norm", "nccl_comm_num above 1", changes),
        (synced and own.use_hierarchical_allreduce, "sync_batch_norm", hierarchy, changes),
        (synced and own.thread_num > 1, "sync_batch_norm", "thread_num above 1", changes),
        (feeds_back and not own.quantises, "outer_error_feedback", fp32, "nothing is lost on the wire"),
        (grouped and own.quantises, workers, int8, "INT8 uses one all-to-all over all trainers"),
        (grouped and own.use_hierarchical_allreduce, hierarchy, workers, "worker_trainers already defines the groups"),
        (grouped and own.fuses_by_cost, "fusion", workers, "the cost is that of an all-reduce over all trainers"),
        (grouped and (unused or is_static), some, workers, "a parameter's flag is exchanged among all trainers"),
        (grouped and own.scales_loss, workers, "amp", "gradients meet before an overflow is known"),
        (grouped and own.sharding, "sharding", workers, "sharding_degree already makes workers"),
        (served and own.sharding, "sharding", 'mode = "ps"', "servers hold the parameters"),
        (own.sharding and own.adaptive_localsgd, "adaptive_localsgd", "sharding", "a worker of several trainers has no loss"),
        (own.sharding and cut, parts, "sharding", "a block belongs to no fragment"),
        (own.sharding and own.quantises, int8, "sharding", "INT8 uses one all-to-all over all trainers"),
        (own.sharding and shares_state, state, "sharding", "each trainer has only a shard of it"),
        (own.sharding and average.momentum != "local", "momentum other than local", "sharding", "each trainer has only a shard of it"),
        (own.sharding and average.buffers == "average", 'buffers = "average"', "sharding", "statistics belong to trainers, not to workers"),
        (own.sharding and own.localsgd and local.outer_on_host, "outer_on_host", "sharding", "each trainer has only a shard of it"),
        (own.sharding and own.use_hierarchical_allreduce, hierarchy, "sharding", "sharding_degree already defines the groups"),
        (own.sharding and own.fusion != "fleet", "fusion", "sharding", "each block is one bucket"),
        (own.sharding and own.nccl_comm_num > 1, "nccl_comm_num above 1", "sharding", alone),
        (own.sharding and not own.sync_nccl_allreduce, "sync_nccl_allreduce = false", "sharding", alone),
        (own.sharding and (unused or is_static), some, "sharding", "every block is scattered in every step"),
        (own.sharding and by_bucket, update, "sharding", "a trainer updates its shard of all blocks at once"),
        (own.sharding and in_order, sequential, "sharding", "gathers overlap compute"),
        (own.sharding and merge.remainder == "flush", 'remainder = "flush"', "sharding", "shards are only accumulated in a backward"),
        (is_static and unused, "static_graph", "find_unused_parameters", "the first backward shows which are unused"),
        (elastic and cut, "elastic", parts, "a worker that leaves would take the exchange in flight with it"),
        (elastic and (half or own.quantises), "elastic", "a wire of 16 or 8 bits", "steps weight the differences on the wire"),
        (elastic and groups, "elastic", f"{hierarchy}, nccl_comm_num or worker_trainers above 1", alone_each),
        (elastic and own.sharding, "elastic", "sharding", "a shard would be lost with its worker"),
        (elastic and own.scales_loss, "elastic", "amp", "workers do not meet in every step to skip an overflow together"),
        (elastic and shared, "elastic", 'momentum, optimizer_state or buffers = "average"', "they stay with their worker"),
    )


def check_hierarchy(trainers: int, inner: int) -> None:
    """Raise ``ConfigError`` unless ``inner`` is at least 2 and divides the number of trainers."""
    if inner < 2 or trainers % inner:
        what = f"does not divide the world of {trainers} trainers into groups of at least 2"
        hint = f"choose a number above 1 that divides the {trainers} trainers, or switch use_hierarchical_allreduce off"
        raise ConfigError(what, "strategy.hierarchical_inner_ranks", repr(inner), hint)


def check_workers(trainers: int, number: int) -> None:
    """Raise ``ConfigError`` unless workers of ``number`` trainers each are two at least and have all trainers."""
    if number > 1 and (trainers % number or number == trainers):
        what = f"does not make {trainers} trainers two or more workers of as many trainers each"
        divisors = ", ".join(str(each) for each in range(1, trainers // 2 + 1) if trainers % each == 0) or "1"
        raise ConfigError(what, "strategy.localsgd_configs.worker_trainers", repr(number), f"one of {divisors}")
