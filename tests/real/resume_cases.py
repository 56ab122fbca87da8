"""The cases of the resume tests: what is trained, by which strategy, and after which step it is saved."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from parity_cases import FUSED, SEVERAL

STEPS = 13
OVERFLOW = 4
"""In this step rank 1 overflows, where there is a loss scale, or a scaler is to leave it out."""
DECAY = 11
"""From this step on the scheduler's learning rate is lower: after most saves, so that a forgotten scheduler shows."""
_SCALING = {"init_loss_scaling": 128.0, "decr_every_n_nan_or_inf": 1, "incr_every_n_steps": 3}
_K4 = {"localsgd": True, "localsgd_configs": {"k_steps": 4}}


def _merge(k_steps: int, **more: Any) -> dict[str, Any]:
    return {"gradient_merge": True, "gradient_merge_configs": {"k_steps": k_steps, **more}}


def _local(**configs: Any) -> dict[str, Any]:
    return {"localsgd": True, "localsgd_configs": {"outer_lr": 0.7, "outer_momentum": 0.9, **configs}}


_FLIES = _local(k_steps=6, fragments=2, overlap_steps=2, mixing=0.25)
"""Fragments set out after steps 1, 4, 7, ... and are merged after 3, 6, 9, ...: 2, 7 and 8 lie within a flight."""
_ADAPTIVE = {"adaptive_localsgd": True, "adaptive_localsgd_configs": {"init_k_steps": 4, "begin_step": 2, "outer_momentum": 0.9}}


@dataclass(frozen=True)
class Case:
    """One training. Rounds of K = 4 end after steps 1, 5, 9, 13, so that 7 lies within one."""

    name: str
    strategy: dict[str, Any] = field(default_factory=dict)
    saved: int = 7
    model: str = "normed"
    optimizer: str = "momentum"
    dtype: str = "float64"
    scales: bool = False
    """The script has a GradScaler of its own."""
    skips: bool = False
    """It leaves out the step after which it is saved, which overflows."""

    @property
    def measures(self) -> bool:
        """Whether each engine makes its plan from times of its own, so that two trainings may add in another order."""
        return self.strategy.get("fusion") in ("merged_gradient", "optimal")


CASES = (
    Case("synchronous", SEVERAL),
    Case("synchronous, Adam, fused update", {**SEVERAL, **FUSED}, optimizer="adam"),
    Case("synchronous, update by bucket", {**SEVERAL, "build_strategy": {"enable_backward_optimizer_op_deps": False}}),
    Case("synchronous, by measured times", {"fusion": "merged_gradient"}),
    Case("synchronous, the best partition of measured times", {"fusion": "optimal"}),
    Case("synchronous, dropout", SEVERAL, model="dropout"),
    Case("synchronous, two optimizers", SEVERAL, optimizer="two"),
    Case("synchronous, a scaler of the script's", SEVERAL, dtype="float32", scales=True),
    Case("synchronous, a step that a scaler leaves out", SEVERAL, saved=OVERFLOW, dtype="float32", scales=True, skips=True),
    Case("merge of 4, two of them in the sum", {**SEVERAL, **_merge(4)}, saved=6),
    Case("merge of 4, statistics an update", {**SEVERAL, **_merge(4, batch_norm_per="update")}, saved=6),
    Case("merge of 3, sparse", {**SEVERAL, **_merge(3)}, saved=8, model="looked", optimizer="sgd"),
    Case("merge of 3, unused parameters", {**SEVERAL, "find_unused_parameters": True, **_merge(3)}, saved=7, model="gated"),
    Case("Local SGD", {**SEVERAL, **_K4}),
    Case(
        "Local SGD, the state of two averaged",
        {**SEVERAL, "localsgd": True, "localsgd_configs": {"k_steps": 4, "optimizer_state": "average"}},
        optimizer="two",
    ),
    Case("Local SGD of merges", {**SEVERAL, "localsgd": True, "localsgd_configs": {"k_steps": 2}, **_merge(3)}, saved=8),
    Case("outer optimizer", {**SEVERAL, **_local(k_steps=4)}, optimizer="adam"),
    Case("fragment in flight", {**SEVERAL, **_FLIES}, optimizer="adam"),
    Case("fragment in flight, before the plan settles", {**SEVERAL, **_FLIES}, saved=2, optimizer="adam"),
    Case("fragment in flight, BF16", {**SEVERAL, **_FLIES, "bf16_allreduce": True}, saved=8),
    Case("INT8, with error feedback", _local(k_steps=4, outer_wire="int8", outer_error_feedback=True)),
    Case("adaptive", {**SEVERAL, "adaptive_localsgd": True, "adaptive_localsgd_configs": {"init_k_steps": 4, "begin_step": 2}}, saved=8),
    Case(
        "adaptive by the paper", {"adaptive_localsgd": True, "adaptive_localsgd_configs": {"init_k_steps": 3, "variant": "paper"}}, saved=8
    ),
    Case("synchronous, statistics of all", {**SEVERAL, "sync_batch_norm": True}),
    Case("loss scale", {**SEVERAL, "amp": True, "amp_configs": _SCALING}, saved=6, dtype="float32"),
    Case("loss scale, Local SGD", {**SEVERAL, "amp": True, "amp_configs": _SCALING, **_K4}, saved=6, dtype="float32"),
)
EPOCH = 5
"""Steps of an epoch, where a case counts them."""
_BY_THREE = (
    "synchronous",
    "synchronous, by measured times",
    "merge of 4, two of them in the sum",
    "merge of 3, sparse",
    "Local SGD",
    "adaptive",
    "outer optimizer",
    "fragment in flight",
    "loss scale, Local SGD",
)
"""What three trainers try: there sums depend on the order of addition, and so on the plan."""


def cases(ranks: int) -> tuple[Case, ...]:
    """The cases of a number of ranks."""
    return CASES if ranks == 2 else tuple(case for case in CASES if case.name in _BY_THREE)
