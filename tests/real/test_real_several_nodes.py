"""Several nodes: one ``fleetbench launch`` a node, all of them on this machine, with one rendezvous."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import training_problem as problem
from processes import fork_command

HERE = Path(__file__).parent
FOUR_LINES = HERE / "four_lines.py"
ENDLESS = HERE / "endless_script.py"
STRIKES_S = 60.0


class _Node:
    """One node's launch: a process, and what it wrote."""

    def __init__(self, folder: Path, node: int, port: int, *script: str | Path, timeout_s: float = 60.0) -> None:
        command = ["launch", "--nproc", "1", "--nnodes", "2", "--node-rank", str(node)]
        command += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--startup-timeout", str(timeout_s), "--log-dir", str(folder / "log")]
        self._out = folder / f"node{node}.out"
        self.process = fork_command([*command, *script], self._out, folder)

    def wait(self) -> tuple[int, str]:
        """Exit code and output."""
        code = self.process.wait(100)
        return code, self._out.read_text()


@pytest.fixture
def port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number: int = probe.getsockname()[1]
        return number


@contextlib.contextmanager
def _endless(folder: Path, port: int, timeout_s: float = 60.0) -> Iterator[tuple[list[_Node], list[int]]]:
    """Two nodes in the midst of training: their launches, and the numbers of their workers."""
    nodes = [_Node(folder, node, port, ENDLESS, folder, str(timeout_s)) for node in range(2)]
    try:
        deadline = time.monotonic() + STRIKES_S
        files = [folder / f"pid.{rank}" for rank in range(2)]
        while not all(file.exists() for file in files):
            assert all(node.process.poll() is None for node in nodes), [node.wait() for node in nodes if node.process.poll() is not None]
            assert time.monotonic() < deadline, "the nodes did not begin to train"
            time.sleep(0.05)
        workers = [int(file.read_text().split()[0]) for file in files]
        yield nodes, workers
        _await_end(workers)
    finally:
        for node in nodes:
            node.process.kill()
            node.process.wait(30)


def _await_end(pids: list[int]) -> None:
    deadline = time.monotonic() + 5.0
    while living := [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline, f"left over: {living}"
        time.sleep(0.05)


def test_two_launches_with_one_rendezvous_train_as_one(tmp_path: Path, port: int) -> None:
    """Two nodes of one trainer give one process's result on the joint batch; logs are numbered over both, and old ones go."""
    (tmp_path / "log").mkdir()
    for rank in (0, 1, 7):
        (tmp_path / "log" / f"workerlog.{rank}").write_text("of an earlier launch")
    nodes = [_Node(tmp_path, node, port, FOUR_LINES, tmp_path / "out") for node in range(2)]
    ends = [node.wait() for node in nodes]
    assert [code for code, _ in ends] == [0, 0], ends
    expected = problem.joint_training(2, "float64", problem.optimizer_of("momentum"))[-1].numpy()
    for rank in range(2):
        np.testing.assert_allclose(np.load(tmp_path / f"out.{rank}.npz")["parameters"], expected, rtol=0, atol=1e-12)
        assert f"rank {rank} of 2 is done" in (tmp_path / "log" / f"workerlog.{rank}").read_text()
    assert not (tmp_path / "log" / "workerlog.7").exists()
    assert "2 trainers on 2 nodes" in ends[0][1]
    assert "rank 0 of 2 is done" in ends[0][1]
    assert "earlier" not in ends[0][1]
    assert "node 1 of 2" in ends[1][1]
    assert "is done" not in ends[1][1]
    assert not list(tmp_path.glob("fleetbench-*"))


def test_a_killed_worker_is_named_on_every_node(tmp_path: Path, port: int) -> None:
    """Both launches end at once and name the rank, its node and the signal, though only one of them saw it."""
    with _endless(tmp_path, port) as (nodes, workers):
        os.kill(workers[1], signal.SIGKILL)
        began = time.monotonic()
        ends = [node.wait() for node in nodes]
        assert time.monotonic() - began < 20.0
    for code, text in ends:
        assert code == 4
        assert "rank 1 on node 1: was killed by SIGKILL" in text
    assert not list(tmp_path.glob("fleetbench-*"))


def test_the_rendezvous_end_is_named(tmp_path: Path, port: int) -> None:
    """Node 0's launch holds the store; without it node 1 ends, and says why, and the workers of both have ended."""
    with _endless(tmp_path, port) as (nodes, _):
        nodes[0].process.kill()
        (code, _), (other, text) = [node.wait() for node in nodes]
    assert (code, other) == (-signal.SIGKILL, 4)
    assert "node 0: its launcher ended without a word" in text


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_an_ended_launch_ends_the_others(how: signal.Signals, tmp_path: Path, port: int) -> None:
    """Whoever ends the launch on one node ends it on all; one that was killed has said nothing."""
    with _endless(tmp_path, port) as (nodes, _):
        os.kill(nodes[1].process.pid, how)
        (code, text), (other, _) = [node.wait() for node in nodes]
    assert code == 4
    assert other == (130 if how == signal.SIGTERM else -signal.SIGKILL)
    assert f"node 1: {'the launch was ended there' if how == signal.SIGTERM else 'its launcher ended without a word'}" in text


def test_a_stopped_worker_is_named_on_every_node(tmp_path: Path, port: int) -> None:
    """The others run into their timeout; who did not answer is not taken for killed by a stranger."""
    with _endless(tmp_path, port, timeout_s=4.0) as (nodes, workers):
        os.kill(workers[1], signal.SIGSTOP)
        ends = [node.wait() for node in nodes]
    for code, text in ends:
        assert code == 4
        assert "rank 1 on node 1: was stopped" in text


def test_nodes_that_do_not_meet_say_so(tmp_path: Path, port: int) -> None:
    """Either node alone gives up after the start-up timeout, with exit code 3 and the place where it waited."""
    ports = [port, port + 1]
    nodes = [_Node(tmp_path, node, ports[node], FOUR_LINES, tmp_path / "out", timeout_s=3.0) for node in range(2)]
    for node, at in zip(nodes, ports, strict=True):
        code, text = node.wait()
        assert code == 3, text
        assert f"--rdzv-endpoint 127.0.0.1:{at}: 2 nodes did not meet within 3 s" in text
