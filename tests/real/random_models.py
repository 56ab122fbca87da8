"""The models and optimizers of random cases."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from random_cases import RANKS, Case
from torch import nn
from torch.utils.checkpoint import checkpoint

FEATURES = 12
CLASSES = 5
BATCH = 6
ROWS = 9
WIDTHS = (16, 7, 20, 9)
LR = 0.05
SHIFTS = (80_000.0, 20_000.0)
"""Of a rank each; FP16 ends at 65,504."""

Vector = torch.Tensor
"""``(numbers,)``: all of a network's parameters, flat, in float64."""


class Network(nn.Module):
    """``first``, some layers, ``last``; ``kind`` is what is special about it."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.kind = case.model
        dtype = getattr(torch, case.dtype)
        widths = (FEATURES, *WIDTHS[: case.num_layers - 1])
        self.first = nn.Linear(FEATURES, widths[1], dtype=dtype)
        self.middle = nn.ModuleList(nn.Linear(a, b, dtype=dtype) for a, b in itertools.pairwise(widths[1:]))
        self.last = nn.Linear(widths[-1], CLASSES, dtype=dtype)
        if case.model == "gated":
            self.branches = nn.ModuleList(nn.Linear(FEATURES, FEATURES, dtype=dtype) for _ in range(2))
            self.rare = nn.Linear(FEATURES, FEATURES, dtype=dtype)
        elif case.model == "sparse":
            self.table = nn.Embedding(ROWS, FEATURES, sparse=True, dtype=dtype)
        elif case.model == "tied":
            self.mix = nn.Linear(FEATURES, FEATURES, dtype=dtype)
            self.again = nn.Linear(FEATURES, FEATURES, dtype=dtype)
            self.again.weight = self.mix.weight
        elif case.model == "normed":
            self.norm = nn.BatchNorm1d(widths[1], dtype=dtype)
        elif case.model == "frozen":
            self.first.requires_grad_(False)  # torch's signature
            self.last.bias.requires_grad_(False)
        if case.large:
            self.shift = nn.Parameter(torch.zeros(3, dtype=dtype))
        self._add(case, dtype)
        self.turn = 0
        self.rank = 0

    def _add(self, case: Case, dtype: torch.dtype) -> None:
        """What may be beside any kind."""
        self.writes = case.writes
        if case.strides:
            out, into = self.first.weight.shape
            wide = torch.cat([self.first.weight.detach(), torch.full((out, 3), torch.nan, dtype=dtype)], 1)
            self.first.weight = nn.Parameter(wide[:, :into], requires_grad=self.first.weight.requires_grad)  # with gaps
            self.last.weight = nn.Parameter(self.last.weight.detach().t().contiguous().t())
            self.register_buffer("gaps", wide.clone()[:, :into])
        if case.types == "float32":
            self.scale = nn.Parameter(torch.ones(CLASSES, dtype=torch.float32))
        elif case.types == "complex":
            self.scale = nn.Parameter(torch.full((CLASSES,), 0.8 + 0.6j, dtype=torch.complex128))
        elif case.types == "odd sizes":
            self.scale = nn.Parameter(torch.ones((), dtype=dtype))
            self.empty = nn.Parameter(torch.ones((0, 3), dtype=dtype))
        if case.writes:
            self.register_buffer("mean", torch.zeros(FEATURES, dtype=dtype))

    def forward(self, x: torch.Tensor) -> Any:
        """Class scores ``(batch, classes)``, or a nest with them; what is special comes first."""
        if self.writes:
            x = x - self._moved(x)
        if self.kind == "gated":  # a branch by turn and rank, and a layer that every other turn reaches on no rank
            self.turn += 1
            x = x + torch.tanh(self.branches[(self.turn + self.rank) % 2](x))
            x = x + torch.tanh(self.rare(x)) if self.turn % 2 else x
        elif self.kind == "sparse":
            x = self.table((x[:, :2].abs() * 3).long() % ROWS).sum(dim=1)
        elif self.kind == "tied":
            x = torch.tanh(self.mix(torch.tanh(self.again(x))))
        x = self.first(x)
        x = torch.tanh(self.norm(x) if self.kind == "normed" else x)
        for layer in self.middle:
            x = self._block(layer, x)
        scores = self.last(x)
        if hasattr(self, "scale"):
            scores = scores * ((self.scale * self.scale.conj()).real if self.scale.is_complex() else self.scale)
        if hasattr(self, "empty"):
            scores = scores + self.empty.sum()
        if hasattr(self, "shift"):
            scores = scores + 0.0 * self.shift.sum()  # reached, and without effect: its gradient comes from the loss
        return {"scores": scores, "hidden": (x,)} if self.kind == "nested" else scores

    @torch.no_grad()
    def _moved(self, x: torch.Tensor) -> torch.Tensor:
        """The moving mean of the inputs, which a training forward writes: of this rank's, of all ranks', or of none."""
        if self.training:
            mean = x.mean(0)
            if self.writes == "of all":
                dist.all_reduce(mean)
                mean /= RANKS
            elif self.writes == "counts":
                mean = torch.ones_like(mean)
            self.mean.data.mul_(0.8).add_(mean, alpha=0.2)
        return self.mean.clone()

    def _block(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        def run(x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(torch.tanh(layer(x)), 0.1 if self.kind == "checkpointed" else 0.0)

        if self.kind not in ("checkpointed", "reentrant") or not self.training or not torch.is_grad_enabled():
            return torch.tanh(layer(x))
        return checkpoint(run, x, use_reentrant=self.kind == "reentrant")  # type: ignore[no-any-return]  # torch's


def network_of(case: Case, rank: int, offset: float = 0.0) -> Network:
    """The case's model, ``offset`` away from where it begins."""
    torch.manual_seed(case.index)
    network = Network(case)
    network.rank = rank
    if case.by_rank:
        _differ(network, case.by_rank, rank)
    with torch.no_grad():
        for tensor in (*network.parameters(), *(buffer for buffer in network.buffers() if buffer.is_floating_point())):
            tensor.add_(offset)
    torch.manual_seed(1000 + rank)  # of whatever the loop draws
    return network


