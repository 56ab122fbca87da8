"""Simulations on Ray: on a cluster of two nodes, and on one that the command starts; results are this process's, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.ray
TESTS = Path(__file__).parents[1]
FILE = """\
name = "swept"
[workload]
model = "layers"
steps = 50
layers = [{ name = "block", params = 250_000, forward = "1 ms", backward = "2 ms", repeat = 4 }]
[cluster]
nodes = 2
inter = { bandwidth = "8 Gbit/s", latency = "10 us" }
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What ``ray_cluster.py`` finds."""
    path = os.pathsep.join([str(TESTS.parent), str(TESTS), str(TESTS / "sim"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "ignore", str(TESTS / "sim" / "ray_cluster.py")]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("what", ["points", "seeds", "cases", "plans", "fitted", "learnt", "refused"])
def test_a_cluster_finds_what_this_process_finds(what: str, found: dict[str, Any]) -> None:
    """A sweep, seeds, what-if, a search, fits without one cell, virtual trainers, and an error: equal to the last digit."""
    here, there = found[what]
    assert here == there
    assert len(here) > 20


def test_both_nodes_work(found: dict[str, Any]) -> None:
    """Afterwards this process is connected no more, and its environment is what it was."""
    assert found["nodes"] == 2
    assert not found["connected"]
    assert found["environment"]


def test_killed_workers_lose_nothing(found: dict[str, Any]) -> None:
    """Three of sixty calls kill their worker when they are made first: all results are there."""
    assert found["struck"] == {"numbers": [-number for number in range(60)], "killed": 3}


def test_the_command_starts_a_ray_of_its_own(tmp_path: Path) -> None:
    """Without RAY_ADDRESS: the table of the local pool, nothing on stderr that it does not say, and no process is left."""
    (tmp_path / "e.toml").write_text(FILE, encoding="utf-8")
    said = []
    before = {process.pid for process in psutil.process_iter()}
    for on in ("local", "ray"):
        command = [sys.executable, "-m", "fleetbench", "sim", "e.toml", "--sweep", "cluster.nodes=2..40", "--json", "--on", on]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
        assert done.returncode == 0, done.stderr
        said.append((json.loads(done.stdout)["points"], [line for line in done.stderr.splitlines() if "points" not in line]))
    assert said[0] == said[1]
    lines = {process.pid: " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])}  # a zombie has none
    assert [line for pid, line in lines.items() if pid not in before and "ray" in line] == []
