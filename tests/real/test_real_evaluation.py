"""Vectors of a data set against forwards written in numpy, and what cannot be evaluated."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.vectors import Vectors, read_vectors
from real.evaluation import evaluate, load_weights

SAMPLES = 23
SEED = 5


def _experiment(*overrides: str) -> Experiment:
    perceptron = (
        "workload.model=mlp",
        "workload.data=synthetic",
        "workload.model_options={ features = 6, classes = 3, hidden = 4, depth = 1 }",
        f"workload.data_options={{ samples = {SAMPLES} }}",
        f"run.seed={SEED}",
    )
    return Experiment.load(overrides=[*perceptron, *overrides])


def _weights() -> dict[str, npt.NDArray[np.float64]]:
    generator = np.random.default_rng(11)
    shapes = {"1.weight": (4, 6), "1.bias": (4,), "3.weight": (3, 4), "3.bias": (3,)}
    return {name: generator.standard_normal(shape).astype(np.float32).astype(np.float64) for name, shape in shapes.items()}


def _inputs() -> npt.NDArray[np.float64]:
    """The synthetic samples, by their definition: normal numbers of the generator with the key (seed, 1)."""
    return np.random.Generator(np.random.Philox(key=[SEED, 1])).standard_normal((SAMPLES, 6))


def _checkpoint(path: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    weights = {name: torch.from_numpy(value).to(dtype) for name, value in _weights().items()}
    torch.save({**weights, **changes}, path)
    return path


def _evaluated(tmp_path: Path, experiment: Experiment, **wanted: Any) -> tuple[Vectors, dict[str, Any]]:
    path = tmp_path / "vectors.parquet"
    found = evaluate(experiment, path, **wanted)
    return read_vectors(path), found


@pytest.mark.parametrize("batch_size", [1, 7, 23, 100])
def test_vectors_are_the_models_outputs(tmp_path: Path, batch_size: int) -> None:
    """The perceptron in numpy: every sample of the data in their order, in batches of any size, the last one smaller."""
    weights, inputs = _weights(), _inputs()
    hidden = np.maximum(inputs @ weights["1.weight"].T + weights["1.bias"], 0)
    expected = hidden @ weights["3.weight"].T + weights["3.bias"]
    checkpoint = _checkpoint(tmp_path / "m.pt")
    seen: list[tuple[int, int]] = []
    path = tmp_path / "vectors.parquet"
    experiment = _experiment(f"workload.batch_size={batch_size}")
    found = evaluate(experiment, path, checkpoint=checkpoint, progress=lambda *at: seen.append(at))
    vectors = read_vectors(path)
    assert vectors.ids == tuple(map(str, range(SAMPLES)))
    np.testing.assert_allclose(vectors.values, expected, rtol=0, atol=2e-6)
    assert (found["samples"], found["length"], found["num_not_finite"], found["model"]) == (SAMPLES, 3, 0, "mlp")
    assert found["checkpoint_sha256"] == hashlib.sha256(checkpoint.read_bytes()).hexdigest()
    assert seen[-1] == (SAMPLES, SAMPLES)
    assert len(seen) == -(-SAMPLES // batch_size)
    assert not torch.is_inference_mode_enabled()


def test_the_first_samples_alone(tmp_path: Path) -> None:
    """The first nine."""
    every, _ = _evaluated(tmp_path, _experiment(), checkpoint=_checkpoint(tmp_path / "m.pt"))
    vectors, found = _evaluated(tmp_path, _experiment(), checkpoint=_checkpoint(tmp_path / "m.pt"), samples=9)
    np.testing.assert_allclose(vectors.values, every.values[:9], rtol=0, atol=2e-6)
    assert (found["samples"], found["length"]) == (9, 3)


def test_float64_is_computed_as_such(tmp_path: Path) -> None:
    """And rounded once, at the end: to the bit what numpy rounds, but for a last place here and there."""
    weights, inputs = _weights(), _inputs()
    hidden = np.maximum(inputs @ weights["1.weight"].T + weights["1.bias"], 0)
    expected = (hidden @ weights["3.weight"].T + weights["3.bias"]).astype(np.float32)
    checkpoint = _checkpoint(tmp_path / "m.pt", torch.float64)
    vectors, _ = _evaluated(tmp_path, _experiment("workload.dtype=float64"), checkpoint=checkpoint)
    assert (vectors.values == expected).mean() > 0.98
    np.testing.assert_array_max_ulp(vectors.values, expected, maxulp=1)


def test_safetensors_are_read(tmp_path: Path) -> None:
    """The same weights, the same vectors; also by their folder."""
    from safetensors.torch import save_file

    (tmp_path / "saved").mkdir()
    file = tmp_path / "saved" / "model.safetensors"
    save_file({name: torch.from_numpy(value).float() for name, value in _weights().items()}, file)
    expected, _ = _evaluated(tmp_path, _experiment(), checkpoint=_checkpoint(tmp_path / "m.pt"))
    for checkpoint in (file, file.parent):
        vectors, found = _evaluated(tmp_path, _experiment(), checkpoint=checkpoint)
        assert vectors.values.tobytes() == expected.values.tobytes()
        assert found["checkpoint"] == str(file)
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ConfigError, match=r"model\.safetensors: is damaged"):
        _evaluated(tmp_path, _experiment(), checkpoint=file)


def test_tied_weights_may_be_stored_once(tmp_path: Path) -> None:
    """One matrix, whichever of its two names the file has; without either, it is missing."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    for names in (["0.weight"], ["1.weight"], ["0.weight", "1.weight"]):
        torch.save(dict.fromkeys(names, torch.full((2, 2), len(names)) * 1.5), tmp_path / "tied.pt")
        load_weights(model, tmp_path / "tied.pt")
        assert (model[0].weight == 1.5 * len(names)).all()
    torch.save({}, tmp_path / "tied.pt")
    with pytest.raises(ConfigError, match=r"another model.*not saved: 0\.weight"):
        load_weights(model, tmp_path / "tied.pt")


