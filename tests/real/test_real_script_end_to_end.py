"""The example script under its launchers, measured and tuned as a user would."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from processes import forked_launches, run_python
from sim_cases import with_profile
from torch import nn

from fleetbench.experiment import Experiment
from fleetbench.profile import table_for
from fleetbench.recommended import key_of_profiled
from fleetbench.report.folder import save_profile
from fleetbench.report.html import write_report
from fleetbench.strategy import DistributedStrategy
from real.collective import model_key
from real.job.launch import started_with
from real.job.launcher import launch_script
from real.job.script_session import ScriptSession
from real.leg import Leg
from real.processes.place import sweep
from real.profile.measuring import profile_script
from sim.run import simulate
from tuner.evidence import Evidence
from tuner.jobs import Script
from tuner.ledger import Ledger
from tuner.recommendation import Arm
from tuner.tune import tune
from tuner.ways import OUTER

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_digits.py"
LONG = """
import sys
from pathlib import Path
text = Path({example!r}).read_text().replace("EPOCHS, BATCH = 10, 32", "EPOCHS, BATCH = {epochs}, 32")
text = text.replace("loss.backward()", "loss.backward(); fleet.report(loss=loss)")
exec(compile(text, {example!r}, "exec"))
"""


def launched(script: Path, folder: Path) -> list[str]:
    """Under our own launcher."""
    return [sys.executable, "-m", "fleetbench", "launch", "--nproc", "2", "--log-dir", str(folder / "log"), str(script)]


def _key_of_the_example() -> str:
    """Under which ``strategy.auto`` looks for the example's model on two trainers."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    return model_key(model, trainers=2, trainers_per_node=2, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example for 200 epochs, telling its loss."""
    path = tmp_path_factory.mktemp("scripts") / "train_long.py"
    path.write_text(LONG.format(example=str(EXAMPLE), epochs=200))
    return path


@pytest.fixture(scope="module")
def session(script: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptSession]:
    """One launch for the tests of this module."""
    base = Experiment.from_dict({"name": "digits", "run": {"warmup_steps": 5}})
    with forked_launches(), ScriptSession(launched(script, tmp_path_factory.mktemp("launch")), base) as opened:
        yield opened


def test_the_script_is_what_it_is(session: ScriptSession) -> None:
    """Two trainers of one node, batches of 32, SGD with momentum, a loss that is reported."""
    found = session.experiment
    assert (found.workload.model, found.workload.batch_size, found.workload.optimizer) == ("script:train_long.py", 32, "momentum")
    assert (found.cluster.nodes, found.cluster.trainers_per_node, found.run.backend) == (1, 2, "gloo")
    assert found.strategy == DistributedStrategy()


def test_strategies_change_in_the_living_script(session: ScriptSession) -> None:
    """A B B A in one launch: each leg has its own plan, its rows for every rank and step, and the script's losses, which fall.

    Local steps with an outer optimizer follow in the same launch: whole rounds end at steps 4, 8, 12, 16 and 20.
    """
    strategies = (DistributedStrategy(), DistributedStrategy(fuse_all_reduce_ops=False))
    runs = [session.run(Leg(strategy=strategies[index], steps=20, warmup_steps=5)) for index in (0, 1, 1, 0)]
    assert [len(run.plan.buckets) for run in runs] == [1, 6, 6, 1]
    assert [len(run.steps) for run in runs] == [50] * 4
    assert all(run.summary.num_syncs == 20 and run.summary.exposed_comm_s > 0 for run in runs)
    assert runs[-1].steps["loss"].mean() < runs[0].steps["loss"].mean()
    assert min(runs[0].peak_bytes) > 10**7
    outer = DistributedStrategy(localsgd=True, localsgd_configs={"k_steps": 4, **OUTER})
    assert session.run(Leg(strategy=outer, steps=20, warmup_steps=4)).summary.num_syncs == 5
    assert session._num_launches == 1


def test_the_profile_is_what_sim_runs_with(session: ScriptSession, tmp_path: Path) -> None:
    """The three linear layers with their gradients, the link between the two trainers, and a simulation of the script's own strategy."""
    taken = profile_script(session, seconds=0.5)
    table = table_for(with_profile(taken.experiment, taken.profile))
    assert [layer.name for layer in table.layers] == ["0", "2", "4"]
    shapes = {gradient.name: gradient.numel for layer in table.layers for gradient in layer.gradients}
    assert shapes == {"0.weight": 64 * 256, "0.bias": 256, "2.weight": 256 * 256, "2.bias": 256, "4.weight": 2560, "4.bias": 10}
    assert table.read > 0
    assert taken.profile.communication is not None
    assert taken.profile.gradient_noise is not None
    assert taken.profile.gradient_noise.steps > 0
    assert taken.profile.gradient_noise.batch_size == 2 * taken.experiment.workload.batch_size
    assert taken.profile.memory is not None
    assert taken.profile.memory.optimizer_state == taken.profile.memory.parameters
    assert key_of_profiled(taken.experiment, table) == _key_of_the_example()
    folder = save_profile(taken.experiment, taken.profile, taken.runs, tmp_path)
    assert simulate(Experiment.load(folder / "measured.toml")).summary.step_s["mean"] > 0
    assert session._num_launches == 1


