"""What is said of every field of a strategy, written down here a second time.

Whoever adds a field adds its row; whoever changes what is said of one changes its row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

import pytest

from fleetbench.experiment import Experiment, Tune
from fleetbench.fields import knobs_of
from fleetbench.knobs import Need
from fleetbench.plan.servers.rules import SERVED
from fleetbench.plan.training import PLANNED
from fleetbench.profile import COMPUTE_ONLY
from fleetbench.strategy import DistributedStrategy
from real.supported import executed_part
from sim.learning.trajectory import CLOCK, LEARNT
from tuner.space import NAMES, needs, parameters_of, way_of

AVERAGED = ["k_steps", "begin_step", "schedule", "warmup_epochs", "warmup", "fragments", "overlap_steps", "mixing", "worker_trainers"]
AVERAGED += ["elastic", "elastic_lr"]
AVERAGING = ["momentum", "buffers", "optimizer_state", "outer_lr", "outer_momentum", "outer_nesterov"]
MERGED = ["k_steps", "avg", "remainder", "lr_per", "batch_norm_per"]
SCALED = ["init_loss_scaling", "incr_every_n_steps", "decr_every_n_nan_or_inf", "incr_ratio", "decr_ratio", "use_dynamic_loss_scaling"]
SENT = """
k_steps max_merge_var_num send_queue_size independent_recv_thread min_send_grad_num_before_recv thread_pool_size send_wait_times
launch_barrier
"""
ROWS: dict[str, str] = {
    "mode": "served way",
    "auto": "",
    "fuse_all_reduce_ops": "planned clock",
    "fusion": "planned clock",
    "fuse_grad_size_in_MB": "planned clock",
    "fuse_grad_count": "planned clock",
    "fuse_grad_size_in_num": "planned clock",
    "last_comm_group_size_MB": "planned clock",
    "first_bucket_size_in_MB": "planned clock",
    "use_hierarchical_allreduce": "planned learnt",
    "hierarchical_inner_ranks": "planned learnt",
    "hierarchical_variant": "planned learnt",
    "sync_nccl_allreduce": "planned clock",
    "nccl_comm_num": "planned clock",
    "fp16_allreduce": "planned learnt",
    "bf16_allreduce": "planned learnt",
    "find_unused_parameters": "planned clock",
    "static_graph": "planned clock",
    "broadcast_buffers": "planned learnt",
    "thread_num": "planned served clock table",
    "build_strategy.fuse_all_optimizer_ops": "planned clock table",
    "build_strategy.fuse_elewise_add_act_ops": "planned clock table restarts",
    "build_strategy.fuse_bn_act_ops": "planned clock table restarts",
    "build_strategy.fuse_relu_depthwise_conv": "planned clock table restarts",
    "build_strategy.enable_backward_optimizer_op_deps": "planned clock",
    "build_strategy.enable_sequential_execution": "planned clock",
    "build_strategy.compile_split": "planned clock table",
    "sync_batch_norm": "planned table",
    "cudnn_exhaustive_search": "planned clock table",
    "conv_workspace_size_limit": "planned clock table",
    "fraction_of_gpu_memory_to_use": "planned clock table",
    "fetch_every_n_steps": "planned served clock table",
    "lr_scale": "planned served learnt way",
    "amp": "planned learnt way table restarts",
    **{f"amp_configs.{name}": "planned learnt way restarts" for name in SCALED},
    "amp_configs.dtype": "planned learnt way table restarts",
    "recompute": "planned clock table restarts",
    "recompute_configs.checkpoints": "planned clock table restarts",
    "localsgd": "planned learnt way",
    **{f"localsgd_configs.{name}": "planned learnt way" for name in (*AVERAGED, *AVERAGING)},
    "localsgd_configs.outer_wire": "planned way",
    "localsgd_configs.outer_error_feedback": "planned way",
    "localsgd_configs.outer_on_host": "planned clock way",
    "adaptive_localsgd": "planned learnt way",
    **{
        f"adaptive_localsgd_configs.{name}": "planned learnt way" for name in ("init_k_steps", "begin_step", "variant", "alpha", *AVERAGING)
    },
    "gradient_merge": "planned learnt way",
    **{f"gradient_merge_configs.{name}": "planned learnt way" for name in MERGED},
    **dict.fromkeys(("sharding", "sharding_configs.sharding_degree"), "planned clock restarts"),
    **{f"sharding_configs.{name}": "planned clock" for name in ("stage", "reshard_after_forward", "param_dtype", "blocks")},
    "a_sync": "served way",
    **{f"a_sync_configs.{name}": "served way" for name in SENT.split()},
    "a_sync_configs.runtime_split_send_recv": "way",
}
"""By field: which lists it is in. ``way``: two strategies that differ in it are two ways of training to the tuner."""
BASES: dict[str, dict[str, Any]] = {
    "fuse_grad_size_in_num": {"fusion": "by_number"},
    "last_comm_group_size_MB": {"fusion": "by_number"},
    "first_bucket_size_in_MB": {"fusion": "ddp"},
    "hierarchical": {"use_hierarchical_allreduce": True},
    "amp_configs.": {"amp": True},
    "recompute_configs.": {"recompute": True},
    "localsgd_configs.warmup": {"localsgd": True, "localsgd_configs": {"schedule": "document"}},
    "localsgd_configs.outer_wire": {"localsgd": True, "localsgd_configs": {"k_steps": 4, "outer_lr": 0.7}},
    "localsgd_configs.outer_error": {"localsgd": True, "localsgd_configs": {"k_steps": 4, "outer_lr": 0.7, "outer_wire": "int8"}},
    "localsgd_configs.elastic_lr": {"localsgd": True, "localsgd_configs": {"k_steps": 4, "elastic": True}},
    "localsgd_configs.": {"localsgd": True, "localsgd_configs": {"k_steps": 4}},
    "adaptive_localsgd_configs.": {"adaptive_localsgd": True},
    "gradient_merge_configs.": {"gradient_merge": True},
    "sharding_configs.param_dtype": {"sharding": True, "amp": True, "amp_configs": {"dtype": "bf16"}},
    "sharding_configs.reshard": {"sharding": True, "sharding_configs": {"stage": 3}},
    "sharding_configs.": {"sharding": True},
    "a_sync_configs.": {"mode": "ps", "a_sync": True},
    "a_sync": {"mode": "ps"},
}
"""With which other fields the fields whose names begin so can be changed; the first one holds."""
OTHERS: dict[str, Any] = {
    "mode": "ps",
    "fusion": "optimal",
    "hierarchical_variant": "reduce_scatter",
    "build_strategy.compile_split": "bucket",
    "fraction_of_gpu_memory_to_use": 0.5,
    "amp_configs.decr_ratio": 0.5,
    "amp_configs.dtype": "bf16",
    "recompute_configs.checkpoints": ("a",),
    "sharding_configs.blocks": ("a",),
    "sharding_configs.param_dtype": "bfloat16",
    "localsgd_configs.schedule": "torch",
    "localsgd_configs.warmup": "linear",
    "localsgd_configs.mixing": 0.5,
    "localsgd_configs.elastic_lr": "sqrt",
    "localsgd_configs.outer_wire": "int8",
    "adaptive_localsgd_configs.variant": "qsr",
    "gradient_merge_configs.remainder": "drop",
    "gradient_merge_configs.lr_per": "update",
    "gradient_merge_configs.batch_norm_per": "update",
    **{
        f"{table}_configs.{name}": "average"
        for table in ("localsgd", "adaptive_localsgd")
        for name in ("momentum", "buffers", "optimizer_state")
    },
    **{f"{table}_configs.outer_momentum": 0.5 for table in ("localsgd", "adaptive_localsgd")},
}
"""Another value, where it is neither the opposite nor a number more."""


def listed(word: str) -> set[str]:
    """The fields whose row has a word."""
    return {name for name, row in ROWS.items() if word in row.split()}


def plain(names: Any) -> set[str]:
    """Without the part of the experiment."""
    return {name.removeprefix("strategy.") for name in names}


def value_of(strategy: Any, name: str) -> Any:
    """Of a dotted name."""
    for part in name.split("."):
        strategy = getattr(strategy, part)
    return strategy


def pair(name: str) -> tuple[DistributedStrategy, DistributedStrategy]:
    """Two strategies that differ in a field alone."""
    base = DistributedStrategy().replace(**next((base for prefix, base in BASES.items() if name.startswith(prefix)), {}))
    old = value_of(base, name)
    new = OTHERS[name] if name in OTHERS else not old if isinstance(old, bool) else old + 1
    table, _, key = name.rpartition(".")
    return base, base.replace(**({table: {key: new}} if table else {key: new}))


def differing(what: Any) -> set[str]:
    """The fields by which ``what`` of a strategy differs."""
    return {name for name in ROWS if what(pair(name)[0]) != what(pair(name)[1])}


def test_a_field_of_which_nothing_is_said_is_an_error() -> None:
    """With the field's name; ``fleetbench.fields`` is imported by everything that executes."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Longer(DistributedStrategy):
        patience: int = 1

    with pytest.raises(TypeError, match=r"^strategy.patience: call a Knob"):
        dict(knobs_of(Longer()))


