"""Hooks: what an engine and fleet leave on a model stays with it, and not with its copies."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from processes import run_python
from torch import nn
from zero_trainer import ZeroTrainer, engine_of

from real.compute.living import NotCopied

ELSEWHERE = """
import sys
for name in ("fleetbench", "real", "sim", "tuner"):
    sys.modules[name] = None  # importing it fails
import torch
for path in sys.argv[1:]:
    model, optimizer = torch.load(path, weights_only=False)
    with model.no_sync():
        model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    torch.save(model.state_dict(), path + ".trained")
"""
STRATEGIES: list[dict[str, Any]] = [
    {},
    {"localsgd": True, "localsgd_configs": {"k_steps": 3, "outer_lr": 0.7, "outer_momentum": 0.9}},
    {"amp": True, "amp_configs": {"dtype": "bf16"}},
    {"recompute": True, "recompute_configs": {"checkpoints": ["0", "2"]}},
    {"build_strategy": {"enable_backward_optimizer_op_deps": False}},
]


def test_a_model_that_was_saved_whole_loads_and_trains_without_the_package(others: ZeroTrainer, tmp_path: Path) -> None:
    """With its optimizer, as plain torch's: nothing in the file names a module of ours."""
    plain = []
    for number, fields in enumerate(STRATEGIES):
        torch.manual_seed(number)
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
        engine, optimizer = engine_of(model, others, **fields)
        model.no_sync = NotCopied(engine.no_sync, nullcontext)  # type: ignore[assignment]  # as fleet.distributed_model does
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.save((model, optimizer), tmp_path / f"{number}.pt")
        engine.close()
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        plain.append(model.state_dict())
    script = tmp_path / "elsewhere.py"
    script.write_text(ELSEWHERE)
    ended = run_python([script, *(tmp_path / f"{number}.pt" for number in range(len(STRATEGIES)))], tmp_path)
    assert ended.code == 0, ended.out
    for number, expected in enumerate(plain):
        torch.testing.assert_close(torch.load(tmp_path / f"{number}.pt.trained"), dict(expected))
