"""One rank of the comparison with torchft: ``beside_rank.py RANK RANKS STORE OUTPUT JOB``.

JOB is JSON: the folder of torchft, K, P, how many steps a block has, the order of the arms, and whether nothing trains
before them. Rank 0 writes a line a block: the arm, the
median step over ranks, the peak of resident memory that the arm added, and how far its parameters are from those of the written-out loop.
"""

from __future__ import annotations

import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torchft_servers import Servers, SkippedArm, _torchft

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "beside_ddp"))
from workloads import WORKLOADS

from fleetbench.strategy import DistributedStrategy
from real.communication.communicators import Communicators
from real.engine.engine import Engine

TIMEOUT = timedelta(seconds=120)
ETA, MU, LR = 0.7, 0.9, 1e-3
WARMUP_ROUNDS, SENTINEL_ITERATIONS = 1, 200
WORKLOAD = WORKLOADS["deep"]
Close = Callable[[], None]


def halves(model: nn.Module, parts: int, plan: Engine | None) -> list[list[nn.Parameter]]:
    """The parameters of every fragment, in our plan's split."""
    if parts == 1:
        return [list(model.parameters())]
    assert plan is not None
    named = dict(model.named_parameters())
    buckets = {bucket.id: bucket.gradients for bucket in plan.plan.buckets}
    return [[named[name] for bucket in own for name in buckets[bucket]] for own in plan.plan.fragments]


def ours(model: nn.Module, optimizer: torch.optim.Optimizer, job: dict[str, Any], context: dict[str, Any]) -> Close:
    """Ours: buckets, an outer optimizer."""
    engine = Engine(model, strategy_of(job), context["communicators"])
    engine.attach_optimizer(optimizer)
    return engine.close


def strategy_of(job: dict[str, Any]) -> DistributedStrategy:
    """Rounds of K updates from the start, as torchft's."""
    configs: dict[str, Any] = {"k_steps": job["k"], "outer_lr": ETA, "outer_momentum": MU}
    configs |= {"fragments": job["p"]} if job["p"] > 1 else {"schedule": "torch", "begin_step": job["k"]}
    return DistributedStrategy.from_dict({"localsgd": True, "localsgd_configs": configs})


class Fragment(nn.Module):
    """Parameters that torchft takes for a part of the model."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self.own = nn.ParameterList(parameters)


def torchft(model: nn.Module, optimizer: torch.optim.Optimizer, job: dict[str, Any], context: dict[str, Any], **options: Any) -> Close:
    """DiLoCo of torchft with its own manager, one all-reduce a parameter."""
    local_sgd = _torchft("local_sgd")
    servers = Servers()
    parts = [Fragment(own) for own in context["split"](model)]
    outer = [torch.optim.SGD(part.parameters(), lr=ETA, momentum=MU, nesterov=True) for part in parts]
    diloco = local_sgd.DiLoCo(servers.manager, parts, optimizer, outer, sync_every=job["k"], **options)
    diloco.__enter__()

    def close() -> None:
        diloco.__exit__(None, None, None)
        dist.barrier()  # no rank needs another's server any more
        servers.shutdown()

    return close


def torchft_buckets(model: nn.Module, optimizer: torch.optim.Optimizer, job: dict[str, Any], context: dict[str, Any]) -> Close:
    """The same with flat buckets, which torchft has on request."""
    return torchft(model, optimizer, job, context, use_bucketization=True)


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, job: dict[str, Any], context: dict[str, Any]) -> Close:
    """Written out in torch: one all-reduce a parameter, torch's own SGD as the outer optimizer; the truth of this comparison."""
    fragments = context["split"](model)
    thetas = [[parameter.detach().clone() for parameter in own] for own in fragments]
    outers = [torch.optim.SGD(theta, lr=ETA, momentum=MU, nesterov=True) for theta in thetas]
    period = job["k"] // job["p"]
    done = 0

    @torch.no_grad()
    def after_step(*_: Any) -> None:
        nonlocal done
        done += 1
        if done % period:
            return
        part = (done // period - 1) % job["p"]
        for theta, parameter in zip(thetas[part], fragments[part], strict=True):
            theta.grad = theta - parameter
            dist.all_reduce(theta.grad, op=dist.ReduceOp.AVG)
        outers[part].step()
        for theta, parameter in zip(thetas[part], fragments[part], strict=True):
            parameter.copy_(theta)
            theta.grad = None

    return optimizer.register_step_post_hook(after_step).remove


ARMS = {"ours": ours, "torchft": torchft, "torchft, buckets": torchft_buckets, "loop": loop}


def block(name: str, job: dict[str, Any], context: dict[str, Any]) -> dict[str, Any]:
    """Train one arm from the same start on the same batches."""
    gc.collect()
    model = WORKLOAD.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    steps = (WARMUP_ROUNDS + job["rounds"]) * job["k"]
    batches = WORKLOAD.batches(job["k"], dist.get_rank())  # again in every round
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _resident("VmRSS")
    close = ARMS[name](model, optimizer, job, context)
    times = []
    for step in range(steps):
        inputs, labels = batches[step % job["k"]]
        if step == WARMUP_ROUNDS * job["k"]:
            dist.barrier()
        begin = time.perf_counter()
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - begin)
    rounds = [sum(times[start : start + job["k"]]) / job["k"] for start in range(WARMUP_ROUNDS * job["k"], steps, job["k"])]
    peak = _resident("VmHWM") - before
    close()
    own = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    return {"step_s": statistics.median(rounds), "peak_bytes": peak, "parameters": own}


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) * 1024


def _over_ranks(value: float) -> float:
    gathered = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(gathered, op=dist.ReduceOp.AVG)
    return float(gathered)


def main() -> None:
    """Blocks in the job's order; the loop's parameters are the truth."""
    rank, ranks, store, output, text = sys.argv[1:]
    job = json.loads(text)
    if job["torchft"]:
        sys.path.append(job["torchft"])  # last: nothing that it brings along may hide what the arms run on
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks), timeout=TIMEOUT)
    communicators = Communicators("gloo", TIMEOUT)
    probe = WORKLOAD.model()
    engine = Engine(probe, strategy_of(job), communicators)
    names = {parameter: name for name, parameter in probe.named_parameters()}
    split = [[names[parameter] for parameter in own] for own in halves(probe, job["p"], engine)]
    engine.close()
    context = {
        "communicators": communicators,
        "split": lambda model: [[dict(model.named_parameters())[name] for name in own] for own in split],
    }
    truth = None if job["alone"] else block("loop", job, context)["parameters"]
    start = torch.cat([parameter.detach().reshape(-1) for parameter in WORKLOAD.model().parameters()])
    found, missing = [], {}
    for place, name in enumerate(job["order"]):
        if name in missing:
            continue
        try:
            taken = block(name, job, context)
        except SkippedArm as reason:
            missing[name] = str(reason)
            found.append({"arm": name, "place": place, "skipped": str(reason)})
            continue
        own = taken.pop("parameters")
        first = own.clone()
        dist.broadcast(first, src=0)
        apart = _over_ranks(float(not torch.equal(own, first)))
        distance = math.nan if truth is None else float((own - truth).norm() / (truth - start).norm())
        entry = {name: _over_ranks(value) for name, value in taken.items()}
        found.append({"arm": name, "place": place, **entry, "distance": _over_ranks(distance), "ranks_agree": apart == 0})
    if rank == "0":
        Path(output).write_text("".join(json.dumps(entry) + "\n" for entry in found), encoding="utf-8")
    dist.barrier()
    communicators.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
