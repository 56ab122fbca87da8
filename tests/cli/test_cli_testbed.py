"""``fleetbench testbed``: what it prints, what it refuses, and that it also works without root."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetbench.errors import EnvironmentLacks
from real.testbed import network, noise
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
RATE = 200_000_000
AS_ROOT = ("unshare", "--map-root-user", "--net")


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


@pytest.mark.parametrize("tool", ["ip", "tc"])
def test_a_missing_tool_is_named(tool: str, command: Callable[..., Any], box: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 3, with a hint at what to install."""
    real = shutil.which
    monkeypatch.setattr(network.shutil, "which", lambda name, path=None: None if name == tool else real(name, path=path))
    ended = command("testbed", box())
    assert ended.code == 3
    assert f"needs {tool}, and it is not installed" in ended.err
    assert "HINT:" in ended.err
    assert "iproute2" in ended.err


def test_a_machine_without_namespaces_says_so(box: Callable[..., Path], tmp_path: Path) -> None:
    """Where the limit of network namespaces is 0: exit code 3 with the reason and a hint, and no traceback."""
    forbid = 'echo 0 > /proc/sys/user/max_net_namespaces && exec "$@"'
    inside = ["unshare", "--user", "--map-root-user", "sh", "-c", forbid, "sh"]
    if shutil.which("unshare") is None or subprocess.run([*inside, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("SKIPPED: no user namespace can be made")
    run = [sys.executable, "-m", "fleetbench", "testbed", str(box()), "--out", str(tmp_path / "runs")]
    done = subprocess.run([*inside, *run], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "no network namespace can be created" in done.stderr
    assert "HINT:" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("quiet_enough")
def test_links_are_printed(command: Callable[..., Any], box: Callable[..., Path], tmp_path: Path) -> None:
    """A row a link and direction, the noise, and what is not there."""
    ended = command("testbed", box(), "--out", tmp_path / "runs")
    assert ended.code == 0, ended.err
    for phrase in ("host0", "host1", "up", "down", "200 Mbit/s", "191.28 Mbit/s", "foreign user time"):
        assert phrase in ended.out


@pytest.fixture
def nobodys_folder() -> Iterator[Path]:
    """A folder that an ordinary user may write, outside root's own ones."""
    folder = Path(tempfile.mkdtemp(prefix="tests-of-fleetbench-nobody-", dir=os.environ["PYTEST_DEBUG_TEMPROOT"]))
    os.chown(folder, 65534, 65534)
    yield folder
    shutil.rmtree(folder)


def _python_of_nobody(environment: dict[str, str]) -> str | None:
    """An interpreter that an ordinary user may run, with this one's packages; this one may lie in root's own folder."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for python in (sys.executable, shutil.which(version, path="/usr/local/bin:/usr/bin")):
        if python is None:
            continue
        try:
            load = [python, "-c", "import torch, fleetbench.cli.main, real.testbed.testbed"]
            subprocess.run(load, check=True, capture_output=True, env=environment, user=65534, group=65534, extra_groups=[])
        except (OSError, subprocess.CalledProcessError):
            continue
        return python
    return None


@pytest.mark.slow
@pytest.mark.root
def test_it_works_without_root(nobodys_folder: Path) -> None:
    """As an ordinary user, with root's rights in a user namespace: the links are as declared, and nothing is left."""
    file = nobodys_folder / "box.toml"
    file.write_text(CLUSTER + TWO_HOSTS, encoding="utf-8")
    packages = ":".join((sysconfig.get_path("purelib"), str(Path(__file__).parents[2])))
    environment = {"PATH": os.environ["PATH"], "HOME": str(nobodys_folder), "TMPDIR": str(nobodys_folder), "PYTHONPATH": packages}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    python = _python_of_nobody(environment)
    if python is None:
        pytest.skip("SKIPPED: an ordinary user can run no Python with these packages")
    done = subprocess.run(
        [*AS_ROOT, python, "-m", "fleetbench", "testbed", str(file), "--json", "--out", str(nobodys_folder / "runs")],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        user=65534,
        group=65534,
        extra_groups=[],
        cwd=nobodys_folder,
    )
    if "no network namespace can be created" in done.stderr or done.stderr.startswith("unshare: "):
        pytest.skip(f"SKIPPED: an ordinary user may make no namespaces: {done.stderr.strip()[-200:]}")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert all(abs(link["error"]) <= 0.03 for link in found["links"])
    assert [path.name for path in nobodys_folder.iterdir()] == ["box.toml"]
