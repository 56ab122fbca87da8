"""Framing: the share of a link's declared bits that carries payload.

A declared bandwidth is the rate on the wire. Every packet on it has headers:

- ``tcp``: Ethernet (14 bytes), IPv4 (20) and TCP with timestamps (32). With an MTU of 1500 bytes, 1448 of
  1514 bytes are payload; with 9000, 8948 of 9014. A shaper or a cloud's limit counts these bytes. A physical
  Ethernet line also has preamble, checksum and gap, 24 bytes per packet, which leave 1.6 % less at an MTU of
  1500.
- ``roce``: RoCE v2 puts Ethernet (14), IPv4 (20), UDP (8), the transport header (12) and its checksum (4)
  around 4096 bytes (InfiniBand Architecture Specification, annex A17).
- ``infiniband``: local header (8), transport header (12) and two checksums (6) around 4096 bytes (InfiniBand
  Architecture Specification, volume 1, chapter 6). Rates such as 400 Gbit/s are after line coding.
- ``nvlink``: NCCL assumes 20 of 25 GB/s for each link of Volta and Ampere, and 20.6 for Hopper
  (``SM80_NVLINK_BW`` in ``src/graph/topo.h`` of github.com/NVIDIA/nccl); we assume four fifths.
- ``none``: every declared bit carries payload, as in a host's memory.
"""

import math
from fractions import Fraction
from typing import Literal

Framing = Literal["tcp", "roce", "infiniband", "nvlink", "none"]

DEFAULT_MTU: dict[Framing, int] = {"tcp": 1500, "roce": 4096, "infiniband": 4096}
"""Default packet size in bytes: for TCP the packet with its IP and TCP headers, for the others the payload.
The remaining framings have no declared packet size."""

TCP_IN_PACKET = 52
SEGMENT_BYTES = DEFAULT_MTU["tcp"] - TCP_IN_PACKET
"""Payload in bytes of a full TCP packet of the default size."""
AROUND_PACKET: dict[Framing, int] = {"tcp": 14, "roce": 58, "infiniband": 26}
NVLINK_SHARE = Fraction(4, 5)
VERBS_EFFICIENCY = Fraction(19, 20)
"""Default efficiency of InfiniBand and RoCE: the middle of six published or measured values, 0.92 to 0.97
(reports/nccl_model)."""


def payload_share(framing: Framing, mtu: int | None = None) -> Fraction:
    """Return the share of the wire's bits that carries payload.

    ``mtu`` is the size of a packet in bytes; default: ``DEFAULT_MTU``.
    """
    if framing == "nvlink":
        return NVLINK_SHARE
    if framing == "none":
        return Fraction(1)
    packet = mtu or DEFAULT_MTU[framing]
    payload = packet - TCP_IN_PACKET if framing == "tcp" else packet
    return Fraction(payload, packet + AROUND_PACKET[framing])


def default_framing(backend: str, *, between_nodes: bool) -> Framing:
    """Return the framing of a backend's default medium.

    Gloo uses TCP between nodes and memory inside them; NCCL uses InfiniBand and NVLink.
    """
    if backend == "nccl":
        return "infiniband" if between_nodes else "nvlink"
    return "tcp" if between_nodes else "none"


def default_efficiency(framing: Framing) -> Fraction:
    """Return the share of the payload bandwidth that NCCL's collectives reach; see ``Link.efficiency``."""
    return VERBS_EFFICIENCY if framing in ("infiniband", "roce") else Fraction(1)


def loss_limit(loss: float, round_trip_ns: int) -> int:
    """Return the payload rate in bit/s that one TCP connection has at most, of whose packets a share ``loss`` is lost.

    It is MSS / RTT sqrt(3 / 2) / sqrt(loss), with full packets of the default size (Mathis, Semke, Mahdavi and
    Ott, "The macroscopic behavior of the TCP congestion avoidance algorithm", Computer Communication Review
    27(3), 1997).
    """
    return max(1, round(8e9 * SEGMENT_BYTES / round_trip_ns * math.sqrt(1.5 / loss)))
