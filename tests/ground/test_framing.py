"""Framing: what a link carries of what is declared, by the packets' headers."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from fleetbench.cluster import Cluster, Link
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.framing import Framing, payload_share
from fleetbench.profile import Communication, Profile, links_for
from fleetbench.quantities import BitsPerSecond
from fleetbench.report.folder import measured_cluster


@pytest.mark.parametrize(
    ("framing", "mtu", "payload", "on_wire"),
    [
        ("tcp", None, 1500 - 20 - 32, 1500 + 14),
        ("tcp", 9000, 9000 - 20 - 32, 9000 + 14),
        ("roce", None, 4096, 4096 + 14 + 20 + 8 + 12 + 4),
        ("roce", 1024, 1024, 1024 + 14 + 20 + 8 + 12 + 4),
        ("infiniband", None, 4096, 4096 + 8 + 12 + 4 + 2),
        ("nvlink", None, 20, 25),
        ("none", None, 1, 1),
    ],
)
def test_headers_take_their_part(framing: Framing, mtu: int | None, payload: int, on_wire: int) -> None:
    """A packet's payload over all its bytes on the wire."""
    assert payload_share(framing, mtu) == Fraction(payload, on_wire)


@pytest.mark.parametrize(
    ("declared", "backend", "between_nodes", "bits_per_s"),
    [
        ({}, "gloo", True, 1e10 * 1448 / 1514),
        ({}, "gloo", False, 1e10),
        ({}, "nccl", True, 1e10 * 0.95 * 4096 / 4122),
        ({}, "nccl", False, 8e9),
        ({"mtu": 9000}, "gloo", True, 1e10 * 8948 / 9014),
        ({"framing": "roce"}, "nccl", True, 1e10 * 0.95 * 4096 / 4154),
        ({"efficiency": 0.5}, "nccl", True, 1e10 * 0.5 * 4096 / 4122),
        ({"framing": "tcp"}, "nccl", True, 1e10 * 1448 / 1514),
        ({"payload": True}, "nccl", True, 1e10),
        ({"efficiency": 0.5, "framing": "infiniband"}, "gloo", True, 1e10 * 4096 / 4122),
        ({"payload": True}, "gloo", True, 1e10),
    ],
)
def test_a_link_carries_what_its_transport_leaves(
    declared: dict[str, object], backend: str, between_nodes: bool, bits_per_s: float
) -> None:
    """The backend says the transport where the link does not; payload stays payload when it is asked for again.

    NCCL reaches 0.95 of InfiniBand and RoCE.
    """
    link = Link(bandwidth=BitsPerSecond(10**10), **declared)  # type: ignore[arg-type]  # fields of a link
    carried = link.carried(backend, between_nodes=between_nodes)
    assert carried.bandwidth == round(bits_per_s)
    assert carried.carried(backend, between_nodes=between_nodes) == carried


def test_a_connections_limit_is_framed_too() -> None:
    """A cloud's limit of a flow counts headers as its interface does."""
    link = Link(bandwidth=BitsPerSecond(10**11), flow_limit=BitsPerSecond(10**10)).carried("gloo", between_nodes=True)
    assert link.flow_limit == round(1e10 * 1448 / 1514)
    with pytest.raises(ConfigError, match="flow_limit"):
        Link(bandwidth=BitsPerSecond(10**9), flow_limit=BitsPerSecond(0))


