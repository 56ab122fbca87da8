"""The cases of the tests of loops: which loop is run under which strategy."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import training_loops as loops
from parity_cases import FUSED, SEVERAL
from training_loops import Loop


@dataclass(frozen=True)
class Truth:
    """What a case is to come to, whatever buckets there are and whoever updates."""

    loop: Loop
    model: str = "plain"
    meets: int = 0
    """Trainers average after so many updates; 0: they never part."""
    merge: int = 1
    """Calls of ``optimizer.step()`` that share an update."""
    dtype: str = "float64"


@dataclass(frozen=True)
class Case:
    """One training. ``strategy``: fields, or none for DistributedDataParallel."""

    name: str
    strategy: dict[str, Any] | None
    loop: Loop
    truth: Truth


ALWAYS = (
    loops.usual,
    loops.kept,
    loops.in_no_sync,
    loops.forward_outside,
    loops.two_forwards,
    loops.one_of_two_losses,
    loops.penalty,
    loops.kept_penalty,
    loops.left_over,
    loops.no_backward,
)
"""What every strategy takes; clipping, but for updates in the backward."""
TWICE = (loops.plain, loops.mixed, loops.two_losses)
"""Several backwards that all want an exchange."""
DROPS = (loops.dropped, loops.scaler_of_its_own)
"""A backward's gradients are thrown away."""
UNUSED = (loops.usual, loops.kept, loops.in_no_sync)
"""Where some trainers' losses do not reach some parameters."""
BY_BUCKET = {"build_strategy": {"enable_backward_optimizer_op_deps": False}}
MERGE = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}
LOCAL = {"localsgd": True, "localsgd_configs": {"k_steps": 3}}
SYNCHRONOUS: dict[str, dict[str, Any]] = {
    "one bucket": {},
    "several buckets": SEVERAL,
    "two communicators at once": {**SEVERAL, "nccl_comm_num": 2, "sync_nccl_allreduce": False},
    "fused update": {**SEVERAL, **FUSED},
    "recompute": {**SEVERAL, "recompute": True, "recompute_configs": {"checkpoints": ["0", "4"]}},
}


COUNTED = (loops.usual, loops.in_no_sync, loops.two_forwards, loops.plain, loops.two_losses, loops.penalty)
"""Loops whose collectives are counted."""
WITH_ALL_LOOPS = ("several buckets", "merge of 2", "K = 3", "unused", "sparse", "ddp", "ddp, unused")


def sample() -> list[Case]:
    """What ``make test-all`` trains: every loop under a strategy of each family, and of the others one in three, by a fixed draw."""
    draws = random.Random(0)  # noqa: S311  # no secret
    found = []
    for case in cases():
        strategy, is_drawn = case.name.rpartition(": ")[0], draws.random() < 1 / 3
        if strategy in WITH_ALL_LOOPS or (strategy in SYNCHRONOUS and case.loop in COUNTED) or is_drawn:
            found.append(case)
    return found


def cases() -> list[Case]:
    """All of them."""
    found = [_case("ddp", None, loop) for loop in (loops.usual, loops.in_no_sync, loops.plain, loops.two_forwards, loops.dropped)]
    found += [_case("ddp", None, loop) for loop in (loops.left_over, loops.no_backward)]
    found += [_case("ddp, unused", None, loop, model="gated") for loop in UNUSED]
    for name, fields in SYNCHRONOUS.items():
        found += [_case(name, fields, loop) for loop in (*ALWAYS, *TWICE, *DROPS, loops.whole)]
    found += [_case("update by bucket", {**SEVERAL, **BY_BUCKET}, loop) for loop in ALWAYS]
    for name, fields in (("merge of 2", MERGE), ("merge of 2, fused", {**MERGE, **FUSED})):
        found += [_case(name, {**SEVERAL, **fields}, loop, merge=2) for loop in (*ALWAYS, loops.whole)]
    for name, fields in (("K = 3", LOCAL), ("K = 3, fused", {**LOCAL, **FUSED})):
        found += [_case(name, {**SEVERAL, **fields}, loop, meets=3) for loop in (*ALWAYS, *TWICE, loops.whole)]
    found += [_case("K = 3, merge of 2", {**SEVERAL, **LOCAL, **MERGE}, loop, meets=3, merge=2) for loop in (*ALWAYS, loops.whole)]
    unused = {**SEVERAL, "find_unused_parameters": True}
    found += [_case("unused", unused, loop, model="gated") for loop in (*UNUSED, loops.plain, loops.mixed, loops.kept_penalty)]
    found += [_case("unused, merge of 2", {**unused, **MERGE}, loop, model="gated", merge=2) for loop in (*UNUSED, loops.penalty)]
    found += [_case("unused, K = 3", {**unused, **LOCAL}, loop, model="gated", meets=3) for loop in (*UNUSED, loops.plain)]
    found += [
        _case("sparse", SEVERAL, loop, model="looked")
        for loop in (loops.usual, loops.in_no_sync, loops.plain, loops.mixed, loops.left_over)
    ]
    found += [_case("sparse, merge of 2", {**SEVERAL, **MERGE}, loops.in_no_sync, model="looked", merge=2)]
    once = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 1}}
    found += [_case("sparse, K = 3, merge of 1", {**SEVERAL, **LOCAL, **once}, loops.usual, model="looked", meets=3)]
    scaled = {"amp": True, "amp_configs": {"init_loss_scaling": 128.0, "dtype": "fp16"}}
    for name, fields in (("amp", scaled), ("amp bf16", {"amp": True, "amp_configs": {"dtype": "bf16"}})):
        for loop in (loops.usual, loops.in_no_sync, loops.one_of_two_losses):
            found.append(_case(name, {**SEVERAL, **fields}, loop, dtype="float32"))
            found.append(_case(f"{name}, merge of 2", {**SEVERAL, **fields, **MERGE}, loop, merge=2, dtype="float32"))
            found.append(_case(f"{name}, K = 3", {**SEVERAL, **fields, **LOCAL}, loop, meets=3, dtype="float32"))
    return found


def _case(strategy: str, fields: dict[str, Any] | None, loop: Loop, **more: Any) -> Case:
    return Case(f"{strategy}: {loop.__name__}", fields, loop, Truth(loop, **more))
