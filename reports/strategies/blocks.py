"""Blocks: one arm, from fresh parameters, timed step by step; and what else was true while it ran."""

from __future__ import annotations

import gc
import itertools
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from loop import Arm
from timing import UNIT_STEPS
from torch.distributed.distributed_c10d import _world  # the collectives of every group, DDP's in C++ among them, are counted nowhere else
from workloads import WARMUP_STEPS, Workload

TICK_S = 0.01
"""USER_HZ of /proc/stat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One block of one arm, seen from rank 0."""

    step_us: list[list[int]]
    """Timed steps of every rank."""
    collectives: int
    """Collectives that a rank enqueued on all process groups during the timed steps."""
    bytes_on_wire: int
    """Bytes that the loopback interface carried meanwhile, headers included, of all ranks together."""
    foreign_cores: float
    """Cores that other programs' user time took meanwhile."""
    early: torch.Tensor
    """Parameters behind the first unit (and the extra steps), before roundings have grown."""
    parameters: torch.Tensor
    """Parameters at the end."""
    agree: bool
    """Whether all ranks ended with the same bits."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, but for the parameters."""
        return {
            "step_us": self.step_us,
            "collectives": self.collectives,
            "bytes_on_wire": self.bytes_on_wire,
            "foreign_cores": round(self.foreign_cores, 3),
            "agree": self.agree,
        }


def run_block(arm: Arm, model: torch.nn.Module, workload: Workload, units: int, warmup: int = WARMUP_STEPS, extra: int = 0) -> Block:
    """Train ``warmup`` steps, then ``units`` timed ones, then ``extra``; the arm stays open."""
    assert warmup >= UNIT_STEPS + extra
    timed = units * UNIT_STEPS
    batches = workload.batches(warmup + timed + extra, dist.get_rank())
    gc.collect()
    gc.disable()
    dist.barrier()
    for number, (inputs, labels) in enumerate(batches[:warmup], start=1):
        arm.step(inputs, labels)
        if number == UNIT_STEPS + extra:
            early = flat(model)
    before = _Meters.read(arm)
    stamps = [time.perf_counter_ns()]
    for inputs, labels in batches[warmup : warmup + timed]:
        arm.step(inputs, labels)
        stamps.append(time.perf_counter_ns())
    after = _Meters.read(arm)
    gc.enable()
    for inputs, labels in batches[warmup + timed :]:
        arm.step(inputs, labels)
    arm.finish()
    own = torch.tensor([end - begin for begin, end in itertools.pairwise(stamps)], dtype=torch.int64) // 1000
    of_ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, own)
    used_s = torch.tensor([after.own_user_s - before.own_user_s], dtype=torch.float64)
    dist.all_reduce(used_s)
    wall_s = after.wall_s - before.wall_s
    parameters = flat(model)
    return Block(
        step_us=[rank.tolist() for rank in of_ranks],
        collectives=after.collectives - before.collectives,
        bytes_on_wire=after.wire_bytes - before.wire_bytes,
        foreign_cores=max(0.0, (after.all_user_s - before.all_user_s - float(used_s)) / wall_s),
        early=early,
        parameters=parameters,
        agree=_agree(parameters),
    )


def flat(model: torch.nn.Module) -> torch.Tensor:
    """All parameters as one vector."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def _agree(parameters: torch.Tensor) -> bool:
    first = parameters.clone()
    dist.broadcast(first, src=0)
    differ = torch.tensor([0 if torch.equal(first, parameters) else 1])
    dist.all_reduce(differ)
    return not bool(differ)


@dataclass(frozen=True, slots=True)
class _Meters:
    wall_s: float
    own_user_s: float
    all_user_s: float
    wire_bytes: int
    collectives: int

    @classmethod
    def read(cls, arm: Arm) -> _Meters:
        user, nice = Path("/proc/stat").read_text(encoding="ascii").split()[1:3]
        loopback = next(line for line in Path("/proc/net/dev").read_text(encoding="ascii").splitlines() if line.strip().startswith("lo:"))
        groups = _world.pg_map
        listed = sum(group._get_backend(torch.device("cpu"))._get_sequence_number_for_group() for group in groups)  # noqa: SLF001  # torch has no public counter
        return cls(
            wall_s=time.monotonic(),
            own_user_s=resource.getrusage(resource.RUSAGE_SELF).ru_utime,
            all_user_s=(int(user) + int(nice)) * TICK_S,
            wire_bytes=int(loopback.split()[1]),
            collectives=listed + getattr(arm, "unlisted_collectives", int)(),
        )


def sentinel(repeats: int = 12) -> dict[str, float]:
    """Work that never changes, in seconds (medians): it moves only with the machine."""
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(256, 256, generator=generator)
    large = torch.randn(1 << 22, generator=generator)
    gradient = torch.randn(1 << 18, generator=generator)
    return {
        "multiply_s": _median_s(lambda: left @ left, 4 * repeats),
        "copy_s": _median_s(large.clone, repeats),
        "all_reduce_s": _median_s(lambda: dist.all_reduce(gradient, op=dist.ReduceOp.AVG), repeats),
    }


def _median_s(work: Callable[[], object], repeats: int) -> float:
    times = []
    dist.barrier()
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return median(times)
