"""Algorithms: what a collective's ranks send to each other, by the names of ``cluster.collective``.

Among P ranks, for S bytes, with a latency of alpha a message and B bytes/s on every hop:

- ``ring``: over equal hops an all-reduce takes 2 (P - 1) (alpha + S / (P B)), its halves, a reduce-scatter and an
  all-gather, half of it, and an all-gather of rows, where every rank gives S bytes, (P - 1)
  (alpha + S / B). Over unequal hops a chunk's latencies add up, and the slowest port is the bottleneck:
  see ``longest_chain``. A reduce and a broadcast take the hops' latencies and S / B: the buffer passes along the
  ring in chunks so small that all hops work at once, as in NCCL's ring kernels
  (``src/device/broadcast.h``, ``reduce.h``).
- ``halving_doubling`` (Rabenseifner, "Optimization of Collective Reduction Operations", ICCS 2004):
  2 log2 P alpha + 2 (P - 1) / P S / B. Neighbours exchange halves, then ranks at twice the distance
  quarters, and back. Beyond the largest power of two below P, each further rank first hands its
  buffer to a neighbour and gets the result from it: 2 (alpha + S / B) more. A reduce-scatter and an
  all-gather take ceil(log2 P) alpha + (P - 1) / P S / B, for other P by Bruck's distances (Thakur,
  Rabenseifner and Gropp, IJHPCA 2005, section 4.1).
- ``tree``: a reduce and a broadcast each take ceil(log2 P) (alpha + S / B) on a binomial tree that
  passes whole buffers, and an all-reduce is one after the other.
- ``double_binary_tree`` (Sanders, Speck and Traeff, Parallel Computing 35, 2009; NCCL's ``src/graph/trees.cc``):
  an all-reduce takes 2 ceil(log2 P) alpha + 2 S / B at most. Two trees carry half the buffer each, in
  small chunks, up and down at once; who has children in one is a leaf in the other.

What an algorithm has no way of its own for, the ring does.
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
    """The ring over ``ranks`` in their order, of which the first is the root; ``rows`` is of an all-gather."""
    steps = len(ranks) - 1
    around = list(pairwise([*ranks, ranks[0]]))
    if kind in ("reduce", "broadcast"):  # ends at the root, or starts there
        used = around[1:] if kind == "reduce" else around[:-1]
        return Work(links).pipeline(sum(links.hop(*pair).latency_ns for pair in used), WHOLE, used)
    share = WHOLE if rows else Fraction(1, len(ranks))
    return Work(links).around(2 * steps if kind == "all_reduce" else steps, share, around)


def halving_doubling(kind: Collective, ranks: Ranks, links: Links, *, rows: bool = False) -> Work:
    """Exchanges between ranks at doubling distances."""
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
    """A binomial tree from the first of ``ranks``."""
    if kind == "broadcast":
        return Work(links).rounds(_binomial(ranks))
    if kind == "reduce":
        return Work(links).rounds(_towards_root(ranks))
    if kind == "all_reduce":
        return Work(links).rounds([*_towards_root(ranks), *_binomial(ranks)])
    return ring(kind, ranks, links, rows=rows)


def double_binary_tree(kind: Collective, ranks: Ranks, links: Links, *, rows: bool = False) -> Work:
    """Two trees of half the buffer each."""
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
    """The parent of ``index`` > 0 in the binary tree over 0 ... ``size`` - 1 whose leaves are the odd numbers and whose root is 0.

    A number's lowest one is its height: 4 has the children 2 and 6, whose children are 1, 3, 5 and 7.
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
"""Functions by name; each takes the kind of a collective, its ranks, the links, and ``rows``."""


def _exchanges(ranks: Ranks) -> Iterator[Round]:
    """Among a power of two: neighbours exchange halves, then those at distance 2 quarters, ..."""
    distance, share = 1, Fraction(1, 2)
    while distance < len(ranks):
        yield share, [(rank, ranks[index ^ distance]) for index, rank in enumerate(ranks)]
        distance, share = 2 * distance, share / 2


def _bruck(ranks: Ranks) -> Iterator[Round]:
    """Yield Bruck's rounds: each rank sends all blocks that it holds to the rank 1, then 2, then 4, ... before it.

    In the last round, it sends only the blocks that the receiver lacks.
    """
    size, distance = len(ranks), 1
    while distance < size:
        share = Fraction(min(distance, size - distance), size)
        yield share, [(rank, ranks[(index - distance) % size]) for index, rank in enumerate(ranks)]
        distance *= 2


def _binomial(ranks: Ranks) -> Iterator[Round]:
    """From the first rank to that half way, from both to those a quarter on, ..."""
    distance = 1 << ((len(ranks) - 1).bit_length() - 1)
    while distance:
        starts = range(0, len(ranks) - distance, 2 * distance)
        yield WHOLE, [(ranks[index], ranks[index + distance]) for index in starts]
        distance //= 2


def _towards_root(ranks: Ranks) -> list[Round]:
    return [(share, [(b, a) for a, b in pairs]) for share, pairs in reversed(list(_binomial(ranks)))]