@pytest.mark.slow
def test_a_run_to_the_target_trains_as_an_ordinary_launch(script: Path, tmp_path: Path) -> None:
    """With local steps from the first step on, whatever ``run.warmup_steps`` is: rank 0's losses are those of the script by itself."""
    strategy = DistributedStrategy(localsgd=True, localsgd_configs={"k_steps": 8, **OUTER})
    strategy.save(tmp_path / "strategy.toml")
    told, report = tmp_path / "plain.py", "fleet.report(loss=loss)"
    printed = f"{report}; fleet.is_first_worker() and print('loss', loss.item())"
    told.write_text(script.read_text().replace(report, printed).replace("= 200", "= 2"))
    lines: list[bytes] = []
    base = Experiment.from_dict({"name": "digits", "run": {"warmup_steps": 5}})
    with forked_launches():
        launch_script(2, [str(told), str(tmp_path / "strategy.toml")], log_dir=tmp_path / "log", echo=lines.append)
        with ScriptSession(launched(script, tmp_path), base) as session:
            arm = Arm(name="one", strategy=strategy, simulated_s=0.01)
            request = Ledger(session.experiment, Evidence(), 0.01).to_target(arm, 0)
            table = session.run(replace(request.leg, steps=40)).steps
    expected = [float(line.split()[1]) for line in b"".join(lines).decode().splitlines() if line.startswith("loss ")]
    assert table.loc[table["rank"] == 0, "loss"].tolist() == pytest.approx(expected[:40], rel=1e-6)


def test_an_ordinary_run_knows_nothing_of_it(tmp_path: Path) -> None:
    """Without the variable no module of legs is imported, and ``optimizer.step`` is torch's own."""
    path = tmp_path / "plain.py"
    path.write_text(
        "import sys, torch\nfrom fleetbench import fleet\nfleet.init()\nmodel = fleet.distributed_model(torch.nn.Linear(2, 1))\n"
        "optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))\n"
        "assert 'step' not in vars(optimizer)\n"
        "assert not [name for name in sys.modules if name.startswith('real.job.')]\n"
    )
    done = run_python([path], tmp_path)
    assert done.code == 0, done.out


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_driver_leaves_nothing_behind(script: Path, tmp_path: Path) -> None:
    """Ranks, agent and launcher end within seconds of its SIGKILL; the tuning directory goes with the next start."""
    driver = subprocess.Popen(
        [sys.executable, "-m", "fleetbench", "tune", "--out", str(tmp_path / "runs"), "--", *launched(script, tmp_path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    try:
        deadline = time.monotonic() + 200
        while not (found := list(tmp_path.glob("fleetbench-*/1/results/0/rank1.json"))) and time.monotonic() < deadline:
            time.sleep(0.1)
        folder = found[0].parents[2]
        assert started_with(folder)
    finally:
        driver.kill()
        driver.wait()
    deadline = time.monotonic() + 20
    while started_with(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not started_with(folder)
    sweep(tmp_path)
    assert not list(tmp_path.glob("fleetbench-*"))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_tuning_of_the_example_has_a_verdict(tmp_path: Path) -> None:
    """The example as it is, 280 steps a launch: profile, search, trials and pairs by one command, in under six minutes."""
    base = Experiment.from_dict({"name": "digits", "tune": {"trials": 30, "leg_steps": 30, "pairs": 3}, "run": {"warmup_steps": 5}})
    begin_s = time.monotonic()
    found, folder = tune(base, script=Script(tuple(launched(EXAMPLE, tmp_path)), seconds=1.0), out=tmp_path / "runs")
    assert time.monotonic() - begin_s < 360
    assert found.verdict in ("USE", "KEEP DEFAULT")
    assert DistributedStrategy.load(folder / "recommended.toml") == found.strategy
    stored = tmp_path / "runs" / "recommended" / f"{_key_of_the_example()}.toml"
    assert DistributedStrategy.load(stored) == found.strategy  # what strategy.auto loads
    assert any(note.startswith("it holds for 2 trainers on") for note in found.notes)
    assert not list((tmp_path / "runs").glob("resume-*"))
    assert "digits" in write_report(folder).read_text(encoding="utf-8")
