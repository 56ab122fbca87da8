"""A step of this engine beside DistributedDataParallel and loops written out, in turns: two gloo ranks, one thread each.

Run from the repository's root: ``python reports/beside_ddp/measure.py [--rounds N] [--models NAME ...]``. Adds to ``raw.jsonl`` a line
an arm and round, and prints README.md's tables, which ``--tables`` prints again. ``--memory`` looks at peaks of memory.

Every round builds each arm anew from the same parameters, in a drawn order and then in its mirror image. 8 steps warm up (the plan
settles after the first), and the median of the timed steps counts, of the slower rank. All updates are torch's fused ones. DDP is tuned:
with bucket views, at the bucket size, of four, that is fastest here in a round of its own.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from workloads import WORKLOADS, Workload

from fleetbench.store import commit, machine, versions
from fleetbench.strategy import DistributedStrategy
from real.communication.communicators import Communicators
from real.engine.engine import Engine

HERE = Path(__file__).parent
RANKS, WARMUP, K = 2, 8, 4
CAPS_MB = (0.25, 1.0, 4.0, 25.0)
STEPS = {"deep": 48, "wide": 40, "conv": 48, "resnet18": 16, "gpt": 24}
Step = Callable[[torch.Tensor, torch.Tensor], None]
Close = Callable[[], None]


class Gpt(nn.Module):
    """Four blocks of width 128 over 64 tokens of 256; 0.85 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, 128), nn.Parameter(0.02 * torch.randn(64, 128))
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks, self.head = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Linear(128, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Of ``(batch, 64)`` whole numbers, given as floats."""
        hidden = self.tokens((tokens.abs() * 60).long().clamp(max=255)) + self.places
        return self.head(self.blocks(hidden).mean(1))


WORKLOADS["gpt"] = Workload(build=Gpt, features=(64,), batch=8)


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Fused: AdamW of the GPT, else SGD with momentum."""
    if name == "gpt":
        return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4, fused=True)


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, then: Callable[[], None] = lambda: None) -> Step:
    """The usual one."""

    def step(inputs: torch.Tensor, labels: torch.Tensor) -> None:
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        then()

    return step


def ddp(name: str, model: nn.Module, cap_mb: float) -> tuple[Step, Close]:
    """DistributedDataParallel with bucket views."""
    wrapped = DistributedDataParallel(model, bucket_cap_mb=cap_mb, gradient_as_bucket_view=True)  # type: ignore[arg-type]  # fractions are taken
    return loop(wrapped, optimizer_of(name, model)), lambda: None


def post_local(name: str, model: nn.Module) -> tuple[Step, Close]:
    """Local SGD as torch documents it: DDP with its hook, and PostLocalSGDOptimizer around the same fused update."""
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    state = PostLocalSGDState(None, None, start_localSGD_iter=0, post_local_gradient_allreduce=False)
    wrapped.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(period=K, warmup_steps=0)
    return loop(wrapped, PostLocalSGDOptimizer(optimizer_of(name, model), averager)), lambda: None


def ours(name: str, model: nn.Module, communicators: Communicators, changes: dict[str, Any]) -> tuple[Step, Close]:
    """This engine."""
    engine = Engine(model, DistributedStrategy.from_dict(changes), communicators, keep_times=False)
    optimizer = optimizer_of(name, model)
    engine.attach_optimizer(optimizer)
    return loop(model, optimizer), engine.close


def ddp_alike(name: str, model: nn.Module, communicators: Communicators) -> tuple[Step, Close]:
    """DistributedDataParallel with the buckets that Fleet's defaults make of the model."""
    twin = WORKLOADS[name].model()
    engine = Engine(twin, DistributedStrategy(), communicators, keep_times=False)
    optimizer = optimizer_of(name, twin)
    engine.attach_optimizer(optimizer)
    step = loop(twin, optimizer)
    for batch in WORKLOADS[name].batches(2, dist.get_rank()):
        step(*batch)
    sizes = {parameter_name: parameter.nbytes for parameter_name, parameter in twin.named_parameters()}
    caps = [sum(sizes[gradient] for gradient in bucket.gradients) / 2**20 for bucket in engine.plan.buckets]
    engine.close()
    wrapped = DistributedDataParallel(model, bucket_cap_mb_list=caps, gradient_as_bucket_view=True)
    return loop(wrapped, optimizer_of(name, model)), lambda: None


