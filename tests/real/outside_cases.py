"""Weights that a script changes beside its optimizer: by every strategy, at every moment, in every way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from parity_cases import SEVERAL
from torch import nn

STEPS = 12
OUTER = {"outer_lr": 0.7, "outer_momentum": 0.9}
_DILOCO = {"k_steps": 4, **OUTER}
_MERGE = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}
_BY_RATE = {"init_k_steps": 3, "variant": "qsr"}


def _local(**configs: Any) -> dict[str, Any]:
    return {**SEVERAL, "localsgd": True, "localsgd_configs": configs}


@dataclass(frozen=True)
class Family:
    """A strategy, and after which steps something comes by hand."""

    strategy: dict[str, Any]
    meets: tuple[int, ...] = ()
    """All of the model is averaged, or a fragment merged."""
    merge: int = 1
    fragments: int = 1
    overlap: int = 0
    mixing: float = 0.0
    flies: int = 0
    """A step after which an exchange is under way."""
    tolerance: float = 1e-12

    @property
    def outer(self) -> tuple[float, float]:
        """Rate and momentum of the outer optimizer."""
        configs = self.strategy.get("localsgd_configs", {}) | self.strategy.get("adaptive_localsgd_configs", {})
        return configs.get("outer_lr", 1.0), configs.get("outer_momentum", 0.0)

    @property
    def has_theta(self) -> bool:
        """Whether it matters what distances are measured from."""
        return self.outer != (1.0, 0.0) or self.fragments > 1 or self.mixing > 0

    @property
    def moments(self) -> dict[str, int]:
        """After which step each moment is; before the first at 0."""
        if not self.meets:
            return {"before the optimizer": 0, "after it": 0, "between steps": 5}
        after = self.meets[1] if len(self.meets) > 1 else self.meets[0]
        found = {"before the optimizer": 0, "after it": 0, "in a round": after + self.merge, "after an averaging": after}
        return found | ({"in flight": self.flies} if self.flies else {})


FAMILIES = {
    "synchronous": Family(SEVERAL),
    "gradient merge": Family({**SEVERAL, **_MERGE}, merge=2),
    "update by bucket": Family({**SEVERAL, "build_strategy": {"enable_backward_optimizer_op_deps": False}}),
    "Local SGD": Family(_local(k_steps=4), (1, 5, 9)),
    "Local SGD, momentum averaged": Family(_local(k_steps=4, momentum="average"), (1, 5, 9)),
    "document": Family(_local(k_steps=3, schedule="document", warmup="const"), (1, 4, 7, 10)),
    "torch": Family(_local(k_steps=4, schedule="torch", begin_step=2), (2, 6, 10)),
    "adaptive": Family({**SEVERAL, "adaptive_localsgd": True, "adaptive_localsgd_configs": _BY_RATE}, (1, 4, 7, 10)),
    "outer": Family(_local(**_DILOCO), (4, 8, 12)),
    "outer, torch": Family(_local(**_DILOCO, schedule="torch", begin_step=2), (2, 6, 10)),
    "outer, adaptive": Family({**SEVERAL, "adaptive_localsgd": True, "adaptive_localsgd_configs": {**_BY_RATE, **OUTER}}, (3, 6, 9, 12)),
    "outer, merged": Family({**_local(k_steps=2, **OUTER), **_MERGE}, (4, 8, 12), merge=2),
    "outer, INT8": Family(_local(**_DILOCO, outer_wire="int8", outer_error_feedback=True), (4, 8, 12), tolerance=5e-3),
    "outer, on the host": Family(_local(**_DILOCO, outer_on_host=True), (4, 8, 12)),
    "fragments": Family(_local(k_steps=6, fragments=2, **OUTER), (3, 6, 9, 12), fragments=2),
    "fragments beside steps": Family(
        _local(k_steps=6, fragments=2, overlap_steps=1, mixing=0.25, **OUTER), (3, 6, 9, 12), fragments=2, overlap=1, mixing=0.25, flies=5
    ),
}
Change = Callable[[nn.Module], None]


def _values(module: nn.Module) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(17)
    return {name: torch.randn(own.shape, generator=generator, dtype=own.dtype) for name, own in module.named_parameters()}


def _load(module: nn.Module) -> None:
    module.load_state_dict(_values(module))


def _assign(module: nn.Module) -> None:
    module.load_state_dict(_values(module), assign=True)


@torch.no_grad()
def _copy(module: nn.Module) -> None:
    values = _values(module)
    for name, own in module.named_parameters():
        own.copy_(values[name])


def _draw(module: nn.Module) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(29)
        for own in module.parameters():
            nn.init.uniform_(own, -0.7, 0.7)


def _data(module: nn.Module) -> None:
    values = _values(module)
    for name, own in module.named_parameters():
        own.data = values[name]


def _into_data(module: nn.Module) -> None:
    values = _values(module)
    for name, own in module.named_parameters():
        own.data.copy_(values[name])


@torch.no_grad()
def _in_place(module: nn.Module) -> None:
    for own in module.parameters():
        own.zero_().add_(0.03)


@torch.no_grad()
def _last_layer(module: nn.Module) -> None:
    *_, last = module.parameters()
    last.fill_(2.0)


@torch.no_grad()
def _scale(module: nn.Module) -> None:
    for own in module.parameters():
        own.mul_(0.5)


@torch.no_grad()
def _back_and_forth(module: nn.Module) -> None:
    """As averaged weights take the place of the trained ones for an evaluation."""
    before = [own.clone() for own in module.parameters()]
    _copy(module)
    for own, value in zip(module.parameters(), before, strict=True):
        own.copy_(value)


def _on_rank_0(module: nn.Module) -> None:
    """As rank 0 alone evaluates."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        _back_and_forth(module)


WAYS: dict[str, Change] = {
    "load_state_dict": _load,
    "load_state_dict, assigned": _assign,
    "copy_": _copy,
    "nn.init": _draw,
    "another .data": _data,
    "into .data": _into_data,
    "in place": _in_place,
    "one layer": _last_layer,
    "scaled": _scale,
    "back and forth": _back_and_forth,
    "back and forth, on rank 0 alone": _on_rank_0,
}


@dataclass(frozen=True)
class Case:
    """One training of two ranks."""

    family: str
    moment: str
    way: str

    def __str__(self) -> str:
        return f"{self.family}, {self.moment}, {self.way}"

    @property
    def refused(self) -> str:
        """What of the error says why the change cannot be taken over; empty where it is."""
        family = FAMILIES[self.family]
        if self.way == "load_state_dict, assigned":
            return "was replaced after fleet.distributed_model"
        if self.way.startswith("back and forth"):
            return ""
        if self.moment == "in flight":
            return "while the exchange of its fragment is under way"
        apart = self.way == "scaled" and (self.moment == "in a round" or (self.moment == "after an averaging" and family.fragments > 1))
        return "parameters changed outside of optimizer.step(): differs between rank 0 and rank 1" if apart and family.has_theta else ""


READ = [
    (family, moment)
    for family, one in FAMILIES.items()
    for moment in one.moments
    if moment not in ("before the optimizer", "in flight") and one.merge == 1
]
"""Where weights are loaded, and the model is saved and read directly after that."""
CASES = [Case(family, moment, way) for family, one in FAMILIES.items() for moment in one.moments for way in WAYS]
SAMPLE = CASES[::29]
"""One in 29: of all ways, moments and families."""
