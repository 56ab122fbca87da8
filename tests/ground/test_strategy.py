from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

from fleetbench.cluster import Cluster
from fleetbench.config import Config, encode
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment, HierarchySwitchedOff, Tune
from fleetbench.fleet_names import NO_EFFECT, FieldHasNoEffect
from fleetbench.strategy import BuildStrategy, DistributedStrategy, LocalSGDConfigs
from fleetbench.workload import Workload

FLEET_DEFAULTS: dict[str, Any] = {  # by hand, from the documents' tables of fields
    "mode": "collective",
    "fuse_all_reduce_ops": True,
    "fuse_grad_size_in_MB": 32,
    "fuse_grad_count": 50,
    "fuse_grad_size_in_num": 8,
    "last_comm_group_size_MB": 1,
    "use_hierarchical_allreduce": False,
    "hierarchical_inner_ranks": 0,
    "sync_nccl_allreduce": True,
    "nccl_comm_num": 1,
    "thread_num": 1,
    "build_strategy": {
        "fuse_all_optimizer_ops": False,
        "fuse_elewise_add_act_ops": False,
        "fuse_bn_act_ops": False,
        "fuse_relu_depthwise_conv": False,
        "enable_backward_optimizer_op_deps": True,
        "enable_sequential_execution": False,
    },
    "sync_batch_norm": False,
    "fp16_allreduce": False,
    "amp": False,
    "amp_configs": {
        "init_loss_scaling": 32768,
        "incr_every_n_steps": 1000,
        "decr_every_n_nan_or_inf": 2,
        "incr_ratio": 2.0,
        "decr_ratio": 0.8,
        "use_dynamic_loss_scaling": True,
    },
    "recompute": False,
    "recompute_configs": {"checkpoints": []},
    "cudnn_exhaustive_search": True,
    "auto": False,
    "localsgd": False,
    "localsgd_configs": {"k_steps": 1, "begin_step": 1, "schedule": "fleet"},
    "adaptive_localsgd": False,
    "adaptive_localsgd_configs": {"init_k_steps": 1, "begin_step": 1, "variant": "fleet"},
    "gradient_merge": False,
    "gradient_merge_configs": {"k_steps": 1, "avg": True, "remainder": "carry", "lr_per": "micro_batch", "batch_norm_per": "micro_batch"},
    "a_sync": False,
    "a_sync_configs": {
        "k_steps": -1,
        "max_merge_var_num": 1,
        "send_queue_size": 16,
        "independent_recv_thread": False,
        "min_send_grad_num_before_recv": 1,
        "thread_pool_size": 1,
        "send_wait_times": 1,
        "runtime_split_send_recv": False,
        "launch_barrier": True,
    },
}
OWN_FIELDS = {  # ours, or Fleet's without a published default
    "fusion",
    "first_bucket_size_in_MB",
    "hierarchical_variant",
    "bf16_allreduce",
    "lr_scale",
    "find_unused_parameters",
    "static_graph",
    "broadcast_buffers",
    "conv_workspace_size_limit",
    "fraction_of_gpu_memory_to_use",
    "fetch_every_n_steps",
    "sharding",
    "sharding_configs.stage",
    "sharding_configs.sharding_degree",
    "sharding_configs.reshard_after_forward",
    "sharding_configs.blocks",
    "sharding_configs.param_dtype",
    "build_strategy.compile_split",
    "amp_configs.dtype",
    "localsgd_configs.warmup_epochs",
    "localsgd_configs.warmup",
    "localsgd_configs.momentum",
    "localsgd_configs.buffers",
    "localsgd_configs.optimizer_state",
    "localsgd_configs.outer_lr",
    "localsgd_configs.outer_momentum",
    "localsgd_configs.outer_nesterov",
    "localsgd_configs.outer_wire",
    "localsgd_configs.outer_error_feedback",
    "localsgd_configs.outer_on_host",
    "localsgd_configs.fragments",
    "localsgd_configs.overlap_steps",
    "localsgd_configs.worker_trainers",
    "localsgd_configs.mixing",
    "localsgd_configs.elastic",
    "localsgd_configs.elastic_lr",
    "adaptive_localsgd_configs.alpha",
    "adaptive_localsgd_configs.momentum",
    "adaptive_localsgd_configs.buffers",
    "adaptive_localsgd_configs.optimizer_state",
    "adaptive_localsgd_configs.outer_lr",
    "adaptive_localsgd_configs.outer_momentum",
    "adaptive_localsgd_configs.outer_nesterov",
}


def flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Tables within tables as dotted names."""
    found: dict[str, Any] = {}
    for key, value in data.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def test_every_field_of_fleet_is_here_with_fleets_default() -> None:
    """Each published field exists under its name with its published default."""
    ours = flat(encode(DistributedStrategy()))
    assert {name: ours.get(name, "missing") for name in flat(FLEET_DEFAULTS)} == flat(FLEET_DEFAULTS)


def test_no_field_is_here_unseen() -> None:
    """A field that is neither Fleet's nor known to be our own fails here, so that it is documented."""

    def names(value: Config, prefix: str = "") -> set[str]:
        found: set[str] = set()
        for field in dataclasses.fields(value):  # type: ignore[arg-type]  # Config's subclasses are dataclasses
            inner = getattr(value, field.name)
            found |= names(inner, f"{prefix}{field.name}.") if isinstance(inner, Config) else {prefix + field.name}
        return found

    assert names(DistributedStrategy()) - set(flat(FLEET_DEFAULTS)) == OWN_FIELDS


@pytest.mark.parametrize(
    ("old", "today"),
    [
        ({"mode": "nccl2"}, {}),
        ({"mode": "grad_allreduce"}, {}),
        ({"collective_mode": "grad_allreduce"}, {}),
        ({"mode": "local_sgd"}, {"localsgd": True}),
        ({"mode": "collective", "collective_mode": "local_sgd"}, {"localsgd": True}),
        ({"use_local_sgd": True}, {"localsgd": True}),
        (
            {"use_local_sgd": True, "local_sgd_steps": 16, "local_sgd_is_warm_steps": 3},
            {"localsgd": True, "localsgd_configs": {"schedule": "document", "k_steps": 16, "warmup_epochs": 3}},
        ),
        ({"forward_recompute": True}, {"recompute": True}),
        ({"forward_recompute": True, "recompute_checkpoints": ["a"]}, {"recompute": True, "recompute_configs": {"checkpoints": ["a"]}}),
        ({"exec_strategy": {"num_threads": 3}}, {"thread_num": 3}),
        ({"execution_strategy": {"num_threads": 3}}, {"thread_num": 3}),
        ({"execution_strategy": {"num_iteration_per_drop_scope": 30}}, {"fetch_every_n_steps": 30}),
        ({"num_iteration_per_drop_scope": 30}, {"fetch_every_n_steps": 30}),
        ({"fuse_grad_size_in_TFLOPS": 20}, {"fuse_grad_count": 20}),
        (
            {"use_hierarchical_allreduce": True, "hierarchical_allreduce_inter_nranks": 8},
            {"use_hierarchical_allreduce": True, "hierarchical_inner_ranks": 8},
        ),
    ],
    ids=str,
)
def test_names_of_old_mean_what_they_mean_today(old: dict[str, Any], today: dict[str, Any]) -> None:
    """Fleet's older and misleading names are read as today's fields."""
    assert DistributedStrategy.from_dict(old) == DistributedStrategy(**today)


@pytest.mark.parametrize(
    "table",
    [
        {"cudnn_batchnorm_spatial_persistent": True},
        {"execution_strategy": {"num_iteration_per_run": 3}},
        {"exec_strategy": {"use_thread_barrier": True}},
        {"build_strategy": {"enable_inplace": True}},
        {"build_strategy": {"fuse_broadcast_ops": True}},
        {"build_strategy": {"cache_runtime_context": True}},
    ],
    ids=str,
)
def test_a_field_without_an_equivalent_is_read_and_reported(table: dict[str, Any]) -> None:
    """It changes nothing, and a warning names it."""
    with pytest.warns(FieldHasNoEffect) as caught:
        strategy = DistributedStrategy.from_dict(table)
    assert strategy == DistributedStrategy()
    assert any(name in str(caught[0].message) for name in NO_EFFECT)


