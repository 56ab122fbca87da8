from __future__ import annotations

from typing import Any

import pytest

from fleetbench.advice import Advice, advice
from fleetbench.cluster import Cluster
from fleetbench.strategy import DistributedStrategy
from fleetbench.workload import LrDecay, Workload

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
