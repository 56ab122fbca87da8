"""One rank of the tests of what DDP's Reducer does: ``reducer_rank.py RANK RANKS STORE OUTPUT NAMES`` trains these of ``CASES``.

Saved, by case: how far it is from its truth (numbers), or how it was refused (text).
"""

from __future__ import annotations

import copy
import gc
import io
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import optimizer_scripts
import reducer_scripts
import torch
import torch.distributed as dist
from living_fleet import be_rank, leave
from model_scripts import MODELS_REFUSED, MODELS_TRAINED, averaged_by_hand
from reducer_scripts import Script, Way, layers, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_pre_hooks

from fleetbench.errors import FleetbenchError
from fleetbench.strategy import DistributedStrategy
from real.fleet import Fleet

RANKS = 2
LOCAL = {"localsgd": True, "localsgd_configs": {"k_steps": 2}}
MERGE = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}
FUSED = {"build_strategy": {"fuse_all_optimizer_ops": True}}
BY_BUCKET = {"build_strategy": {"enable_backward_optimizer_op_deps": False}}

Found = dict[str, float | str]


class Layouts(nn.Module):
    """Parameters and buffers of every kind of strides and numbers; each rank begins with its own."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(rank)
        randn = partial(torch.randn, generator=generator, dtype=torch.float64)
        self.gap = nn.Parameter(randn(3, 4)[:, :2])
        self.turned = nn.Parameter(randn(4, 3).t())
        self.last = nn.Parameter(randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
        self.number = nn.Parameter(randn(()))
        self.none = nn.Parameter(randn(0, 3))
        self.every_other = nn.Parameter(randn(6)[::2])
        whole = torch.randint(0, 9, (4, 6), generator=generator)
        for name, buffer in {
            "gaps": randn(4, 6)[:, ::2],
            "expanded": randn(3).expand(4, 3),
            "spread": randn(()).expand(2, 5),
            "windows": randn(8).unfold(0, 3, 1),
            "short": whole.to(torch.int16)[:, ::2],
            "mask": whole[:, ::2] > 4,
            "complex": torch.view_as_complex(randn(3, 2)).conj(),
            "imaginary": torch.view_as_complex(randn(4, 2)).conj().imag,
            "eight": randn(5).to(torch.float8_e4m3fn),
            "unsigned": whole[0].to(torch.uint16),
            "count": torch.tensor(rank),
            "empty": randn(0),
            "by_rank": randn(2, 3, 4, 5).to(memory_format=torch.channels_last if rank else torch.contiguous_format),
        }.items():
            self.register_buffer(name, buffer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A number that every parameter is in."""
        return torch.stack([(x.mean() * parameter).tanh().sum() for parameter in self.parameters()]).sum()


def layouts(fleet: Fleet, rank: int, **strategy: Any) -> Found:
    """All of them are rank 0's after ``distributed_model``; then they train as plain SGD with averages taken by hand."""
    model = Layouts(rank)
    first = Layouts(0)
    truth = [nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype).copy_(parameter)) for parameter in first.parameters()]
    model = _joined(fleet, model, **strategy)
    apart = [name for name, own, other in _pairs(model, first) if not torch.equal(_bits(own), _bits(other))]
    if strategy:
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        plain = torch.optim.SGD(truth, lr=0.1, momentum=0.9)
    else:
        optimizer = fleet.distributed_optimizer(torch.optim.Adagrad(model.parameters(), lr=0.1))
        plain = torch.optim.Adagrad(truth, lr=0.1)
    for step in range(4):
        x = torch.full((2,), 1.0 + step + rank, dtype=torch.float64)
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
        gradients = torch.autograd.grad(torch.stack([(x.mean() * one).tanh().sum() for one in truth]).sum(), truth)
        for one, gradient in zip(truth, gradients, strict=True):
            one.grad = gradient if "localsgd" in strategy else _mean(gradient)
        plain.step()
        if "localsgd" in strategy and step % 2 == 0:  # after updates 1 and 3
            for one in truth:
                one.data.copy_(_mean(one.detach()))
    off = max(float((own - one).abs().max()) for own, one in zip(model.parameters(), truth, strict=True) if own.numel())
    return {"apart": ", ".join(apart), "off": off}


