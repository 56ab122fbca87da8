"""One rank of one launch; started by measure.py, not by hand.

``rank.py RANK RANKS STORE OUTPUT JOB``: JOB is JSON with ``kind`` (search, search_ours, round, plan, live, resident),
``model`` and what the kind needs. Rank 0 writes its findings to OUTPUT, one JSON object a line.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from arms import ARMS, FUSED, Context, DdpOptions, Ours, bucket_size, ddp, ours
from blocks import Block, run_block, sentinel
from loop import Arm, SkippedArm
from timing import UNIT_STEPS, median_step_s
from torch import nn
from workloads import WARMUP_STEPS, WORKLOADS, Workload

from real.communication.communicators import Communicators

TIMEOUT = timedelta(seconds=120)
SEARCH_WARMUP = 4
CAPS_MB = (None, 0.25, 1.0, 5.0, 12.0, 100.0)
"""None is DDP's default: 25 MiB behind a first bucket of 1 MiB."""
OURS_MB = (0.0, 0.25, 1.0, 5.0, 12.0)
"""Caps in MiB, 0: everything in one bucket."""
FLAGS = ("gradient_as_bucket_view", "static_graph", "batched_grad_copy")

Finding = dict[str, Any]


def main() -> None:
    """Do the job."""
    rank, ranks, store, output, text = sys.argv[1:]
    job = json.loads(text)
    faulthandler.enable()
    _end_with_parent()
    if job["torchft"]:
        sys.path.append(job["torchft"])  # last: nothing that it brings along may hide what the arms run on
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks), timeout=TIMEOUT)
    communicators = Communicators("gloo", TIMEOUT)
    context = Context(communicators, DdpOptions(**job["tuned"]), job["ours"])
    workload = WORKLOADS[job["model"]]
    jobs = {
        "search": search,
        "search_ours": search_ours,
        "round": measured_round,
        "plan": plan_calls,
        "live": live_bytes,
        "resident": resident_bytes,
    }
    with Path(output).open("w", encoding="utf-8") if rank == "0" else Path(os.devnull).open("w", encoding="utf-8") as out:
        for finding in jobs[job["kind"]](job, workload, context):
            out.write(json.dumps({"kind": job["kind"], "model": job["model"], "ranks": int(ranks), **finding}) + "\n")
            out.flush()
    dist.barrier()
    communicators.close()
    dist.destroy_process_group()


def _end_with_parent() -> None:
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def opened(name: str, workload: Workload, context: Context) -> Iterator[tuple[nn.Module, Arm]]:
    """A fresh model in an arm."""
    model = workload.model()
    arm = ARMS[name].build(model, context)
    try:
        yield model, arm
    finally:
        arm.close()


