"""Scripts that leave to a Reducer what DDP's does, or do what neither it nor an engine can make right.

Each is a function of a ``Way``: fleet's four lines, or plain DDP, which is the truth where DDP trains it.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms import Join
from torch.nn.parallel import DistributedDataParallel

SIZE = 6
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
LOCAL: dict[str, Any] = {"localsgd": True, "localsgd_configs": {"k_steps": 3}}
STATE: dict[str, Any] = {"localsgd": True, "localsgd_configs": {"k_steps": 3, "optimizer_state": "average"}}
HELD: dict[str, Any] = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2, "batch_norm_per": "update"}}
MERGE: dict[str, Any] = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}
BY_BUCKET: dict[str, Any] = {"build_strategy": {"enable_backward_optimizer_op_deps": False}}
SCALED: dict[str, Any] = {"amp": True}
UNUSED: dict[str, Any] = {"find_unused_parameters": True}


def step_all(optimizers: Sequence[Any]) -> None:
    """Step one after the other."""
    for optimizer in optimizers:
        optimizer.step()


@dataclass(frozen=True)
class Way:
    """How a script makes its model and its optimizer distributed; ``rank`` is this one."""

    rank: int
    wrap: Callable[[nn.Module], nn.Module]
    give: Callable[[Any], Any]
    meet: Callable[[], None] = lambda: None
    """Trainers agree, and an epoch ends."""
    save: Callable[[], None] = lambda: None
    join: Callable[[list[Any]], AbstractContextManager[Any]] = Join
    """Around a loop that has unequally many batches on the ranks."""
    update: Callable[[Sequence[Any]], None] = step_all
    """With these optimizers."""


Script = Callable[[Way], nn.Module]


def layers(number: int = 3) -> nn.Sequential:
    """The same on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(SIZE, SIZE, dtype=torch.float64) for _ in range(number)))


def train(way: Way, model: Any, *optimizers: Any, steps: int = 4, before: Callable[[int], object] = lambda _: None) -> None:
    """The usual loop, with data by rank; ``before`` runs before every step."""
    for step in range(1, steps + 1):
        before(step)
        x = torch.randn(5, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + way.rank))
        model(x.to(next(model.parameters()).dtype)).square().mean().backward()
        way.update(optimizers)
        for optimizer in optimizers:
            optimizer.zero_grad()


# Wrappers of torch's around or inside the model


def inside(way: Way, wrapper: Callable[[nn.Module], object]) -> nn.Module:
    """The model is wrapped, or made another in place, before fleet has it."""
    network = layers()
    made = wrapper(network)
    model = way.wrap(made if isinstance(made, nn.Module) else network)
    train(way, model, way.give(SGD(model.parameters())))
    return model


def sharded(network: nn.Module) -> object:
    """Sharded in place."""
    return importlib.import_module("torch.distributed.fsdp").fully_shard(network)


def deeper(way: Way) -> nn.Module:
    """A part of the model is a DDP."""
    network = layers()
    network[1] = DistributedDataParallel(network[1])
    train(way, way.wrap(network), way.give(SGD(network.parameters())))
    return network


def around(way: Way, *, first: bool, wrapper: Callable[[nn.Module], Any] = DistributedDataParallel, part: int | None = None) -> nn.Module:
    """The loop calls a wrapper of what fleet has, or of a part of it, made before it or afterwards."""
    network = layers()
    outer = wrapper(network) if first else way.wrap(network)
    optimizer = SGD(network.parameters())
    if first:
        way.wrap(network)
    elif part is None:
        outer = wrapper(network) or outer
    else:
        network[part] = wrapper(network[part])
    train(way, outer, way.give(optimizer))
    return network


def sharded_late(way: Way, *, given: bool) -> nn.Module:
    """The model is sharded after fleet has it; ``given``: and its optimizer."""
    network = layers()
    model = way.wrap(network)
    if given:
        optimizer = way.give(SGD(network.parameters()))
        sharded(network)
    else:
        sharded(network)
        optimizer = way.give(SGD(network.parameters()))
    train(way, model, optimizer)
    return network


