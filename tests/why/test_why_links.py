"""The link test: two ranks of gloo on the loopback, hosts in network namespaces, and what is said of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import fork_command, run_ranks

from fleetbench.cluster import Link
from fleetbench.config import decode, encode
from fleetbench.errors import EnvironmentLacks, WorkerFailed
from fleetbench.quantities import BitsPerSecond
from fleetbench.why.interfaces import Host, Interface
from fleetbench.why.links import AllReduceTime, InterfaceTime, Links, PairTime, remarks_of_links
from real.testbed.link_shaping import Step
from real.testbed.network import Network
from real.why.link_test import run_with, with_module

RANK = Path(__file__).with_name("links_rank.py")


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """What each of two ranks has measured in the job's group and in another, and what was left over."""
    return [json.loads(str(rank["found"])) for rank in run_ranks(RANK, 2)]


def test_two_ranks_find_the_same(found: list[dict[str, Any]]) -> None:
    """Three sizes with right sums, one host, the loopback, and nothing to set."""
    assert found[0]["links"] == found[1]["links"]
    links = decode(found[0]["links"], Links, "links")
    assert (links.backend, links.ranks, links.interface) == ("gloo", 2, "lo")
    assert [each.size_bytes for each in links.times] == [4096, 65536, 262144]
    for each in links.times:
        assert each.is_correct
        assert each.num >= 3
        factor = 2 * (2 - 1) / 2
        assert each.busbw_bytes_per_s == pytest.approx(factor * each.size_bytes / each.median_s)
    assert isinstance(links.fit, Link)
    assert (links.pairs, links.interfaces, remarks_of_links(links)) == ((), (), ())


def test_the_test_leaves_nothing_behind(found: list[dict[str, Any]]) -> None:
    """No group, key, variable, thread or open file; and the job's group still sums."""
    for rank in found:
        assert all(rank["left"].values()), rank["left"]
        assert rank["after"] == 2.0


def test_a_training_goes_on_as_if_nothing_had_been_measured(found: list[dict[str, Any]]) -> None:
    """DistributedDataParallel has the same loss, to the last bit, with a link test between two steps."""
    for rank in found:
        without, with_test = rank["losses"]
        assert without == with_test


@pytest.fixture
def hosts() -> Iterator[Network]:
    """Two hosts with two links between them: ``one`` carries 40 Mbit/s, ``two`` 160 Mbit/s."""
    network = Network(["host0", "host1"])
    steps = [Step(namespace=name, tool="ip", lines=("link set dev lo up",)) for name in ("host0", "host1")]
    for number, (device, rate) in enumerate({"one": "40mbit", "two": "160mbit"}.items()):
        pair = f"link add name {device} type veth peer name {device} netns {{host1}}"
        steps.append(Step(namespace="host0", tool="ip", lines=(pair,)))
        for host in (0, 1):
            lines = (f"addr add 10.{number}.0.{host + 1}/24 dev {device}", f"link set dev {device} up")
            bucket = f"qdisc replace dev {device} root tbf rate {rate} burst 64kb limit 4mb"
            steps.append(Step(namespace=f"host{host}", tool="ip", lines=lines))
            steps.append(Step(namespace=f"host{host}", tool="tc", lines=(bucket,)))
    network.apply(steps)
    yield network
    network.close()


