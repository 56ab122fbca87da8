"""``fleetbench evaluate``: vectors of a perceptron whose numbers numpy gives too, and services that are right, wrong or incomplete."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch

SAMPLES = 30

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


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an experiment and its weights, to work in."""
    (tmp_path / "served.toml").write_text(EXPERIMENT, encoding="utf-8")
    generator = np.random.default_rng(4)
    shapes = {"1.weight": (4, 5), "1.bias": (4,), "3.weight": (3, 4), "3.bias": (3,)}
    torch.save({name: torch.from_numpy(generator.standard_normal(shape)).float() for name, shape in shapes.items()}, tmp_path / "m.pt")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _outputs(place: Path) -> np.ndarray:
    """What any server of these weights would return, in float64."""
    weights = {name: value.double().numpy() for name, value in torch.load(place / "m.pt", weights_only=True).items()}
    inputs = np.random.Generator(np.random.Philox(key=[2, 1])).standard_normal((SAMPLES, 5))
    return np.maximum(inputs @ weights["1.weight"].T + weights["1.bias"], 0) @ weights["3.weight"].T + weights["3.bias"]


def _service(place: Path, vectors: np.ndarray, ids: list[int] | None = None) -> Path:
    """What the service returned, a row a sample, the last one first."""
    path = place / "online.parquet"
    ids = list(range(len(vectors))) if ids is None else ids
    pd.DataFrame({"id": ids[::-1], "vector": list(vectors[::-1].astype(np.float32))}).to_parquet(path)
    return path


def _folder(place: Path) -> Path:
    (folder,) = (place / "runs").iterdir()
    return folder


def test_an_evaluation_is_a_run_folder(command: Callable, place: Path) -> None:
    """Its vectors are numpy's; the resolved experiment, the summary that is printed, and the manifest lie beside them."""
    ended = command("evaluate", "served.toml", "--checkpoint", "m.pt", "--json")
    assert ended.code == 0, ended.err
    folder = _folder(place)
    assert folder.name.startswith("served-evaluate-")
    assert sorted(path.name for path in folder.iterdir()) == ["experiment.toml", "manifest.json", "summary.json", "vectors.parquet"]
    table = pq.read_table(folder / "vectors.parquet")
    assert table.column("id").to_pylist() == [str(row) for row in range(SAMPLES)]
    np.testing.assert_allclose(table.column("vector").to_pylist(), _outputs(place), rtol=0, atol=2e-6)
    summary = json.loads(ended.out)
    assert summary == json.loads((folder / "summary.json").read_text())
    assert (summary["executor"], summary["samples"], summary["length"], summary["dtype"]) == ("evaluate", SAMPLES, 3, "float32")
    assert summary["data"] == "synthetic"
    assert folder.name == f"served-evaluate-{summary['experiment']}-{summary['run_id']}"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["kind"], manifest["run_id"]) == ("evaluation", summary["run_id"])
    assert manifest["checkpoint"]["sha256"] == summary["checkpoint_sha256"]
    assert {"host", "versions", "commit", "environment", "host_s", "schema"} <= manifest.keys()
    assert folder.name in ended.err
    again = command("evaluate", folder / "experiment.toml", "--checkpoint", "m.pt", "--out", place / "again")
    assert again.code == 0
    assert f"{SAMPLES} vectors of 3 numbers" in again.out
    (second,) = (place / "again").iterdir()
    assert (second / "vectors.parquet").read_bytes() == (folder / "vectors.parquet").read_bytes()


def test_a_service_that_is_right_passes(command: Callable, place: Path) -> None:
    """In another order, with float64's digits: within the default tolerance, and the figures lie beside the vectors."""
    ended = command("evaluate", "served.toml", "--checkpoint", "m.pt", "--against", _service(place, _outputs(place)))
    assert ended.code == 0, ended.err
    assert "all within the tolerance of 0.0001" in ended.out
    comparison = json.loads((_folder(place) / "comparison.json").read_text())
    assert comparison["passed"] is True
    assert comparison["lowest_cosine"] == pytest.approx(1.0, abs=1e-10)


