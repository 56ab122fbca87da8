"""``fleetbench profile``: a launch, and what is refused before one."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from fleetbench.cli.profile import show
from fleetbench.experiment import Experiment
from fleetbench.plan.layers import Layer, LayerTable
from fleetbench.profile import Profile, compute_key
from fleetbench.quantities import Bytes, Nanoseconds
from real.profile.measuring import Taken

EXPERIMENT = """\
name = "mine"
[workload]
model = "mlp"
model_options = { features = 16, hidden = 32, depth = 1, classes = 4 }
data = "synthetic"
batch_size = 8
steps = 20
[cluster]
trainers_per_node = 2
[run]
seed = 3
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an experiment, to work in."""
    (tmp_path / "mine.toml").write_text(EXPERIMENT, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_a_profile_is_what_sim_runs_with(command: Callable, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch: the folder's files, the printed tables, and `sim` with the measured experiment."""
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    monkeypatch.delenv("FLEETBENCH_BUSY")
    ended = command("profile", "mine.toml", "--seconds", "0.2", "--out", place / "runs")
    assert ended.code == 0, ended.err
    (folder,) = (place / "runs").iterdir()
    assert folder.name.startswith("mine-profile-")
    files = ("experiment.toml", "measured.toml", "profile.toml", "steps.parquet", "manifest.json")
    assert sorted(path.name for path in folder.iterdir()) == sorted(files)
    assert ended.out.splitlines()[-1] == f"simulate with it: fleetbench sim {folder / 'measured.toml'}"
    profile = Profile.load(folder / "profile.toml")
    (table,) = profile.tables
    assert table.key == compute_key(Experiment.load(folder / "experiment.toml"))
    assert [layer.name for layer in table.layers] == ["1", "3"]
    assert profile.communication is not None
    assert profile.communication.trainers == 2
    assert profile.foreign_cores is not None
    assert profile.gradient_noise is not None
    assert profile.gradient_noise.steps > 0
    assert profile.memory is not None
    assert profile.memory.parameters == 4 * (16 * 32 + 32 + 32 * 4 + 4)
    assert [line.thread_num for line in profile.threads] == [1]
    measured = Experiment.load(folder / "measured.toml")
    link = profile.communication.link
    assert measured.cluster.intra is not None
    assert (measured.cluster.intra.bandwidth, measured.cluster.intra.latency) == (link.bandwidth, link.latency)
    assert measured.workload.model == "mlp"
    legs = pd.read_parquet(folder / "steps.parquet")
    assert legs["leg"].unique().tolist() == ["whole, 1 thread", "queued", "queued, two in flight", "several, 1 thread", "averaged"]
    simulated = command("sim", folder / "measured.toml", "--json", "--out", place / "sims")
    assert simulated.code == 0, simulated.err
    assert json.loads(simulated.out)["trainers"] == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--set", "workload.model=layers", "--set", 'workload.layers=[{name="a",params=1,forward="1 ms",backward="1 ms"}]'],
            "computes nothing",
        ),
        (["--set", "workload.model=resnet5"], "not a model that can be executed"),
    ],
)
def test_what_cannot_be_profiled_is_refused_before_a_launch(command: Callable, place: Path, arguments: list[str], said: str) -> None:
    """Exit code 2, with a hint, and nothing on stdout."""
    ended = command("profile", "mine.toml", *arguments, "--out", place / "runs")
    assert ended.code == 2
    assert said in ended.err
    assert "HINT: " in ended.err
    assert ended.out == ""
    assert not (place / "runs").exists()


def _shown(cluster: dict, folder: Path, *, nbytes: int, as_json: bool = False) -> None:
    experiment = Experiment.from_dict({"name": "mine", "cluster": cluster})
    layer = Layer(name="a", forward=Nanoseconds(1), backward=Nanoseconds(1))
    table = LayerTable(key=compute_key(experiment), layers=(layer,), buffers_nbytes=Bytes(nbytes))
    taken = Taken(experiment=experiment, profile=Profile(machine="m", created="c", tables=(table,)), runs={})
    assert show(taken, argparse.Namespace(out=folder, json=as_json)) == 0


TWO_NODES = {
    "nodes": 2,
    "trainers_per_node": 2,
    "intra": {"bandwidth": "8 GB/s", "latency": "3 us", "payload": True},
    "inter": {"bandwidth": "100 MB/s", "latency": "40 us", "payload": True},
}


def test_a_profile_of_shards_tells_of_a_trainers_update(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 400 ms for the whole model four trainers take 100 each: 8 samples take 1 + 2 + 100 ms. Nothing is said of local steps."""
    experiment = Experiment.from_dict(
        {"name": "mine", "workload": {"batch_size": 8}, "cluster": {"trainers_per_node": 4}, "strategy": {"sharding": True}}
    )
    layer = Layer(name="a", forward=Nanoseconds(10**6), backward=Nanoseconds(2 * 10**6))
    table = LayerTable(key=compute_key(experiment), layers=(layer,), update=Nanoseconds(4 * 10**8))
    taken = Taken(experiment=experiment, profile=Profile(machine="m", created="c", tables=(table,)), runs={})
    assert show(taken, argparse.Namespace(out=tmp_path, json=False)) == 0
    told = capsys.readouterr().out
    assert re.search(r"optimizer +│ 100.0 ms", told)
    assert f"{8 / 0.103:.2f} samples/s" in told
    assert "local steps" not in told