def idle_wrapper(way: Way) -> nn.Module:
    """A DDP that nobody calls any more, and one of another model."""
    network = layers()
    others = DistributedDataParallel(layers()), DistributedDataParallel(network)
    train(way, way.wrap(network), way.give(SGD(network.parameters())))
    del others
    return network


# Optimizers


class Scheduled:
    """A wrapper that is no optimizer of torch's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def step(self) -> None:
        """Step the optimizer inside."""
        self._optimizer.step()

    def zero_grad(self) -> None:
        """Clear its gradients."""
        self._optimizer.zero_grad()


class Lookahead(torch.optim.Optimizer):
    """A wrapper that is one, and is made without ``Optimizer.__init__``, or with it."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, begins: bool = False) -> None:
        if begins:
            super().__init__(optimizer.param_groups, {})
        self._optimizer = optimizer

    def step(self) -> None:  # type: ignore[override]  # without a closure
        """Step the optimizer inside."""
        self._optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear its gradients."""
        self._optimizer.zero_grad(set_to_none)


def one_optimizer(way: Way, wrapper: Callable[[Any], Any], *, outside: bool = False) -> nn.Module:
    """A wrapped optimizer; ``outside``: fleet is given the one inside, and the loop steps the wrapper."""
    network = layers()
    model = way.wrap(network)
    optimizer = SGD(network.parameters())
    train(way, model, wrapper(way.give(optimizer)) if outside else way.give(wrapper(optimizer)))
    return network


def of_torch(name: str) -> Any:
    """A class of torch.distributed.optim, whose import warns of others."""
    with warnings.catch_warnings(action="ignore"):
        return getattr(importlib.import_module("torch.distributed.optim"), name)


def averaging(optimizer: torch.optim.Optimizer) -> Any:
    """Torch's own Local SGD."""
    averagers = importlib.import_module("torch.distributed.algorithms.model_averaging.averagers")
    return of_torch("PostLocalSGDOptimizer")(optimizer, averagers.PeriodicModelAverager(2))


def shared_out(optimizer: torch.optim.Optimizer) -> Any:
    """A ZeroRedundancyOptimizer of the same parameters."""
    return of_torch("ZeroRedundancyOptimizer")(optimizer.param_groups[0]["params"], torch.optim.SGD, lr=0.05, momentum=0.9)


def two_optimizers(way: Way, *, new: bool = False) -> nn.Module:
    """One for each half; ``new``: of the same parameters, from the third step on."""
    network = layers()
    model = way.wrap(network)
    held = [*network.parameters()]
    one = way.give(SGD(held if new else held[:2]))
    if new:
        train(way, model, one, steps=2)
        train(way, model, torch.optim.AdamW(held, lr=0.01))
    else:
        train(way, model, one, torch.optim.AdamW(held[2:], lr=0.01))
    return network


def in_backward(way: Way) -> nn.Module:
    """An optimizer for each parameter, which steps as soon as the gradient is there."""
    network = layers()
    model, given = way.wrap(network), way.give(SGD(network.parameters()))
    optimizers = {parameter: torch.optim.AdamW([parameter]) for parameter in network.parameters()}
    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(lambda own: optimizers[own].step())
    train(way, model, given)
    return network


def left_out(way: Way, kind: Callable[..., torch.optim.Optimizer] = SGD) -> nn.Module:
    """Parameters that no optimizer holds."""
    network = layers()
    train(way, way.wrap(network), way.give(kind(network[2].parameters())))
    return network


def thawed(way: Way, *, own: bool) -> nn.Module:
    """A layer is unfrozen in the third step, for the same optimizer or a new one."""
    network = layers()
    network[0].requires_grad_(False)  # torch's signature
    model = way.wrap(network)
    optimizer = way.give(SGD([parameter for parameter in network.parameters() if parameter.requires_grad]))
    train(way, model, optimizer, steps=2)
    network[0].requires_grad_(True)  # torch's signature
    if own:
        optimizer.add_param_group({"params": list(network[0].parameters())})
    train(way, model, optimizer if own else torch.optim.AdamW(network.parameters(), lr=0.01))
    return network