def by_hand(name: str, model: nn.Module, outer: tuple[float, float] | None) -> tuple[Step, Close]:
    """Local SGD in plain torch: every K-th step one all-reduce of all parameters in a flat buffer; with Nesterov's outer step: DiLoCo."""
    parameters = list(model.parameters())
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    theta, velocity, done = flat.clone(), torch.zeros_like(flat), itertools.count(1)
    sizes = [parameter.numel() for parameter in parameters]

    @torch.no_grad()
    def average() -> None:
        if next(done) % K:
            return
        torch.cat([parameter.reshape(-1) for parameter in parameters], out=flat)
        if outer is None:
            dist.all_reduce(flat, op=dist.ReduceOp.AVG)
            new = flat
        else:
            delta = theta - flat
            dist.all_reduce(delta, op=dist.ReduceOp.AVG)
            velocity.mul_(outer[1]).add_(delta)
            new = theta.sub_(delta.add_(velocity, alpha=outer[1]), alpha=outer[0])
        torch._foreach_copy_(parameters, [piece.view_as(own) for piece, own in zip(new.split(sizes), parameters, strict=True)])

    return loop(model, optimizer_of(name, model), average), lambda: None


LOCAL = {"localsgd": True, "localsgd_configs": {"k_steps": K, "schedule": "torch", "begin_step": K}}
DILOCO = {"localsgd": True, "localsgd_configs": {"k_steps": K, "outer_lr": 0.7, "outer_momentum": 0.9}}
ARMS = ("ddp", "ddp alike", "default", "one bucket", "optimal", "local by hand", "local", "PostLocalSGD", "diloco by hand", "diloco")
BESIDE = {"default": "ddp", "ddp alike": "ddp", "one bucket": "ddp", "optimal": "ddp", "local": "local by hand"}
BESIDE |= {"PostLocalSGD": "local by hand", "diloco": "diloco by hand"}


def built(name: str, arm: str, communicators: Communicators, cap_mb: float) -> tuple[nn.Module, Step, Close]:
    """An arm on a model of its own."""
    model = WORKLOADS[name].model()
    if arm == "ddp alike":
        return model, *ddp_alike(name, model, communicators)
    if arm == "ddp":
        return model, *ddp(name, model, cap_mb)
    if arm == "PostLocalSGD":
        return model, *post_local(name, model)
    if arm.endswith("by hand"):
        return model, *by_hand(name, model, (0.7, 0.9) if "diloco" in arm else None)
    one = {"fuse_grad_size_in_MB": 0.0}
    changes = {"default": {}, "one bucket": one, "optimal": {"fusion": "optimal"}, "local": one | LOCAL, "diloco": one | DILOCO}[arm]
    return model, *ours(name, model, communicators, changes)


def timed(name: str, arm: str, communicators: Communicators, cap_mb: float) -> tuple[float, list[float]]:
    """Median seconds of a step, of the slower rank; and the parameters' sums, that equal algorithms share."""
    steps = STEPS[name]
    batches = WORKLOADS[name].batches(WARMUP + steps, dist.get_rank())
    model, step, close = built(name, arm, communicators, cap_mb)
    gc.collect()
    gc.disable()
    stamps = []
    for number, batch in enumerate(batches):
        if number == WARMUP:
            dist.barrier()
        stamps.append(time.perf_counter())
        step(*batch)
    stamps.append(time.perf_counter())
    gc.enable()
    own = stamps[WARMUP:]
    units = [(end - begin) / K for begin, end in zip(own[::K], own[K::K], strict=False)]  # each holds one average
    told = torch.tensor([statistics.median(units)], dtype=torch.float64)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    close()
    return float(told), [float(parameter.detach().double().sum()) for parameter in model.parameters()]


