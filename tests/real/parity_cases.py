"""The cases of the parity tests: what is trained, by which strategy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from training_problem import DECAY_STEP, STEPS

TINY = 0.0015
"""MiB: less than a layer or two, so that there are several buckets."""
SEVERAL = {"fuse_grad_size_in_MB": TINY}
FUSED = {"build_strategy": {"fuse_all_optimizer_ops": True}}


@dataclass(frozen=True)
class Case:
    """One training. ``strategy``: fields of a DistributedStrategy, or none for DistributedDataParallel."""

    name: str
    strategy: dict[str, Any] | None = field(default_factory=dict)
    model: str = "plain"
    optimizer: str = "momentum"
    hook: str = ""
    """DDP's communication hook: ``fp16`` or ``bf16``."""
    cpu_only: bool = False
    """On a GPU torch's own modules do it."""

    @property
    def steps(self) -> int:
        """As many as the problem has; fewer where no step depends on how many came before it, but one after the decay of the rate."""
        rounds = ("localsgd", "adaptive_localsgd", "gradient_merge", "amp")
        return STEPS if any(name in (self.strategy or {}) for name in rounds) else DECAY_STEP + 1


def local(name: str, model: str = "plain", optimizer: str = "momentum", **fields: Any) -> Case:
    """A case of Local SGD in several buckets."""
    return Case(name, {"localsgd": True, **SEVERAL, **fields}, model, optimizer)


