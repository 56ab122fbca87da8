"""Parameter servers on several hosts: each in a network namespace of the testbed's. Skipped where there are none."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from safetensors.numpy import load_file

from fleetbench.cli.templates import render_template
from fleetbench.cluster import Cluster, Link
from fleetbench.errors import EnvironmentLacks
from fleetbench.experiment import Experiment
from fleetbench.quantities import BitsPerSecond
from real.job.served_launcher import launch_placed
from real.servers.hosts import on_this_machine
from real.testbed.testbed import Testbed as Ground  # pytest would take a Test... for tests

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SCRIPT = str(Path(__file__).with_name("served_script.py"))
HOSTS = ("host0", "host1", "host2")
TIMEOUT_S = 24.0
"""Of ``fleet.init``: who is silent for a quarter of it has failed."""
ENDS_WITHIN_S = TIMEOUT_S / 4 + 40.0
"""Silence, graces, and a busy machine of two cores."""


@pytest.fixture(scope="module")
def ground() -> Iterator[Ground]:
    """Three hosts and their links."""
    cluster = Cluster(nodes=3, inter=Link(bandwidth=BitsPerSecond(10**9)))
    try:
        with Ground(cluster) as opened:
            yield opened
    except EnvironmentLacks as error:
        pytest.skip(f"SKIPPED: {error.what}")


class Launches:
    """One launch on every host, by the same line, each with logs of its own."""

    def __init__(self, ground: Ground, folder: Path, servers: str, workers: str, *script: object, timeout_s: float) -> None:
        self.folder = folder
        names = {name: ground.topology.address(name) for name in HOSTS}
        lists = [re.sub(r"host\d", lambda found: names[found[0]], text) for text in (servers, workers)]
        line = [sys.executable, "-m", "fleetbench", "launch", "--servers", lists[0], "--workers", lists[1]]
        self.running = []
        for number in range(len(HOSTS)):
            own = folder / f"host{number}"
            own.mkdir()
            command = ground.command([*line, "--log-dir", str(own / "log"), *map(str, script)], [HOSTS[number]])
            environment = {**os.environ, "SERVED_TIMEOUT_S": str(timeout_s), "TMPDIR": str(own)}
            with (own / "out").open("w") as out, (own / "err").open("w") as err:
                self.running.append(subprocess.Popen(command, env=environment, cwd=own, stdout=out, stderr=err))

    def err(self, host: int) -> str:
        """What its launch has said."""
        return (self.folder / f"host{host}" / "err").read_text()

    def log(self, host: int, name: str) -> str:
        """A process's output, as far as there is any."""
        path = self.folder / f"host{host}" / "log" / name
        return path.read_text() if path.exists() else ""

    def until(self, what: Callable[[], object], patience_s: float = 120.0) -> None:
        """Wait for it, while all launches live."""
        deadline = time.monotonic() + patience_s
        while not what():
            assert time.monotonic() < deadline, "it never came about"
            assert all(process.poll() is None for process in self.running), [self.err(host) for host in range(len(HOSTS))]
            time.sleep(0.05)

    def child(self, host: int, role: str) -> int:
        """A server or trainer of a host, by the role that it was started in."""
        for child in psutil.Process(self.running[host].pid).children():
            if child.environ().get("TRAINING_ROLE") == role:
                return int(child.pid)
        raise AssertionError(role)

    def until_all_train(self) -> None:
        """Both trainers of ``OWN`` are in, and launchers, which ask twice a second, have heard of it."""
        self.until(lambda: all(f"trainer {rank}" in self.log(1 + rank, f"workerlog.{rank}") for rank in (0, 1)))
        time.sleep(2.0)

    def codes(self, within_s: float = 150.0) -> list[int]:
        """How they ended."""
        deadline = time.monotonic() + within_s
        return [process.wait(max(0.1, deadline - time.monotonic())) for process in self.running]


@contextmanager
def launches(ground: Ground, folder: Path, servers: str, workers: str, *script: object, timeout_s: float = TIMEOUT_S) -> Iterator[Launches]:
    """Nothing of them is left over it, and everything had ended by itself."""
    running = Launches(ground, folder, servers, workers, *script, timeout_s=timeout_s)
    try:
        yield running
        begin = time.monotonic()
        while left := _processes_below(folder):
            assert time.monotonic() < begin + 5.0, left
            time.sleep(0.1)
    finally:
        for process in running.running:
            process.terminate()
        for process in running.running:
            process.wait(20)


