"""Outer optimizer and fragments: what a round of local steps ends with, and which part of the model takes which round.

DiLoCo (arXiv 2311.08105) steps an outer optimizer on the mean difference Delta = Theta - theta of a round of H updates, with Theta
and v equal on all trainers:

    v = mu v + Delta;   Theta = Theta - eta (Delta + mu v)         # torch.optim.SGD(nesterov=True); without Nesterov eta v

Streaming DiLoCo (arXiv 2501.18512) gives P parts of the model rounds of h = H / P updates in turn. After update h - tau of round r
fragment r mod P sets out; after update h it is merged into theta as it is then, of which a share alpha stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fleetbench.errors import ConfigError
from fleetbench.plan.layers import Gradient
from fleetbench.strategy import DistributedStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    """The outer optimizer's step."""

    lr: float
    momentum: float
    nesterov: bool

    @classmethod
    def of(cls, strategy: DistributedStrategy) -> Outer | None:
        """None where trainers average: a rate of 1 without momentum."""
        configs = strategy.averaging
        if not strategy.is_local or not configs.has_outer:
            return None
        return cls(lr=configs.outer_lr, momentum=configs.outer_momentum, nesterov=configs.outer_nesterov)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragments:
    """The rounds of fragments. Updates before ``begin_step``, and those of a warm-up, end with an exchange of all of the model."""

    number: int
    """P."""
    period: int
    """Updates of a round, h."""
    overlap: int
    """Updates beside an exchange, tau."""
    mixing: float
    """Share of a trainer's own values that a merge keeps, alpha."""
    begin_step: int

    @classmethod
    def of(cls, strategy: DistributedStrategy) -> Fragments | None:
        """None where a round's end exchanges and merges all of the model."""
        configs = strategy.localsgd_configs
        if not strategy.localsgd or not configs.has_fragments:
            return None
        number = configs.fragments
        period, overlap = configs.k_steps // number, configs.overlap_steps
        return cls(number=number, period=period, overlap=overlap, mixing=configs.mixing, begin_step=configs.begin_step)


def runs_of_layers(gradients: Sequence[Gradient], number: int, order: Sequence[str]) -> list[list[Gradient]]:
    """``gradients`` in ``number`` runs of whole layers, of which the largest has as few bytes as can be; each keeps their order.

    ``order``: names of the gradients as the model has them; none: the reverse of ``gradients``. Raises ``ConfigError`` for too few layers.
    """
    layers = {gradient.name: gradient.layer for gradient in gradients}
    sizes = {layers[name]: 0 for name in order or list(layers)[::-1] if name in layers}
    for gradient in gradients:
        sizes[gradient.layer] += gradient.nbytes
    if len(sizes) < number:
        hint = f"at most {len(sizes)}: a fragment is a run of whole layers"
        raise ConfigError("are more than the model has layers", "strategy.localsgd_configs.fragments", repr(number), hint)
    low, high = max(sizes.values()), sum(sizes.values())
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if max(_runs(sizes, middle, 1).values()) < number else (middle + 1, high)
    run_of = _runs(sizes, low, number)
    return [[gradient for gradient in gradients if run_of[gradient.layer] == run] for run in range(number)]


def _runs(sizes: dict[str, int], most: int, number: int) -> dict[str, int]:
    """The run of each layer, in runs of at most so many bytes, and at least ``number`` of them."""
    found: dict[str, int] = {}
    run = size = 0
    for place, (layer, nbytes) in enumerate(sizes.items()):
        if place and (size + nbytes > most or number - run > len(sizes) - place):
            run, size = run + 1, 0
        found[layer] = run
        size += nbytes
    return found