def held_back(way: Way) -> nn.Module:
    """A layer whose optimizer gets it in the third step: the way to unfreeze."""
    network = layers()
    model = way.wrap(network)
    optimizer = way.give(SGD([*network[1:].parameters()]))
    train(way, model, optimizer, steps=2)
    optimizer.add_param_group({"params": list(network[0].parameters())})
    train(way, model, optimizer)
    return network


def frozen(way: Way) -> nn.Module:
    """A layer is frozen in the third step."""
    network = layers()
    model = way.wrap(network)
    train(way, model, way.give(SGD(network.parameters())), before=lambda step: step == 3 and network[0].requires_grad_(False))
    return network


def grown(way: Way) -> nn.Module:
    """A layer comes in the third step, with an optimizer of its own."""
    network = layers()
    model, optimizer = way.wrap(network), way.give(SGD(network.parameters()))
    train(way, model, optimizer, steps=2)
    network.append(nn.Linear(SIZE, SIZE, dtype=torch.float64))
    train(way, model, optimizer, SGD(network[-1].parameters()))
    return network


# What the training forward writes


class Writes(nn.Module):
    """A layer, and ``write``, which changes a buffer or a parameter of it by the batch."""

    def __init__(self, write: Callable[[Writes, torch.Tensor], object]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(SIZE, SIZE, dtype=torch.float64)
        self.register_buffer("mean", torch.zeros(SIZE, dtype=torch.float64))
        self.register_buffer("table", torch.arange(SIZE))
        self.scale = nn.Parameter(torch.ones(SIZE, dtype=torch.float64))
        self.calls = 0
        self._write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(batch, SIZE)``."""
        if self.training:
            self.calls += 1
            with torch.no_grad():
                self._write(self, x)
        return self.layer(x - self.mean) * self.scale  # type: ignore[no-any-return]  # torch's modules return Any


def in_place(module: Writes, x: torch.Tensor) -> None:
    """A moving mean."""
    module.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)


def as_data(module: Writes, x: torch.Tensor) -> None:
    """By ``.data``, which counts no version."""
    module.mean.data.mul_(0.9).add_(x.mean(0), alpha=0.1)


def as_another(module: Writes, x: torch.Tensor) -> None:
    """Another tensor in its place."""
    module.mean = module.mean * 0.9 + x.mean(0) * 0.1


def as_queue(module: Writes, x: torch.Tensor) -> None:
    """A queue of whole numbers."""
    module.table[module.calls % SIZE] = int(x.abs().sum() * 1000)


def of_all(module: Writes, x: torch.Tensor) -> None:
    """The mean of all ranks' batches."""
    mean = x.mean(0)
    dist.all_reduce(mean)
    module.mean.mul_(0.9).add_(mean / dist.get_world_size(), alpha=0.1)


def counted(module: Writes, _: torch.Tensor) -> None:
    """The same on all ranks."""
    module.table.add_(1)
    module.mean.add_(0.01)


def bounded(module: Writes, _: torch.Tensor) -> None:
    """A parameter is kept in bounds, alike on all ranks."""
    module.scale.clamp_(0.99, 1.01)


def writes(way: Way, write: Callable[[Writes, torch.Tensor], object], *, steps: int = 4, broadcasts: bool = False) -> nn.Module:
    """A model whose forward writes; ``broadcasts``: the script sends rank 0's buffers before every forward."""
    network = Writes(write)
    model, optimizer = way.wrap(network), way.give(SGD(network.parameters()))
    train(way, model, optimizer, steps=steps, before=lambda _: broadcasts and dist.broadcast(network.mean, 0))
    return network


def spectral(way: Way) -> nn.Module:
    """A spectral norm writes its buffers in every forward, from weights alone."""
    network = layers()
    nn.utils.parametrizations.spectral_norm(network[1])
    train(way, way.wrap(network), way.give(SGD(network.parameters())))
    return network


def normed(way: Way, *, forwards: int = 1, evaluates: bool = False, more: bool = False) -> nn.Module:
    """A batch norm, with several forwards a backward, from the third step on in evaluation mode, or with a forward ``more`` on rank 1."""
    network = nn.Sequential(*layers(), nn.BatchNorm1d(SIZE, dtype=torch.float64), *layers(1))
    model, optimizer = way.wrap(network), way.give(SGD(network.parameters()))

    def several(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([model(x + number) for number in range(forwards)])

    def before(step: int) -> None:
        model.train(not (evaluates and step > 2))
        if more and way.rank == 1:
            model(torch.ones(3, SIZE, dtype=torch.float64))

    several.parameters = model.parameters  # type: ignore[attr-defined]  # whose type the loop asks for
    train(way, several, optimizer, before=before)
    return network


class Looked(nn.Module):
    """Embeddings with a largest norm, of one kind or another."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        limit = 0.5 if kind != "function" else None
        self.table = (nn.EmbeddingBag if kind == "bag" else nn.Embedding)(9, SIZE, max_norm=limit, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of numbers that rows are chosen by."""
        rows = (x.abs() * 3).long() % 9
        if self.kind == "function":
            return nn.functional.embedding(rows, self.table.weight, max_norm=0.5)
        return self.table(rows)  # type: ignore[no-any-return]  # torch's modules return Any


def looked(way: Way, kind: str) -> nn.Module:
    """Rows of an embedding are shortened where they are read."""
    network = Looked(kind)
    train(way, way.wrap(network), way.give(SGD(network.parameters())))
    return network


WRAPPED = r"exchanges gradients or shards parameters by itself.*\(got {}\)"
UNKNOWN = r"optimizer AdamW: has stepped parameters of the model, and was not given to fleet.*\(got {}\)"
UNHEARD = r"the optimizer: is no torch.optim.Optimizer, or does not call Optimizer.__init__: its steps are not heard \(got {}\)"
THAWED = r"parameters 0.weight, 0.bias: requires gradients \(requires_grad = True\) since fleet.distributed_model"
FROZEN = r"parameters 0.bias, 0.weight: was frozen \(requires_grad = False\) after fleet.distributed_model"
SHORTENED = "embedding table: shortens its rows"
DDP, DATA = "DistributedDataParallel", "DataParallel"

REFUSED: dict[str, tuple[Script, dict[str, Any], str]] = {
    "a DDP": (partial(inside, wrapper=DistributedDataParallel), {}, WRAPPED.format(DDP)),
    "a DDP, K = 3": (partial(inside, wrapper=DistributedDataParallel), LOCAL, WRAPPED.format(DDP)),
    "a DataParallel": (partial(inside, wrapper=nn.DataParallel), {}, WRAPPED.format(DATA)),
    "a sharded model": (partial(inside, wrapper=sharded), {}, WRAPPED.format("FSDPModule")),
    "a DDP deeper inside": (deeper, {}, "module 1: " + WRAPPED.format(DDP)),
    "a DDP around, made before": (partial(around, first=True), {}, WRAPPED.format(DDP)),
    "a DDP around, made before, K = 3": (partial(around, first=True), LOCAL, WRAPPED.format(DDP)),
    "a DDP around, made later": (partial(around, first=False), {}, WRAPPED.format(DDP)),
    "a DDP around a part": (partial(around, first=False, part=1), MERGE, WRAPPED.format(DDP)),
    "a DataParallel around": (partial(around, first=False, wrapper=nn.DataParallel), {}, WRAPPED.format(DATA)),
    "a model sharded late": (partial(sharded_late, given=False), {}, WRAPPED.format("FSDPModule")),
    "a model sharded later": (partial(sharded_late, given=True), {}, r".*(got FSDPModule|was replaced after fleet\.distributed_model)"),
    "a wrapper of an optimizer": (partial(one_optimizer, wrapper=Scheduled), {}, UNHEARD.format("Scheduled")),
    "a wrapper without its begin": (partial(one_optimizer, wrapper=Lookahead), {}, UNHEARD.format("Lookahead")),
    "PostLocalSGDOptimizer": (partial(one_optimizer, wrapper=averaging), LOCAL, UNHEARD.format("PostLocalSGDOptimizer")),
    "ZeRO, K = 3": (
        partial(one_optimizer, wrapper=shared_out),
        LOCAL,
        r"shares out its updates by itself.*\(got ZeroRedundancyOptimizer\)",
    ),
    **{
        f"two optimizers, {name}": (two_optimizers, fields, UNKNOWN.format("4: 1.weight, 1.bias, 2.weight, 2.bias"))
        for name, fields in (("K = 3", LOCAL), ("merge", MERGE), ("scaled", SCALED))
    },
    "a new optimizer, K = 3": (partial(two_optimizers, new=True), LOCAL, UNKNOWN.format("6: 0.weight, .*")),
    "an optimizer in the backward": (in_backward, {}, UNKNOWN.format("1: 2.bias")),
    "unfrozen": (partial(thawed, own=True), {}, THAWED),
    "unfrozen, a new optimizer": (partial(thawed, own=False), {}, THAWED),
    "unfrozen, K = 3": (partial(thawed, own=True), LOCAL, THAWED),
    "frozen": (frozen, {}, FROZEN),
    "frozen, merge": (frozen, MERGE, FROZEN),
    "a later layer": (grown, {}, r"optimizer SGD: has stepped parameters that came, or were unfrozen, after.*\(got 2: 3.weight, 3.bias\)"),
    **{f"an embedding with a largest norm, {kind}": (partial(looked, kind=kind), {}, SHORTENED) for kind in ("table", "bag")},
    "an embedding with a largest norm, K = 3": (partial(looked, kind="table"), LOCAL, SHORTENED),
}
"""By name: the script, its strategy, and how it is refused."""

TRAINED: dict[str, tuple[Script, dict[str, Any], bool]] = {
    "an idle DDP": (idle_wrapper, {}, True),
    "a wrapper of an optimizer outside": (partial(one_optimizer, wrapper=Scheduled, outside=True), {}, True),
    "a wrapper that is one outside": (partial(one_optimizer, wrapper=partial(Lookahead, begins=True), outside=True), {}, True),
    "a wrapper that is one outside, K = 3": (partial(one_optimizer, wrapper=partial(Lookahead, begins=True), outside=True), LOCAL, False),
    "a wrapper that is one": (partial(one_optimizer, wrapper=partial(Lookahead, begins=True)), {}, True),
    "ZeRO": (partial(one_optimizer, wrapper=shared_out), {}, True),
    "two optimizers": (two_optimizers, {}, True),
    "two optimizers, by bucket": (two_optimizers, BY_BUCKET, True),
    "a new optimizer": (partial(two_optimizers, new=True), {}, True),
    "left out": (left_out, {}, True),
    "left out, K = 3": (left_out, LOCAL, False),
    "left out, state averaged": (partial(left_out, kind=torch.optim.AdamW), STATE, False),
    "held back": (held_back, {}, True),
    "frozen, unused": (frozen, UNUSED, True),
    "a buffer, in place": (partial(writes, write=in_place), {}, True),
    "a buffer, by its data": (partial(writes, write=as_data), {}, True),
    "a buffer, another in its place": (partial(writes, write=as_another), {}, True),
    "a buffer, merge": (partial(writes, write=in_place), MERGE, False),
    "a buffer, by bucket": (partial(writes, write=in_place), BY_BUCKET, True),
    "a queue": (partial(writes, write=as_queue), {}, True),
    "a buffer of all ranks' batches": (partial(writes, write=of_all), {}, True),
    "a buffer that the script sends": (partial(writes, write=in_place, broadcasts=True), {}, True),
    "a buffer that counts": (partial(writes, write=counted), {}, True),
    "a buffer, K = 3": (partial(writes, write=in_place), LOCAL, False),
    "a parameter in bounds": (partial(writes, write=bounded), {}, True),
    "a spectral norm": (spectral, {}, True),
    "a batch norm": (normed, {}, True),
    "a batch norm, trained in evaluation mode": (partial(normed, evaluates=True), {}, True),
    "a batch norm, two forwards": (partial(normed, forwards=2), {}, True),
    "a batch norm, two forwards, merge": (partial(normed, forwards=2), MERGE, False),
    "a batch norm, two forwards, held": (partial(normed, forwards=2), HELD, False),
    "a batch norm, one forward more on rank 1": (partial(normed, more=True), {}, False),
}
"""By name: the script, its strategy, and whether DDP is its truth; elsewhere it is to end with ranks that are equal."""