@pytest.mark.parametrize("tolerance", [(), ("--tolerance", "0.01")])
def test_a_wrong_sample_is_named(command: Callable, place: Path, tolerance: tuple[str, ...]) -> None:
    """One number of sample 17 is off by half of the vector's largest: exit code 1, that sample first, and the table is printed."""
    vectors = _outputs(place)
    largest = np.abs(vectors[17]).max()
    vectors[17, 1] += largest / 2
    online = _service(place, vectors)
    ended = command("evaluate", "served.toml", "--checkpoint", "m.pt", "--against", online, *tolerance)
    assert ended.code == 1
    assert f"1 of {SAMPLES} samples differ by more than" in ended.err
    assert "'17'" in ended.err
    worst = ended.out.partition("the worst samples")[2]
    first = next(line for line in worst.splitlines() if line.startswith("│"))
    assert [cell.strip() for cell in first.split("│")][1:6:2] == ["17", f"{largest / 2:.2e}", "1"]
    ended = command("evaluate", "--vectors", _folder(place), "--against", online, "--json", *tolerance)
    assert ended.code == 1
    comparison = json.loads(ended.out)["comparison"]
    assert comparison["worst"][0]["id"] == "17"
    assert comparison["worst"][0]["relative"] == pytest.approx(0.5, rel=1e-5)
    assert comparison["num_past"] == 1
    assert command("evaluate", "--vectors", _folder(place), "--against", online, "--tolerance", "0.51").code == 0


def test_half_precision_is_told_from_another_order_of_sums(command: Callable, place: Path) -> None:
    """Vectors that were rounded to half precision on their way are past the default tolerance, and within a per cent."""
    online = _service(place, _outputs(place).astype(np.float16).astype(np.float64))
    assert command("evaluate", "served.toml", "--checkpoint", "m.pt", "--against", online).code == 1
    assert command("evaluate", "--vectors", _folder(place), "--against", online, "--tolerance", "0.01").code == 0


def test_files_are_compared_without_a_model(command: Callable, place: Path) -> None:
    """Equal files pass a tolerance of nothing; no folder is made."""
    online = _service(place, _outputs(place))
    ended = command("evaluate", "--vectors", online, "--against", online, "--tolerance", "0")
    assert ended.code == 0
    assert f"({SAMPLES} equal)" in ended.out
    assert not (place / "runs").exists()


def test_samples_that_are_missing_are_bad_usage(command: Callable, place: Path) -> None:
    """Exit code 2, with what to do; the vectors were worth their time and stay. The first samples alone may be asked for."""
    online = _service(place, _outputs(place)[:20])
    ended = command("evaluate", "served.toml", "--checkpoint", "m.pt", "--against", online)
    assert ended.code == 2
    assert f"10 of {SAMPLES} samples have no vector" in ended.err
    assert "--samples N" in ended.err
    assert (_folder(place) / "manifest.json").is_file()
    ended = command("evaluate", "served.toml", "--checkpoint", "m.pt", "--against", online, "--samples", "20", "--out", place / "first")
    assert ended.code == 0, ended.err
    twice = _service(place, _outputs(place), [*range(SAMPLES - 1), 0])
    ended = command("evaluate", "served.toml", "--checkpoint", "m.pt", "--against", twice, "--out", place / "twice")
    assert ended.code == 2
    assert "a sample comes twice" in ended.err
    assert not (place / "twice").exists()  # it was read before anything was evaluated


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("served.toml",), "has random parameters"),
        (("served.toml", "--checkpoint", "absent.pt"), "no such file"),
        (("served.toml", "--checkpoint", "m.pt", "--samples", "31"), "is more than the data have"),
        (("served.toml", "--checkpoint", "m.pt", "--set", "workload.model_options.hidden=5"), "has another shape"),
        (("served.toml", "--checkpoint", "m.pt", "--against", "absent.parquet"), "cannot be read"),
        (("--vectors", "a.parquet"), "nothing to compare with"),
        (("served.toml", "--vectors", "a.parquet", "--against", "b.parquet"), "nothing is evaluated"),
        (("--checkpoint", "m.pt", "--vectors", "a.parquet", "--against", "b.parquet"), "nothing is evaluated"),
    ],
)
def test_bad_usage_leaves_nothing(command: Callable, place: Path, arguments: tuple[str, ...], said: str) -> None:
    """Exit code 2, a message with a hint, no run folder."""
    ended = command("evaluate", *arguments)
    assert ended.code == 2, ended
    assert said in ended.err
    assert "HINT: " in ended.err
    assert ended.out == ""
    assert not (place / "runs").exists()


@pytest.mark.parametrize("arguments", [("--tolerance", "-1"), ("--tolerance", "nan"), ("--samples", "0")])
def test_numbers_out_of_range_are_refused_by_the_parser(command: Callable, arguments: tuple[str, ...]) -> None:
    """With where the usage is."""
    ended = command("evaluate", *arguments)
    assert ended.code == 2
    assert ended.err.endswith("HINT: fleetbench evaluate --help\n")