def search(job: Finding, workload: Workload, _: Context) -> Iterator[Finding]:
    """Find DDP's fastest settings: caps first, then every combination of flags, then the best ones again."""
    repeats = 1 if job["quick"] else 3
    units = 1 if job["quick"] else workload.search_units
    buffers = {"forward_sync_buffers": False} if any(True for _ in workload.model().buffers()) else {}
    every_flag = dict.fromkeys(FLAGS, True)
    found: dict[DdpOptions, list[float]] = {}

    def race(options: Sequence[DdpOptions]) -> list[DdpOptions]:
        for option in options:
            model = workload.model()
            arm = ddp(model, option)
            block = run_block(arm, model, workload, units, SEARCH_WARMUP)
            del arm
            seconds = torch.tensor([median_step_s(block.step_us)], dtype=torch.float64)
            dist.broadcast(seconds, src=0)
            found.setdefault(option, []).append(float(seconds))
        return sorted(set(options), key=lambda option: min(found[option]))

    caps = CAPS_MB[:1] if job["quick"] else CAPS_MB
    first = race([DdpOptions(bucket_cap_mb=cap, **buffers, **flags) for cap in caps for flags in ({}, every_flag)])
    best_caps = list(dict.fromkeys(option.bucket_cap_mb for option in first))[: 1 if job["quick"] else 2]
    combinations = [{flag: bool(number >> bit & 1) for bit, flag in enumerate(FLAGS)} for number in ((0, 7) if job["quick"] else range(8))]
    second = race(
        [DdpOptions(bucket_cap_mb=cap, **buffers, **flags) for cap in best_caps for flags in combinations]
        + [DdpOptions(bucket_cap_mb=cap, keep_gradients=True, **buffers, **every_flag) for cap in best_caps]
    )
    finalists = sorted(set(first) | set(second), key=lambda option: min(found[option]))[: 2 if job["quick"] else 5]
    before = {option: len(found[option]) for option in finalists}
    for turn in range(repeats):
        race(finalists if turn % 2 == 0 else finalists[::-1])
    again = {option: sorted(found[option][before[option] :]) for option in finalists}  # fresh: a best of many flatters itself
    best = min(finalists, key=lambda option: again[option][len(again[option]) // 2])
    for option, seconds in found.items():
        yield {"options": dataclasses.asdict(option), "step_s": seconds, "best": option == best}


def search_ours(job: Finding, workload: Workload, context: Context) -> Iterator[Finding]:
    """Find our fastest bucket size, as often timed as a finalist of DDP's search: it has far more settings."""
    sizes = OURS_MB[:1] if job["quick"] else OURS_MB
    found: dict[float, list[float]] = {size: [] for size in sizes}
    for turn in range(1 if job["quick"] else 4):
        for size in sizes if turn % 2 == 0 else sizes[::-1]:
            model = workload.model()
            arm = ours(bucket_size(size) | FUSED)(model, context)
            block = run_block(arm, model, workload, 1 if job["quick"] else workload.search_units, SEARCH_WARMUP)
            arm.close()
            seconds = torch.tensor([median_step_s(block.step_us)], dtype=torch.float64)
            dist.broadcast(seconds, src=0)
            found[size].append(float(seconds))
    best = min(found, key=lambda size: median(found[size]))
    for size, seconds_of in found.items():
        yield {"options": bucket_size(size), "step_s": seconds_of, "best": size == best}


def measured_round(job: Finding, workload: Workload, context: Context) -> Iterator[Finding]:
    """Every arm once in the round's order and once in its mirror image, and the parity of the first pass."""
    units = 2 if job["quick"] else workload.units
    number, order = job["round"], job["order"]
    yield {"round": number, "sentinel": "before", **sentinel()}
    ended: dict[str, Block] = {}
    unavailable: set[str] = set()
    for position, name in enumerate([*order, *order[::-1]]):
        if position == len(order):
            yield {"round": number, "sentinel": "middle", **sentinel()}
        if name in unavailable:
            continue
        try:
            with opened(name, workload, context) as (model, arm):
                block = run_block(arm, model, workload, units, extra=ARMS[name].extra_steps)
        except SkippedArm as reason:
            unavailable.add(name)
            yield {"round": number, "arm": name, "skipped": str(reason)}
            continue
        ended.setdefault(name, block)
        yield {"round": number, "arm": name, "position": position, **block.to_dict()}
    yield {"round": number, "sentinel": "after", **sentinel()}
    references = {"ddp", "ddp_rounded", "ddp_small"} | {ARMS[name].equals for name in ended}
    for name in sorted(references - {None, *ended}, key=str):
        assert name is not None
        with opened(name, workload, context) as (model, arm):
            ended[name] = run_block(arm, model, workload, units, extra=ARMS[name].extra_steps)
    yield from _parity(number, workload, ended)


def _parity(number: int, workload: Workload, ended: dict[str, Block]) -> Iterator[Finding]:
    start = torch.cat([parameter.detach().reshape(-1) for parameter in workload.model().parameters()])
    pairs = [(name, ARMS[name].equals) for name in ended if ARMS[name].equals is not None]
    if "none" in ended:
        pairs.append(("none", "ddp"))  # the control: what does not exchange must not pass
    for name, other in pairs:
        assert other is not None
        yield {
            "round": number,
            "parity": name,
            "equals": other,
            "early": _distance(ended[name].early, ended[other].early, start),
            "distance": _distance(ended[name].parameters, ended[other].parameters, start),
            "agree": ended[name].agree,
            "batch_norm": any(True for _ in workload.model().buffers()),
        }


def _distance(one: torch.Tensor, other: torch.Tensor, start: torch.Tensor) -> float:
    """How far two trainings are apart, as a share of how far the second one went."""
    return float((one - other).norm() / (other - start).norm())


class _PerStep:
    """An arm that notes what the calls into the plan took in each step."""

    def __init__(self, arm: Arm, calls: list[int]) -> None:
        self._arm = arm
        self._calls = calls
        self.steps: list[tuple[int, int]] = []
        self.finish = arm.finish
        self.close = arm.close

    def step(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        """One step, and its number of calls and their nanoseconds."""
        self._calls.clear()
        self._arm.step(inputs, labels)
        self.steps.append((len(self._calls), sum(self._calls)))


def plan_calls(job: Finding, workload: Workload, context: Context) -> Iterator[Finding]:
    """How long our calls into the plan take a step: in the median step, and on average."""
    units = 2 if job["quick"] else workload.units
    for name in (name for name in ARMS if name.startswith("ours")):
        calls: list[int] = []
        try:
            with opened(name, workload, context) as (model, arm), Ours.clocked_plan(calls.append):
                clocked = _PerStep(arm, calls)
                block = run_block(clocked, model, workload, units)
                bucket_bytes = arm.bucket_bytes if isinstance(arm, Ours) else []
        except SkippedArm as reason:
            yield {"arm": name, "skipped": str(reason)}
            continue
        timed = clocked.steps[WARMUP_STEPS:]
        yield {
            "arm": name,
            "plan_s": median(took for _, took in timed) / 1e9,
            "mean_plan_s": mean(took for _, took in timed) / 1e9,
            "calls": mean(number for number, _ in timed),
            "step_s": median_step_s(block.step_us),
            "bucket_bytes": bucket_bytes,
        }


def live_bytes(job: Finding, workload: Workload, context: Context) -> Iterator[Finding]:
    """The peak of bytes in tensors, as torch's allocator reports them to the profiler, arm by arm."""
    for name in job["arms"]:
        gc.collect()
        try:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
                with opened(name, workload, context) as (_, arm):
                    _train(arm, workload)
                del arm
                gc.collect()
        except SkippedArm as reason:
            yield {"arm": name, "skipped": str(reason)}
            continue
        yield {"arm": name, "peak_bytes": _peak(profiler)}


def _peak(profiler: torch.profiler.profile) -> int:
    """Largest sum of live tensors among those made under the profiler; the allocator's own total mixes earlier ones in."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    live: dict[int, int] = {}
    total = peak = 0
    for event in sorted((event for event in events if event.get("name") == "[memory]"), key=lambda event: event["ts"]):
        address, nbytes = event["args"]["Addr"], event["args"]["Bytes"]
        total -= live.pop(address, 0)
        if nbytes > 0:
            live[address] = nbytes
            total += nbytes
        peak = max(peak, total)
    return peak


def resident_bytes(job: Finding, workload: Workload, context: Context) -> Iterator[Finding]:
    """How far one arm's training raises this process's peak of resident memory (``VmHWM``)."""
    (name,) = job["arms"]
    with opened("none", workload, context) as (_, arm):  # kernels and threads that every arm needs are there before
        _train(arm, workload)
    del arm
    gc.collect()
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts anew
        before = _status("VmRSS")
        with opened(name, workload, context) as (_, arm):
            _train(arm, workload)
        yield {"arm": name, "peak_bytes": _status("VmHWM") - before}
    except SkippedArm as reason:
        yield {"arm": name, "skipped": str(reason)}


def _train(arm: Arm, workload: Workload) -> None:
    for inputs, labels in workload.batches(2 * UNIT_STEPS, dist.get_rank()):
        arm.step(inputs, labels)
    arm.finish()


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) * 1024


if __name__ == "__main__":
    main()
