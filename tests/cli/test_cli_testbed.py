"""``fleetbench testbed``: what it prints, what it refuses, and that it also works without root."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleetbench.errors import EnvironmentLacks
from real.testbed import noise
from real.testbed.network import Network

CLUSTER = """\
schema = 1
name = "box"

[workload]
model = "layers"
layers = [{ name = "block", params = 1, forward = "1 ms", backward = "1 ms" }]

[cluster]
"""
TWO_HOSTS = 'nodes = 2\ninter = { bandwidth = "200 Mbit/s", latency = "20 us" }\n'


@pytest.fixture
def box(tmp_path: Path) -> Callable[[str], Path]:
    """Write an experiment with a cluster."""

    def write(cluster: str = TWO_HOSTS) -> Path:
        path = tmp_path / "box.toml"
        path.write_text(CLUSTER + cluster, encoding="utf-8")
        return path

    return write


@pytest.fixture
def quiet_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure once however busy the machine is; skip where there are no namespaces."""
    try:
        Network(["probe"]).close()
    except EnvironmentLacks as error:
        pytest.skip(f"SKIPPED: {error.what}")
    monkeypatch.setattr(noise, "FOREIGN_LIMIT", 1e9)
    monkeypatch.setattr(noise, "SENTINEL_LIMIT", 1e9)


@pytest.mark.parametrize(
    ("cluster", "where"), [("nodes = 1\ntrainers_per_node = 2\n", "cluster.nodes"), ("nodes = 2\n", "cluster.inter")], ids=["one", "bare"]
)
def test_a_cluster_without_a_link_is_refused(cluster: str, where: str, command: Callable[..., Any], box: Callable[..., Path]) -> None:
    """Exit code 2, with the field and a hint."""
    ended = command("testbed", box(cluster))
    assert ended.code == 2
    assert ended.err.startswith(f"error: {where}")
    assert "HINT:" in ended.err


@pytest.mark.slow
@pytest.mark.usefixtures("quiet_enough")
def test_links_are_printed(command: Callable[..., Any], box: Callable[..., Path], tmp_path: Path) -> None:
    """A row a link and direction, the noise, and what is not there."""
    ended = command("testbed", box(), "--out", tmp_path / "runs")
    assert ended.code == 0, ended.err
    for phrase in ("host0", "host1", "up", "down", "200 Mbit/s", "191.28 Mbit/s", "foreign user time"):
        assert phrase in ended.out
