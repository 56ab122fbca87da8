"""The strategies that are trained in each of torch's modes, in which fleet makes tensors of its own."""

from __future__ import annotations

from typing import Any

AVERAGED = {"k_steps": 2, "optimizer_state": "average", "buffers": "average"}
OUTER = {"k_steps": 4, "outer_lr": 0.7, "outer_momentum": 0.9}
FAMILIES: dict[str, dict[str, Any]] = {
    "synchronous": {"find_unused_parameters": True, "sync_batch_norm": True, "fuse_grad_size_in_MB": 0.001},
    "fp16": {
        "amp": True,
        "amp_configs": {"init_loss_scaling": 128.0},
        "gradient_merge": True,
        "gradient_merge_configs": {"k_steps": 2},
    },
    "by cost": {
        "fusion": "optimal",
        "bf16_allreduce": True,
        "build_strategy": {"fuse_all_optimizer_ops": True},
    },
    "sparse": {},
    "local": {"localsgd": True, "localsgd_configs": AVERAGED},
    "adaptive": {
        "adaptive_localsgd": True,
        "adaptive_localsgd_configs": {"init_k_steps": 2, "variant": "paper", "buffers": "average"},
    },
    "diloco": {
        "localsgd": True,
        "localsgd_configs": {**OUTER, "outer_wire": "int8", "outer_error_feedback": True},
    },
    "fragments": {
        "localsgd": True,
        "localsgd_configs": {**OUTER, "fragments": 2, "overlap_steps": 1, "mixing": 0.5},
    },
}
