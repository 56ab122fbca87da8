"""The testbed itself: namespaces, shaped links, gloo across them, and nothing left over. Skipped where there are none."""

from __future__ import annotations

import dataclasses
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fleetbench.cluster import Cluster, Link, NodeOverride
from fleetbench.errors import ConfigError, EnvironmentLacks
from fleetbench.experiment import Experiment
from fleetbench.quantities import BitsPerSecond, Nanoseconds
from fleetbench.store import load_run, save_run
from real.job.session import Session
from real.leg import Leg
from real.testbed import latency_relay, link_shaping, traffic
from real.testbed.network import Network, is_rootless
from real.testbed.testbed import Testbed as Ground  # pytest would take a Test... for tests
from real.testbed.topology import Wire, wire_s

MBIT = 10**6
RATE = 40 * MBIT
PAYLOAD_BPS = RATE * 1448 / 1514
"""By hand: 1448 bytes of payload in a frame of 1514."""


@pytest.fixture(scope="module", autouse=True)
def namespaces() -> None:
    """Skip where this machine has no namespaces for us."""
    try:
        Network(["probe"]).close()
    except EnvironmentLacks as error:
        pytest.skip(f"SKIPPED: {error.what}")


def _cluster(nodes: int = 3, **fields: object) -> Cluster:
    return Cluster(nodes=nodes, inter=Link(bandwidth=BitsPerSecond(RATE)), **fields)  # type: ignore[arg-type]  # fields of a test's choice


@pytest.fixture(scope="module")
def testbed() -> Iterator[Ground]:
    """Three hosts."""
    with Ground(_cluster()) as ground:
        yield ground


@pytest.mark.slow
def test_every_link_carries_what_was_declared(testbed: Ground) -> None:
    """Each way within 3 % of the rate's payload; what a user namespace may not do is recorded."""
    rates = testbed.verify()
    assert [(rate.link, rate.direction) for rate in rates] == [(f"host{n}", way) for n in range(3) for way in ("up", "down")]
    assert all(abs(rate.measured_payload_bps / PAYLOAD_BPS - 1) <= 0.03 for rate in rates)
    refused = {entry["what"] for entry in testbed.record()["refused"]}
    assert link_shaping.STEERED not in refused or is_rootless()
    assert not any("segments" in what for what in refused)


@pytest.mark.slow
def test_gloo_takes_as_long_as_its_bytes() -> None:
    """All-reduces among three hosts are never faster than their bytes at the payload rate, and packets keep their order.

    A busy machine may make them slower; reports/testbed says by how much they are off on a quiet one.
    """
    assert wire_s(500_000, 3, RATE) == pytest.approx(2 * (2 / 3) * 8 * 500_000 / PAYLOAD_BPS)
    layer = {"name": "block", "params": 125_000, "forward": "1 ms", "backward": "1 ms"}
    data = {
        "name": "box",
        "workload": {"model": "layers", "layers": [layer]},
        "cluster": {"nodes": 3, "inter": {"bandwidth": "40 Mbit/s"}},
        "run": {"launcher": "testbed", "device": "emulated"},
    }
    with Session(Experiment.from_dict(data)) as session:
        result = session.run(Leg(steps=15, warmup_steps=8))
    counted = result.steps[result.steps["step"] >= 1]
    took_s = counted.groupby("step")["exposed_comm_s"].max().median()
    assert 0.97 * wire_s(500_000, 3, RATE) < took_s < 1.5 * wire_s(500_000, 3, RATE)
    assert result.testbed is not None
    reorders = sum(block["noise"]["reorders"] for block in result.testbed["blocks"])
    assert reorders == 0 or any(entry["what"] == link_shaping.STEERED for entry in result.testbed["refused"])