def test_the_lists_are_those_of_the_rows() -> None:
    """Who executes a field, what it acts on, and what a layer table holds of it."""
    assert plain(PLANNED) == listed("planned")
    assert plain(SERVED) == listed("served")
    assert plain(CLOCK) == listed("clock")
    assert plain(LEARNT) == listed("learnt")
    assert plain(COMPUTE_ONLY) == listed("table")


def test_another_way_of_training_differs_in_the_fields_of_the_rows() -> None:
    """The others change when things happen, or the last digits of what is learnt."""
    assert differing(way_of) == listed("way")


def test_an_emulated_device_executes_what_no_table_holds() -> None:
    """Settings of mixed precision go with it."""
    assert ROWS.keys() - differing(executed_part) == listed("table") | {name for name in ROWS if name.startswith("amp_configs.")}


def test_the_searched_parameters_are_these() -> None:
    """In the order in which they are set; a strategy has a value of each."""
    names = ("local_steps", "fusion", "hierarchy", "wire", "nccl_comm_num", "sync_nccl_allreduce", "update_by_bucket", "thread_num")
    assert names == NAMES
    assert tuple(parameters_of(DistributedStrategy()).items()) == tuple(
        zip(names, (1, 32.0, "off", "fp32", 1, True, False, 1), strict=True)
    )
    values = {
        "local_steps": (1, 2, 4, 8, 16),
        "fuse_grad_size_in_MB": (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0),
        "fusion": ("merged_gradient", "optimal", "off"),
        "hierarchy": ("off", "leader", "reduce_scatter"),
        "wire": ("fp32", "fp16", "bf16"),
        "update_by_bucket": (False, True),
        "nccl_comm_num": (1, 2),
        "sync_nccl_allreduce": (True, False),
        "thread_num": (1, 2),
    }
    assert {name: getattr(Tune(), name) for name in values} == values


def test_every_need_has_its_question() -> None:
    """A need that a search may name is one that ``needs`` asks for, with a reason."""
    asked = needs(Experiment())
    assert asked.keys() == set(get_args(Need))
    assert all(why for need, (_, why) in asked.items() if need)