def real(tensor: torch.Tensor) -> torch.Tensor:
    """Its numbers; a complex one has two."""
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()


def flat_of(tensors: Iterable[torch.Tensor]) -> Vector:
    """All numbers of tensors, complex ones as two."""
    return torch.cat([real(tensor).reshape(-1).double() for tensor in tensors])


def _differ(network: Network, how: str, rank: int) -> None:
    """Let ranks build different models."""
    if how == "order":
        for name in ("a", "b")[:: -1 if rank else 1]:
            network.register_buffer(name, torch.zeros(2))
    elif how == "one more" and rank:
        network.register_buffer("another", torch.zeros(2))
    elif how == "shape":
        network.register_buffer("classes", torch.zeros(2 + rank))
    elif how == "frozen" and rank:
        network.middle[0].bias.requires_grad_(False)


def hook(network: Network, kind: str) -> None:
    """Register hooks of the script's own, which clip gradients."""

    def clip(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            parameter.grad.clamp_(-0.02, 0.02)

    for name, parameter in network.named_parameters():
        if not parameter.requires_grad or parameter.is_complex() or name == "table.weight":  # neither has clamp
            continue
        if kind == "tensor":
            parameter.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
        else:
            parameter.register_post_accumulate_grad_hook(clip)


def second_of(case: Case, network: Network) -> torch.optim.Optimizer | None:
    """The script's other optimizer: for the last layer, or from the third step on for all."""
    if not case.second:
        return None
    module = network if case.second == "new" else network.last
    return torch.optim.AdamW([parameter for parameter in module.parameters() if parameter.requires_grad], lr=LR / 5)


def optimizer_of(case: Case, network: nn.Module) -> torch.optim.Optimizer:
    """The case's optimizer, which holds frozen parameters, too."""
    apart = ("shift", "last.weight", "last.bias") if case.second in ("beside", "given") else ("shift",)
    parameters = [parameter for name, parameter in network.named_parameters() if name not in apart]
    groups: list[dict[str, Any]] = [{"params": parameters}]
    if case.num_groups > 1:
        groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": LR / 2, "weight_decay": 0.0}]
    if case.large:
        groups.append({"params": [network.shift], "lr": 1e-6, "weight_decay": 0.0})
    decay = 0.0 if case.model == "sparse" else 0.01
    if case.optimizer in ("adam", "adamw"):
        kind = torch.optim.Adam if case.optimizer == "adam" else torch.optim.AdamW
        return kind(groups, lr=LR / 10, weight_decay=decay)
    momentum = 0.0 if case.optimizer == "sgd" else 0.9
    return torch.optim.SGD(groups, lr=LR, momentum=momentum, weight_decay=decay, nesterov=case.optimizer == "nesterov")
