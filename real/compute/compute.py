"""Compute: everything of a strategy that changes how one trainer computes, put in place and taken back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fleetbench.strategy import DistributedStrategy
from real.communication.communicators import Errors, collective_errors
from real.compute.compiled import apply_compiled
from real.compute.device_settings import apply_device_settings
from real.compute.living import Undo
from real.compute.mixed_precision import apply_mixed_precision
from real.compute.recompute import apply_recompute, check_checkpoints
from real.compute.sync_batch_norm import apply_sync_batch_norm


def apply_compute(
    model: nn.Module,
    strategy: DistributedStrategy,
    *,
    device: torch.device,
    group: dist.ProcessGroup | None,
    scale: Callable[[], float | torch.Tensor],
    buckets: Sequence[Sequence[str]] | None = None,
    backend: str | Callable[..., Any] = "inductor",
    errors: Errors = collective_errors,
) -> Undo:
    """Put the compute part of ``strategy`` in place; nothing stays where any of it fails.

    ``group`` carries the statistics of synchronised batch norm, and nothing else; ``None`` is one
    trainer. ``errors`` stands around its collectives. ``scale()`` is the loss scale. ``buckets`` are
    the parameters' names of each bucket, for ``compile_split`` "bucket"; ``backend`` is torch.compile's.

    The order is the nesting: batch norms first, because compiled graphs are made of them; compiled
    blocks before recompute, which runs a compiled forward twice, because a checkpoint inside a graph
    would move batch-norm statistics twice; mixed precision around all of it. Raises ``ConfigError``
    for a strategy that this model cannot execute.
    """
    checkpoints = strategy.recompute_configs.checkpoints if strategy.recompute else ()
    with contextlib.ExitStack() as undo:
        undo.callback(apply_device_settings(strategy, device))
        if strategy.sync_batch_norm and group is not None:
            undo.callback(apply_sync_batch_norm(model, group, errors))
        if strategy.recompute:
            check_checkpoints(model, checkpoints)
        undo.callback(apply_compiled(model, strategy.build_strategy, buckets, alone=checkpoints, backend=backend))
        if strategy.recompute:
            undo.callback(apply_recompute(model, checkpoints))
        if strategy.amp:
            undo.callback(apply_mixed_precision(model, strategy.amp_configs, device.type, scale))
        kept = undo.pop_all()
    return kept.close