def test_a_file_declares_framing() -> None:
    """``mtu`` and ``payload`` of a file reach the links that executors plan and simulate by."""
    for text, share in (("mtu=9000", 8948 / 9014), ("payload=true", 1.0), ("framing=none", 1.0)):
        experiment = Experiment.load(
            overrides=["cluster.nodes=2", "cluster.trainers_per_node=1", "cluster.inter.bandwidth=1 Gbit/s", f"cluster.inter.{text}"]
        )
        inter = links_for(experiment)[1]
        assert inter is not None
        assert inter.bandwidth == round(1e9 * share)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"payload": True, "mtu": 9000}, "payload = true excludes framing, mtu and efficiency"),
        ({"payload": True, "framing": "tcp"}, "payload = true excludes framing, mtu and efficiency"),
        ({"payload": True, "efficiency": 0.5}, "payload = true excludes framing, mtu and efficiency"),
        ({"efficiency": 1.5}, "must be above 0, at most 1"),
        ({"simple_latency": -1}, "simple_latency"),
        ({"mtu": 100}, "must be at least 256, at most 65535"),
        ({"mtu": 4096, "framing": "nvlink"}, "packet of framing nvlink"),
        ({"mtu": 9000, "framing": "roce"}, "packet of framing roce"),
    ],
)
def test_what_contradicts_itself_is_refused(fields: dict[str, object], says: str) -> None:
    """The field and its value stand in the error."""
    with pytest.raises(ConfigError, match=says):
        Link(bandwidth=BitsPerSecond(10**9), **fields)  # type: ignore[arg-type]  # fields of a link


def test_a_host_that_copies_nothing_is_refused() -> None:
    """A rate of zero would take for ever."""
    with pytest.raises(ConfigError, match="host_bandwidth"):
        Cluster(host_bandwidth=BitsPerSecond(0))


def test_an_mtu_that_the_transport_has_not_is_refused_once_that_is_known() -> None:
    """Gloo inside a node sends through memory, NCCL between nodes by InfiniBand, whose packets carry 4096 bytes at most."""
    link = Link(bandwidth=BitsPerSecond(10**10), mtu=9000)
    assert link.carried("gloo", between_nodes=True).bandwidth == round(1e10 * 8948 / 9014)
    for backend, between_nodes in (("gloo", False), ("nccl", True)):
        with pytest.raises(ConfigError, match="mtu"):
            link.carried(backend, between_nodes=between_nodes)


def test_simulated_nccl_has_its_own_framing_with_any_backend() -> None:
    """400 Gbit/s of InfiniBand and 450 GB/s of NVLink, of an experiment that runs nowhere."""
    given = ["cluster.nodes=2", "cluster.trainers_per_node=2", "cluster.collective=nccl-hopper"]
    experiment = Experiment.load(overrides=[*given, "cluster.inter.bandwidth=400 Gbit/s", "cluster.intra.bandwidth=450 GB/s"])
    intra, inter = links_for(experiment)
    assert intra is not None
    assert inter is not None
    assert (intra.bandwidth, inter.bandwidth) == (360 * 8 * 10**9, round(4e11 * 0.95 * 4096 / 4122))


def test_a_profile_that_was_written_without_payload_keeps_its_link(tmp_path: Path) -> None:
    """Folders of earlier versions declare the measured link beside the profile: it is the measured one."""
    link = Link(bandwidth=BitsPerSecond(10**9))
    measured = Communication(backend="gloo", trainers=2, between="nodes", link=link)
    Profile(machine="by hand", created="2026-01-01", tables=(), communication=measured).save(tmp_path / "profile.toml")
    given = ["cluster.nodes=2", "cluster.trainers_per_node=1", f"workload.profile={tmp_path / 'profile.toml'}"]
    experiment = Experiment.load(overrides=[*given, "cluster.inter.bandwidth=1 Gbit/s"])
    assert links_for(experiment)[1] == link


def test_a_measured_link_is_written_as_what_it_carries() -> None:
    """The cluster beside a profile simulates by the measured bandwidth, with no headers taken off it."""
    link = Link(bandwidth=BitsPerSecond(10**9))
    measured = Communication(backend="gloo", trainers=2, between="nodes", link=link)
    profile = Profile(machine="by hand", created="2026-01-01", tables=(), communication=measured)
    for backend in ("gloo", "nccl"):
        inter = measured_cluster(Cluster(nodes=2), profile).inter
        assert inter is not None
        assert inter.carried(backend, between_nodes=True).bandwidth == link.bandwidth
