"""A trainer of ``measure.py``: ``fleetbench launch --nproc N rank.py PROGRAM OUTPUT DEVICE BACKEND``; rank 0 writes rows to OUTPUT.

``rank.py gpt`` trains a small GPT until ``fleetbench profile`` ends it.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from mirror import Mirror
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from fleetbench import fleet
from fleetbench.strategy import DistributedStrategy
from real.communication.clocks import clock_of
from real.communication.communicators import Communicators
from real.compute.injector import delay_of
from real.engine.engine import Engine
from real.processes.joining import join
from real.processes.roles import role_of

Row = dict[str, Any]
Step = Callable[[], object]
TIMEOUT = timedelta(seconds=120)
TINY = {"fuse_grad_size_in_MB": 0.0015}
PARITY: dict[str, dict[str, Any]] = {
    "default": {},
    "several buckets": TINY,
    "two communicators, free": {**TINY, "nccl_comm_num": 2, "sync_nccl_allreduce": False},
    "sequential": {**TINY, "build_strategy": {"enable_sequential_execution": True}},
    "one fused update": {**TINY, "build_strategy": {"fuse_all_optimizer_ops": True}},
    "reduce-scatter": {**TINY, "use_hierarchical_allreduce": True, "hierarchical_inner_ranks": 2, "hierarchical_variant": "reduce_scatter"},
    "synchronised batch norm": {**TINY, "sync_batch_norm": True},
}
STEPS = 6
ROUNDS = 6
DELAYS_NS = (20_000, 100_000, 500_000, 2_000_000, 10_000_000)


class Gpt(nn.Module):
    """A decoder of ``depth`` layers: tokens ``(batch, length)`` to logits ``(batch * length, 512)``."""

    def __init__(self, width: int, depth: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(512, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, width // 32, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        self.blocks = nn.ModuleList(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False) for _ in range(depth))
        self.head = nn.Linear(width, 512)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Every token sees those before it."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        hidden = self.tokens(tokens) + self.places(torch.arange(length, device=tokens.device))
        for block in self.blocks:
            hidden = block(hidden, mask=mask, is_causal=True)
        return self.head(hidden).flatten(0, 1)


def gpt() -> tuple[nn.Module, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """Model, a batch of inputs, and the loss; small where there is no GPU."""
    width, depth, batch, length = (768, 12, 8, 512) if torch.cuda.is_available() else (64, 2, 2, 32)
    torch.manual_seed(0)
    inputs = torch.randint(512, (batch, length))
    labels = torch.randint(512, (batch * length,), device="cuda" if torch.cuda.is_available() else "cpu")
    return Gpt(width, depth, length), inputs, lambda output: cross_entropy(output, labels.to(output.device))


def small(*, norms: bool) -> nn.Module:
    """What parity is looked at with: float64, always the same parameters."""
    torch.manual_seed(1)
    norm = nn.BatchNorm1d if norms else nn.LayerNorm
    return nn.Sequential(nn.Linear(16, 32), norm(32), nn.Tanh(), nn.Linear(32, 32), norm(32), nn.Tanh(), nn.Linear(32, 4)).double()


def train(model: nn.Module, device: torch.device, attach: Callable[[torch.optim.Optimizer], None]) -> torch.Tensor:
    """Some steps on this rank's own batches; the parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    attach(optimizer)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * dist.get_rank() + step)
        inputs = torch.randn(8, 16, generator=generator, dtype=torch.float64).to(device)
        model(inputs).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).cpu()


def communicators_of(backend: str, device: torch.device) -> Communicators:
    """With one rank those of two like it, so that buckets travel."""
    return (Communicators if dist.get_world_size() > 1 else Mirror)(backend, TIMEOUT, device)


def parity(device: torch.device, backend: str) -> Iterator[Row]:
    """Parameters behind some steps, beside DistributedDataParallel's; on CUDA also where the script works on a stream of its own."""
    streams = {"default stream": nullcontext()}
    if device.type == "cuda":
        streams["own stream"] = torch.cuda.stream(torch.cuda.Stream(device))
    for (where, stream), (name, fields) in itertools.product(streams.items(), PARITY.items()):
        norms = bool(fields.get("sync_batch_norm"))
        row = {"strategy": name, "stream": where}
        if norms and (device.type == "cpu" or dist.get_world_size() < 2):
            yield row | {"skipped": "torch's SyncBatchNorm needs CUDA, and several ranks"}
        elif "hierarchical_inner_ranks" in fields and dist.get_world_size() < 2:
            yield row | {"skipped": "one rank has no hierarchy"}
        else:
            with stream:
                model = small(norms=norms).to(device)
                plain = nn.SyncBatchNorm.convert_sync_batchnorm(model) if norms else model
                expected = train(DistributedDataParallel(plain), device, lambda _: None)
                ours, communicators = small(norms=norms).to(device), communicators_of(backend, device)
                engine = Engine(ours, DistributedStrategy.from_dict(fields), communicators)
                found = train(ours, device, engine.attach_optimizer)
                engine.close()
                communicators.close()
            error = float(((found - expected).abs() / (1 + expected.abs())).max())
            yield row | {"error": error, "equal": error < 1e-9}