@pytest.mark.parametrize(
    ("table", "place"),
    [
        ({"fuse_grad_count": 50, "fuse_grad_size_in_TFLOPS": 20}, "fuse_grad_size_in_TFLOPS"),
        ({"thread_num": 1, "exec_strategy": {"num_threads": 2}}, "thread_num"),
        ({"localsgd": True, "local_sgd_steps": 4, "localsgd_configs": {"k_steps": 2}}, "local_sgd_steps"),
        ({"recompute_checkpoints": ["a"], "recompute_configs": {"checkpoints": ["b"]}}, "recompute_checkpoints"),
        ({"collective_mode": "local_sgd", "localsgd": False}, "collective_mode"),
        ({"collective_mode": "ring"}, "collective_mode"),
        ({"exec_strategy": {"localsgd": True}}, "exec_strategy.localsgd"),
        ({"exec_strategy": {"num_thread": 2}}, "exec_strategy.num_thread"),
        ({"build_strategy": {"fuse_bn_act_op": True}}, "build_strategy.fuse_bn_act_op"),
        ({"mode": "pserver"}, "mode"),
    ],
    ids=str,
)
def test_what_is_said_twice_or_wrongly_is_refused(table: dict[str, Any], place: str) -> None:
    """Two names for one field, or a table's key in the wrong table, is an error that names it."""
    with pytest.raises(ConfigError) as error:
        DistributedStrategy.from_dict(table)
    assert error.value.where == f"strategy.{place}"


