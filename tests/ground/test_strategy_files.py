"""Strategies as files: what is saved loads as itself, and what is wrong is refused by the file's name."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetbench.errors import ConfigError
from fleetbench.strategy import DistributedStrategy


def any_strategy() -> st.SearchStrategy[DistributedStrategy]:
    """Valid strategies: switches, and settings only of what is on."""
    counts = st.integers(1, 64)
    collective = st.fixed_dictionaries(
        {"nccl_comm_num": counts, "sync_nccl_allreduce": st.booleans(), "thread_num": counts},
        optional={
            "fraction_of_gpu_memory_to_use": st.floats(0.01, 1.0),
            "build_strategy": st.fixed_dictionaries(
                {}, optional={"fuse_bn_act_ops": st.booleans(), "fuse_all_optimizer_ops": st.booleans()}
            ),
        },
    )
    sizes = st.floats(0, 1e6) | st.integers(0, 10**6)
    fusion = (
        st.sampled_from([{"fuse_all_reduce_ops": False}, {"fusion": "merged_gradient"}, {"fusion": "optimal"}])
        | st.fixed_dictionaries({}, optional={"fuse_grad_size_in_MB": sizes, "fuse_grad_count": st.integers(0, 1000)})
        | st.fixed_dictionaries({"fusion": st.just("ddp")}, optional={"fuse_grad_size_in_MB": sizes, "first_bucket_size_in_MB": sizes})
        | st.fixed_dictionaries(
            {"fusion": st.just("by_number")}, optional={"fuse_grad_size_in_num": counts, "last_comm_group_size_MB": sizes}
        )
    )
    hierarchy = st.just({}) | st.fixed_dictionaries({"use_hierarchical_allreduce": st.just(True), "hierarchical_inner_ranks": counts})
    local = st.fixed_dictionaries(
        {"localsgd": st.just(True), "localsgd_configs": st.fixed_dictionaries({"k_steps": counts, "begin_step": counts})}
    )
    adaptive = st.fixed_dictionaries(
        {
            "adaptive_localsgd": st.just(True),
            "adaptive_localsgd_configs": st.fixed_dictionaries({"variant": st.sampled_from(["fleet", "paper", "document", "qsr"])}),
        }
    )
    recompute = st.just({}) | st.fixed_dictionaries(
        {"recompute": st.just(True), "recompute_configs": st.fixed_dictionaries({"checkpoints": st.lists(st.text(max_size=5), max_size=3)})}
    )
    parts = st.tuples(collective, fusion, hierarchy, st.just({}) | local | adaptive, recompute)
    return parts.map(lambda tables: DistributedStrategy(**{key: value for table in tables for key, value in table.items()}))


@given(strategy=any_strategy())
def test_saved_strategies_load_as_themselves(strategy: DistributedStrategy, tmp_path_factory: pytest.TempPathFactory) -> None:
    """TOML keeps every field, and the file holds only what differs from the defaults."""
    path = tmp_path_factory.getbasetemp() / "strategy.toml"
    strategy.save(path)
    assert DistributedStrategy.load(path) == strategy
    assert DistributedStrategy().replace(**strategy.changes()) == strategy
    names = {field.name for field in dataclasses.fields(strategy)}
    different = {name for name in names if getattr(strategy, name) != getattr(DistributedStrategy(), name)}
    assert set(strategy.changes()) == different


def test_a_strategy_is_read_from_bare_keys_and_from_an_experiment(tmp_path: Path) -> None:
    """A file may hold the keys alone; an experiment file gives its strategy, and is refused where it names none."""
    path = tmp_path / "s.toml"
    for text, expected in (
        ("nccl_comm_num = 2\n", DistributedStrategy(nccl_comm_num=2)),
        ('name = "e"\n[workload]\nsteps = 3\n[strategy]\nnccl_comm_num = 2\n', DistributedStrategy(nccl_comm_num=2)),
        ("[strategy]\n", DistributedStrategy()),
    ):
        path.write_text(text)
        assert DistributedStrategy.load(path) == expected
    for text in ('schema = 1\nname = "e"\n[workload]\nsteps = 3\n[run]\nseed = 1\n', "[cluster]\nnodes = 2\n"):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"needs \[strategy\]"):
            DistributedStrategy.load(path)
