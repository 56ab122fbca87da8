"""Algorithms: the messages that a collective's ranks send to each other.

With P ranks, S bytes, a latency of alpha per message and B bytes/s on every hop:

- ``ring``: over equal hops an all-reduce takes 2 (P - 1) (alpha + S / (P B)). A reduce-scatter and an
  all-gather, its two halves, take half of that. An all-gather of rows, to which every rank contributes S
  bytes, takes (P - 1) (alpha + S / B). Over unequal hops a chunk's latencies add up, and the slowest port is
  the bottleneck: see ``longest_chain``. A reduce and a broadcast take the hops' latencies and S / B: the
  buffer passes along the ring in chunks so small that all hops work at once, as in NCCL's ring kernels
  (``src/device/broadcast.h``, ``reduce.h``).
- a binomial tree of gloo's broadcast passes whole buffers, in ceil(log2 P) (alpha + S / B).
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise

from fleetbench.plan.operations import Collective
from sim.network.links import Links
from sim.network.work import Round, Work

Ranks = Sequence[int]
WHOLE = Fraction(1)


def ring(kind: Collective, ranks: Ranks, links: Links, *, rows: bool = False) -> Work:
    """Return the work of a ring over ``ranks`` in this order; the first rank is the root.

    ``rows``: whether every rank of an all-gather contributes all bytes.
    """
    steps = len(ranks) - 1
    around = list(pairwise([*ranks, ranks[0]]))
    if kind in ("reduce", "broadcast"):  # a reduce ends at the root, a broadcast starts there
        used = around[1:] if kind == "reduce" else around[:-1]
        return Work(links).pipeline(sum(links.hop(*pair).latency_ns for pair in used), WHOLE, used)
    share = WHOLE if rows else Fraction(1, len(ranks))
    return Work(links).around(2 * steps if kind == "all_reduce" else steps, share, around)


def binomial(ranks: Ranks) -> Iterator[Round]:
    """Yield a broadcast's rounds: the first rank sends half-way, then both send a quarter further, and so on."""
    distance = 1 << ((len(ranks) - 1).bit_length() - 1)
    while distance:
        starts = range(0, len(ranks) - distance, 2 * distance)
        yield WHOLE, [(ranks[index], ranks[index + distance]) for index in starts]
        distance //= 2