@pytest.mark.parametrize(
    "fields",
    [
        {"localsgd_configs": {"k_steps": 4}},
        {"adaptive_localsgd_configs": {"init_k_steps": 4}},
        {"gradient_merge_configs": {"k_steps": 4}},
        {"amp_configs": {"init_loss_scaling": 2.0}},
        {"recompute_configs": {"checkpoints": ["a"]}},
        {"a_sync_configs": {"k_steps": 4}},
        {"hierarchical_inner_ranks": 8},
        {"hierarchical_variant": "reduce_scatter"},
        {"fuse_grad_size_in_num": 3},
        {"last_comm_group_size_MB": 2},
        {"fusion": "merged_gradient", "fuse_grad_size_in_num": 3},
        {"fusion": "optimal", "fuse_grad_size_in_MB": 16},
        {"fusion": "by_number", "fuse_grad_size_in_MB": 16},
        {"fusion": "by_number", "fuse_grad_count": 20},
        {"fuse_all_reduce_ops": False, "fuse_grad_size_in_MB": 16},
        {"fuse_all_reduce_ops": False, "fuse_grad_count": 20},
        {"fusion": "ddp", "fuse_grad_count": 20},
        {"first_bucket_size_in_MB": 1.0},
        {"fuse_all_reduce_ops": False, "fusion": "by_number"},
        {"localsgd": True, "adaptive_localsgd": True},
        {"fp16_allreduce": True, "bf16_allreduce": True},
        {"a_sync": True},
        {"mode": "ps", "localsgd": True},
        {"mode": "ps", "adaptive_localsgd": True},
        {"mode": "ps", "use_hierarchical_allreduce": True},
        {"sync_batch_norm": True, "nccl_comm_num": 2},
        {"sync_batch_norm": True, "thread_num": 2},
        {"sync_batch_norm": True, "use_hierarchical_allreduce": True},
        {"amp": True, "build_strategy": {"enable_backward_optimizer_op_deps": False}},
        {"build_strategy": {"enable_backward_optimizer_op_deps": False}, "find_unused_parameters": True},
        {"build_strategy": {"enable_backward_optimizer_op_deps": False, "fuse_all_optimizer_ops": True}},
        {"build_strategy": {"enable_backward_optimizer_op_deps": False}, "localsgd": True},
        {"build_strategy": {"enable_sequential_execution": True}, "sync_nccl_allreduce": False},
        {"build_strategy": {"fuse_all_optimizer_ops": True}, "find_unused_parameters": True},
        {"build_strategy": {"enable_backward_optimizer_op_deps": False}, "static_graph": True},
        {"find_unused_parameters": True, "static_graph": True},
        {"sharding": True, "static_graph": True},
        {"localsgd": True, "fp16_allreduce": True},
        {"adaptive_localsgd": True, "bf16_allreduce": True},
        {"localsgd": True, "sync_batch_norm": True},
        {"localsgd": True, "localsgd_configs": {"momentum": "reset", "optimizer_state": "average"}},
        {"adaptive_localsgd": True, "adaptive_localsgd_configs": {"momentum": "reset", "optimizer_state": "average"}},
        {"amp": True, "gradient_merge": True, "gradient_merge_configs": {"k_steps": 2, "remainder": "flush"}},
        {"localsgd": True, "localsgd_configs": {"outer_lr": 0.0}},
        {"localsgd": True, "localsgd_configs": {"outer_lr": float("inf")}},
        {"localsgd": True, "localsgd_configs": {"outer_momentum": 1.0}},
        {"adaptive_localsgd": True, "adaptive_localsgd_configs": {"outer_momentum": -0.1}},
        {"localsgd": True, "localsgd_configs": {"k_steps": 2, "outer_momentum": 0.9, "momentum": "average"}},
        {"localsgd": True, "localsgd_configs": {"k_steps": 2, "outer_lr": 0.7, "optimizer_state": "average"}},
        {"localsgd": True, "localsgd_configs": {"k_steps": 2, "fragments": 2, "schedule": "torch"}},
        {"localsgd": True, "localsgd_configs": {"k_steps": 2, "fragments": 2, "buffers": "average"}},
        {"localsgd": True, "localsgd_configs": {"k_steps": 2, "overlap_steps": 1}, "amp": True},
        {"nccl_comm_num": 0},
        {"nccl_comm_num": 65},
        {"thread_num": 0},
        {"fuse_grad_size_in_MB": -1},
        {"fuse_grad_count": -1},
        {"localsgd": True, "localsgd_configs": {"k_steps": 2, "elastic_lr": "sqrt"}},
        {"localsgd": True, "localsgd_configs": {"k_steps": 2, "elastic": True, "fragments": 2}},
        {"localsgd": True, "localsgd_configs": {"k_steps": 2, "elastic": True, "outer_lr": 0.7, "outer_wire": "int8"}},
        {"localsgd": True, "localsgd_configs": {"k_steps": 2, "elastic": True, "outer_lr": 0.7}, "bf16_allreduce": True},
        {"localsgd": True, "localsgd_configs": {"k_steps": 2, "elastic": True}, "use_hierarchical_allreduce": True},
        {"localsgd": True, "localsgd_configs": {"k_steps": 2, "elastic": True}, "nccl_comm_num": 2},
        {"localsgd": True, "localsgd_configs": {"k_steps": 2, "elastic": True}, "sharding": True},
        {"localsgd": True, "localsgd_configs": {"k_steps": 2, "elastic": True}, "amp": True},
        {"localsgd": True, "localsgd_configs": {"k_steps": 2, "elastic": True, "momentum": "average"}},
        {"localsgd": True, "localsgd_configs": {"k_steps": 2, "elastic": True, "optimizer_state": "average"}},
        {"localsgd": True, "localsgd_configs": {"k_steps": 2, "elastic": True, "buffers": "average"}},
        {"localsgd": True, "localsgd_configs": {"k_steps": 0}},
        {"localsgd": True, "localsgd_configs": {"begin_step": 0}},
        {"localsgd": True, "localsgd_configs": {"fragments": 0}},
        {"localsgd": True, "localsgd_configs": {"worker_trainers": 0}},
        {"localsgd": True, "localsgd_configs": {"outer_wire": "fp8"}},
        {"localsgd": True, "localsgd_configs": {"k_steps": 2, "outer_wire": "int8"}},
        {"localsgd": True, "localsgd_configs": {"k_steps": 2, "outer_lr": 0.7, "outer_error_feedback": True}},
        {"localsgd": True, "localsgd_configs": {"outer_lr": 0.7, "outer_wire": "int8"}, "use_hierarchical_allreduce": True},
        {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 0}},
        {"mode": "ps", "a_sync": True, "a_sync_configs": {"k_steps": -2}},
        {"fraction_of_gpu_memory_to_use": 1.5},
    ],
    ids=str,
)
def test_fields_that_contradict_each_other_are_refused(fields: dict[str, Any]) -> None:
    """A setting that would be ignored, or that cannot be, is an error by whatever route it comes."""
    for make in (DistributedStrategy, DistributedStrategy().replace, lambda **table: DistributedStrategy.from_dict(table)):
        with pytest.raises(ConfigError):
            make(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"fuse_grad_size_in_num": 3}, 'add fusion = "by_number", or drop fuse_grad_size_in_num'),
        ({"fusion": "by_number", "fuse_grad_count": 20}, 'is set while fusion is by_number (got 20)\nHINT: add fusion = "fleet"'),
        ({"fuse_all_reduce_ops": False, "fuse_grad_count": 20}, "add fuse_all_reduce_ops = true, or drop fuse_grad_count"),
        ({"localsgd_configs": {"k_steps": 4}}, "is set while localsgd is off\nHINT: add localsgd = true, or drop localsgd_configs"),
    ],
    ids=str,
)
def test_a_setting_of_what_is_off_says_what_switches_it_on(fields: dict[str, Any], message: str) -> None:
    """The hint names the switch and its value, and what to drop instead."""
    with pytest.raises(ConfigError) as error:
        DistributedStrategy(**fields)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"amp": True, "amp_configs": {"dtype": "bf16"}, "build_strategy": {"enable_backward_optimizer_op_deps": False}},
        {"amp": True, "amp_configs": {"dtype": "bf16"}, "gradient_merge": True, "gradient_merge_configs": {"remainder": "flush"}},
        {"amp": True, "gradient_merge": True, "gradient_merge_configs": {"k_steps": 2, "remainder": "drop"}},
        {"amp": True, "fp16_allreduce": True},
        {"localsgd": True, "use_hierarchical_allreduce": True},
        {"localsgd": True, "gradient_merge": True},
        {"localsgd": True, "localsgd_configs": {"momentum": "average", "optimizer_state": "average"}},
        {"build_strategy": {"enable_sequential_execution": True}, "nccl_comm_num": 2},
    ],
    ids=str,
)
def test_neighbours_of_what_is_refused_pass(fields: dict[str, Any]) -> None:
    """BF16 has no loss scale, a dropped remainder no update, and one operation in flight no second stream."""
    strategy = DistributedStrategy().replace(**fields)
    assert set(strategy.changes()) == set(fields)


