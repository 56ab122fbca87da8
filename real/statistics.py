"""Batch-norm statistics that stay where they are for a forward, so that they move once an update."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.nn.modules.batchnorm import _NormBase


def hold_statistics(model: nn.Module) -> Callable[[], None]:
    """Let batch norms normalise by their batch without moving their running statistics; returns what ends that."""
    held = [module for module in model.modules() if isinstance(module, _NormBase) and module.training and module.track_running_stats]
    for module in held:
        module.track_running_stats = False

    def release() -> None:
        for module in held:
            module.track_running_stats = True

    return release