def test_pictures_go_by_their_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of val.txt in its order, by the path that was found; one-coloured pictures have ImageNet's normalised colour."""
    channels = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    monkeypatch.setattr("real.evaluation.build_model", lambda *_: channels)
    torch.save({}, tmp_path / "none.pt")
    checkpoint = tmp_path / "none.pt"
    root, colours = tmp_path / "pictures", [(10, 200, 30), (0, 0, 255), (90, 91, 92)]
    (root / "val").mkdir(parents=True)
    for number, colour in enumerate(colours):
        Image.new("RGB", (40 + number, 50), colour).save(root / "val" / f"{number}.png")
    (root / "val.txt").write_text("2.png 0\nval/0.png 1\n1.png 0\n")
    expected = (np.array([colours[place] for place in (2, 0, 1)]) / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    for batch_size in (1, 2):
        changes = (
            "workload.model=resnet50",
            "workload.model_options={}",
            "workload.data_options={ image_size = 16 }",
            f"workload.batch_size={batch_size}",
        )
        experiment = _experiment(f"workload.data=imagenet:{root}", *changes)
        vectors, _ = _evaluated(tmp_path, experiment, checkpoint=checkpoint)
        assert vectors.ids == ("val/2.png", "val/0.png", "val/1.png")
        np.testing.assert_allclose(vectors.values, expected, rtol=0, atol=1e-5)
    (root / "val.txt").write_text("2.png 0\nval/2.png 1\n")
    with pytest.raises(ConfigError, match="a sample comes twice"):
        _evaluated(tmp_path, experiment, checkpoint=checkpoint)
    (root / "val" / "1.png").write_bytes(b"no picture")
    (root / "val.txt").write_text("2.png 0\n1.png 1\n")
    with pytest.raises(ConfigError, match="cannot be decoded") as caught:
        _evaluated(tmp_path, experiment, checkpoint=checkpoint)
    assert "val.txt:2" in str(caught.value.where)


def test_what_is_not_finite_is_counted(tmp_path: Path) -> None:
    """A bias that is no number makes every vector of a sample so."""
    broken = {"3.bias": torch.tensor([0.0, float("nan"), 0.0])}
    _, found = _evaluated(tmp_path, _experiment(), checkpoint=_checkpoint(tmp_path / "m.pt", **broken))
    assert found["num_not_finite"] == SAMPLES


def test_more_samples_than_there_are_are_refused(tmp_path: Path) -> None:
    """With a hint; no file is left."""
    with pytest.raises(ConfigError, match="is more than the data have") as caught:
        _evaluated(tmp_path, _experiment(), checkpoint=_checkpoint(tmp_path / "m.pt"), samples=SAMPLES + 1)
    assert caught.value.hint
    assert not list(tmp_path.glob("vectors*"))


def test_a_registry_model_needs_weights(tmp_path: Path) -> None:
    """Nobody wants the vectors of random parameters; nor of a device that only sleeps."""
    with pytest.raises(ConfigError, match="has random parameters") as caught:
        _evaluated(tmp_path, _experiment())
    assert "--checkpoint" in str(caught.value.hint)
    with pytest.raises(ConfigError, match="no vectors"):
        _evaluated(tmp_path, _experiment("run.device=emulated"), checkpoint=_checkpoint(tmp_path / "m.pt"))


@pytest.mark.parametrize(
    ("changes", "said", "value"),
    [
        ({"3.bias": None}, "was saved from another model", "not saved: 3.bias"),
        ({"4.bias": torch.ones(3)}, "was saved from another model", "not in the model: 4.bias"),
        ({"3.bias": torch.ones(4)}, "3.bias has another shape", "saved [4] of float32, here [3]"),
        ({"3.bias": torch.ones(3, dtype=torch.float16)}, "3.bias has another shape or type", "float16, here [3] of float32"),
        ({"3.bias": 3}, "not a table of tensors", "keys"),
    ],
)
def test_weights_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, Any], said: str, value: str) -> None:
    """By the tensor's name; nothing is cast, left out or filled in."""
    checkpoint = _checkpoint(tmp_path / "m.pt", **changes)
    if changes == {"3.bias": None}:
        weights = torch.load(checkpoint, weights_only=True)
        del weights["3.bias"]
        torch.save(weights, checkpoint)
    with pytest.raises(ConfigError, match=said) as caught:
        _evaluated(tmp_path, _experiment(), checkpoint=checkpoint)
    assert value in str(caught.value.value)
    assert caught.value.hint


def test_files_that_hold_no_weights_are_refused(tmp_path: Path) -> None:
    """Absent, of another kind, an exported program, damaged, and a folder without any."""
    (tmp_path / "cut.pt").write_bytes(_checkpoint(tmp_path / "m.pt").read_bytes()[:100])
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"model": torch.nn.Linear(1, 1)}, tmp_path / "module.pt")
    for name in ("m.pt2", "m.npz", "empty.pt"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "folder").mkdir()
    said = {
        "absent.pt": "no such file",
        "folder": "no such file",
        "m.pt2": "is damaged, or of another kind",
        "m.npz": "is damaged, or of another kind",
        "cut.pt": "is damaged, or of another kind",
        "empty.pt": "is damaged, or of another kind",
        "module.pt": "is damaged, or of another kind",
        "list.pt": "not a table of tensors",
    }
    for name, phrase in said.items():
        with pytest.raises(ConfigError, match=phrase) as caught:
            _evaluated(tmp_path, _experiment(), checkpoint=tmp_path / name)
        assert name in str(caught.value)
        assert caught.value.hint
