"""The exported model: what a server loads answers as the trained model does, and needs nothing of ours."""

from __future__ import annotations

import copy
import zipfile
from pathlib import Path

import pytest
import torch
from alone import AloneMeeting, Training
from processes import run_python
from torch import nn

from fleetbench.errors import ConfigError, EnvironmentLacks
from real.checkpoints.inference import save_inference_model

ALONE = AloneMeeting()
SERVER = """
import sys
for name in ("fleetbench", "real", "sim", "tuner", "safetensors"):
    sys.modules[name] = None  # importing it fails
import torch
for path in sys.argv[1:]:
    given = torch.load(path + ".given.pt", weights_only=True)
    torch.save(torch.export.load(path).module()(*given), path + ".answer.pt")
"""
STRATEGIES: list[dict[str, object]] = [
    {},
    {"localsgd": True},
    {"amp": True, "amp_configs": {"dtype": "bf16"}},
    {"recompute": True, "recompute_configs": {"checkpoints": ["first"]}},
]


class TwoInputs(nn.Module):
    """Batch norm, dropout and two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        """``(batch, 4)`` of ``(batch, 3)`` and ``(batch, 1)``."""
        return self.drop(self.norm(self.first(x))) + shift  # type: ignore[no-any-return]  # a module's call is untyped


def inputs(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch."""
    return torch.randn(batch, 3), torch.randn(batch, 1)


def serve(*models: tuple[Path, tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    """What a process without these packages makes of what each model is given."""
    for path, given in models:
        torch.save(given, f"{path}.given.pt")
    folder = models[0][0].parent
    (folder / "server.py").write_text(SERVER, encoding="utf-8")
    done = run_python([folder / "server.py", *(str(path) for path, _ in models)], folder)
    assert done.code == 0, done.out
    return [torch.load(f"{path}.answer.pt", weights_only=True) for path, _ in models]


@pytest.mark.slow
def test_a_server_answers_as_the_model_does(tmp_path: Path) -> None:
    """For a batch of another size, in evaluation mode and full precision, whatever the strategy put into the model; training goes on."""
    models, expected = [], []
    for number, fields in enumerate(STRATEGIES):
        folder = tmp_path / str(number)
        with Training(TwoInputs(), **fields) as training:
            for _ in range(3):
                training.step(*inputs(6))
            save_inference_model(training.engine, ALONE, folder / "model.pt2", inputs(2), None)
            assert [path.name for path in folder.iterdir()] == ["model.pt2"]
            reference = TwoInputs().eval()
            reference.load_state_dict(training.model.state_dict())
            models.append((folder / "model.pt2", inputs(9)))
            expected.append(reference(*models[-1][1]))
            assert training.model.training
            training.step(*inputs(6))
    for answer, right in zip(serve(*models), expected, strict=True):
        torch.testing.assert_close(answer, right)


@pytest.mark.parametrize("fragments", [1, 2])
def test_within_a_round_the_outer_parameters_are_exported(tmp_path: Path, fragments: int) -> None:
    """What trainers agreed on last, of every fragment: of a round that is under way, the model itself has left it."""
    rounds = {"schedule": "torch", "begin_step": 4} if fragments == 1 else {"fragments": fragments}
    configs = {"k_steps": 4, "outer_lr": 0.7, "outer_momentum": 0.9, **rounds}
    with Training(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), localsgd=True, localsgd_configs=configs) as training:
        agreed = copy.deepcopy(training.model)
        plan, named = training.engine.plan, dict(training.model.named_parameters())
        merged = [[name for bucket in plan.buckets if bucket.id in ids for name in bucket.gradients] for ids in plan.fragments]
        every = 4 // fragments
        for step in range(1, 8):
            training.step(torch.randn(6, 3))
            if step % every == 0:
                for name in merged[(step // every - 1) % fragments] if fragments > 1 else named:
                    agreed.get_parameter(name).data.copy_(named[name])
        save_inference_model(training.engine, ALONE, tmp_path / "model.pt2", (torch.randn(2, 3),), None)
        given = torch.randn(5, 3)
        answer = torch.export.load(tmp_path / "model.pt2").module()(given)
        torch.testing.assert_close(answer, agreed(given))
        assert not torch.allclose(answer, training.model(given), rtol=1e-3)


def test_the_file_holds_no_pickle_and_no_data_of_the_users(tmp_path: Path) -> None:
    """Torch would pickle the example inputs; weights are raw bytes."""
    with Training(TwoInputs()) as training:
        save_inference_model(training.engine, ALONE, tmp_path / "model.pt2", inputs(2), None)
    with zipfile.ZipFile(tmp_path / "model.pt2") as archive:
        for name in archive.namelist():
            assert not archive.read(name).startswith((b"\x80", b"PK")), name  # a pickle, or torch.save's archive of one


class Branching(nn.Module):
    """Control flow by a tensor's values."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of shape ``(batch, 3)``."""
        return self.first(x) if x.sum() > 0 else x  # type: ignore[no-any-return]  # a module's call is untyped


@pytest.mark.parametrize(
    ("model", "name", "given", "match"),
    [
        (Branching, "m.pt2", (torch.ones(2, 3),), "cannot be exported"),
        (TwoInputs, "m.pt2", inputs(1), "an example of one sample"),
        (TwoInputs, "m.onnx", inputs(2), "let it end in .pt2"),
    ],
    ids=["branch", "one sample", "suffix"],
)
def test_what_cannot_be_exported_is_said(
    tmp_path: Path, model: type[nn.Module], name: str, given: tuple[torch.Tensor, ...], match: str
) -> None:
    """With a hint, and without a file."""
    with Training(model()) as training, pytest.raises(ConfigError) as caught:
        save_inference_model(training.engine, ALONE, tmp_path / name, given, None)
    assert match in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_an_old_model_stays_where_a_new_one_cannot_be_written(tmp_path: Path) -> None:
    """A folder in the way of the file: the environment's fault, in words, and nothing half written."""
    (tmp_path / "model.pt2").mkdir()
    with Training(TwoInputs()) as training, pytest.raises(EnvironmentLacks, match="cannot be written"):
        save_inference_model(training.engine, ALONE, tmp_path / "model.pt2", inputs(2), None)
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt2"]
