"""``fleetbench real`` with emulated trainers and parameter servers, in processes and on the testbed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fleetbench.cli.main import main
from fleetbench.errors import EnvironmentLacks
from fleetbench.experiment import Experiment
from fleetbench.store import load_run
from real.job.session import measure
from real.testbed import noise
from real.testbed.network import Network

FILE = """\
name = "served"

[workload]
model = "layers"
steps = 20
layers = [{ name = "block", params = 20_000, forward = "0.5 ms", backward = "1 ms", repeat = 10 }]

[cluster]
nodes = 2
servers = 2
inter = { bandwidth = "40 Mbit/s", latency = "100 us" }
stragglers = [{ kind = "jitter", distribution = "gamma", mean = 0.5, cv = 1.0 }]

[strategy]
mode = "ps"

[run]
device = "emulated"
warmup_steps = 2
timeout = "60 s"
"""
PAYLOAD_BPS = 40_000_000 * 1448 / 1514
NBYTES = 4 * 10 * 20_000

STEPS = 20
PUSHES = {"synchronous": STEPS, "asynchronous": STEPS + 1, "geo_sgd": 5}
"""Of all numbers, by a trainer in its counted steps: one a step, of which the last of the warm-up may still be on its way; one for every
five of the 22 steps, and for the rest."""

MODES = {
    "synchronous": [],
    "asynchronous": ["strategy.a_sync=true", "strategy.a_sync_configs={ k_steps = 0 }"],
    "geo_sgd": ["strategy.a_sync=true", "strategy.a_sync_configs={ k_steps = 5, send_wait_times = 1000 }"],
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The experiment."""
    path = tmp_path / "served.toml"
    path.write_text(FILE, encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_one_file_is_simulated_run_and_compared(mode: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two stored runs, step by step: all ranks and steps are there, and every part of a step has its error."""
    sets = [word for one in MODES[mode] for word in ("--set", one)]
    for command in ("sim", "real"):
        assert main([command, str(file), "--out", str(tmp_path / command), "--json", *sets]) == 0
        summary = json.loads(capsys.readouterr().out)
        assert summary["staleness"] is not None
        assert {"gradients_per_s", "utilisation", "staleness_histogram"} <= set(summary["server_load"])
    folders = [next((tmp_path / command).iterdir()) for command in ("sim", "real")]
    assert main(["compare", *map(str, folders), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fidelity"]["comparable"]
    assert set(found["fidelity"]["errors"]["phases"]) >= {"compute", "wait", "exposed_comm", "update", "other"}
    rows = {row["key"]: row for row in found["rows"]}
    for key in ("samples_per_s", "staleness.mean", "server_load.gradients_per_s", "server_load.utilisation", "bytes_sent_per_trainer"):
        assert None not in (rows[key]["a"], rows[key]["b"]), key
    for side in ("a", "b"):
        assert rows["bytes_sent_per_trainer"][side] == pytest.approx(PUSHES[mode] * NBYTES, rel=0.1)
    real = load_run(folders[1])
    assert real.summary.emulated
    assert real.summary.lateness_s is not None
    assert len(real.steps) == 2 * 22
    assert main(["compare", *map(str, folders)]) == 0
    assert "emulated its compute" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "placement"),
    [
        ("synchronous", "own"),
        pytest.param("synchronous", "shared", marks=pytest.mark.whole),
        pytest.param("asynchronous", "own", marks=pytest.mark.whole),
        pytest.param("geo_sgd", "shared", marks=pytest.mark.whole),
    ],
)
def test_servers_of_emulated_trainers_are_hosts(mode: str, placement: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the testbed: a synchronous step takes its compute, and its bytes there and back over the trainer's own link.

    With servers on the nodes half of the bytes cross no link of this trainer's, and the other trainer's half crosses it.
    """
    try:
        Network(["probe"]).close()
    except EnvironmentLacks as error:
        pytest.skip(f"SKIPPED: {error.what}")
    monkeypatch.setattr(noise, "FOREIGN_LIMIT", 1e9)
    monkeypatch.setattr(noise, "SENTINEL_LIMIT", 1e9)
    sets = [*MODES[mode], 'run.launcher="testbed"', f'cluster.server_placement="{placement}"']
    result = measure(Experiment.load(file, sets))
    summary = result.summary
    assert summary.testbed is not None
    assert summary.testbed["hosts"] == (4 if placement == "own" else 2)
    assert not {entry["what"] for entry in summary.skipped} & {"cluster.servers", "cluster.server_placement", "cluster.nodes"}
    assert summary.emulated
    assert summary.staleness is not None
    assert summary.bytes_sent_per_trainer == pytest.approx(PUSHES[mode] * NBYTES, rel=0.1)
    if mode == "asynchronous":  # a pull after each push; what a trainer has computed in the meantime is hidden
        waited = result.steps[result.steps["step"] >= 1].groupby("rank")["exposed_comm_s"].sum()
        assert waited.min() > 0.7 * STEPS * 2 * 8 * NBYTES / PAYLOAD_BPS
    if mode == "synchronous":
        waits = result.steps[result.steps["step"] >= 1]["exposed_comm_s"]
        assert waits.median() > 0.9 * 2 * 8 * NBYTES * (1 if placement == "own" else 0.5) / PAYLOAD_BPS
        assert summary.staleness["max"] == 0
