"""``fleetbench sim`` with several simulations: seeds, what-ifs and sweeps."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import psutil
import pytest

Files = Callable[..., Path]
JITTER = '[[cluster.stragglers]]\nkind = "jitter"\nmean = 0.5\n'
SLOW = '[[cluster.stragglers]]\nkind = "slow_rank"\nranks = [1]\nfactor = 2.0\n'
TWO = ("--set", "cluster.nodes=2", "--set", 'cluster.inter={ bandwidth = "8 Gbit/s", latency = "1 ms" }')


def test_seeds_print_means_with_intervals(command: Callable, experiment: Files, tmp_path: Path) -> None:
    """Every figure has one, its mean is that of the seeds' own runs, and no run is stored."""
    path = experiment(more=JITTER)
    data = json.loads(command("sim", path, "--seeds", "2", "--seed", "4", "--json", "--out", tmp_path / "runs").out)
    alone = [json.loads(command("sim", path, "--seed", seed, "--json", "--out", tmp_path / "alone").out) for seed in ("4", "5")]
    assert data["seeds"] == [4, 5]
    assert data["intervals"]["wall_s"]["mean"] == pytest.approx(sum(run["wall_s"] for run in alone) / 2)
    assert data["intervals"]["wall_s"]["low"] < data["intervals"]["wall_s"]["mean"] < data["intervals"]["wall_s"]["high"]
    assert not (tmp_path / "runs").exists()
    ended = command("sim", path, "--seeds", "2", "--out", tmp_path / "runs")
    assert ended.code == 0
    assert "95 % interval" in ended.out
    assert "2 seeds" in ended.out


def test_one_seed_is_refused(command: Callable, experiment: Files, tmp_path: Path) -> None:
    """An interval needs two."""
    ended = command("sim", experiment(), "--seeds", "1", "--out", tmp_path / "runs")
    assert ended.code == 2
    assert "HINT" in ended.err


def test_what_if_is_a_table_of_gains(command: Callable, experiment: Files, tmp_path: Path) -> None:
    """20 ms of compute, rank 1 40, and 2 ms of latency: without stragglers 42 / 22 times as fast."""
    path = experiment(more=SLOW)
    data = json.loads(command("sim", path, *TWO, "--what-if", "--json", "--out", tmp_path / "runs").out)
    gains = {case["name"]: case["gain"] for case in data["cases"]}
    assert gains["without stragglers"] == gains["without rank 1"] == pytest.approx(42 / 22, rel=1e-3)
    assert gains["with infinite bandwidth"] == pytest.approx(1.0, rel=1e-3)
    ended = command("sim", path, *TWO, "--what-if", "--out", tmp_path / "runs")
    assert "without rank 1" in ended.out
    assert "1.909x" in ended.out
    assert not (tmp_path / "runs").exists()


def test_a_sweep_is_a_table_and_a_file(command: Callable, experiment: Files, tmp_path: Path) -> None:
    """Steps of 20 ms and 2 ms of latency a neighbour; the Parquet holds what is printed."""
    path = experiment(more=JITTER)
    arguments = ("sim", path, *TWO, "--sweep", "cluster.nodes=1,2,4", "--out", tmp_path / "runs")
    data = json.loads(command(*arguments, "--json").out)
    assert [point["cluster.nodes"] for point in data["points"]] == [1, 2, 4]
    table = pd.read_parquet(data["table"])
    assert table["samples_per_s"].tolist() == pytest.approx([point["samples_per_s"] for point in data["points"]])
    ended = command(*arguments)
    assert ended.code == 0
    assert "cluster.nodes" in ended.out
    assert "table: " in ended.out
    assert ended.err == ""


def test_a_failed_point_is_an_error_that_names_it(command: Callable, experiment: Files, tmp_path: Path) -> None:
    """Exit code 2, the point, a hint, and nothing is left over."""
    ended = command("sim", experiment(), *TWO, "--sweep", "workload.batch_size=8,0", "--out", tmp_path / "runs")
    assert ended.code == 2
    assert "the point workload.batch_size=0" in ended.err
    assert "HINT" in ended.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "two", [("--seeds", "2", "--what-if"), ("--what-if", "--sweep", "run.seed=1,2"), ("--seeds", "2", "--sweep", "run.seed=1,2")]
)
def test_one_question_at_a_time(two: tuple[str, ...], command: Callable, experiment: Files) -> None:
    """The options exclude each other."""
    ended = command("sim", experiment(), *two)
    assert ended.code == 2
    assert "not allowed with" in ended.err


@pytest.mark.parametrize("asked", [("--seeds", "2"), ("--what-if",), ("--sweep", "run.seed=1,2")])
def test_a_table_is_of_one_run(asked: tuple[str, ...], command: Callable, experiment: Files, tmp_path: Path) -> None:
    """Runs that are not stored have no steps.parquet, so that --table beside them is an error and not ignored."""
    ended = command("sim", experiment(), *asked, "--table", "--out", tmp_path / "runs")
    assert ended.code == 2
    assert f"--table: no run of {asked[0]} is stored" in ended.err
    assert "HINT" in ended.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_ctrl_c_ends_a_sweep_and_its_processes_at_once(experiment: Files, tmp_path: Path) -> None:
    """Exit code 130, a message, no traceback, no table, and no process goes on simulating."""
    script = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from fleetbench.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    long = ("--set", "workload.steps=1000000", "--engine", "reference", "--sweep", "run.seed=1..8")
    arguments = [sys.executable, "-c", script, "sim", str(experiment()), *long, "--out", str(tmp_path / "runs")]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            own = psutil.Process(process.pid)
            deadline = time.monotonic() + 60
            while not (workers := own.children()) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert workers
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=20)
        finally:
            process.kill()
    assert (process.returncode, out) == (130, "")
    assert err.startswith("interrupted:")
    assert "Traceback" not in err
    psutil.wait_procs(workers, timeout=5)
    assert not any(worker.is_running() for worker in workers)
    assert not (tmp_path / "runs").exists()
