"""A loop of one's own around a leg of layer times."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch

from real.layer_times import Measured, ProfileLeg
from real.leg import Leg


def run(
    measuring: ProfileLeg,
    optimizer: torch.optim.Optimizer,
    next_loss: Callable[[], torch.Tensor],
    leg: Leg,
    on_step: Callable[[int], None] = lambda _step: None,
) -> Measured:
    """Train the leg's steps; ``next_loss`` takes the next batch through the model."""
    steps = measuring.steps(leg, on_step)
    while True:
        try:
            saved = next(steps)
        except StopIteration as end:
            measured: Measured = end.value
            return measured
        with saved or nullcontext():
            loss = next_loss()
        measuring.engine.report(loss)
        loss.backward()
        optimizer.step()
        measuring.update_done()
        optimizer.zero_grad()
        measuring.engine.stopwatch.loss(loss)
