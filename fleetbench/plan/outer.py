"""Outer optimizer and fragments: how a round of local steps ends, and for which part of the model.

After a round of H updates, DiLoCo (arXiv 2311.08105) steps an outer optimizer on the mean of the differences
Delta = Theta - theta. Theta, the last agreed parameters, and the momentum v are equal on all trainers:

    v = mu v + Delta;   Theta = Theta - eta (Delta + mu v)         # torch.optim.SGD(nesterov=True); without Nesterov eta v

Streaming DiLoCo (arXiv 2501.18512) divides the model into P fragments, which have rounds of h = H / P updates
in turn. After update h - tau of round r, the exchange of fragment r mod P starts. After update h it is merged
into the current theta, of which a share alpha stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fleetbench.errors import ConfigError
from fleetbench.plan.layers import Gradient
from fleetbench.strategy import DistributedStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    """Settings of the outer optimizer; see ``torch.optim.SGD``."""

    lr: float
    momentum: float
    nesterov: bool

    @classmethod
    def of(cls, strategy: DistributedStrategy) -> Outer | None:
        """Return the outer optimizer of a strategy.

        None if trainers only average, which equals a learning rate of 1 without momentum.
        """
        configs = strategy.averaging
        if not strategy.is_local or not configs.has_outer:
            return None
        return cls(lr=configs.outer_lr, momentum=configs.outer_momentum, nesterov=configs.outer_nesterov)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragments:
    """Settings of the fragments' rounds. Updates of a warm-up, and before ``begin_step``, exchange the whole model."""

    number: int
    """Number of fragments, P."""
    period: int
    """Number of updates in a round, h."""
    overlap: int
    """Number of updates that overlap an exchange, tau."""
    mixing: float
    """Share of a trainer's own values that a merge keeps, alpha."""
    begin_step: int

    @classmethod
    def of(cls, strategy: DistributedStrategy) -> Fragments | None:
        """Return a strategy's fragments, or None if the end of a round exchanges and merges the whole model."""
        configs = strategy.localsgd_configs
        if not strategy.localsgd or not configs.has_fragments:
            return None
        number = configs.fragments
        period, overlap = configs.k_steps // number, configs.overlap_steps
        return cls(number=number, period=period, overlap=overlap, mixing=configs.mixing, begin_step=configs.begin_step)


def runs_of_layers(gradients: Sequence[Gradient], number: int, order: Sequence[str]) -> list[list[Gradient]]:
    """Split ``gradients`` into ``number`` runs of whole layers such that the largest is as small as possible.

    Gradients keep their order within a run. ``order`` has the names of the gradients in the model's order; if
    empty, that is the reverse of ``gradients``. Raises ``ConfigError`` if there are fewer layers than runs.
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
    """Return the run of each layer. Runs have at most ``most`` bytes, and there are at least ``number`` of them."""
    found: dict[str, int] = {}
    run = size = 0
    for place, (layer, nbytes) in enumerate(sizes.items()):
        if place and (size + nbytes > most or number - run > len(sizes) - place):
            run, size = run + 1, 0
        found[layer] = run
        size += nbytes
    return found
