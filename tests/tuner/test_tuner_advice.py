import dataclasses
from pathlib import Path

import pytest
from tuner_fakes import layers_experiment, layers_with, profiled_experiment, target_experiment

from fleetbench.config import encode
from fleetbench.experiment import Experiment
from fleetbench.profile import Profile, compute_key, table_for
from tuner.tune import advice_for

TENTH_MIB = 0.3815
"""Ten gradients of 100,000 float32 values are 4,000,000 bytes: a tenth is 0.3815 MiB."""


def test_several_nodes_get_two_communicators_that_run_free() -> None:
    """On several nodes: two communicators, not serialised, and a thread more than those."""
    experiment = layers_experiment()
    strategy, left_out = advice_for(experiment, table_for(experiment))
    assert (strategy.nccl_comm_num, strategy.sync_nccl_allreduce, strategy.thread_num) == (2, False, 3)
    assert any("hierarchical" in line and "one trainer per node" in line for line in left_out)


def test_a_declared_table_takes_every_rule_that_fits() -> None:
    """Hierarchy over the trainers of a node and a fused optimizer; an emulated device has no mixed precision."""
    experiment = layers_with({}, {"trainers_per_node": 2, "intra": {"bandwidth": "10 Gbit/s"}})
    strategy, left_out = advice_for(experiment, table_for(experiment))
    assert (strategy.use_hierarchical_allreduce, strategy.hierarchical_inner_ranks) == (True, 2)
    assert strategy.build_strategy.fuse_all_optimizer_ops
    assert not strategy.amp
    assert any(line.startswith("mixed precision") for line in left_out)


def test_what_changes_compute_needs_a_table_of_its_own(tmp_path: Path) -> None:
    """A profile without a fused optimizer leaves it out; one that holds its table takes it."""
    experiment = profiled_experiment(tmp_path)
    strategy, left_out = advice_for(experiment, table_for(experiment))
    assert not strategy.build_strategy.fuse_all_optimizer_ops
    assert any(line.startswith("op fusion: the profile holds no layer table") for line in left_out)
    profile = Profile.load(str(experiment.workload.profile))
    fused = experiment.strategy.replace(build_strategy={"fuse_all_optimizer_ops": True})
    table = dataclasses.replace(profile.tables[0], key=compute_key(experiment, fused))
    dataclasses.replace(profile, tables=(*profile.tables, table)).save(Path(str(experiment.workload.profile)))
    strategy, left_out = advice_for(experiment, table_for(experiment))
    assert strategy.build_strategy.fuse_all_optimizer_ops
    assert not any(line.startswith("op fusion") for line in left_out)


def test_local_steps_start_at_the_first_decay() -> None:
    """With a decay inside the measured steps and a target, two local steps begin at that step."""
    data = encode(target_experiment(leg_steps=20, simulated_steps=20))
    data["workload"]["lr_decay"] = [{"step": 15, "factor": 0.1}, {"step": 9, "factor": 0.5}]
    experiment = Experiment.from_dict(data)
    strategy, _ = advice_for(experiment, table_for(experiment))
    assert strategy.localsgd
    assert (strategy.localsgd_configs.k_steps, strategy.localsgd_configs.begin_step) == (2, 9)


@pytest.mark.parametrize(
    ("workload", "reason"),
    [
        ({}, "names none"),
        ({"lr_decay": [{"step": 30, "factor": 0.1}]}, "after"),
        ({"lr_decay": [{"step": 3, "factor": 0.1}], "target_loss": None}, "prices"),
        ({"lr_decay": [{"step": 3, "factor": 0.1}], "optimizer": "adam"}, "averages"),
    ],
)
def test_local_steps_are_left_out_with_the_reason(workload: dict[str, object], reason: str) -> None:
    """No decay, one that no leg reaches, no target, or an optimizer that rules it out."""
    data = encode(target_experiment(leg_steps=20, simulated_steps=20))
    data["workload"] = {key: value for key, value in (data["workload"] | workload).items() if value is not None}
    experiment = Experiment.from_dict(data)
    strategy, left_out = advice_for(experiment, table_for(experiment))
    assert not strategy.localsgd
    assert any("Local SGD" in line and reason in line for line in left_out)