def arm(name: str, device: torch.device, backend: str) -> Step:
    """A step of a GPT of its own; ``KIND``, ``KIND, compiled`` or ``KIND, graphed``, where KIND is bare, ddp or fleet."""
    kind, _, how = name.partition(", ")
    model, inputs, loss = gpt()
    model, inputs = model.to(device), inputs.to(device)
    if how == "graphed":
        model = torch.cuda.make_graphed_callables(model, (inputs,))
    if how == "compiled" and kind == "bare":
        model.blocks = nn.ModuleList(torch.compile(block) for block in model.blocks)
    called = DistributedDataParallel(model) if kind == "ddp" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    if kind == "fleet":
        fields = {"build_strategy": {"fuse_elewise_add_act_ops": True}} if how == "compiled" else {}
        engine = Engine(model, DistributedStrategy.from_dict(fields), communicators_of(backend, device), keep_times=False)
        engine.attach_optimizer(optimizer)

    def step() -> None:
        loss(called(inputs)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def timed(step: Step, device: torch.device, steps: int) -> float:
    """Milliseconds a step; the host waits for the device at both ends."""
    torch.get_device_module(device).synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    torch.get_device_module(device).synchronize()
    return (time.perf_counter() - begin) / steps * 1e3


def compared(names: tuple[str, ...], device: torch.device, backend: str) -> Iterator[Row]:
    """Every arm against the first, paired by round; every other round runs the other way round."""
    steps = 30 if device.type == "cuda" else 10
    arms = {name: arm(name, device, backend) for name in names}
    for step in arms.values():
        timed(step, device, 5)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(ROUNDS):
        for name in names if number % 2 == 0 else names[::-1]:
            times[name].append(timed(arms[name], device, steps))
    for name in names:
        ratios = [own / first for own, first in zip(times[name], times[names[0]], strict=True)]
        low, _, high = quantiles(ratios, n=4)
        yield {"arm": name, "ms": median(times[name]), "ratio": median(ratios), "quartiles": [low, high], "rounds": ROUNDS}


def delays(device: torch.device, _backend: str) -> Iterator[Row]:
    """How long an injected delay is, behind compute that keeps the device busy."""
    delay, clock = delay_of(device), clock_of(device)
    size = 4096 if device.type == "cuda" else 64
    matrix = torch.rand(size, size, device=device)
    for asked_ns in DELAYS_NS:
        marks = []
        for _ in range(40):
            torch.mm(matrix, matrix)
            begin = clock.mark()
            delay.add(asked_ns)
            marks += [begin, clock.mark()]
        times = clock.resolve(marks)
        ratios = [(end - begin) / asked_ns for begin, end in zip(times[::2], times[1::2], strict=True)]
        low, middle, high = quantiles(ratios, n=4)
        yield {"asked_ns": asked_ns, "ratio": middle, "quartiles": [low, high], "delays": len(ratios)}


def train_gpt() -> None:
    """The usual loop, of which ``fleetbench profile`` takes as many steps as it wants."""
    fleet.init()
    device = torch.device("cuda", fleet.worker_index() % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")
    made, inputs, loss_of = gpt()
    model = fleet.distributed_model(made.to(device))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    inputs = inputs.to(device)
    while True:
        loss = loss_of(model(inputs))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


PROGRAMS: dict[str, Callable[[torch.device, str], Iterator[Row]]] = {
    "parity": parity,
    "overhead": lambda device, backend: compared(("bare", "ddp", "fleet"), device, backend),
    "compile": lambda device, backend: compared(("bare", "bare, compiled", "fleet, compiled"), device, backend),
    "graphs": lambda device, backend: compared(("bare", "bare, graphed", "fleet, graphed"), device, backend),
    "delays": delays,
}


def main() -> None:
    """Run one program."""
    if sys.argv[1:] == ["gpt"]:
        train_gpt()
    program, output, kind, backend = sys.argv[1:]
    role = role_of(os.environ)
    device = torch.device(kind, role.rank % torch.cuda.device_count()) if kind == "cuda" else torch.device(kind)
    torch.get_device_module(device).set_device(device)
    torch.set_num_threads(1)
    join(role, TIMEOUT, backend)
    rows = list(PROGRAMS[program](device, backend))
    if role.rank == 0:
        Path(output).write_text(json.dumps(rows), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # lanes of engines that were not closed


if __name__ == "__main__":
    main()
