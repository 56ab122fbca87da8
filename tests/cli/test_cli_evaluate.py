"""``fleetbench evaluate``: an exported perceptron whose numbers numpy gives too, and services that are right, wrong or incomplete."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

SAMPLES = 30
GENERATOR = np.random.default_rng(4)
WEIGHTS = {
    name: GENERATOR.standard_normal(shape)
    for name, shape in {"0.weight": (4, 5), "0.bias": (4,), "2.weight": (3, 4), "2.bias": (3,)}.items()
}

EXPERIMENT = f"""\
name = "served"
[workload]
model = "mlp"
model_options = {{ features = 5, classes = 3, hidden = 4, depth = 1 }}
data = "synthetic"
data_options = {{ samples = {SAMPLES} }}
batch_size = 8
[run]
seed = 2
"""


def _export(model: torch.nn.Module, example: torch.Tensor, path: Path) -> None:
    batch = {0: torch.export.Dim("batch")}
    torch.export.save(torch.export.export(model.eval(), (example,), dynamic_shapes=(batch,)), path)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported perceptron, by a user of torch alone."""
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))
    model.load_state_dict({name: torch.from_numpy(value) for name, value in WEIGHTS.items()})
    path = tmp_path_factory.mktemp("program") / "m.pt2"
    _export(model, torch.zeros(2, 5), path)
    return path


@pytest.fixture
def place(tmp_path: Path, program: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an experiment and an exported model, to work in."""
    (tmp_path / "served.toml").write_text(EXPERIMENT, encoding="utf-8")
    (tmp_path / "m.pt2").write_bytes(program.read_bytes())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _outputs() -> np.ndarray:
    """What any server of these weights would return, in float64."""
    inputs = np.random.Generator(np.random.Philox(key=[2, 1])).standard_normal((SAMPLES, 5))
    return np.maximum(inputs @ WEIGHTS["0.weight"].T + WEIGHTS["0.bias"], 0) @ WEIGHTS["2.weight"].T + WEIGHTS["2.bias"]


def _service(place: Path, vectors: np.ndarray, ids: list[int] | None = None) -> Path:
    """What the service returned, a row a sample, the last one first."""
    path = place / "online.parquet"
    ids = list(range(len(vectors))) if ids is None else ids
    lists = pa.array(vectors[::-1].astype(np.float32).tolist(), pa.list_(pa.float32()))
    pq.write_table(pa.table({"id": ids[::-1], "vector": lists}), path)
    return path


def test_vectors_are_those_of_the_model(command: Callable, place: Path) -> None:
    """They are numpy's numbers, in the data's order, by position; the file is what any reader of Parquet expects."""
    ended = command("evaluate", "m.pt2", "served.toml", "--to", "v.parquet")
    assert ended.code == 0, ended.err
    assert f"v.parquet, {SAMPLES} of 3 numbers" in ended.err
    table = pq.read_table(place / "v.parquet")
    assert table.column("id").to_pylist() == [str(row) for row in range(SAMPLES)]
    np.testing.assert_allclose(table.column("vector").to_pylist(), _outputs(), rtol=0, atol=2e-6)
    ended = command("evaluate", "m.pt2", "served.toml", "--to", "first.parquet", "--samples", "9")
    np.testing.assert_allclose(pq.read_table("first.parquet").column("vector").to_pylist(), _outputs()[:9], rtol=0, atol=2e-6)


def test_a_service_that_is_right_passes(command: Callable, place: Path) -> None:
    """In another order, with float64's digits: within the default tolerance."""
    ended = command("evaluate", "m.pt2", "served.toml", "--against", _service(place, _outputs()))
    assert ended.code == 0, ended.err
    assert "all within the tolerance of 0.0001" in ended.out


def test_a_wrong_sample_is_named(command: Callable, place: Path) -> None:
    """One number of sample 17 is off by half of the vector's largest: exit code 1, that sample first, and both norms are numpy's."""
    vectors, right = _outputs(), _outputs()
    largest = np.abs(vectors[17]).max()
    vectors[17, 1] += largest / 2
    online = _service(place, vectors)
    ended = command("evaluate", "m.pt2", "served.toml", "--against", online, "--to", "v.parquet")
    assert ended.code == 1
    assert f"1 of {SAMPLES} samples differ by more than" in ended.err
    assert "'17'" in ended.err
    first = next(line for line in ended.out.splitlines() if line.startswith("│"))
    assert [cell.strip() for cell in first.split("│")][1:4] == ["17", "5.00e-01", "1"]
    ended = command("evaluate", "v.parquet", "--against", online, "--json")
    assert ended.code == 1
    found = json.loads(ended.out)
    assert (found["num_past"], found["samples"], found["worst"][0]["id"], found["worst"][0]["at"]) == (1, SAMPLES, "17", 1)
    assert found["worst"][0]["largest"] == pytest.approx(0.5, rel=1e-5)
    assert found["euclidean"]["max"] == pytest.approx(largest / 2 / np.linalg.norm(right[17]), rel=1e-5)
    assert command("evaluate", "v.parquet", "--against", online, "--tolerance", "0.51").code == 0


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_never_passes(command: Callable, place: Path, value: float) -> None:
    """Not even beside itself; in JSON it is null."""
    vectors = _outputs()
    vectors[5, 0] = value
    online = _service(place, vectors)
    ended = command("evaluate", online, "--against", online, "--json", "--tolerance", "1e9")
    assert ended.code == 1
    found = json.loads(ended.out)
    assert (found["num_past"], found["worst"][0]["id"], found["worst"][0]["largest"]) == (1, "5", None)


def test_samples_that_one_side_lacks_are_bad_usage(command: Callable, place: Path) -> None:
    """Exit code 2, with what to do. The first samples alone may be asked for."""
    online = _service(place, _outputs()[:20])
    ended = command("evaluate", "m.pt2", "served.toml", "--against", online, "--to", "v.parquet")
    assert ended.code == 2
    assert f"10 of {SAMPLES} samples have no vector" in ended.err
    assert "--samples N" in ended.err
    assert (place / "v.parquet").exists()  # it was worth its time
    assert command("evaluate", "m.pt2", "served.toml", "--against", online, "--samples", "20").code == 0
    ended = command("evaluate", "m.pt2", "served.toml", "--against", online, "--samples", "10")
    assert ended.code == 2
    assert "10 were not evaluated" in ended.err
    twice = _service(place, _outputs(), [*range(SAMPLES - 1), 0])
    ended = command("evaluate", "m.pt2", "served.toml", "--against", twice, "--to", "twice.parquet")
    assert ended.code == 2
    assert "a sample that comes twice" in ended.err
    assert not (place / "twice.parquet").exists()  # it was read before anything was evaluated


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("m.pt2", "served.toml"), "nothing is asked for"),
        (("absent.pt2", "served.toml", "--to", "v.parquet"), "cannot be read"),
        (("damaged.pt2", "served.toml", "--to", "v.parquet"), "is damaged"),
        (("m.pt2", "served.toml", "--samples", "31", "--to", "v.parquet"), "is more than the data have"),
        (("m.pt2", "served.toml", "--set", "workload.model_options.features=6", "--to", "v.parquet"), "does not take these data"),
        (("m.pt2", "served.toml", "--against", "absent.parquet"), "cannot be read"),
        (("m.pt2", "served.toml", "--against", "damaged.pt2"), "is damaged"),
    ],
)
def test_bad_usage_leaves_nothing(command: Callable, place: Path, arguments: tuple[str, ...], said: str) -> None:
    """Exit code 2, a message with a hint, no file."""
    (place / "damaged.pt2").write_bytes((place / "m.pt2").read_bytes()[:-1000])
    before = sorted(place.iterdir())
    ended = command("evaluate", *arguments)
    assert ended.code == 2, ended
    assert said in ended.err
    assert "HINT: " in ended.err
    assert ended.out == ""
    assert sorted(place.iterdir()) == before


