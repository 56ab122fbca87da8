"""Both engines on rails, racks, nodes that differ, and every algorithm: the same nanoseconds."""

from __future__ import annotations

import dataclasses

from engine_cases import Case, agree, cases
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sim_cases import link

from fleetbench.cluster import Cluster, NodeOverride, Racks

MANY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
COLLECTIVES = st.sampled_from(
    ["ring", "halving_doubling", "tree", "double_binary_tree", "gloo", "nccl-volta", "nccl-ampere", "nccl-hopper"]
)


@st.composite
def networks(draw: st.DrawFn, inner: st.SearchStrategy[Case]) -> Case:
    """The same experiment on a cluster whose network has all that a file can say of it."""
    experiment, profile = draw(inner)
    cluster = experiment.cluster
    nodes = st.integers(0, cluster.nodes - 1)
    override = st.builds(
        lambda node, inter, intra, slowdown: NodeOverride(nodes=(node,), inter=inter, intra=intra, slowdown=slowdown),
        nodes,
        st.sampled_from([None, link(2.5, 170), link(30)]),
        st.sampled_from([None, link(7), link(100, 3)]),
        st.sampled_from([1.0, 1.5, 0.7]),
    )
    racks = st.builds(lambda size, over: Racks(nodes=size, oversubscription=over), st.integers(1, 3), st.sampled_from([1.0, 1.7, 6.0]))
    changed: Cluster = dataclasses.replace(
        cluster,
        nics_per_node=draw(st.integers(1, 3)),
        racks=draw(st.none() | racks),
        node_overrides=tuple(draw(st.lists(override, max_size=2))),
        collective=draw(COLLECTIVES),
    )
    return experiment.replace(cluster=changed), profile


@MANY
@given(networks(cases()))
def test_engines_agree_on_any_network(case: Case) -> None:
    """One collective in flight."""
    agree(case)


@MANY
@given(networks(cases(free=True)))
def test_engines_agree_on_any_network_that_is_shared(case: Case) -> None:
    """Several in flight, over interfaces, rails and uplinks that they share or not."""
    agree(case)
