"""Links of a process group, as ``real.why.links`` measures them, and advice on what slows them."""

from dataclasses import dataclass
from typing import Literal

from fleetbench.cluster import Link
from fleetbench.config import Config
from fleetbench.why.interfaces import Host

FASTER = 1.2
"""Ratio of bus bandwidths from which another interface counts as faster, rather than measured at a better
moment."""
_SLOW = 0.7
"""Share of the median bandwidth of the faster half of the pairs, below which a pair of hosts is slow."""
_UNUSED = 0.5
"""Share of the interface's speed below which the link carries less than the hardware should."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark(Config):
    """Something that slows the exchange."""

    what: str
    """Sentence that states the problem."""
    remedy: str
    """Variable to set or unset, such as ``GLOO_SOCKET_IFNAME=eth1``, or another action."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceTime(Config):
    """An all-reduce of one size."""

    size_bytes: int
    """Bytes that each rank contributes."""
    median_s: float
    """Median duration in seconds, on the rank where it is longest."""
    num: int
    """Number of repeats, without the warm-up."""
    busbw_bytes_per_s: float
    """Bus bandwidth among n ranks, as nccl-tests defines it: 2 (n - 1) / n times the algorithm bandwidth."""
    is_correct: bool
    """Whether the sum was correct."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTime(Config):
    """Round trips of messages of 4 MiB between the first ranks of two neighbouring hosts."""

    hosts: tuple[int, ...]
    """Indices of the two hosts in ``Links.hosts``."""
    bytes_per_s: float
    """Bytes per second in one direction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceTime(Config):
    """All-reduces of a gloo group that uses one interface."""

    name: str
    """Name of the interface."""
    times: tuple[AllReduceTime, ...] = ()
    """Times of all-reduces, the smallest size first; empty after an error."""
    error: str | None = None
    """Gloo's error if the group could not be made, or failed; None if it was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links(Config):
    """Measured links of one process group. All ranks have the same value."""

    backend: Literal["gloo", "nccl"]
    """Backend of the group."""
    ranks: int
    """Number of ranks."""
    hosts: tuple[Host, ...]
    """Hosts in the order of their first ranks."""
    times: tuple[AllReduceTime, ...]
    """Times of all-reduces, the smallest size first."""
    fit: Link | None = None
    """Link with which a ring all-reduce takes the measured times: latency of a message, bandwidth in one
    direction. None if fewer than two sizes were measured."""
    interface: str | None = None
    """Interface that gloo's connections use on most ranks; None for NCCL, or without connections."""
    pairs: tuple[PairTime, ...] = ()
    """Round trips between each host and the next, and between the last and the first; empty for one host."""
    interfaces: tuple[InterfaceTime, ...] = ()
    """All-reduces over the interface in use, measured twice, and over each other shared interface. Empty
    except for gloo between several hosts."""

    @property
    def busbw_bytes_per_s(self) -> float:
        """Bus bandwidth at the largest size; 0 for a single rank."""
        return self.times[-1].busbw_bytes_per_s if self.times else 0.0

    @property
    def host_names(self) -> tuple[str, ...]:
        """Names of the hosts."""
        return tuple(host.name for host in self.hosts)

    def faster_interface(self) -> tuple[str, float] | None:
        """Return the fastest other interface, and the ratio of its bus bandwidth to that of the one in use.

        Return None if no other interface is ``FASTER`` times as fast. If an interface was measured several
        times, the fastest measurement counts.
        """
        speeds: dict[str, float] = {}
        for each in self.interfaces:
            if each.times:
                speeds[each.name] = max(speeds.get(each.name, 0.0), each.times[-1].busbw_bytes_per_s)
        used = speeds.pop(self.interface or "", 0.0)
        best = max(speeds, key=lambda name: speeds[name], default=None)
        if best is None or not used or speeds[best] < FASTER * used:
            return None
        return best, speeds[best] / used


def remarks_of_links(links: Links) -> tuple[Remark, ...]:
    """Return remarks on what slows the group's exchange, as far as the measurement shows."""
    found = [_other_interface(links), _slow_host(links), _below_hardware(links)]
    wrong = [each.size_bytes for each in links.times if not each.is_correct]
    if wrong:
        remedy = "update torch, or exchange tensors of the CPU: this backend corrupts data here"
        found.insert(0, Remark(what=f"The all-reduce of {wrong[0]:,} bytes gave a wrong sum.", remedy=remedy))
    return tuple(remark for remark in found if remark is not None)


def _other_interface(links: Links) -> Remark | None:
    faster = links.faster_interface()
    if faster is None:
        return None
    name, ratio = faster
    used = f"gloo exchanges over {links.interface}"
    what = f"{used}; over {name} an all-reduce has {ratio:.1f} times the bandwidth."
    return Remark(what=what, remedy=f"GLOO_SOCKET_IFNAME={name}")


def _slow_host(links: Links) -> Remark | None:
    """Report the host whose pairs are slow, or else a slow pair; None for fewer than three hosts."""
    if len(links.pairs) < 3:
        return None
    speeds = sorted(pair.bytes_per_s for pair in links.pairs)
    middle = speeds[-(len(speeds) // 2)]  # with one slow host among three, two of three pairs are slow
    slow = [pair for pair in links.pairs if pair.bytes_per_s < _SLOW * middle]
    if not slow:
        return None
    names, share = links.host_names, min(pair.bytes_per_s for pair in slow) / middle
    common = set.intersection(*(set(pair.hosts) for pair in slow))
    if len(common) == 1 and len(slow) > 1:
        name = names[common.pop()]
        what = f"The links of {name} carry {100 * share:.0f} % of what the other hosts' carry."
        return Remark(what=what, remedy=f"leave {name} out, and look at its adapter, cable and switch port")
    between = " and ".join(names[host] for host in slow[0].hosts)
    what = f"Between {between} a message has {100 * share:.0f} % of the other pairs' bandwidth."
    return Remark(what=what, remedy="look at the cables and switch ports between the two")


def _below_hardware(links: Links) -> Remark | None:
    """Report a bus bandwidth, a ring link's load, below half the slowest interface's speed (gloo only)."""
    found = [host.interface(links.interface) for host in links.hosts]
    speeds = [interface.speed for interface in found if interface is not None and interface.speed is not None]
    carries = 8 * links.busbw_bytes_per_s
    if len(links.hosts) < 2 or len(speeds) < len(links.hosts) or carries >= _UNUSED * min(speeds):
        return None
    carried, made_for = (f"{rate / 1e9:.3g} Gbit/s" for rate in (carries, min(speeds)))
    what = f"{links.interface} supports {made_for}, but the exchange only gets {carried}."
    remedy = "look for other traffic, and on GPUs use backend nccl: gloo copies through the host"
    return Remark(what=what, remedy=remedy)
