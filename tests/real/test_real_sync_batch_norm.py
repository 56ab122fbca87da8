"""Synchronised batch norm: ranks with their parts of a batch compute what one process computes with the whole."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import Arrays, run_ranks, values_of
from sync_batch_norm_rank import CASES, NETWORK, STEPS, STRATEGIES, network, train
from torch import nn

import real.compute.sync_batch_norm as module
from fleetbench.errors import ConfigError

RANK = Path(__file__).with_name("sync_batch_norm_rank.py")


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def results(request: pytest.FixtureRequest) -> list[Arrays]:
    """What every rank saved."""
    return run_ranks(RANK, request.param, json.dumps(values_of(request, "name")))


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CASES)
def test_equals_one_process_with_the_joint_batch(results: list[Arrays], name: str) -> None:
    """Outputs, all gradients and running statistics of several steps are those of a plain batch norm on the joint batch."""
    case = CASES[name]
    layer = case.layer().double()
    for step in range(STEPS):
        inputs, factors = case.joint(step, len(results))
        expected = train(layer, inputs.double(), factors.double())
        _compare(results, f"{name}/{step}", expected, case.tolerance)
    layer.eval()
    evaluated = layer(case.joint(STEPS, len(results))[0].double()).detach().numpy()
    for found in results:
        _assert_close(found[f"{name}/eval"], evaluated, 5 * case.tolerance, "eval")


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_network_of_them_equals_one_process_with_the_joint_batch(results: list[Arrays], name: str) -> None:
    """Gradients travel through several synchronised layers, also where they are recomputed or stand in compiled blocks."""
    model = network()
    for step in range(STEPS):
        inputs, factors = NETWORK.joint(step, len(results))
        expected = train(model, inputs, factors.flatten(1)[:, :30])
        _compare(results, f"network {name}/{step}", expected, 1e-10)


def _compare(results: list[Arrays], prefix: str, expected: dict[str, Any], relative: float) -> None:
    assert {key for key in results[0] if key.startswith(f"{prefix}/")} == {f"{prefix}/{name}" for name in expected}
    for name, value in expected.items():
        parts = [found[f"{prefix}/{name}"] for found in results]
        if name in ("outputs", "inputs.grad"):
            _assert_close(np.concatenate(parts), value, relative, f"{prefix} {name}")
        elif name.endswith(".grad"):
            _assert_close(np.sum(parts, axis=0, dtype=np.float64), value, relative, f"{prefix} {name}")
        else:
            for part in parts:
                _assert_close(part, value, relative, f"{prefix} {name}")


def _assert_close(found: Any, expected: Any, relative: float, what: str) -> None:
    assert found.shape == expected.shape, what
    scale = max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=0, atol=relative * scale, err_msg=what)


def test_on_cuda_the_modules_become_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The class changes to SyncBatchNorm and back; the module, its parameters, hooks and names stay."""
    monkeypatch.setattr(module, "_is_on_cuda", lambda _: True)
    monkeypatch.setattr(dist, "get_world_size", lambda _: 2)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    handle = model[1].register_forward_hook(lambda *_: None)
    layer, state, attributes = model[1], list(model.state_dict()), set(model[1].__dict__)
    group: Any = object()
    undo = module.apply_sync_batch_norm(model, group)
    assert model[1] is layer
    assert type(layer) is nn.SyncBatchNorm
    assert layer.process_group is group
    assert list(model.state_dict()) == state
    assert len(layer._forward_hooks) == 1
    undo()
    assert type(layer) is nn.BatchNorm2d
    assert set(layer.__dict__) == attributes
    handle.remove()


def test_subclasses_stay_what_they_are_and_copies_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A subclass without a forward of its own keeps its methods; a deep copy of the model can be made, and trains by itself."""

    class Named(nn.BatchNorm2d):
        def hello(self) -> str:
            return "hello"

    monkeypatch.setattr(dist, "get_world_size", lambda _: 2)
    model = nn.Sequential(Named(4))
    group: Any = (value for value in ())  # cannot be copied, like a process group
    undo = module.apply_sync_batch_norm(model, group)
    assert type(model[0]) is Named
    assert model[0].hello() == "hello"
    inputs = torch.randn(3, 4, 2, 2)
    assert torch.equal(copy.deepcopy(model)(inputs), nn.BatchNorm2d(4)(inputs))
    undo()
    assert "forward" not in model[0].__dict__


def test_one_trainer_keeps_its_batch_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """The statistics of one rank's group are its own."""
    monkeypatch.setattr(dist, "get_world_size", lambda _: 1)
    model = nn.Sequential(nn.BatchNorm1d(4))
    group: Any = object()
    module.apply_sync_batch_norm(model, group)()
    assert type(model[0]) is nn.BatchNorm1d


def test_batch_norms_with_a_forward_of_their_own_are_refused_and_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be synchronised is named, lazy layers included, before any module has changed."""

    class Own(nn.BatchNorm1d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # torch's name
            return input

    monkeypatch.setattr(dist, "get_world_size", lambda _: 2)
    group: Any = object()
    for layer, kind in ((Own(3), "Own"), (nn.LazyBatchNorm1d(), "LazyBatchNorm1d")):
        model = nn.Sequential(nn.BatchNorm1d(3), layer)
        with pytest.raises(ConfigError, match=rf"1: this kind of batch norm cannot be synchronised \(got {kind}\)"):
            module.apply_sync_batch_norm(model, group)
        assert type(model[0]) is nn.BatchNorm1d
        assert "forward" not in model[0].__dict__
