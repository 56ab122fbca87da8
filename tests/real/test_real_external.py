"""Models from outside the registry: what a factory may return, and what is said where it returns something else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.profile import compute_key
from real.evaluation import load_external, named

MODELS = """
import torch
from torch import nn

def plain():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

def whole():
    return nn.Bilinear(4, 3, 2), (torch.ones(8, 4), torch.ones(8, 3)), lambda output: output.square().mean()

def single():
    return nn.Linear(4, 2), torch.ones(8, 4), lambda output: output.sum()

def breaks():
    raise OSError("no weights here")

def leaves():
    raise SystemExit(0)

def number():
    return 3

def pair():
    return nn.Linear(4, 2), torch.ones(8, 4)

def scalar_inputs():
    return nn.Linear(4, 2), torch.tensor(1.0), lambda output: output.sum()

needs = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of the working directory."""
    name = "models_of_" + tmp_path.name.replace("-", "_")
    (tmp_path / f"{name}.py").write_text(MODELS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_a_factory_returns_a_model_alone_or_all_three(module: str) -> None:
    """A model, or one with a batch of its own: several inputs as a tuple, one by itself."""
    assert load_external(f"{module}:plain", 0)[1] is None
    _, inputs = load_external(f"{module}:whole", 0)
    assert [tuple(item.shape) for item in inputs or ()] == [(8, 4), (8, 3)]
    assert len(load_external(f"{module}:single", 0)[1] or ()) == 1


def test_initial_parameters_follow_the_seed_alone(module: str) -> None:
    """Equal for equal seeds, whatever was drawn before; torch's own generator is left as it was."""
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, again, other = (load_external(f"{module}:plain", seed)[0].state_dict()["1.weight"] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("breaks", "gives no model: OSError: no weights here"),
        ("leaves", "SystemExit"),
        ("number", "returned int"),
        ("pair", "returned tuple"),
        ("scalar_inputs", "no batch of tensors"),
        ("nothing", "no attribute 'nothing'"),
        ("needs", "not callable"),
    ],
)
def test_what_is_no_factory_of_a_model_is_refused(module: str, factory: str, said: str) -> None:
    """By name, with a hint."""
    with pytest.raises(ConfigError, match=said) as caught:
        load_external(f"{module}:{factory}", 0)
    assert caught.value.where == "--model"
    assert caught.value.hint


@pytest.mark.parametrize("name", ["plain", "a.b", ":f", "a:", "a b:f", "a:f()", "../a:f"])
def test_what_names_no_factory_is_refused(name: str) -> None:
    """With what Python says of it."""
    with pytest.raises(ConfigError, match="gives no model"):
        load_external(name, 0)


def test_a_module_that_is_not_there_is_refused() -> None:
    """With what Python says of it."""
    with pytest.raises(ConfigError, match="No module named"):
        load_external("no_such_module_anywhere:f", 0)


def test_a_module_that_raises_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slip of the pen, and an AttributeError of the module's own, which is no missing factory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text, said in (("slip_of_the_pen", "def f(:", "SyntaxError"), ("raises_itself", "[].nothing", "AttributeError")):
        Path(f"{name}.py").write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=f"gives no model: {said}") as caught:
            load_external(f"{name}:f", 0)
        assert caught.value.hint


def test_its_name_is_part_of_the_key_and_of_the_file(module: str) -> None:
    """Tables of a model from outside are kept under its name, which an experiment file holds and nobody imports."""
    experiment = Experiment.load()
    outside = named(experiment, f"{module}:plain")
    assert outside.workload.model == f"{module}:plain"
    assert compute_key(outside) != compute_key(experiment)
    assert Experiment.from_dict({"workload": {"model": f"{module}:plain"}}).workload.model == f"{module}:plain"
