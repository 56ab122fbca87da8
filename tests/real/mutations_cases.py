"""The trainings whose waits are left out one after the other, and which of a lane's dependencies each of them needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from parity_cases import SEVERAL

IN_TURN = {**SEVERAL, "nccl_comm_num": 2}
"""Two communicators, one operation in flight over both: only tickets order them."""
HIERARCHY = {"use_hierarchical_allreduce": True, "hierarchical_inner_ranks": 2}


@dataclass(frozen=True)
class Mutated:
    """One training. ``needs``: what a lane orders, and goes wrong without (see ``deferred.DEPENDENCIES``)."""

    name: str
    strategy: dict[str, Any] = field(default_factory=lambda: SEVERAL)
    needs: frozenset[str] = frozenset({"submitter", "work", "ticket"})
    model: str = "plain"
    ranks: int = 2


ALL = frozenset({"submitter", "after", "work", "ticket"})
CASES = (
    Mutated("synchronous"),
    Mutated("two communicators in turn", IN_TURN, ALL),
    Mutated("two communicators at once", {**IN_TURN, "sync_nccl_allreduce": False}),
    Mutated("fp16 wire", {**SEVERAL, "fp16_allreduce": True}),
    Mutated("update by bucket", {**SEVERAL, "build_strategy": {"enable_backward_optimizer_op_deps": False}}, ALL),
    Mutated("fused update", {**SEVERAL, "build_strategy": {"fuse_all_optimizer_ops": True}}),
    Mutated("gradient merge", {**SEVERAL, "gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}),
    Mutated("Local SGD", {**SEVERAL, "localsgd": True, "localsgd_configs": {"k_steps": 2}}),
    Mutated(
        "Local SGD with momentum and buffers",
        {**SEVERAL, "localsgd": True, "localsgd_configs": {"k_steps": 2, "momentum": "average", "buffers": "average"}},
        model="normed",
    ),
    Mutated("leaders, two communicators in turn", {**IN_TURN, **HIERARCHY}, ALL, ranks=4),
    Mutated("reduce-scatter", {**SEVERAL, **HIERARCHY, "hierarchical_variant": "reduce_scatter"}, ranks=4),
)


def cases(ranks: int) -> list[Mutated]:
    """Those of a number of ranks."""
    return [case for case in CASES if case.ranks == ranks]