def own_hooks(fleet: Fleet, rank: int, *, where: str, kind: str, **strategy: Any) -> Found:
    """A hook of the script's own clips every gradient, slowly: the truth is DDP with the same hooks."""
    torch.manual_seed(0)
    network = nn.Sequential(*(nn.Linear(6, 6, dtype=torch.float64) for _ in range(4)))
    twin = copy.deepcopy(network)
    ddp = DistributedDataParallel(twin)

    def clip(parameter: torch.Tensor) -> None:
        time.sleep(0.003)
        assert parameter.grad is not None
        parameter.grad.clamp_(-0.01, 0.01)

    def clipped(gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(0.003)
        return gradient.clamp(-0.01, 0.01)

    def register(model: nn.Module) -> None:
        for parameter in model.parameters():
            if kind == "tensor":
                parameter.register_hook(clipped)
            else:
                parameter.register_post_accumulate_grad_hook(clip)

    register(twin)
    if where == "before":
        register(network)
    model = _joined(fleet, network, **strategy)
    if where == "after":
        register(network)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(network.parameters(), lr=0.5))
    plain = torch.optim.SGD(twin.parameters(), lr=0.5)
    for step in range(4):
        x = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))
        for net, optim in ((model, optimizer), (ddp, plain)):
            net(x).square().sum().backward()
            optim.step()
            optim.zero_grad()
    return {"off": max(float((one - other).abs().max()) for one, other in zip(network.parameters(), twin.parameters(), strict=True))}


class Named(nn.Module):
    """A model that ranks may build differently, as from a set of names or the classes of their own data."""

    def __init__(self, rank: int, kind: str) -> None:
        super().__init__()
        names = ("a", "b")[:: -1 if rank else 1]
        order = {what: names if kind == f"order of {what}" else ("a", "b") for what in ("buffers", "frozen", "parameters")}
        self.last = nn.Linear(4, 3 + rank if kind == "shape" else 3)
        for name in order["buffers"]:
            self.register_buffer(f"buffer_{name}", torch.ones(2 + rank if kind == "shape of a buffer" else 2))
        for name in order["frozen"]:
            setattr(self, f"frozen_{name}", nn.Parameter(torch.ones(2), requires_grad=False))
        for name in order["parameters"]:
            setattr(self, f"layer_{name}", nn.Linear(4, 4))
        if kind == "one more" and rank:
            self.register_buffer("third", torch.ones(3))
        if kind == "one less" and rank:
            del self.buffer_b
        if kind == "type" and rank:
            self.buffer_b = self.buffer_b.double()
        if kind == "frozen" and rank:
            self.last.bias.requires_grad_(False)  # torch's signature
        if kind == "strides" and rank:
            self.last.weight.data = self.last.weight.detach().t().contiguous().t()


def by_rank(fleet: Fleet, rank: int, *, kind: str) -> Found:
    """Ranks whose models differ."""
    _joined(fleet, Named(rank, kind))
    return {}


def other_strategy(fleet: Fleet, rank: int) -> Found:
    """Ranks whose strategies differ."""
    _joined(fleet, nn.Linear(3, 3), nccl_comm_num=1 + rank)
    return {}


