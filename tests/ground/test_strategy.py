from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fleetbench.cluster import Cluster
from fleetbench.config import Config, encode
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment, HierarchySwitchedOff
from fleetbench.fleet_names import NO_EFFECT, FieldHasNoEffect
from fleetbench.strategy import DistributedStrategy, LocalSGDConfigs
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


def test_replace_makes_another_value() -> None:
    """The original stays; tables, older names and mistakes are treated as in a file."""
    strategy = DistributedStrategy()
    changed = strategy.replace(localsgd=True, localsgd_configs={"k_steps": 4})
    assert (strategy.local_steps, changed.local_steps) == (1, 4)
    assert changed.replace(fuse_grad_size_in_TFLOPS=20).fuse_grad_count == 20
    with pytest.raises(TypeError, match="nccl_com_num"):
        strategy.replace(nccl_com_num=2)