def test_an_exclusion_names_both_and_says_why() -> None:
    """One of the two is at the place of the error, both are in its text with the reason, and the hint keeps one."""
    with pytest.raises(ConfigError) as error:
        DistributedStrategy(localsgd=True, sync_batch_norm=True)
    assert str(error.value) == (
        "localsgd: Local SGD and sync_batch_norm exclude each other: "
        "batch norm would synchronise in every layer of every step\nHINT: keep one of them"
    )


@pytest.mark.parametrize(
    ("fields", "is_local", "scales_loss"),
    [
        ({}, False, False),
        ({"localsgd": True}, True, False),
        ({"adaptive_localsgd": True}, True, False),
        ({"amp": True}, False, True),
        ({"amp": True, "amp_configs": {"dtype": "bf16"}}, False, False),
    ],
    ids=str,
)
def test_what_a_strategy_is(fields: dict[str, Any], is_local: bool, scales_loss: bool) -> None:
    """Trainers part under both kinds of Local SGD; a loss is scaled for FP16 alone."""
    strategy = DistributedStrategy().replace(**fields)
    assert (strategy.is_local, strategy.scales_loss) == (is_local, scales_loss)


def test_what_is_averaged_besides_parameters_is_the_active_configs() -> None:
    """The fixed and the adaptive schedule have a table each; the one that is on counts."""
    fixed = DistributedStrategy().replace(localsgd=True, localsgd_configs={"momentum": "average"})
    adaptive = DistributedStrategy().replace(adaptive_localsgd=True, adaptive_localsgd_configs={"buffers": "average"})
    assert (fixed.averaging.momentum, fixed.averaging.buffers) == ("average", "local")
    assert (adaptive.averaging.momentum, adaptive.averaging.buffers) == ("local", "average")


@pytest.mark.parametrize(
    ("configs", "where", "what"),
    [
        ({"k_steps": 2, "fragments": 3}, "k_steps", "multiple of the 3 fragments"),
        ({"k_steps": 7, "fragments": 3}, "k_steps", "multiple of the 3 fragments"),
        ({"k_steps": 6, "fragments": 2, "overlap_steps": 3}, "overlap_steps", "less than the 3 updates"),
        ({"k_steps": 1, "overlap_steps": 1}, "overlap_steps", "less than the 1 updates"),
        ({"k_steps": 6, "mixing": 1.1}, "mixing", "at least 0, at most 1"),
        ({"k_steps": 6, "mixing": -0.1}, "mixing", "at least 0, at most 1"),
    ],
)
def test_rounds_of_fragments_come_out_even(configs: dict[str, Any], where: str, what: str) -> None:
    """H below P or no multiple of it, a delay as long as a fragment's round, and shares outside of [0, 1] are refused by name."""
    with pytest.raises(ConfigError, match=what) as error:
        LocalSGDConfigs(**configs)
    assert error.value.where == where
    for fits in ({"k_steps": 6, "fragments": 3, "overlap_steps": 1, "mixing": 1.0}, {"k_steps": 3, "overlap_steps": 2, "mixing": 0.5}):
        assert LocalSGDConfigs(**fits).has_fragments