@pytest.mark.parametrize(
    "columns",
    [
        {"id": ["a"], "vector": pa.array([[1.0]], pa.list_(pa.float64()))},
        {"name": ["a"], "vector": pa.array([[1.0]], pa.list_(pa.float32()))},
        {"id": ["a", "b"], "vector": pa.array([[1.0], [1.0, 2.0]], pa.list_(pa.float32()))},
        {"id": ["a", "b"], "vector": pa.array([[1.0], None], pa.list_(pa.float32()))},
        {"id": pa.array([], pa.string()), "vector": pa.array([], pa.list_(pa.float32()))},
    ],
    ids=["float64", "other_names", "lengths", "no_vector", "empty"],
)
def test_columns_that_are_no_vectors_are_refused(command: Callable, tmp_path: Path, columns: dict[str, list]) -> None:
    """Nothing is cast or left out."""
    pq.write_table(pa.table(columns), tmp_path / "v.parquet")
    ended = command("evaluate", tmp_path / "v.parquet", "--against", tmp_path / "v.parquet")
    assert ended.code == 2
    assert "v.parquet: has" in ended.err


def test_pictures_go_by_their_paths(command: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of val.txt in its order, by the path that was found; one-coloured pictures have ImageNet's normalised colour."""
    root, colours = tmp_path / "pictures", [(10, 200, 30), (0, 0, 255), (90, 91, 92)]
    (root / "val").mkdir(parents=True)
    for number, colour in enumerate(colours):
        Image.new("RGB", (40 + number, 50), colour).save(root / "val" / f"{number}.png")
    (root / "val.txt").write_text("2.png 0\n0.png 1\n1.png 0\n")
    monkeypatch.chdir(tmp_path)
    _export(torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()), torch.zeros(2, 3, 16, 16), tmp_path / "colour.pt2")
    (tmp_path / "e.toml").write_text(
        f'name = "e"\n[workload]\nmodel = "resnet50"\ndata = "imagenet:{root}"\ndata_options = {{ image_size = 16 }}\nbatch_size = 2\n'
    )
    ended = command("evaluate", "colour.pt2", "e.toml", "--to", "v.parquet")
    assert ended.code == 0, ended.err
    table = pq.read_table("v.parquet")
    assert table.column("id").to_pylist() == ["val/2.png", "val/0.png", "val/1.png"]
    expected = (np.array([colours[place] for place in (2, 0, 1)]) / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    np.testing.assert_allclose(table.column("vector").to_pylist(), expected, rtol=0, atol=1e-5)
    (root / "val" / "1.png").write_bytes(b"no picture")
    ended = command("evaluate", "colour.pt2", "e.toml", "--to", "w.parquet")
    assert ended.code == 2
    assert "val.txt:3" in ended.err