@pytest.mark.slow
def test_a_link_that_is_off_stops_with_its_name(testbed: Ground) -> None:
    """One direction of one link at 90 % of its rate is found, and mended it is not found."""
    wrong = link_shaping.shape([Wire(lower="host1", upper="switch", rate_bps=RATE * 9 // 10, down_bps=RATE)])[1]
    assert wrong.namespace == "host1"
    try:
        testbed.apply([wrong])
        with pytest.raises(
            EnvironmentLacks, match=r"link of host1 .* upwards, 40 Mbit/s .* off by -1?\d\.\d % .*got 3[345]\.?\d* Mbit/s"
        ) as caught:
            testbed.verify()
        assert caught.value.exit_code == 3
    finally:
        testbed.apply(link_shaping.shape(testbed.topology.wires))
    testbed.verify()


def test_a_refused_line_is_named(testbed: Ground) -> None:
    """What the kernel says, with the namespace and the line."""
    step = link_shaping.Step(namespace="host0", tool="ip", lines=("link set dev absent0 up",))
    with pytest.raises(EnvironmentLacks, match=r"host0: link set dev absent0 up: Cannot find device"):
        testbed.apply([step])


@pytest.mark.slow
@pytest.mark.alone
def test_links_have_the_declared_latency() -> None:
    """4 ms a message between most hosts, 8 ms to and from one: round trips within 2 % and 0.3 ms, rates as without, nothing left over.

    The machine's own time is not added: all round trips together are within 0.1 ms.
    """
    late = Link(bandwidth=BitsPerSecond(RATE), latency=Nanoseconds(8 * 10**6))
    cluster = Cluster(
        nodes=3, inter=dataclasses.replace(late, latency=Nanoseconds(4 * 10**6)), node_overrides=(NodeOverride(nodes=(2,), inter=late),)
    )
    before = set(psutil.Process().children())
    with Ground(cluster) as ground:
        if skipped := ground.skipped():
            pytest.skip(f"SKIPPED: {skipped[0]['why']}")
        ground.verify()
        trips = {(trip["source"], trip["target"]): 1000 * trip["measured_s"] for trip in ground.round_trips}
        assert trips == {
            ("host0", "host1"): pytest.approx(8, abs=0.46),
            ("host1", "host2"): pytest.approx(16, abs=0.62),
            ("host2", "host0"): pytest.approx(16, abs=0.62),
        }
        assert abs(statistics.median(trip["measured_s"] - trip["declared_s"] for trip in ground.round_trips)) < 1e-4
        assert [1000 * trip["measured_s"] for trip in ground.record()["round_trips"]] == list(trips.values())
        (relay,) = set(psutil.Process().children()) - before
        relay.kill()
        relay.wait()
        with pytest.raises(EnvironmentLacks, match="delays packets has ended"):
            ground.read()


def test_a_kernel_that_delays_nothing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The testbed is built all the same, and the latency is listed."""
    monkeypatch.setattr(latency_relay, "_TUN", "/dev/absent")
    late = Link(bandwidth=BitsPerSecond(RATE), latency=Nanoseconds(4 * 10**6))
    with Ground(Cluster(nodes=2, inter=late)) as ground:
        assert [entry["what"] for entry in ground.skipped()] == ["cluster.inter.latency"]
        assert any("/dev/net/tun" in entry["what"] for entry in ground.record()["refused"])
        trips = traffic.round_trips(ground._built.inside, ("host0", "host1", ground.topology.address("host1")), 5)
        assert min(trips) < 0.004


def _networks() -> set[str]:
    """Network namespaces that any process is in."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            found.add(str(path.readlink()))
        except OSError:
            continue
    return found


DRIVER = """
import subprocess
import sys
from fleetbench.cluster import Cluster, Link
from fleetbench.children import bound
from real.testbed.testbed import Testbed
with Testbed(Cluster(nodes=2, inter=Link(bandwidth=40_000_000))) as ground:
    program = [sys.executable, "-c", "import time; print('running', flush=True); time.sleep(600)"]
    worker = subprocess.Popen(bound(ground.command(program, ["host0"])))
    while True:
        ground.sentinel()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [signal.SIGKILL, *(pytest.param(other, marks=pytest.mark.whole) for other in (signal.SIGTERM, signal.SIGINT))]
)
def test_a_driver_that_is_gone_leaves_no_process_and_no_namespace(how: signal.Signals, tmp_path: Path) -> None:
    """Killed in the middle of traffic: workers end, and with them and the driver the namespaces."""
    before = _networks()
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
    assert driver.stdout is not None
    assert driver.stdout.readline().startswith(b"running")
    children = psutil.Process(driver.pid).children(recursive=True)
    assert len(children) == 1
    assert _networks() - before
    driver.send_signal(how)
    driver.wait()
    driver.stdout.close()
    _, alive = psutil.wait_procs(children, timeout=10)
    for process in alive:
        process.kill()
    assert not alive
    assert not _networks() - before
    assert not list(tmp_path.iterdir())


EXPERIMENT = {
    "name": "box",
    "workload": {
        "model": "layers",
        "steps": 10,
        "layers": [{"name": "block", "params": 25_000, "forward": "1 ms", "backward": "2 ms", "repeat": 4}],
    },
    "cluster": {"nodes": 2, "trainers_per_node": 2, "inter": {"bandwidth": "40 Mbit/s", "latency": "20 us"}},
    "run": {"launcher": "testbed", "device": "emulated", "warmup_steps": 2},
}


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    """Two nodes of two trainers."""
    with Session(Experiment.from_dict(EXPERIMENT)) as launched:
        yield launched


def _workers(session: Session) -> list[psutil.Process]:
    """By rank."""
    children = psutil.Process().children(recursive=True)
    found = [process for process in children if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    found = [process for process in found if {"real.workloads.train", str(session._folder / "experiment.toml")} <= set(process.cmdline())]
    return sorted(found, key=lambda process: int(process.environ()["RANK"]))


@pytest.mark.slow
def test_a_run_is_on_its_hosts(session: Session, tmp_path: Path) -> None:
    """Trainers of a node share a namespace, nodes do not; what was built and what happened is stored with the run."""
    result = session.run(Leg(steps=10, warmup_steps=2))
    networks = [os.readlink(f"/proc/{process.pid}/ns/net") for process in _workers(session)]  # noqa: PTH115  # a magic link, not a path
    assert len(networks) == 4
    assert networks[0] == networks[1] != networks[2] == networks[3]
    assert os.readlink("/proc/self/ns/net") not in networks  # noqa: PTH115  # a magic link, not a path
    wire_bound_s = wire_s(4 * 25_000 * 4, 4, RATE)
    assert 0.97 * wire_bound_s < result.summary.step_s["p50"] < 2 * wire_bound_s + 0.1
    skipped = {entry["what"] for entry in result.summary.skipped}
    assert not skipped & {"cluster.nodes", "cluster.inter", "cluster.inter.bandwidth"}
    assert result.testbed is not None
    assert "cluster.inter.latency" in skipped  # 20 us: no more than the machine's own
    assert result.summary.testbed is not None
    assert result.summary.testbed["counts"] == (not result.testbed["blocks"][-1]["void"])
    assert len(result.testbed["links"]) == 4
    stored = load_run(save_run(result, tmp_path).path or "")
    assert stored.testbed == result.testbed
    assert stored.summary == result.summary


@pytest.mark.parametrize(
    ("part", "match"),
    [
        ({"cluster": {"nodes": 2}}, "cluster.inter"),
        ({"run": {"launcher": "testbed", "device": "emulated", "environment": {"GLOO_SOCKET_IFNAME": "eth7"}}}, "GLOO_SOCKET_IFNAME"),
    ],
)
def test_what_no_testbed_can_be_built_from_is_refused(part: dict[str, object], match: str) -> None:
    """Before anything is started."""
    with pytest.raises(ConfigError, match=match):
        Session(Experiment.from_dict({**EXPERIMENT, **part}))