@pytest.mark.parametrize("optimizer", ["adam", "adagrad"])
def test_averaging_after_every_update_needs_an_optimizer_whose_average_of_steps_is_a_step_of_averages(optimizer: Any) -> None:
    """Adam and Adagrad are refused at K = 1, unless their state is averaged too or an outer optimizer steps; longer rounds take any."""
    every = {"localsgd": True}

    def of(optimizer: Any, strategy: dict[str, Any]) -> Experiment:
        found = DistributedStrategy().replace(**strategy)
        return Experiment(cluster=Cluster(nodes=2), workload=Workload(optimizer=optimizer), strategy=found)

    with pytest.raises(ConfigError, match="optimizer_state"):
        of(optimizer, every)
    of("momentum", every)
    for configs in ({"optimizer_state": "average"}, {"k_steps": 2}, {"outer_lr": 0.7}):
        of(optimizer, {**every, "localsgd_configs": configs})
    of(optimizer, {"adaptive_localsgd": True})


@pytest.mark.parametrize(
    ("nodes", "per_node", "inner", "divides"), [(2, 4, 0, True), (2, 4, 2, True), (2, 4, 3, False), (2, 1, 0, False), (3, 2, 4, False)]
)
def test_hierarchical_groups_divide_the_world(nodes: int, per_node: int, inner: int, divides: bool) -> None:
    """The world is inner x outer with inner above 1; the node's trainers where inner is not given."""
    cluster = Cluster(nodes=nodes, trainers_per_node=per_node)
    strategy = DistributedStrategy(use_hierarchical_allreduce=True, hierarchical_inner_ranks=inner)
    if divides:
        assert Experiment(cluster=cluster, strategy=strategy).strategy.use_hierarchical_allreduce
    else:
        with pytest.raises(ConfigError, match="does not divide the world"):
            Experiment(cluster=cluster, strategy=strategy)


@pytest.mark.parametrize("trainers", [1, 4])
def test_one_node_switches_hierarchy_off_with_a_warning(trainers: int) -> None:
    """As in Fleet, and unlike Fleet not silently; a trainer alone is no other case."""
    strategy = DistributedStrategy(use_hierarchical_allreduce=True, hierarchical_inner_ranks=2, nccl_comm_num=2)
    with pytest.warns(HierarchySwitchedOff):
        experiment = Experiment(cluster=Cluster(nodes=1, trainers_per_node=trainers), strategy=strategy)
    assert experiment.strategy == DistributedStrategy(nccl_comm_num=2)


@pytest.mark.parametrize("cluster", [{"nodes": 4}, {"nodes": 2, "trainers_per_node": 2}])
def test_one_group_of_all_trainers_switches_hierarchy_off_with_a_warning(cluster: dict[str, int]) -> None:
    """Four trainers in a group of four have a flat ring, and the strategy that the run's folder keeps says so."""
    strategy = DistributedStrategy(use_hierarchical_allreduce=True, hierarchical_inner_ranks=4)
    with pytest.warns(HierarchySwitchedOff, match="one group of hierarchical_inner_ranks = 4 has no hierarchy"):
        experiment = Experiment(cluster=Cluster(**cluster), strategy=strategy)
    assert experiment.strategy == DistributedStrategy()


def test_parameter_servers_need_servers() -> None:
    """``mode = "ps"`` with no server has nowhere to push to."""
    with pytest.raises(ConfigError, match="servers"):
        Experiment(cluster=Cluster(nodes=2), strategy=DistributedStrategy(mode="ps"))
    Experiment(cluster=Cluster(nodes=2, servers=1), strategy=DistributedStrategy(mode="ps"))


