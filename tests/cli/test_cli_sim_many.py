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


def test_two_keys_may_be_swept(command: Callable, experiment: Files, tmp_path: Path) -> None:
    """A row each combination."""
    arguments = ("--sweep", "cluster.nodes=1,2", "--sweep", "run.seed=1..2", "--json", "--out", tmp_path / "runs")
    points = json.loads(command("sim", experiment(more=JITTER), *TWO, *arguments).out)["points"]
    assert [(point["cluster.nodes"], point["run.seed"]) for point in points] == [(1, 1), (1, 2), (2, 1), (2, 2)]


def test_a_failed_point_is_an_error_that_names_it(command: Callable, experiment: Files, tmp_path: Path) -> None:
    """Exit code 2, the point, a hint, and nothing is left over."""
    ended = command("sim", experiment(), *TWO, "--sweep", "workload.batch_size=8,0", "--out", tmp_path / "runs")
    assert ended.code == 2
    assert "the point workload.batch_size=0" in ended.err
    assert "HINT" in ended.err
    assert not (tmp_path / "runs").exists()


def test_a_note_is_said_once(command: Callable, experiment: Files, tmp_path: Path) -> None:
    """Not at every point."""
    path = experiment(more="[strategy]\nuse_thread_barrier = true\n")
    ended = command("sim", path, "--sweep", "run.seed=1,2", "--out", tmp_path / "runs")
    assert ended.err.count("note: use_thread_barrier") == 1


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


def test_no_summary_of_several_says_that_its_table_is_missing(command: Callable, experiment: Files, tmp_path: Path) -> None:
    """Nobody asked for one."""
    data = json.loads(command("sim", experiment(more=JITTER), "--seeds", "2", "--json", "--out", tmp_path / "runs").out)
    assert [summary["skipped"] for summary in data["summaries"]] == [[], []]


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


def test_a_presets_nodes_are_swept_and_said_once(command: Callable, experiment: Files, tmp_path: Path) -> None:
    """The sweep's nodes win over the preset's, and what it stands for is one note, before the table."""
    path = experiment(more="")
    path.write_text(path.read_text().replace("nodes = 1\ntrainers_per_node = 1", 'preset = "8 x DGX A100"'))
    nccl = ("--set", "run.backend=nccl", "--set", "run.device=cuda", "--set", "workload.steps=2")
    ended = command("sim", path, *nccl, "--sweep", "cluster.nodes=2,4", "--json", "--out", tmp_path / "runs")
    assert [point["trainers"] for point in json.loads(ended.out)["points"]] == [16, 32]
    assert ended.err.count('note: cluster.preset = "8 x DGX A100" stands for') == 1
    assert 'inter = { bandwidth = "200 Gbit/s"' in ended.err


def test_a_gpu_that_is_not_here_is_to_be_estimated(command: Callable, tmp_path: Path) -> None:
    """Before it is replaced by this machine's processor."""
    ended = command("sim", "examples/gpt_350m.toml", "--what-if", "--out", tmp_path / "runs")
    assert ended.code == 3
    assert "HINT: to simulate: fleetbench estimate" in ended.err


def test_what_is_said_of_a_node_is_left_out_where_a_point_has_no_such_node(command: Callable, experiment: Files, tmp_path: Path) -> None:
    """With a note that names point and node; four times as slow, 20 ms of compute take 80 where the node is there."""
    slow = ("--set", "cluster.node_overrides=[{ nodes = [0, 1], slowdown = 4 }, { nodes = [1], slowdown = 4 }]")
    ended = command("sim", experiment(), *TWO, *slow, "--sweep", "cluster.nodes=1,2", "--json", "--out", tmp_path / "runs")
    assert ended.code == 0, ended.err
    assert ended.err.count("note: at cluster.nodes=1 cluster.node_overrides of node 1 is left out") == 2  # of each override
    assert [point["compute_s"] for point in json.loads(ended.out)["points"]] == [pytest.approx(0.08)] * 2