def _processes_below(folder: Path) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if SCRIPT in process.cmdline() and str(folder) in " ".join(process.cmdline()):
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


def script(folder: Path, *, k_steps: int = 0, steps: int = 60, save: str = "-", suicide: int = -1, pause: float = 0.0) -> list[object]:
    """The counting script: every gradient is 1 in every number, and SGD's rate is 1."""
    return [SCRIPT, k_steps, steps, save, suicide, pause, folder]


def weights(folder: Path) -> list[float]:
    """What servers saved."""
    parts = [load_file(path)["parameters.0"] for path in sorted(folder.glob("shard-*"))]
    return [float(value) for part in parts for value in part]


OWN = ("host0:7164", "host1:1,host2:1")
"""A server on a host of its own, and a trainer on each of the others."""


@pytest.mark.parametrize(
    ("servers", "workers", "k_steps"),
    [
        pytest.param(*OWN, 0, id="own hosts"),
        pytest.param("host0:7164,host1:7164", "host1:1,host2:2", -2, id="shared and synchronous", marks=pytest.mark.whole),
        pytest.param("host1:7164,host0:7164,host0:7165", "host1:1,host2:1", 0, id="three servers", marks=pytest.mark.whole),
    ],
)
def test_one_line_on_every_host_trains(
    servers: str, workers: str, k_steps: int, ground: Ground, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum of all gradients arrives, as it does in a launch on one machine; rank 0 is heard where it runs, and all say 0."""
    num = sum(int(part.partition(":")[2]) for part in workers.split(","))
    saved = tmp_path / "saved"
    with launches(ground, tmp_path, servers, workers, *script(tmp_path, k_steps=k_steps, steps=20, save=str(saved))) as running:
        assert running.codes() == [0, 0, 0], [running.err(host) for host in range(3)]
        assert "trainer 0 of" in (tmp_path / "host1" / "out").read_text()
        assert "trainer 0 of" not in (tmp_path / "host2" / "out").read_text()
        assert f"trainer {num - 1} of {num}" in running.log(2, f"workerlog.{num - 1}")
    expected = -20.0 * (1 if k_steps == -2 else num)  # synchronous: the mean of all
    assert weights(saved) == pytest.approx([expected] * 3, abs=1e-6)
    monkeypatch.setenv("SERVED_TIMEOUT_S", str(TIMEOUT_S))
    here = tmp_path / "here"
    here.mkdir()
    arguments = [*map(str, script(here, k_steps=k_steps, steps=20, save=str(here / "saved")))]
    launch_placed(on_this_machine(len(servers.split(",")), num), arguments, log_dir=here / "log", echo=lambda _text: None)
    assert weights(saved) == pytest.approx(weights(here / "saved"), abs=1e-6)


@pytest.mark.parametrize("k_steps", [-2, pytest.param(0, marks=pytest.mark.whole)], ids=["synchronous", "asynchronous"])
def test_a_killed_trainer_ends_the_job_on_every_host(k_steps: int, ground: Ground, tmp_path: Path) -> None:
    """At once, by its name, also where servers are alone: they and the other trainers find its connection broken."""
    with launches(ground, tmp_path, *OWN, *script(tmp_path, k_steps=k_steps, steps=4000, suicide=-1, pause=0.01)) as running:
        running.until_all_train()
        os.kill(running.child(2, "TRAINER"), signal.SIGKILL)
        assert running.codes(ENDS_WITHIN_S) == [4, 4, 4]
        address = ground.topology.address("host2")
        for host in range(3):
            how = "was killed by SIGKILL" if host == 2 else "its connection has broken"
            assert f"error: rank 1 on {address}: {how}" in running.err(host), running.err(host)


@pytest.mark.parametrize(
    ("servers", "k_steps"),
    [
        ("host0:7164", 0),
        pytest.param("host0:7164,host1:7164", 0, marks=pytest.mark.whole),
        pytest.param("host0:7164,host1:7164", -2, marks=pytest.mark.whole),
    ],
)
def test_a_killed_server_is_named_on_every_host(servers: str, k_steps: int, ground: Ground, tmp_path: Path) -> None:
    """At once: trainers find their connection broken, and tell the other servers."""
    line = script(tmp_path, k_steps=k_steps, steps=4000, pause=0.01)
    with launches(ground, tmp_path, servers, "host1:1,host2:1", *line) as running:
        running.until_all_train()
        os.kill(running.child(0, "PSERVER"), signal.SIGKILL)
        assert running.codes(ENDS_WITHIN_S) == [4, 4, 4]
        for host in range(3):
            assert f"error: server 0 on {ground.topology.address('host0')}: " in running.err(host), running.err(host)


@pytest.mark.parametrize(
    ("host", "k_steps"),
    [
        pytest.param(0, 0, id="of servers", marks=pytest.mark.whole),
        pytest.param(2, 0, id="of trainers"),
        pytest.param(2, -2, id="of trainers, synchronous", marks=pytest.mark.whole),
    ],
)
def test_an_interrupt_on_one_host_ends_all(host: int, k_steps: int, ground: Ground, tmp_path: Path) -> None:
    """That one says 130, and the others name its server or its rank at once."""
    with launches(ground, tmp_path, *OWN, *script(tmp_path, k_steps=k_steps, steps=4000, pause=0.01)) as running:
        running.until_all_train()
        begin = time.monotonic()
        running.running[host].send_signal(signal.SIGINT)
        assert running.codes(ENDS_WITHIN_S) == [130 if number == host else 4 for number in range(3)], [
            running.err(host) for host in range(3)
        ]
        assert time.monotonic() - begin < TIMEOUT_S / 4 + 20.0
        name = f"{'server 0' if host == 0 else 'rank 1'} on {ground.topology.address(f'host{host}')}"
        for number in {0, 1, 2} - {host}:
            assert f"error: {name}: its connection has broken" in running.err(number), running.err(number)


EXPERIMENT = """\
name = "apart"
[strategy]
mode = "ps"
[cluster]
nodes = {nodes}
trainers_per_node = 1
servers = {servers}
server_placement = "{placement}"
"""


@pytest.mark.parametrize(("nodes", "servers", "placement"), [pytest.param(2, 1, "own", marks=pytest.mark.whole), (3, 2, "shared")])
def test_slurms_batch_script_trains(nodes: int, servers: int, placement: str, ground: Ground, tmp_path: Path) -> None:
    """With stand-ins for its two programs, one of which starts the command on every host: all pushes arrive."""
    experiment = tmp_path / "apart.toml"
    experiment.write_text(EXPERIMENT.format(nodes=nodes, servers=servers, placement=placement))
    saved = tmp_path / "saved"
    arguments = [*map(str, script(tmp_path, steps=20, save=str(saved)))]
    job = tmp_path / "job.sh"
    job.write_text(render_template("slurm", Experiment.load(str(experiment)), experiment, arguments))
    tools = tmp_path / "bin"
    tools.mkdir()
    start = "".join(f'{shlex.join(ground.command([], [host]))} "$@" & pids+=($!)\n' for host in HOSTS)
    programs = {
        "scontrol": "printf '%s\\n' " + " ".join(map(ground.topology.address, HOSTS)),
        "srun": f'while [[ $1 == --* ]]; do shift; done\nset -- "$(command -v "$1")" "${{@:2}}"\npids=()\n{start}'
        'for pid in "${pids[@]}"; do wait "$pid" || exit; done',
        "fleetbench": f'exec {shlex.quote(sys.executable)} -m fleetbench "$@"',
        "python": f'exec {shlex.quote(sys.executable)} "$@"',
    }
    for name, text in programs.items():
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "host[0-2]",
        "SLURM_CPUS_ON_NODE": "2",
        "SERVED_TIMEOUT_S": str(TIMEOUT_S),
    }
    done = subprocess.run(["bash", job], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)  # noqa: S607  # the user's own shell
    assert done.returncode == 0, done.stderr
    assert weights(saved) == pytest.approx([-20.0 * nodes] * 3, abs=1e-6)
    assert {path.name for path in (tmp_path / "log").iterdir()} == {
        *(f"serverlog.{number}" for number in range(servers)),
        *(f"workerlog.{rank}" for rank in range(nodes)),
    }


def test_a_host_that_is_in_no_list_is_told_so(ground: Ground, tmp_path: Path) -> None:
    """Only that one: it starts nothing."""
    with launches(ground, tmp_path, "host0:7164", "host1:1", *script(tmp_path, steps=5)) as running:
        assert running.codes() == [0, 0, 2]
        assert "this machine is none of these hosts" in running.err(2)