def apart(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest difference of two arms' sums, over their size."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True)) / (1 + max(map(abs, one)))


def rank(number: int, store: str, arguments: argparse.Namespace) -> None:
    """All rounds, on one rank; rank 0 writes."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=RANKS, timeout=timedelta(seconds=300))
    communicators = Communicators("gloo", timedelta(seconds=300))
    now = {"commit": commit(), "date": f"{datetime.now(UTC):%Y-%m-%d}"}
    for name in arguments.models:
        caps = {cap: min(timed(name, "ddp", communicators, cap)[0] for _ in range(2)) for cap in CAPS_MB}
        best = torch.tensor([min(caps, key=caps.__getitem__)], dtype=torch.float64)
        dist.broadcast(best, 0)
        for number_of_round in range(arguments.rounds):
            if os.getppid() != arguments.driver:  # it was ended, and another measurement may run by now
                return
            order = random.Random(f"{name} {number_of_round}").sample(arguments.arms, len(arguments.arms))  # noqa: S311  # no secret
            found: dict[str, list[float]] = {arm: [] for arm in arguments.arms}
            sums: dict[str, list[float]] = {}
            for arm in (*order, *reversed(order)):
                step_s, sums[arm] = timed(name, arm, communicators, float(best))
                found[arm].append(step_s)
            if number == 0:
                lines = []
                for arm in arguments.arms:
                    beside = {"apart": apart(sums[arm], sums[BESIDE[arm]])} if arm in BESIDE else {"cap_mb": float(best)}
                    lines.append({"model": name, "round": number_of_round, "arm": arm, "step_s": found[arm], **beside, **now})
                with arguments.out.open("a", encoding="utf-8") as out:
                    out.writelines(json.dumps(line) + "\n" for line in lines)
                print(f"{name} {number_of_round}: load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    dist.destroy_process_group()


def memory(arguments: argparse.Namespace) -> None:
    """Peak resident memory of a rank with one arm, over that of the same loop without an exchange."""
    for name, arm in itertools.product(arguments.models, ("none", "ddp", "default", "local by hand", "local")):
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(remembered, (f"{folder}/store", name, arm, arguments.out), nprocs=RANKS)


def remembered(number: int, store: str, name: str, arm: str, out: Path) -> None:
    """One arm in a process of its own."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=RANKS, timeout=timedelta(seconds=300))
    communicators = Communicators("gloo", timedelta(seconds=300))
    batches = WORKLOADS[name].batches(WARMUP, number)
    if arm == "none":
        model = WORKLOADS[name].model()
        step: Step = loop(model, optimizer_of(name, model))
        close: Close = lambda: None  # noqa: E731  # as the others give
    else:
        model, step, close = built(name, arm, communicators, 25.0)
    for batch in batches:
        step(*batch)
    if number == 0:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        with out.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"model": name, "arm": arm, "peak_mb": peak, "commit": commit()}) + "\n")
    dist.barrier()
    close()
    dist.destroy_process_group()


def tables(path: Path) -> None:
    """Of each model: DDP's milliseconds, and how many times as fast ours is; median and quartiles over rounds of both turns' mean."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows = {(one["model"], one["arm"], one["round"]): statistics.fmean(one["step_s"]) for one in lines if "step_s" in one}
    models = list(dict.fromkeys(model for model, *_ in rows))
    compared = {arm: beside for arm, beside in BESIDE.items() if any(one.get("arm") == arm for one in lines)}
    print(f"| model | DDP, ms | {' | '.join(f'{arm} / {beside}' for arm, beside in compared.items())} | apart |")
    print(f"|{'---|' * (len(compared) + 3)}")
    for model in models:
        rounds = sorted({number for name, _, number in rows if name == model})
        cells = []
        for arm, beside in compared.items():
            logs = [math.log(rows[model, beside, number] / rows[model, arm, number]) for number in rounds]
            low, mid, high = (math.exp(one) for one in statistics.quantiles(logs, n=4)) if len(logs) > 1 else [math.exp(logs[0])] * 3
            cells.append(f"{mid:.2f} ({low:.2f} to {high:.2f})")
        ms = 1e3 * statistics.median(rows[model, "ddp", number] for number in rounds)
        off = max((one["apart"] for one in lines if one["model"] == model and "apart" in one and one["arm"] != "optimal"), default=None)
        print(f"| {model} | {ms:.2f} | {' | '.join(cells)} | {'' if off is None else f'{off:.0e}'} |")
    peaks = {(one["model"], one["arm"]): one["peak_mb"] for one in lines if "peak_mb" in one}
    for model in dict.fromkeys(name for name, _ in peaks):
        above = [f"{arm} {peak - peaks[model, 'none']:.1f}" for (name, arm), peak in peaks.items() if name == model]
        print(f"{model}: MB above a loop alone: {', '.join(above)}")


def main() -> None:
    """Measure, or print again."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--models", nargs="+", default=list(STEPS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="with what each is compared with: see BESIDE")
    parser.add_argument("--out", type=Path, default=HERE / "raw.jsonl")
    parser.add_argument("--tables", action="store_true")
    parser.add_argument("--memory", action="store_true")
    arguments = parser.parse_args()
    arguments.driver = os.getpid()
    if not arguments.tables and not arguments.memory:
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(rank, (f"{folder}/store", arguments), nprocs=RANKS)
        print({**machine(), **versions()}, file=sys.stderr)
    if arguments.memory:
        memory(arguments)
    tables(arguments.out)


if __name__ == "__main__":
    main()