@pytest.mark.root
@pytest.mark.slow
def test_the_faster_interface_is_named(hosts: Network, tmp_path: Path) -> None:
    """Two hosts whose gloo was told to use the slower of two links."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "one", "OMP_NUM_THREADS": "1"}
    outputs = [tmp_path / f"{rank}.npz" for rank in (0, 1)]
    program = [sys.executable, str(RANK)]
    words = [[str(rank), "2", str(tmp_path / "store"), str(output)] for rank, output in enumerate(outputs)]
    commands = [hosts.command([f"host{rank}"], [*program, *own]) for rank, own in enumerate(words)]
    ranks = [subprocess.Popen(command, env=environment) for command in commands]
    assert [rank.wait(200) for rank in ranks] == [0, 0]
    told = [json.loads(str(np.load(output)["found"])) for output in outputs]
    assert told[0]["links"] == told[1]["links"]
    assert all(all(rank["left"].values()) for rank in told)
    links = decode(told[0]["links"], Links, "links")
    assert (len(links.hosts), links.interface) == (2, "one")
    assert [each.name for each in links.interfaces] == ["one", "two", "one"]
    assert not any(each.error for each in links.interfaces)
    assert 8 * links.pairs[0].bytes_per_s == pytest.approx(40e6, rel=0.3)
    (remark,) = remarks_of_links(links)
    assert remark.remedy == "GLOO_SOCKET_IFNAME=two"


@pytest.mark.slow
def test_doctor_tests_links_on_this_machine(tmp_path: Path) -> None:
    """Ranks of its own, over the loopback: nothing is to be set, whatever other interfaces there are."""
    words = ["doctor", "--network", "--nproc", "2", "--json"]
    assert fork_command(words, tmp_path / "said", tmp_path).wait(200) == 0
    told = json.loads((tmp_path / "said").read_text(encoding="utf-8"))
    assert told["remarks"] == []
    assert decode(told["links"], Links, "links").ranks == 2
    assert "transports" not in told


@pytest.mark.parametrize(
    ("command", "last"),
    [
        (["torchrun", "--nnodes", "2"], ["-m", "real.why.link_test"]),
        (["srun", "-N2", "/opt/bin/torchrun", "--nnodes", "2"], ["-m", "real.why.link_test"]),
        (["python3", "-m", "torch.distributed.run", "--nnodes", "2"], ["-m", "real.why.link_test"]),
        (["srun", "-n16", "python3", "-u"], ["-m", "real.why.link_test"]),
        (["python", "launch.py", "--hosts=2"], [sys.executable, "-u", "-P", "-m", "real.why.link_test"]),
        (["srun", "-n16"], [sys.executable, "-u", "-P", "-m", "real.why.link_test"]),
    ],
)
def test_a_launcher_gets_the_module_as_it_takes_one(command: list[str], last: list[str]) -> None:
    """Launchers of Python take a module, others a program."""
    assert with_module(command) == [*command, *last]


def test_a_launcher_that_fails_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    """Its output is passed on; so is one that does not exist, and a single rank has no links."""
    said = list[str]()
    with pytest.raises(WorkerFailed, match="exit code 7"):
        run_with(["sh", "-c", "echo trouble; exit 7"], said.append)
    assert said == ["trouble"]
    with pytest.raises(EnvironmentLacks, match="No such file"):
        run_with(["no-such-launcher"], said.append)
    with pytest.raises(WorkerFailed, match="exit code 1"):
        run_with(["env", "-u", "RANK"], said.append)
    assert "links need two ranks" in capfd.readouterr().err


def times(bytes_per_s: float, *, is_correct: bool = True) -> tuple[AllReduceTime, ...]:
    """One all-reduce of 1 MB."""
    one = AllReduceTime(
        size_bytes=10**6,
        median_s=1e6 / bytes_per_s,
        num=3,
        busbw_bytes_per_s=bytes_per_s,
        is_correct=is_correct,
    )
    return (one,)


def links_of(*names: str, speed: float | None = None, bytes_per_s: float = 1e9, **fields: Any) -> Links:
    """Links of hosts with an interface ``eth0``, one rank on each."""
    rate = None if speed is None else BitsPerSecond(round(speed))
    interface = (Interface(name="eth0", addresses=("10.0.0.1/24",), mtu=1500, speed=rate),)
    ports = fields.pop("ports", ())
    given = {"backend": "gloo", "interface": "eth0", "times": times(bytes_per_s)} | fields
    hosts = tuple(Host(name=name, interfaces=interface, ports=ports) for name in names)
    return Links(ranks=len(names), hosts=hosts, **given)


def test_an_interface_that_is_little_faster_is_no_remedy() -> None:
    """Measured is the one in use twice, and the better counts; another that failed counts for nothing."""
    used = (InterfaceTime(name="eth0", times=times(0.5e9)), InterfaceTime(name="eth0", times=times(1e9)))
    for speed, remedies in ((1.15e9, []), (1.3e9, ["GLOO_SOCKET_IFNAME=eth1"])):
        other = InterfaceTime(name="eth1", times=times(speed))
        failed = InterfaceTime(name="eth2", error="no route")
        found = links_of("a", "b", interfaces=(used[0], other, failed, used[1]))
        assert [remark.remedy for remark in remarks_of_links(found)] == remedies
        assert decode(encode(found), Links, "") == found


def test_a_host_with_slow_links_is_named() -> None:
    """Both of its pairs are slow; a single slow pair names two hosts; of two hosts none is named."""

    def pairs(*speeds: float) -> tuple[PairTime, ...]:
        num = len(speeds)
        return tuple(PairTime(hosts=(host, (host + 1) % num), bytes_per_s=speed) for host, speed in enumerate(speeds))

    names = ("a", "b", "c", "d", "e")
    (remark,) = remarks_of_links(links_of(*names, pairs=pairs(9e8, 3e8, 3e8, 1e9, 1e9)))
    assert "of c carry 30 %" in remark.what
    (remark,) = remarks_of_links(links_of("a", "b", "c", pairs=pairs(1e8, 1e8, 4e8)))
    assert "of b carry 25 %" in remark.what
    (remark,) = remarks_of_links(links_of(*names, pairs=pairs(9e8, 1e9, 3e8, 1e9, 1e9)))
    assert "Between c and d" in remark.what
    assert remarks_of_links(links_of(*names, pairs=pairs(9e8, 1e9, 8e8, 1e9, 1e9))) == ()
    assert remarks_of_links(links_of("a", "b", pairs=pairs(1e8, 1e9)[:1])) == ()


def test_less_than_the_hardware_should_carry_is_said() -> None:
    """Between hosts, where the interface's speed is known."""
    (remark,) = remarks_of_links(links_of("a", "b", speed=25e9))
    assert "supports 25 Gbit/s" in remark.what
    assert "gets 8 Gbit/s" in remark.what
    for fine in (links_of("a", "b"), links_of("a", "b", speed=10e9), links_of("a", speed=25e9)):
        assert remarks_of_links(fine) == ()


def test_a_wrong_sum_is_said() -> None:
    """First, whatever else."""
    (remark,) = remarks_of_links(links_of("a", "b", times=times(1e9, is_correct=False)))
    assert "wrong sum" in remark.what
