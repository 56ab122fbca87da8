"""Activations: what recompute saves, measured on a copy of the model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from fleetbench.result import Activations
from fleetbench.strategy import DistributedStrategy, RecomputeConfigs
from real.compute.compute import apply_compute
from real.compute.recompute import activation_bytes


def compare_activations(
    model: nn.Module, strategy: DistributedStrategy, device: torch.device, run: Callable[[nn.Module], torch.Tensor]
) -> Activations:
    """Bytes that one forward of ``model`` saves for its backward, with the strategy's recompute and without any.

    ``run`` takes the model to its loss. The model's running statistics move; torch's random numbers
    do not. Blocks are not compiled for it, nor do batch norms meet.
    """
    alone = DistributedStrategy(
        thread_num=strategy.thread_num,
        amp=strategy.amp,
        amp_configs=strategy.amp_configs,
        recompute=strategy.recompute,
        recompute_configs=strategy.recompute_configs,
    )
    model.train()
    saved = [
        _saved(model, variant, device, run) for variant in (alone, alone.replace(recompute=False, recompute_configs=RecomputeConfigs()))
    ]
    return Activations(saved_bytes=saved[0], without_recompute_bytes=saved[1])


def _saved(model: nn.Module, strategy: DistributedStrategy, device: torch.device, run: Callable[[nn.Module], torch.Tensor]) -> int:
    undo = apply_compute(model, strategy, device=device, group=None, scale=lambda: 1.0)
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            return activation_bytes(model, lambda: run(model))
    finally:
        undo()
