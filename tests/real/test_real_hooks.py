"""Hooks: what an engine and fleet leave on a model stays with it, and not with its copies."""

from __future__ import annotations

import copy
import io
from contextlib import nullcontext

import torch
from zero_trainer import ZeroTrainer, engine_of, six_layers

from real.compute.living import NotCopied


def test_a_copy_has_a_no_sync_that_does_nothing(others: ZeroTrainer) -> None:
    """It trains by itself: entering its ``no_sync`` neither reaches the engine nor fails; the model's own does. The model can be saved."""
    model = six_layers()
    engine, _ = engine_of(model, others)
    model.no_sync = NotCopied(engine.no_sync, nullcontext)  # type: ignore[assignment]  # as fleet.distributed_model does
    torch.save(model, io.BytesIO())
    count = len(others.flights)
    other = copy.deepcopy(model)
    with other.no_sync():  # type: ignore[operator]  # see above
        model(torch.ones(2, 8))
        other(torch.ones(2, 8)).sum().backward()
    assert all(parameter.grad is not None for parameter in other.parameters())
    assert len(others.flights) == count
    with model.no_sync():  # type: ignore[operator]  # see above
        model(torch.ones(2, 8)).sum().backward()
    assert len(others.flights) == count
    model(torch.ones(2, 8)).sum().backward()
    assert len(others.flights) > count
    engine.close()
