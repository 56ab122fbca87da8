"""What a testbed will be, worked out without a system call: hosts, wires, rates, commands."""

from __future__ import annotations

import pytest

from fleetbench.cluster import Cluster, Link, NodeOverride, Racks, Site
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.quantities import BitsPerSecond, Nanoseconds
from real.testbed import link_shaping
from real.testbed.topology import Topology, topology_of, unrealised
from sim.servers.simulate import hosts_of

MBIT = 10**6


def link(mbit: int, latency_us: int = 0) -> Link:
    """A link by its rate."""
    return Link(bandwidth=BitsPerSecond(mbit * MBIT), latency=Nanoseconds(latency_us * 1000))


def rates(topology: Topology) -> dict[tuple[str, str], int]:
    """Mbit/s of every wire."""
    return {(wire.lower, wire.upper): wire.rate_bps // MBIT for wire in topology.wires}


def test_every_node_is_a_host_on_one_switch() -> None:
    """A wire each, at the declared rate; trainers of a node are on one host."""
    topology = topology_of(Cluster(nodes=3, trainers_per_node=2, inter=link(100)))
    assert rates(topology) == {("host0", "switch"): 100, ("host1", "switch"): 100, ("host2", "switch"): 100}
    assert [topology.host_of(rank) for rank in range(6)] == ["host0", "host0", "host1", "host1", "host2", "host2"]


def test_overrides_change_their_nodes_links() -> None:
    """The last override that has a link counts; others keep the cluster's."""
    overrides = (NodeOverride(nodes=(0, 2), inter=link(50)), NodeOverride(nodes=(2,), inter=link(25)))
    topology = topology_of(Cluster(nodes=4, inter=link(100), node_overrides=overrides))
    assert [wire.rate_bps // MBIT for wire in topology.wires] == [50, 100, 25, 100]
    assert topology.slowest_bps == 25 * MBIT


def test_servers_are_hosts_where_they_are_on_their_own() -> None:
    """Two servers beside two nodes make four hosts; servers that share a node add none."""
    own = topology_of(Cluster(nodes=2, servers=2, inter=link(100), node_overrides=(NodeOverride(nodes=(0,), inter=link(10)),)))
    assert [wire.rate_bps // MBIT for wire in own.wires] == [10, 100, 100, 100]
    assert topology_of(Cluster(nodes=2, servers=2, server_placement="shared", inter=link(100))).num_hosts == 2


def test_servers_listen_where_the_simulator_places_them() -> None:
    """Two servers of three nodes: after the nodes, or on the first two; host n's address is 10.77.0.(n + 1)."""
    for placement, hosts in (("own", (3, 4)), ("shared", (0, 1))):
        cluster = {"nodes": 3, "servers": 2, "server_placement": placement, "inter": {"bandwidth": "100 Mbit/s"}}
        experiment = Experiment.from_dict({"workload": {"model": "digits_mlp"}, "cluster": cluster, "strategy": {"mode": "ps"}})
        topology = topology_of(experiment.cluster)
        assert topology.server_hosts == tuple(f"host{host}" for host in hosts)
        assert topology.server_endpoints == tuple(f"10.77.0.{host + 1}:6170" for host in hosts)
        assert hosts_of(experiment).servers == hosts
        assert hosts_of(experiment).trainers == tuple(int(topology.host_of(rank).removeprefix("host")) for rank in range(3))


SITES = (Site(nodes=1, up=link(50, 20_000), down=link(40, 10_000)), Site(nodes=2, up=link(30, 2_000)))


def test_sites_have_a_link_each_that_differs_by_direction() -> None:
    """The end that sends upwards has the rate of ``up``, the other one that of ``down``."""
    topology = topology_of(Cluster(nodes=3, inter=link(100, 1_000), sites=SITES))
    assert rates(topology) == {
        ("host0", "site0"): 100,
        ("host1", "site1"): 100,
        ("host2", "site1"): 100,
        ("site0", "core"): 50,
        ("site1", "core"): 30,
    }
    assert topology.slowest_bps == 30 * MBIT
    shaped = {
        (step.namespace, step.lines[0].split()[3]): step.lines[0].split(" rate ")[1].split()[0]
        for step in link_shaping.shape(topology.wires)
    }
    assert shaped["site0", "uplink"] == "50000000bit"
    assert shaped["core", "p-site0"] == "40000000bit"
    assert shaped["core", "p-site1"] == shaped["site1", "uplink"] == "30000000bit"


def test_a_message_between_sites_takes_the_latencies_of_both_in_addition() -> None:
    """Those of the sender's way up and of the receiver's way down; inside a site, and to a switch, only the hosts' own."""
    topology = topology_of(Cluster(nodes=3, inter=link(100, 1_000), sites=SITES))
    late = {
        pair: topology.latency_ns(*pair) / 10**6 for pair in [("host0", "host1"), ("host2", "host0"), ("host1", "host2"), ("host0", "core")]
    }
    assert late == {("host0", "host1"): 1 + 20 + 2, ("host2", "host0"): 1 + 2 + 10, ("host1", "host2"): 1, ("host0", "core"): 1}


@pytest.mark.parametrize(
    ("cluster", "match"),
    [
        (Cluster(nodes=2), "cluster.inter"),
        (Cluster(nodes=2, inter=link(10), node_overrides=(NodeOverride(nodes=(1,), slowdown=2.0),)), r"node_overrides\[0\].slowdown"),
        (Cluster(nodes=70_000, inter=link(10)), "cluster.nodes"),
        (Cluster(nodes=3, inter=link(10), racks=Racks(nodes=1, oversubscription=2.0)), "cluster.racks"),
    ],
)
def test_what_is_no_link_is_refused(cluster: Cluster, match: str) -> None:
    """By name, with a hint."""
    with pytest.raises(ConfigError, match=match) as caught:
        topology_of(cluster)
    assert caught.value.hint


def test_what_cannot_be_built_is_listed() -> None:
    """Each line of the cluster that has no effect, and no other; a latency where the kernel cannot delay, or of less than 300 us."""
    cluster = Cluster(
        nodes=2,
        inter=link(100, latency_us=2000),
        intra=link(1000),
        nics_per_node=2,
        cores_per_node=8,
        node_overrides=(NodeOverride(nodes=(1,), inter=link(50)), NodeOverride(nodes=(0,), inter=link(50, latency_us=299))),
    )
    names = [entry["what"] for entry in unrealised(cluster, latency=False)]
    inherent = ["cluster.intra", "cluster.nics_per_node", "cluster.cores_per_node"]
    assert names == ["cluster.inter.latency", "cluster.node_overrides[1].inter.latency", *inherent]
    assert [entry["what"] for entry in unrealised(cluster, latency=True)] == ["cluster.node_overrides[1].inter.latency", *inherent]
    assert unrealised(Cluster(nodes=2, inter=link(100)), latency=False) == []


LATE = topology_of(
    Cluster(
        nodes=3,
        inter=link(10, latency_us=1000),
        node_overrides=(NodeOverride(nodes=(1,), inter=link(20)), NodeOverride(nodes=(2,), inter=link(10, latency_us=5000))),
    )
)


def test_a_message_has_the_latency_of_the_later_link() -> None:
    """Each way; a switch's own traffic has its host's; no latency needs no relay."""
    pairs = {(source, target): LATE.latency_ns(f"host{source}", f"host{target}") / 1000 for source in range(3) for target in range(source)}
    assert pairs == {(1, 0): 1000, (2, 0): 5000, (2, 1): 5000}
    delays = LATE.delays()
    assert set(delays) == {"host0", "host1", "host2"}
    assert delays["host1"] == {
        LATE.hardware_address("host0"): 10**6,
        LATE.hardware_address("host2"): 5 * 10**6,
        LATE.hardware_address("switch"): 0,
    }
    assert topology_of(Cluster(nodes=2, inter=link(10, latency_us=299))).delays() == {}
