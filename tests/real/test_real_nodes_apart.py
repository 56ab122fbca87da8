"""Two nodes that share no interface: each in a network namespace of the testbed's, with a link between. Skipped where there are none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import training_problem as problem

from fleetbench.cluster import Cluster, Link
from fleetbench.errors import EnvironmentLacks
from fleetbench.quantities import BitsPerSecond
from real.processes.joining import GLOO
from real.testbed.testbed import Testbed as Ground  # pytest would take a Test... for tests

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
HOSTS = ("host0", "host1")


@pytest.fixture(scope="module")
def ground() -> Iterator[Ground]:
    """Two hosts and their link."""
    cluster = Cluster(nodes=2, inter=Link(bandwidth=BitsPerSecond(10**9)))
    try:
        with Ground(cluster) as opened:
            yield opened
    except EnvironmentLacks as error:
        pytest.skip(f"SKIPPED: {error.what}")


def _on_both(ground: Ground, folder: Path, *programs: list[str]) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of a program on each host."""
    environment = {name: value for name, value in os.environ.items() if name != GLOO} | {"TMPDIR": str(folder)}
    running = [
        subprocess.Popen(
            ground.command(program, HOSTS),
            env={**environment, "RANK": str(node)},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node, program in enumerate(programs)
    ]
    try:
        texts = [process.communicate(timeout=100) for process in running]
    finally:
        for process in running:
            process.kill()
    return [(process.returncode, *text) for process, text in zip(running, texts, strict=True)]


def _torchrun(ground: Ground, node: int, *arguments: str | Path) -> list[str]:
    place = ["--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1"]
    address = ["--master-addr", ground.topology.address("host0"), "--master-port", "29511"]
    return [sys.executable, "-m", "torch.distributed.run", *place, *address, *map(str, arguments)]


def test_torchrun_on_both_nodes_trains(ground: Ground, tmp_path: Path) -> None:
    """No variable names gloo's interface: it finds one on both."""
    script = [HERE / "four_lines.py", tmp_path / "out"]
    (code, _, err), (other, _, other_err) = _on_both(ground, tmp_path, *(_torchrun(ground, node, *script) for node in range(2)))
    assert (code, other) == (0, 0), err + other_err
    expected = problem.joint_training(2, "float64", problem.optimizer_of("momentum"))[-1].numpy()
    for rank in range(2):
        np.testing.assert_allclose(np.load(tmp_path / f"out.{rank}.npz")["parameters"], expected, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_driver_inside_runs_legs_over_both(ground: Ground, tmp_path: Path) -> None:
    """Under plain torchrun, and nobody told gloo an interface: legs, a killed trainer, and a leg from the beginning."""
    job = [HERE / "inside_job.py", tmp_path / "runs", tmp_path / "notes"]
    (code, out, err), (other, _, other_err) = _on_both(ground, tmp_path, *(_torchrun(ground, node, *job) for node in range(2)))
    assert (code, other) == (0, 0), err + other_err
    found = json.loads(out)
    assert (found["trainers"], found["trainers_per_node"]) == (2, 1)
    assert found["steps"] == [[[0, 10], [1, 10]], [[0, 12], [1, 12]], [[0, 8], [1, 8]]]
    assert list((tmp_path / "runs").iterdir()) == []