DDP = (
    Case("ddp plain", None),
    Case("ddp odd", None, "odd"),
    Case("ddp gated", None, "gated"),
    Case("ddp fp16", None, hook="fp16"),
    Case("ddp bf16", None, hook="bf16"),
)
SYNCHRONOUS = (
    Case("one bucket"),
    Case("several buckets", SEVERAL),
    Case("a bucket a gradient", {"fuse_all_reduce_ops": False}),
    Case("by number", {"fusion": "by_number", "fuse_grad_size_in_num": 3, "last_comm_group_size_MB": 0.0005}),
    Case("as DDP", {"fusion": "ddp", "fuse_grad_size_in_MB": 0.001, "sync_nccl_allreduce": False}),
    Case("merged gradient", {"fusion": "merged_gradient"}),
    Case("optimal fusion", {"fusion": "optimal"}),
    Case("one communicator, free", {**SEVERAL, "sync_nccl_allreduce": False}),
    Case("two communicators in turn", {**SEVERAL, "nccl_comm_num": 2}),
    Case("two communicators at once", {**SEVERAL, "nccl_comm_num": 2, "sync_nccl_allreduce": False}),
    Case("update by bucket", {**SEVERAL, "build_strategy": {"enable_backward_optimizer_op_deps": False}}),
    Case("fused update", {**SEVERAL, **FUSED}),
    Case("one after the other", {**SEVERAL, "build_strategy": {"enable_sequential_execution": True}}),
    Case("recompute", {**SEVERAL, "recompute": True, "recompute_configs": {"checkpoints": ["0", "4"]}}),
)
"""Equal to DDP and to one process with the joint batch, whatever the ranks."""
HIERARCHICAL = (
    Case("leaders", {**SEVERAL, "use_hierarchical_allreduce": True, "hierarchical_inner_ranks": 2}),
    Case(
        "reduce-scatter",
        {**SEVERAL, "use_hierarchical_allreduce": True, "hierarchical_inner_ranks": 2, "hierarchical_variant": "reduce_scatter"},
    ),
    Case(
        "leaders on two communicators at once",
        {**SEVERAL, "use_hierarchical_allreduce": True, "hierarchical_inner_ranks": 2, "nccl_comm_num": 2, "sync_nccl_allreduce": False},
    ),
)
"""The same, on four ranks."""
ODD = (
    Case("odd", SEVERAL, "odd"),
    Case("odd, a bucket a gradient", {"fuse_all_reduce_ops": False}, "odd"),
    Case("odd, fused update", {**SEVERAL, **FUSED}, "odd"),
    Case("odd, update by bucket", {**SEVERAL, "build_strategy": {"enable_backward_optimizer_op_deps": False}}, "odd"),
)
WIRE = (Case("fp16 wire", {"fp16_allreduce": True}), Case("bf16 wire", {"bf16_allreduce": True}))
GATED = (Case("unused parameters", {**SEVERAL, "find_unused_parameters": True}, "gated"),)
SPARSE = (
    Case("sparse", SEVERAL, "looked", "sgd"),
    Case("sparse, merged", {**SEVERAL, "gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}, "looked", "sgd"),
)
NORMED = (Case("synchronised batch norm", {**SEVERAL, "sync_batch_norm": True}, "normed", cpu_only=True),)
MERGED = (
    Case("merge of 4", {**SEVERAL, "gradient_merge": True, "gradient_merge_configs": {"k_steps": 4}}),
    Case("merge of 4, fused update", {**SEVERAL, **FUSED, "gradient_merge": True, "gradient_merge_configs": {"k_steps": 4}}),
    Case("merge of 2, sum", {**SEVERAL, "gradient_merge": True, "gradient_merge_configs": {"k_steps": 2, "avg": False}}),
)
LOCAL = (
    local("K = 1"),
    local("K = 4", localsgd_configs={"k_steps": 4}),
    local("K = 4, fused update", localsgd_configs={"k_steps": 4}, **FUSED),
    local("K = 4, odd", "odd", localsgd_configs={"k_steps": 4}),
    local("K = 3 from 6", localsgd_configs={"k_steps": 3, "begin_step": 6}),
    local("document, K = 4", localsgd_configs={"k_steps": 4, "schedule": "document", "warmup": "const"}),
    local("torch, K = 4", localsgd_configs={"k_steps": 4, "schedule": "torch"}),
    local("K = 4, momentum reset", localsgd_configs={"k_steps": 4, "momentum": "reset"}),
    local("K = 4, momentum averaged", localsgd_configs={"k_steps": 4, "momentum": "average"}),
    local("K = 4, momentum averaged, fused", localsgd_configs={"k_steps": 4, "momentum": "average"}, **FUSED),
    local("K = 4, Adam averaged", optimizer="adam", localsgd_configs={"k_steps": 4, "optimizer_state": "average"}),
    local("K = 2, merge of 3", localsgd_configs={"k_steps": 2}, gradient_merge=True, gradient_merge_configs={"k_steps": 3}),
    Case("adaptive, K0 = 2", {**SEVERAL, "adaptive_localsgd": True, "adaptive_localsgd_configs": {"init_k_steps": 2, "begin_step": 2}}),
    local("K = 4, buffers averaged", "normed", localsgd_configs={"k_steps": 4, "buffers": "average"}),
)
LOCAL_HIERARCHICAL = (
    local("K = 4, leaders", localsgd_configs={"k_steps": 4}, use_hierarchical_allreduce=True, hierarchical_inner_ranks=2),
)
SCALED = (
    Case("amp", {**SEVERAL, "amp": True, "amp_configs": {"init_loss_scaling": 128.0, "decr_every_n_nan_or_inf": 1}}),
    Case(
        "amp, merge of 2",
        {
            **SEVERAL,
            "amp": True,
            "amp_configs": {"init_loss_scaling": 128.0, "decr_every_n_nan_or_inf": 1},
            "gradient_merge": True,
            "gradient_merge_configs": {"k_steps": 2},
        },
    ),
    local("amp, K = 4", amp=True, amp_configs={"init_loss_scaling": 128.0, "decr_every_n_nan_or_inf": 1}, localsgd_configs={"k_steps": 4}),
)
"""Rank 1 overflows in step ``OVERFLOW``."""
OVERFLOW = 6


_ON_TWO_RANKS = """
by number; merged gradient; one communicator, free; two communicators in turn; fused update; one after the other; recompute;
odd, a bucket a gradient; odd, fused update; merge of 4, fused update; K = 4, fused update; document, K = 4; torch, K = 4;
K = 4, momentum averaged, fused; K = 2, merge of 3; amp, merge of 2; leaders on two communicators at once
"""
ON_TWO_RANKS = frozenset(_ON_TWO_RANKS.replace("\n", " ").strip().split("; "))
"""What three and four ranks leave to two, and to ``make test SLOW=--whole``: their sample has another case of each kind."""


def cases(ranks: int, *, sampled: bool = False) -> tuple[Case, ...]:
    """All cases of a number of ranks, or their sample."""
    if sampled:
        return tuple(case for case in cases(ranks) if case.name not in ON_TWO_RANKS)
    found = (*DDP, *SYNCHRONOUS, *ODD, *WIRE, *GATED, *SPARSE, *NORMED, *MERGED, *LOCAL, *SCALED)
    return (*found, *HIERARCHICAL, *LOCAL_HIERARCHICAL) if ranks == 4 else found
