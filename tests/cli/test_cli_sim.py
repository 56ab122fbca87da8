"""``fleetbench sim``, end to end, on layers whose step takes 20 ms by hand."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fleetbench import store
from fleetbench.result import Summary
from fleetbench.strategy import DistributedStrategy

Files = Callable[..., Path]


def test_json_is_the_summary_and_nothing_else(command: Callable, experiment: Files, tmp_path: Path) -> None:
    """It is the stored summary.json, with exactly the schema's keys."""
    ended = command("sim", experiment(), "--json", "--out", tmp_path / "runs")
    assert ended.code == 0
    data = json.loads(ended.out)
    assert list(data) == [field.name for field in dataclasses.fields(Summary)]
    (run,) = (tmp_path / "runs").iterdir()
    assert data == json.loads((run / "summary.json").read_text())
    assert data["step_s"]["mean"] == pytest.approx(0.020)
    assert data["wall_s"] == pytest.approx(0.1)


def test_people_get_a_table_and_the_folder(command: Callable, experiment: Files, tmp_path: Path) -> None:
    """The step time with its unit, and where the run is."""
    ended = command("sim", experiment(), "--out", tmp_path / "runs")
    (run,) = (tmp_path / "runs").iterdir()
    assert "20.00 ms" in ended.out
    assert f"run: {run}" in ended.out
    assert ended.err == ""
    assert (run / "manifest.json").is_file()


def test_another_files_strategy_takes_the_experiments_place(command: Callable, experiment: Files, tmp_path: Path) -> None:
    """A ``recommended.toml`` is applied by its name, ``--set`` changes it further; without an experiment it is refused, not left out."""
    path, recommended = experiment(more="[strategy]\nfuse_grad_count = 7\n"), tmp_path / "recommended.toml"
    DistributedStrategy(localsgd=True, localsgd_configs={"k_steps": 4}).save(recommended)
    further = "strategy.fuse_all_reduce_ops=false"
    assert command("sim", path, "--strategy", recommended, "--set", further, "--out", tmp_path / "runs").code == 0
    (run,) = (tmp_path / "runs").iterdir()
    strategy = store.load_run(run).experiment.strategy
    assert (strategy.localsgd_configs.k_steps, strategy.fuse_grad_count, strategy.fuse_all_reduce_ops) == (4, 50, False)
    flat = tmp_path / "flat.toml"
    flat.write_text("nccl_comm_num = 2\n")
    for file in (recommended, flat):
        ended = command("sim", file, "--out", tmp_path / "runs")
        assert ended.code == 2
        assert "holds a strategy, not an experiment" in ended.err
        assert "--strategy" in ended.err
    missing = command("sim", path, "--strategy", tmp_path / "none.toml", "--out", tmp_path / "runs")
    assert (missing.code, "none.toml" in missing.err) == (2, True)


@pytest.mark.parametrize(("asked", "found"), [(None, "vector"), ("reference", "reference"), ("vector", "vector")])
def test_the_engine_is_asked_for_and_named(command: Callable, experiment: Files, tmp_path: Path, asked: str | None, found: str) -> None:
    """In the summary, and in words; step times are the same where nothing is random."""
    arguments = () if asked is None else ("--engine", asked)
    ended = command("sim", experiment(), "--json", "--out", tmp_path / "runs", *arguments)
    data = json.loads(ended.out)
    assert data["engine"] == found
    assert data["step_s"]["mean"] == pytest.approx(0.020)
    assert f"engine: {found}" in command("sim", experiment(), "--out", tmp_path / "runs", *arguments).out


def test_a_run_without_a_table_is_stored_and_not_compared(
    command: Callable, experiment: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above five million rows there is no steps.parquet unless asked for; the run can be loaded, and comparing it is refused."""
    monkeypatch.setattr("sim.run.MOST_ROWS", 1)
    data = json.loads(command("sim", experiment(), "--json", "--out", tmp_path / "runs").out)
    assert [entry["what"] for entry in data["skipped"]] == ["steps.parquet"]
    (run,) = (tmp_path / "runs").iterdir()
    assert not (run / "steps.parquet").exists()
    assert store.load_run(run).steps.empty
    refused = command("compare", run, run)
    assert refused.code == 2
    assert "--table" in refused.err
    command("sim", experiment(), "--json", "--table", "--out", tmp_path / "asked")
    (run,) = (tmp_path / "asked").iterdir()
    assert (run / "steps.parquet").exists()
    assert command("compare", run, run).code == 0


def test_overrides_and_seed_reach_the_experiment(command: Callable, experiment: Files, tmp_path: Path) -> None:
    """--set is repeatable, the last one wins, and --seed is run.seed."""
    arguments = ("--set", "workload.steps=9", "--set", "workload.steps=3", "--seed", "7")
    data = json.loads(command("sim", experiment(), "--json", "--out", tmp_path / "runs", *arguments).out)
    assert (data["steps"], data["seed"]) == (3, 7)


def test_a_field_without_effect_is_a_note(command: Callable, experiment: Files, tmp_path: Path) -> None:
    """It goes to stderr, and stdout stays JSON."""
    path = experiment(more="[strategy]\nuse_thread_barrier = true\n")
    ended = command("sim", path, "--json", "--out", tmp_path / "runs")
    assert ended.code == 0
    assert "note: use_thread_barrier has no effect" in ended.err
    assert json.loads(ended.out)


def test_a_run_that_is_interrupted_while_it_is_stored_leaves_nothing(
    command: Callable, experiment: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between two files of a run removes the ones already written."""
    seen: list[Path] = []

    def interrupted(path: Path, _: object) -> None:
        seen.extend(path.parent.iterdir())
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "write_timeline", interrupted)
    ended = command("sim", experiment(), "--out", tmp_path / "runs")
    assert seen, "some files had been written"
    assert ended.code == 130
    assert "interrupted" in ended.err
    assert not (tmp_path / "runs").exists()


def test_ctrl_c_ends_a_simulation_at_once(experiment: Files, tmp_path: Path) -> None:
    """Exit code 130, a message, no traceback, and no run folder."""
    path = experiment(steps=1_000_000, more="[strategy]\nuse_thread_barrier = true\n")
    script = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from fleetbench.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    arguments = [sys.executable, "-c", script, "sim", str(path), "--out", str(tmp_path / "runs")]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            assert "note:" in process.stderr.readline()  # the file is read, the simulation comes next
            time.sleep(1.5)
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert out == ""
    assert err.startswith("interrupted:")
    assert "Traceback" not in err
    assert not (tmp_path / "runs").exists()