def script(fleet: Fleet, rank: int, *, run: Script, truth: bool | int, **strategy: Any) -> Found:
    """A script under fleet; ``off`` from the ``truth``: plain DDP, the algorithm written out, or averages by hand after so many updates.

    Else ranks from each other, once they have met.
    """

    def meet() -> None:
        fleet.synchronize()
        fleet.end_epoch()

    def give_by_hand(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        counts: dict[int, int] = {}

        def stepped(*_: object) -> None:
            for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
                if parameter.grad is not None:
                    counts[id(parameter)] = count = counts.get(id(parameter), 0) + 1
                    if count % truth == 1:
                        averaged_by_hand([parameter], _mean)

        optimizer.register_step_post_hook(stepped)
        return optimizer

    def wrapped(model: nn.Module) -> nn.Module:
        return _joined(fleet, model, **strategy)

    save = partial(fleet.save_persistables, "nowhere")
    network = run(Way(rank, wrapped, fleet.distributed_optimizer, meet, save, lambda _: fleet.join()))
    if truth is True:
        other = run(_truth(rank, strategy))
    elif truth:
        fleet.synchronize()
        other = run(Way(rank, lambda model: model, give_by_hand))
        averaged_by_hand(other.parameters(), _mean)
    else:
        fleet.synchronize()
        return {"off": max(_apart(network.parameters()), 0.0 if "localsgd" in strategy else _apart(network.buffers()))}
    off = max(float((one - two).abs().max()) for one, two in zip(network.parameters(), other.parameters(), strict=True))
    return {"off": off if "localsgd" in strategy else max(off, _apart(network.buffers()))}


def let_go(fleet: Fleet, _rank: int, *, number: int, saves: bool = False, **strategy: Any) -> Found:
    """Folds one after the other, each of which the script lets go of: how many models live on, and by how much the process grows."""
    models, sizes = [], []
    for _ in range(number):
        network = layers(2)
        models.append(ref(network))
        train(Way(0, lambda model: model, lambda own: own), _joined(fleet, network, **strategy), _given(fleet, network), steps=3)
        fleet.synchronize()
        if saves:
            fleet.save_persistables(Path(sys.argv[3]).with_name("saved"))
        threads = len(list(Path("/proc/self/task").iterdir()))
        sizes.append((threads, len(dist.distributed_c10d._world.pg_map), len(_global_optimizer_pre_hooks)))
    del network
    gc.collect()
    grown = [f"{first} to {last}" for first, last in zip(sizes[2], sizes[-1], strict=True) if last > first]
    return {"alive": float(sum(own() is not None for own in models)), "grown": ", ".join(grown)}


def copies(fleet: Fleet, _rank: int) -> Found:
    """A model's copies, files, exports and compiled forms are what they would be without fleet."""
    network, x = layers(2), torch.ones(2, 6, dtype=torch.float64)
    model = _joined(fleet, network)
    other = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    names = [name for name, _ in network.named_parameters()]
    named = all(list(one.state_dict()) == names and one.module is one for one in (model, other, loaded))
    same = torch.export.export(other.eval(), (x,)).module()(x), torch.compile(model, backend="eager")(x), loaded(x)
    kept = fleet.distributed_model(Holder(2, 2)).module
    return {"off": max(float((one - network(x)).abs().max()) for one in same), "named": float(named and kept == "its own")}


class Holder(nn.Linear):
    """A model with attributes that fleet would set."""

    module = "its own"


def _given(fleet: Fleet, network: nn.Module) -> torch.optim.Optimizer:
    return fleet.distributed_optimizer(torch.optim.SGD(network.parameters(), lr=0.1))


def _truth(rank: int, strategy: dict[str, Any]) -> Way:
    if "localsgd" in strategy or "gradient_merge" in strategy:
        written = optimizer_scripts.WrittenOut(strategy)
        return Way(rank, written.wrap, lambda optimizer: optimizer, update=written.update)
    wrap = partial(DistributedDataParallel, find_unused_parameters="find_unused_parameters" in strategy)
    return Way(rank, wrap, lambda optimizer: optimizer)


def _apart(tensors: Iterable[torch.Tensor]) -> float:
    """By how much ranks differ."""
    numbers = [tensor.detach() if tensor.is_complex() else tensor.detach().double() for tensor in tensors]
    return max((float((own - _mean(own)).abs().max()) for own in numbers), default=0.0)


def _joined(fleet: Fleet, model: nn.Module, **strategy: Any) -> nn.Module:
    if fleet._job is None:
        fleet.init(DistributedStrategy.from_dict({"fuse_grad_size_in_MB": 0.0001, **strategy}), timeout_s=20.0)
    return fleet.distributed_model(model)


def _pairs(model: nn.Module, other: nn.Module) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    for of in (nn.Module.named_parameters, nn.Module.named_buffers):
        for (name, one), (_, two) in zip(of(model), of(other), strict=True):
            yield name, one.detach(), two.detach()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).reshape(-1).view(torch.uint8)


