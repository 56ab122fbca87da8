"""Framing: what a link carries of what is declared, by the packets' headers."""

from __future__ import annotations

from fractions import Fraction

import pytest

from fleetbench.cluster import Link
from fleetbench.errors import ConfigError
from fleetbench.framing import Framing, payload_share
from fleetbench.quantities import BitsPerSecond


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
