"""The cases of the tests of outer optimizers and fragments on processes: ``localsgd_configs``, and what else is set."""

from __future__ import annotations

from typing import Any

from parity_cases import SEVERAL

STEPS = 26
ROUNDS = {"schedule": "torch", "begin_step": 4, "k_steps": 4}
"""Of torchft and of the papers: the first round ends after update 4."""
DILOCO = {"outer_lr": 0.7, "outer_momentum": 0.9}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "outer": ({**ROUNDS, **DILOCO}, {}),
    "outer, several buckets": ({**ROUNDS, **DILOCO}, SEVERAL),
    "outer without Nesterov": ({**ROUNDS, **DILOCO, "outer_nesterov": False}, SEVERAL),
    "outer rate alone": ({**ROUNDS, "outer_lr": 0.5}, SEVERAL),
    "two fragments": ({"k_steps": 6, "fragments": 2, **DILOCO}, SEVERAL),
    "two fragments beside two steps": ({"k_steps": 6, "fragments": 2, "overlap_steps": 2, "mixing": 0.25, **DILOCO}, SEVERAL),
    "beside a step, averaged": ({"k_steps": 3, "overlap_steps": 1}, SEVERAL),
    "two fragments, free communicators": (
        {"k_steps": 6, "fragments": 2, "overlap_steps": 1, **DILOCO},
        {**SEVERAL, "nccl_comm_num": 2, "sync_nccl_allreduce": False},
    ),
    "two fragments in BF16": ({"k_steps": 6, "fragments": 2, "overlap_steps": 1, **DILOCO}, {**SEVERAL, "bf16_allreduce": True}),
}
PAIRS = {"worker_trainers": 2}
WORKERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "workers": ({**ROUNDS, **PAIRS}, {}),
    "workers, several buckets, outer": ({**ROUNDS, **DILOCO, **PAIRS}, SEVERAL),
    "workers, two fragments beside two steps": (
        {"k_steps": 6, "fragments": 2, "overlap_steps": 2, "mixing": 0.25, **DILOCO, **PAIRS},
        SEVERAL,
    ),
    "workers, free communicators": (
        {"k_steps": 6, "fragments": 2, "overlap_steps": 1, **DILOCO, **PAIRS},
        {**SEVERAL, "nccl_comm_num": 2, "sync_nccl_allreduce": False},
    ),
    "workers in BF16": ({**ROUNDS, **DILOCO, **PAIRS}, {**SEVERAL, "bf16_allreduce": True}),
}
"""Of four ranks, in workers of two trainers."""
LEADERS = {"use_hierarchical_allreduce": True, "hierarchical_inner_ranks": 2}