def _mean(tensor: torch.Tensor) -> torch.Tensor:
    whole = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    dist.all_reduce(whole)
    return whole / dist.get_world_size()


REFUSED = reducer_scripts.REFUSED | optimizer_scripts.REFUSED | MODELS_REFUSED
TRAINED = reducer_scripts.TRAINED | optimizer_scripts.TRAINED | MODELS_TRAINED
BY_RANK = {
    "order of buffers": "buffer buffer_a [2] torch.float32 on rank 0, buffer buffer_b [2]",
    "order of frozen": "frozen parameter frozen_a [2] torch.float32 on rank 0, frozen parameter frozen_b [2]",
    "order of parameters": "parameter layer_a.weight [4, 4] torch.float32, strides (4, 1) on rank 0, parameter layer_b.weight",
    "shape": "parameter last.weight [3, 4] torch.float32, strides (4, 1) on rank 0, parameter last.weight [4, 4]",
    "shape of a buffer": "buffer buffer_a [2] torch.float32 on rank 0, buffer buffer_a [3]",
    "one more": "nothing on rank 0, buffer third [3] torch.float32 on rank 1",
    "one less": "buffer buffer_b [2] torch.float32 on rank 0, nothing on rank 1",
    "type": "buffer buffer_b [2] torch.float32 on rank 0, buffer buffer_b [2] torch.float64 on rank 1",
    "frozen": "parameter last.bias [3] torch.float32, strides (1,) on rank 0, frozen parameter last.bias",
    "strides": "strides (4, 1) on rank 0, parameter last.weight [3, 4] torch.float32, strides (1, 3)",
}
"""How models differ by rank, and what is said of them."""
Case = Callable[[Fleet, int], Found]
CASES: dict[str, Case] = {
    "layouts": layouts,
    "layouts, K = 2": partial(layouts, **LOCAL),
    "layouts, fused": partial(layouts, **FUSED),
    **{
        f"{kind} hooks {where}": partial(own_hooks, where=where, kind=kind)
        for kind in ("tensor", "parameter")
        for where in ("before", "after")
    },
    **{f"by rank: {kind}": partial(by_rank, kind=kind) for kind in BY_RANK},
    "another strategy": other_strategy,
    "let go": partial(let_go, number=20),
    "let go, K = 2": partial(let_go, number=5, **LOCAL),
    "let go, saved": partial(let_go, number=4, saves=True),
    "copies": copies,
    **{f"refused: {name}": partial(script, run=run, truth=False, **fields) for name, (run, fields, _) in REFUSED.items()},
    **{f"trained: {name}": partial(script, run=run, truth=truth, **fields) for name, (run, fields, truth) in TRAINED.items()},
    "parameter hooks after, by bucket": partial(own_hooks, where="after", kind="parameter", **BY_BUCKET),
}


@contextmanager
def _refused(found: Found) -> Iterator[None]:
    begin = time.monotonic()
    try:
        yield
    except FleetbenchError as error:
        found["refused"] = str(error)
        found["after_s"] = time.monotonic() - begin
    except Exception as error:  # noqa: BLE001  # the test sees it, and the other cases run
        found["raised"] = f"{type(error).__name__}: {error}"


def main() -> None:
    """Run the cases of these names, a list as JSON."""
    rank, ranks, store, output, names = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks), timeout=timedelta(seconds=60))
    be_rank(int(rank), int(ranks))
    saved: Found = {}
    for name in json.loads(names):
        fleet, found = Fleet(), Found()
        with _refused(found):
            found |= CASES[name](fleet, int(rank))
        leave(fleet)
        saved |= {f"{name}/{key}": value for key, value in found.items()}
    np.savez(output, **{key: np.array(value) for key, value in saved.items()})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
