"""Algorithms: the messages that a collective's ranks send to each other, by the names of ``cluster.collective``.

With P ranks, S bytes, a latency of alpha per message and B bytes/s on every hop:

- ``ring``: over equal hops an all-reduce takes 2 (P - 1) (alpha + S / (P B)). A reduce-scatter and an
  all-gather, its two halves, take half of that. An all-gather of rows, to which every rank contributes S
  bytes, takes (P - 1) (alpha + S / B). Over unequal hops a chunk's latencies add up, and the slowest port is
  the bottleneck: see ``longest_chain``. A reduce and a broadcast take the hops' latencies and S / B: the
  buffer passes along the ring in chunks so small that all hops work at once, as in NCCL's ring kernels
  (``src/device/broadcast.h``, ``reduce.h``).
- ``halving_doubling`` (Rabenseifner, "Optimization of Collective Reduction Operations", ICCS 2004): an
  all-reduce takes 2 log2 P alpha + 2 (P - 1) / P S / B. Neighbours exchange halves, then ranks at twice the
  distance exchange quarters, and so on, and back. If P is not a power of two, each rank beyond the largest
  power of two first hands its buffer to a neighbour, and at last gets the result from it: 2 (alpha + S / B)
  more. A reduce-scatter and an all-gather take ceil(log2 P) alpha + (P - 1) / P S / B, for other P by Bruck's
  distances (Thakur, Rabenseifner and Gropp, IJHPCA 2005, section 4.1).
- ``tree``: a reduce and a broadcast each take ceil(log2 P) (alpha + S / B) on a binomial tree that passes
  whole buffers. An all-reduce is a reduce followed by a broadcast.
- ``double_binary_tree`` (Sanders, Speck and Traeff, Parallel Computing 35, 2009; NCCL's
  ``src/graph/trees.cc``): an all-reduce takes 2 ceil(log2 P) alpha + 2 S / B at most. Two trees carry half
  the buffer each, in small chunks, up and down at once. A rank that has children in one tree is a leaf in the
  other.

For a kind of collective that an algorithm does not define, the ring is used.
"""

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import pairwise

from fleetbench.plan.operations import Collective
from sim.network.links import Links
from sim.network.work import Pair, Round, Work

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


def halving_doubling(kind: Collective, ranks: Ranks, links: Links, *, rows: bool = False) -> Work:
    """Return the work of exchanges between ranks at doubling distances."""
    if kind in ("reduce", "broadcast"):
        return tree(kind, ranks, links)
    if kind == "all_reduce":
        core = 1 << (len(ranks).bit_length() - 1)
        rest = len(ranks) - core
        pairs = [(ranks[2 * index], ranks[2 * index + 1]) for index in range(rest)]
        meeting = [first for first, _ in pairs] + list(ranks[2 * rest :])
        there = list(_exchanges(meeting))
        return Work(links).rounds([(WHOLE, [(b, a) for a, b in pairs]), *there, *reversed(there), (WHOLE, pairs)])
    is_power = len(ranks) & (len(ranks) - 1) == 0
    rounds = _exchanges(ranks) if is_power else _bruck(ranks)
    scale = len(ranks) if rows else 1
    return Work(links).rounds((scale * share, messages) for share, messages in rounds)


def tree(kind: Collective, ranks: Ranks, links: Links, *, rows: bool = False) -> Work:
    """Return the work of a binomial tree whose root is the first of ``ranks``."""
    if kind == "broadcast":
        return Work(links).rounds(_binomial(ranks))
    if kind == "reduce":
        return Work(links).rounds(_towards_root(ranks))
    if kind == "all_reduce":
        return Work(links).rounds([*_towards_root(ranks), *_binomial(ranks)])
    return ring(kind, ranks, links, rows=rows)


def double_binary_tree(kind: Collective, ranks: Ranks, links: Links, *, rows: bool = False) -> Work:
    """Return the work of an all-reduce on two binary trees of half the buffer each; other kinds use the ring."""
    if kind != "all_reduce":
        return ring(kind, ranks, links, rows=rows)
    size = len(ranks)
    other = list(reversed(ranks)) if size % 2 == 0 else [*ranks[1:], ranks[0]]
    depth_ns = 0
    messages: list[Pair] = []
    for order in (ranks, other):
        reach_ns = [0] * size
        for index in sorted(range(1, size), key=lambda child: -(child & -child)):  # a parent comes before its children
            parent = tree_parent(index, size)
            up, down = links.hop(order[index], order[parent]), links.hop(order[parent], order[index])
            reach_ns[index] = reach_ns[parent] + up.latency_ns + down.latency_ns
            messages += [(order[index], order[parent]), (order[parent], order[index])]
        depth_ns = max(depth_ns, *reach_ns)
    return Work(links).pipeline(depth_ns, Fraction(1, 2), messages)


def tree_parent(index: int, size: int) -> int:
    """Return the parent of ``index`` > 0 in a binary tree over 0 ... ``size`` - 1; the root is 0, the leaves are odd.

    An index's lowest set bit is its height: 4 has the children 2 and 6, whose children are 1, 3, 5 and 7.
    """
    height = index & -index
    parent = (index ^ height) | (height << 1)
    return parent if parent < size else index ^ height


ALGORITHMS: dict[str, Callable[..., Work]] = {
    "ring": ring,
    "halving_doubling": halving_doubling,
    "tree": tree,
    "double_binary_tree": double_binary_tree,
}
"""Algorithms by name: functions of a collective's kind, its ranks, the links, and ``rows``."""


def _exchanges(ranks: Ranks) -> Iterator[Round]:
    """Yield rounds among a power of two of ranks: neighbours exchange halves, then ranks at distance 2 quarters, ..."""
    distance, share = 1, Fraction(1, 2)
    while distance < len(ranks):
        yield share, [(rank, ranks[index ^ distance]) for index, rank in enumerate(ranks)]
        distance, share = 2 * distance, share / 2


def _bruck(ranks: Ranks) -> Iterator[Round]:
    """Yield Bruck's rounds.

    Each rank sends all blocks that it holds to the rank 1, then 2, then 4, ... places before it; in the last
    round, only the blocks that the receiver lacks.
    """
    size, distance = len(ranks), 1
    while distance < size:
        share = Fraction(min(distance, size - distance), size)
        yield share, [(rank, ranks[(index - distance) % size]) for index, rank in enumerate(ranks)]
        distance *= 2


def _binomial(ranks: Ranks) -> Iterator[Round]:
    """Yield a broadcast's rounds: the first rank sends half-way, then both send a quarter further, and so on."""
    distance = 1 << ((len(ranks) - 1).bit_length() - 1)
    while distance:
        starts = range(0, len(ranks) - distance, 2 * distance)
        yield WHOLE, [(ranks[index], ranks[index + distance]) for index in starts]
        distance //= 2


def _towards_root(ranks: Ranks) -> list[Round]:
    return [(share, [(b, a) for a, b in pairs]) for share, pairs in reversed(list(_binomial(ranks)))]
