from __future__ import annotations

from typing import Any

import pytest

from fleetbench.advice import Advice, advice
from fleetbench.cluster import Cluster
from fleetbench.strategy import DistributedStrategy
from fleetbench.workload import LayerSpec, LrDecay, Workload

NODES_OF_EIGHT = Cluster(nodes=4, trainers_per_node=8)
RESNET50_BYTES = 25_557_032 * 4
"""A tenth of them is 9.749 MiB."""


def left_out(found: Advice, what: str) -> str | None:
    """The reason that is given for what was left out."""
    return next((line.removeprefix(f"{what}: ") for line in found.left_out if line.startswith(what)), None)


def test_several_nodes_of_gpus_get_all_of_it() -> None:
    """The documents' rules for ResNet-50 on four nodes of eight GPUs, with a decay of the learning rate at step 100."""
    workload = Workload(lr_decay=(LrDecay(step=300, factor=0.1), LrDecay(step=100, factor=0.1)))
    found = advice(workload, NODES_OF_EIGHT, RESNET50_BYTES, device="cuda")
    assert found.left_out == ()
    assert found.strategy.changes() == {
        "fuse_grad_size_in_MB": pytest.approx(9.749),
        "nccl_comm_num": 2,
        "sync_nccl_allreduce": False,
        "thread_num": 3,
        "use_hierarchical_allreduce": True,
        "hierarchical_inner_ranks": 8,
        "localsgd": True,
        "localsgd_configs": {"k_steps": 2, "begin_step": 100},
        "build_strategy": {"fuse_all_optimizer_ops": True},
        "amp": True,
    }


def test_one_node_needs_little_of_it() -> None:
    """One communicator, one thread, no hierarchy; on a CPU no mixed precision, and without a decay no Local SGD."""
    found = advice(Workload(), Cluster(trainers_per_node=8), RESNET50_BYTES)
    assert found.strategy.changes() == {
        "fuse_grad_size_in_MB": pytest.approx(9.749),
        "build_strategy": {"fuse_all_optimizer_ops": True},
    }
    assert left_out(found, "mixed precision") == "it is GPUs whose FP16 is faster, and run.device is cpu"
    assert left_out(found, "Local SGD after the first decay of the learning rate") == "workload.lr_decay names none"
    assert len(found.left_out) == 2


def test_the_gradients_of_a_table_of_layers_are_known() -> None:
    """Twenty layers of 1 MiB: a tenth is 2 MiB. Of a model whose gradients are not known the fusion size stays Fleet's."""
    layers = (LayerSpec(name="block", params=2**18, forward=1, backward=1, repeat=20),)
    assert advice(Workload(model="layers", layers=layers), Cluster(trainers_per_node=2)).strategy.fuse_grad_size_in_MB == 2
    found = advice(Workload(), Cluster(trainers_per_node=2))
    assert found.strategy.fuse_grad_size_in_MB == 32
    assert left_out(found, "fusion size") is not None


@pytest.mark.parametrize(
    ("workload", "cluster", "base", "what", "reason"),
    [
        ({}, {"trainers_per_node": 1}, {}, "hierarchical all-reduce", "nothing to reduce"),
        ({}, {}, {"sync_batch_norm": True}, "hierarchical all-reduce", "exclude each other"),
        ({}, {}, {"sync_batch_norm": True}, "nccl_comm_num = 2", "exclude each other"),
        ({"dtype": "float64"}, {}, {}, "mixed precision", "float64"),
        ({"lr_decay": [(700, 0.1)]}, {}, {}, "Local SGD", "step 700 lies after the 600 steps"),
        ({"lr_decay": [(7, 0.1)], "optimizer": "adam"}, {}, {}, "Local SGD", "averages parameters"),
        ({"lr_decay": [(7, 0.1)]}, {}, {"adaptive_localsgd": True}, "Local SGD", "exclude each other"),
    ],
)
def test_what_does_not_fit_is_left_out_with_the_reason(
    workload: dict[str, Any], cluster: dict[str, Any], base: dict[str, Any], what: str, reason: str
) -> None:
    """Whatever the workload, the cluster or the strategy that is built on contradicts."""
    decays = tuple(LrDecay(step=step, factor=factor) for step, factor in workload.pop("lr_decay", ()))
    found = advice(
        Workload(**workload, lr_decay=decays),
        Cluster(**{"nodes": 4, "trainers_per_node": 8} | cluster),
        RESNET50_BYTES,
        device="cuda",
        base=DistributedStrategy(**base),
    )
    assert reason in str(left_out(found, what))


def test_another_schedule_of_the_base_gives_way() -> None:
    """Local SGD from a step on is Fleet's schedule, whichever the base strategy had."""
    base = DistributedStrategy().replace(localsgd=True, localsgd_configs={"schedule": "document", "k_steps": 8, "warmup_epochs": 3})
    found = advice(Workload(lr_decay=(LrDecay(step=100, factor=0.1),)), Cluster(), base=base)
    assert found.strategy.changes()["localsgd_configs"] == {"k_steps": 2, "begin_step": 100}


def test_one_trainer_is_advised_no_fusion() -> None:
    """It exchanges nothing."""
    found = advice(Workload(), Cluster(), RESNET50_BYTES)
    assert found.strategy.fuse_grad_size_in_MB == DistributedStrategy().fuse_grad_size_in_MB
    assert "fusion size: one trainer exchanges nothing" in found.left_out