def test_more_communicators_than_anybody_opens_are_refused() -> None:
    """Every one is a process group with connections to all others; a search's values are bounded alike."""
    assert DistributedStrategy(nccl_comm_num=64).nccl_comm_num == 64
    for make in (lambda: DistributedStrategy(nccl_comm_num=100_000), lambda: Tune(nccl_comm_num=(1, 100_000))):
        with pytest.raises(ConfigError, match=r"nccl_comm_num: must be at least 1, at most 64 \(got 100000\)"):
            make()


def test_adaptive_steps_need_a_loss_only_where_they_follow_it() -> None:
    """A table of layers has no loss; the quadratic rule needs the learning rate alone."""
    layers = {"model": "layers", "layers": [{"name": "b", "params": 1, "forward": "1 ms", "backward": "1 ms"}]}
    base: dict[str, Any] = {"workload": layers, "cluster": {"nodes": 2}}
    with pytest.raises(ConfigError, match="use localsgd with a fixed"):
        Experiment.from_dict({**base, "strategy": {"adaptive_localsgd": True}})
    Experiment.from_dict({**base, "strategy": {"localsgd": True, "localsgd_configs": {"k_steps": 2}}})
    Experiment.from_dict({**base, "strategy": {"adaptive_localsgd": True, "adaptive_localsgd_configs": {"variant": "qsr"}}})


def test_replace_makes_another_value() -> None:
    """The original stays; tables, older names and mistakes are treated as in a file."""
    strategy = DistributedStrategy()
    changed = strategy.replace(localsgd=True, localsgd_configs={"k_steps": 4})
    assert (strategy.local_steps, changed.local_steps) == (1, 4)
    assert changed.replace(fuse_grad_size_in_TFLOPS=20).fuse_grad_count == 20
    with pytest.raises(ConfigError, match="Did you mean 'nccl_comm_num'"):
        strategy.replace(nccl_com_num=2)
    with pytest.raises(ConfigError, match="known keys: mode, "):
        strategy.replace(zzz=2)


def test_a_replaced_table_changes_only_the_keys_that_it_names() -> None:
    """The other keys of the table stay, also where an older name sets one; a whole value replaces the whole."""
    configs = {"schedule": "document", "k_steps": 4, "warmup": "linear", "warmup_epochs": 3}
    strategy = DistributedStrategy(localsgd=True, localsgd_configs=configs)  # type: ignore[arg-type]  # a table is taken for its value
    eight = DistributedStrategy(localsgd=True, localsgd_configs={**configs, "k_steps": 8})  # type: ignore[arg-type]  # the same
    assert strategy.replace(localsgd_configs={"k_steps": 8}) == eight
    assert strategy.replace(local_sgd_steps=8) == eight
    assert strategy.replace(localsgd_configs=LocalSGDConfigs(k_steps=8)).localsgd_configs == LocalSGDConfigs(k_steps=8)
    built = DistributedStrategy().replace(build_strategy={"fuse_bn_act_ops": True}).replace(build_strategy={"fuse_all_optimizer_ops": True})
    assert built.build_strategy == BuildStrategy(fuse_bn_act_ops=True, fuse_all_optimizer_ops=True)
    with pytest.raises(ConfigError, match="Did you mean 'k_steps'"):
        strategy.replace(localsgd_configs={"k_step": 8})


@pytest.mark.parametrize(
    ("configs", "hint"),
    [
        ({"schedule": "document", "begin_step": 6}, "use warmup_epochs"),
        ({"warmup_epochs": 3}, 'set schedule = "document"'),
        ({"schedule": "torch", "warmup": "linear"}, 'set schedule = "document"'),
    ],
)
def test_a_warm_up_that_the_schedule_does_not_read_is_refused(configs: dict[str, Any], hint: str) -> None:
    """The document's schedule counts epochs, the others steps; what would be ignored is an error."""
    with pytest.raises(ConfigError, match="does not read it") as error:
        DistributedStrategy().replace(localsgd=True, localsgd_configs=configs)
    assert hint in str(error.value.hint)


def test_importing_the_strategy_imports_neither_torch_nor_numpy() -> None:
    """A user's script pays for the package what it uses of it."""
    code = (
        "import sys; from fleetbench import DistributedStrategy; DistributedStrategy(); "
        "print([name for name in ('torch', 'numpy', 'pandas', 'scipy', 'matplotlib', 'optuna') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
