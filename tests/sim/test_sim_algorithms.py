"""Algorithms: closed forms, and message-by-message runs that move real numbers over ports of their own."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim_cases import link

from fleetbench.plan.longest_chain import Pace, around_ring, envelope
from fleetbench.plan.operations import Collective
from sim.network.algorithms import ALGORITHMS, tree_parent
from sim.network.links import Links
from sim.network.work import Route

RANKS = st.integers(2, 40)
LATENCIES = st.integers(0, 10**6)
SIZES = st.integers(0, 10**8)


def route(name: str, kind: Collective, ranks: int, nbytes: int, latency_ns: int, *, rows: bool = False) -> Route:
    """Among nodes of one trainer, at 1 ns a byte."""
    links = Links(trainers_per_node=1, intra=None, inter=link(8, latency_ns))
    return ALGORITHMS[name](kind, range(ranks), links, rows=rows).route(nbytes)


def total_ns(found: Route) -> Fraction:
    """Latency and transfer."""
    return found.cost.latency_ns + found.cost.transfer_ns


class Wire:
    """Ranks that send one message after the other and receive one after the other, at 1 ns a byte, each ``latency_ns`` late."""

    def __init__(self, ranks: int, latency_ns: int) -> None:
        self.latency_ns = latency_ns
        self.out_free = [Fraction(0)] * ranks
        self.in_free = [Fraction(0)] * ranks

    def send(self, sender: int, receiver: int, nbytes: Fraction, ready_ns: Fraction) -> Fraction:
        """When a message that may set out at ``ready_ns`` has arrived."""
        start = max(ready_ns, self.out_free[sender], self.in_free[receiver])
        self.out_free[sender] = self.in_free[receiver] = start + nbytes
        return start + nbytes + self.latency_ns


def summed(ranks: int) -> int:
    """What every rank must hold in the end: rank r gives 10^r."""
    return sum(10**rank for rank in range(ranks))


def run_ring(ranks: int, nbytes: int, wire: Wire) -> Fraction:
    """Patarasuk and Yuan's ring: a rank passes on the chunk that it just got, added up, then whole."""
    data = [[10**rank] * ranks for rank in range(ranks)]
    ready = [Fraction(0)] * ranks
    for step in range(2 * (ranks - 1)):
        sent = [((rank - step) % ranks, data[rank][(rank - step) % ranks]) for rank in range(ranks)]
        arrivals = [wire.send(rank, (rank + 1) % ranks, Fraction(nbytes, ranks), ready[rank]) for rank in range(ranks)]
        for rank, (chunk, value) in enumerate(sent):
            own = data[(rank + 1) % ranks]
            own[chunk] = own[chunk] + value if step < ranks - 1 else value
        ready = [max(ready[rank], arrivals[rank - 1]) for rank in range(ranks)]
    assert all(chunk == summed(ranks) for own in data for chunk in own)
    return max(ready)


def run_halving_doubling(ranks: int, nbytes: int, wire: Wire) -> Fraction:
    """Rabenseifner's: an exchange of halves with rank xor 1, of quarters with rank xor 2, ...; the rest folds in first.

    A rank goes on when what it sent has arrived and what it waits for has come.
    """
    core = 2 ** int(log2(ranks))
    rest = ranks - core
    cells = max(core, 1)
    data = [[10**rank] * cells for rank in range(ranks)]
    ready = [Fraction(0)] * ranks
    for even in range(0, 2 * rest, 2):
        ready[even] = wire.send(even + 1, even, Fraction(nbytes), Fraction(0))
        data[even] = [a + b for a, b in zip(data[even], data[even + 1], strict=True)]
    members = list(range(0, 2 * rest, 2)) + list(range(2 * rest, ranks))
    spans = [(0, cells)] * core
    distances = [2**power for power in range(int(log2(core)))]
    for distance in distances:
        old, arrivals, mine = [list(own) for own in data], list(ready), list(spans)
        for index, rank in enumerate(members):
            low, high = spans[index]
            middle = (low + high) // 2
            mine[index] = (low, middle) if index & distance == 0 else (middle, high)
            partner = members[index ^ distance]
            given_away = (middle, high) if index & distance == 0 else (low, middle)
            arrived = wire.send(rank, partner, Fraction(nbytes * (high - low), 2 * cells), ready[rank])
            arrivals[partner], arrivals[rank] = max(arrivals[partner], arrived), max(arrivals[rank], arrived)
            for cell in range(*given_away):
                data[partner][cell] += old[rank][cell]
        ready, spans = arrivals, mine
    for distance in reversed(distances):
        old, arrivals, wider = [list(own) for own in data], list(ready), list(spans)
        for index, rank in enumerate(members):
            low, high = spans[index]
            partner = members[index ^ distance]
            arrived = wire.send(rank, partner, Fraction(nbytes * (high - low), cells), ready[rank])
            arrivals[partner], arrivals[rank] = max(arrivals[partner], arrived), max(arrivals[rank], arrived)
            data[partner][low:high] = old[rank][low:high]
            other = spans[index ^ distance]
            wider[index] = (min(low, other[0]), max(high, other[1]))
        ready, spans = arrivals, wider
    for even in range(0, 2 * rest, 2):
        ready[even + 1] = wire.send(even, even + 1, Fraction(nbytes), ready[even])
        data[even + 1] = list(data[even])
    assert all(cell == summed(ranks) for own in data for cell in own)
    return max(ready)


def run_tree(ranks: int, nbytes: int, wire: Wire) -> Fraction:
    """A binomial tree: ranks add up to the one whose lowest bit is cleared, and the sum comes back the same way.

    Both ends of a message go on when it has arrived.
    """
    data = [10**rank for rank in range(ranks)]
    ready = [Fraction(0)] * ranks
    powers = [2**power for power in range(ceil(log2(ranks)))]
    for distance in powers:
        for rank in range(distance, ranks, 2 * distance):
            data[rank - distance] += data[rank]
            arrived = wire.send(rank, rank - distance, Fraction(nbytes), max(ready[rank], ready[rank - distance]))
            ready[rank] = ready[rank - distance] = arrived
    ready = [max(ready)] * ranks
    for distance in reversed(powers):
        for rank in range(distance, ranks, 2 * distance):
            data[rank] = data[rank - distance]
            arrived = wire.send(rank - distance, rank, Fraction(nbytes), max(ready[rank], ready[rank - distance]))
            ready[rank] = ready[rank - distance] = arrived
    assert data == [summed(ranks)] * ranks
    return max(ready)


RUNS: dict[str, Callable[[int, int, Wire], Fraction]] = {"ring": run_ring, "halving_doubling": run_halving_doubling, "tree": run_tree}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6, 7, 8, 12, 16, 17])
@pytest.mark.parametrize(("nbytes", "latency_ns"), [(1, 1_000), (48_000, 700), (10**7, 3)])
def test_an_all_reduce_takes_what_its_messages_take(name: str, ranks: int, nbytes: int, latency_ns: int) -> None:
    """Message by message, with a sum that comes out right, the last rank has everything when the route says."""
    assert RUNS[name](ranks, nbytes, Wire(ranks, latency_ns)) == total_ns(route(name, "all_reduce", ranks, nbytes, latency_ns))


@given(RANKS, SIZES, LATENCIES)
def test_halving_doubling_is_its_closed_form(ranks: int, nbytes: int, latency_ns: int) -> None:
    """2 log2 P alpha + 2 (P - 1) / P S / B among the largest power of two, and two whole buffers more where there are others."""
    core = 2 ** int(log2(ranks))
    expected = 2 * int(log2(core)) * latency_ns + Fraction(2 * (core - 1) * nbytes, core)
    if core != ranks:
        expected += 2 * (latency_ns + nbytes)
    assert total_ns(route("halving_doubling", "all_reduce", ranks, nbytes, latency_ns)) == expected


@given(RANKS, SIZES, LATENCIES)
def test_the_halves_and_the_trees_are_their_closed_forms(ranks: int, nbytes: int, latency_ns: int) -> None:
    """Halves: ceil(log2 P) alpha + (P - 1) / P S, rows P times the bytes; a binomial tree: ceil(log2 P) (alpha + S), twice both ways."""
    levels = ceil(log2(ranks))
    halves: tuple[Collective, ...] = ("reduce_scatter", "all_gather")
    for kind in halves:
        found = total_ns(route("halving_doubling", kind, ranks, nbytes, latency_ns))
        assert found == levels * latency_ns + Fraction((ranks - 1) * nbytes, ranks)
    rows = total_ns(route("halving_doubling", "all_gather", ranks, nbytes, latency_ns, rows=True))
    assert rows == levels * latency_ns + (ranks - 1) * nbytes
    trees: tuple[Collective, ...] = ("reduce", "broadcast")
    for name in ("tree", "halving_doubling"):
        for kind in trees:
            assert total_ns(route(name, kind, ranks, nbytes, latency_ns)) == levels * (latency_ns + nbytes)
    assert total_ns(route("tree", "all_reduce", ranks, nbytes, latency_ns)) == 2 * levels * (latency_ns + nbytes)


@given(RANKS, SIZES, LATENCIES)
def test_a_double_binary_tree_is_its_closed_form(ranks: int, nbytes: int, latency_ns: int) -> None:
    """At most 2 ceil(log2 P) alpha + 2 S, and exactly that for a power of two beyond 2; two ranks send each other what a ring does."""
    cost = route("double_binary_tree", "all_reduce", ranks, nbytes, latency_ns).cost
    assert cost.latency_ns <= 2 * ceil(log2(ranks)) * latency_ns
    assert cost.transfer_ns <= 2 * nbytes
    if ranks > 2 and ranks & (ranks - 1) == 0:
        assert (cost.latency_ns, cost.transfer_ns) == (2 * log2(ranks) * latency_ns, 2 * nbytes)
    if ranks == 2:
        assert (cost.latency_ns, cost.transfer_ns) == (2 * latency_ns, nbytes)


@given(st.sampled_from(sorted(ALGORITHMS)), RANKS, st.integers(1, 10**6))
def test_every_all_reduce_sends_the_same_in_all(name: str, ranks: int, nbytes: int) -> None:
    """2 (P - 1) S over all ranks, whichever way: a buffer less one must reach somebody, and the sum everybody but one.

    So the bytes that a run counts, in the mean over ranks, are those of any of them.
    """
    found = route(name, "all_reduce", ranks, nbytes, 0)
    sent = sum(load * found.cost.transfer_ns for port, load in zip(found.ports, found.loads, strict=True) if port[2] == "out")
    assert sent == 2 * (ranks - 1) * nbytes


def test_the_tree_over_eight_by_hand() -> None:
    """0 has the child 4, 4 has 2 and 6, and those have the odd numbers; over six, 5 hangs under 4."""
    assert [tree_parent(index, 8) for index in range(1, 8)] == [2, 4, 2, 0, 6, 4, 6]
    assert [tree_parent(index, 6) for index in range(1, 6)] == [2, 4, 2, 0, 4]


@given(st.integers(2, 200))
def test_who_has_children_in_one_tree_is_a_leaf_in_the_other(ranks: int) -> None:
    """So no rank receives or sends more than 2 S: seen on the ports that the two trees load."""
    found = route("double_binary_tree", "all_reduce", ranks, 1_000, 0)
    assert found.cost.transfer_ns <= 2_000
    assert len(found.ports) == 2 * ranks


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8, 16])
def test_a_double_binary_tree_takes_what_its_chunks_take(ranks: int) -> None:
    """Chunk by chunk, with a sum that comes out right: never faster than said, and at most a quarter slower, in turns taken greedily.

    Turns after the trees' two colours, which is what Sanders, Speck and Traeff prove, lose nothing but the start.
    """
    chunks = 60
    said = route("double_binary_tree", "all_reduce", ranks, 2 * chunks, 0).cost.transfer_ns
    assert said <= run_double_tree(ranks, chunks) <= 1.25 * said


def run_double_tree(ranks: int, chunks: int) -> int:  # noqa: C901  # a turn, in order
    """Turns in which a rank sends a chunk and receives one, of two trees with so many chunks each; what goes up goes first.

    A chunk goes up when all children's have come, and down when it has come from above.
    """
    orders = [list(range(ranks)), list(reversed(range(ranks))) if ranks % 2 == 0 else [*range(1, ranks), 0]]
    parent = {(tree, order[index]): order[tree_parent(index, ranks)] for tree, order in enumerate(orders) for index in range(1, ranks)}
    children: dict[tuple[int, int], list[int]] = {}
    for (tree, rank), above in parent.items():
        children.setdefault((tree, above), []).append(rank)
    places = [(tree, rank, chunk) for tree in (0, 1) for rank in range(ranks) for chunk in range(chunks)]
    missing = {place: len(children.get(place[:2], [])) for place in places}
    values = {place: 10 ** place[1] for place in places}
    waiting: set[tuple[bool, int, int, int, int]] = set()

    def goes_on(tree: int, rank: int, chunk: int, *, is_down: bool) -> None:
        if is_down or (tree, rank) not in parent:
            waiting.update((True, chunk, tree, rank, below) for below in children.get((tree, rank), []))
        else:
            waiting.add((False, chunk, tree, rank, parent[tree, rank]))

    for tree, rank, chunk in places:
        if not missing[tree, rank, chunk]:
            goes_on(tree, rank, chunk, is_down=False)
    turns = 0
    while waiting:
        turns += 1
        sending: set[int] = set()
        receiving: set[int] = set()
        sent = []
        for message in sorted(waiting):
            _, _, _, sender, receiver = message
            if sender not in sending and receiver not in receiving:
                sending.add(sender)
                receiving.add(receiver)
                sent.append(message)
        waiting.difference_update(sent)
        for is_down, chunk, tree, sender, receiver in sent:
            if is_down:
                values[tree, receiver, chunk] = values[tree, sender, chunk]
            else:
                values[tree, receiver, chunk] += values[tree, sender, chunk]
                missing[tree, receiver, chunk] -= 1
            if is_down or not missing[tree, receiver, chunk]:
                goes_on(tree, receiver, chunk, is_down=is_down)
    assert set(values.values()) == {summed(ranks)}
    return turns


def run_chains(rounds: list[list[tuple[int, int, int, Fraction]]], ranks: int, *, waits: bool = False) -> Fraction:
    """When all is over: messages of sender, receiver, latency and time on the port, round by round.

    A rank sends when its port is free and what it received in rounds before has come, or, where it ``waits``, when both
    ends are done with all messages before.
    """
    free, came = [Fraction(0)] * ranks, [Fraction(0)] * ranks
    for messages in rounds:
        arrivals = []
        for sender, receiver, latency_ns, port_ns in messages:
            begin_ns = max(free[sender], came[sender], came[receiver] if waits else 0)
            free[sender] = begin_ns + port_ns
            arrivals += [(end, begin_ns + port_ns + latency_ns) for end in ((sender, receiver) if waits else (receiver,))]
        for end, at_ns in arrivals:
            came[end] = max(came[end], at_ns)
    return max(came)


HOPS = st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 400)), min_size=2, max_size=9)


@given(HOPS, st.sampled_from([0, 1, 10**3, 10**5, 10**7, 123_456_789]), st.booleans())
def test_a_ring_of_any_hops_takes_what_its_messages_take(hops: list[tuple[int, int]], nbytes: int, both: bool) -> None:
    """Hops of any latency and bandwidth: message by message, each waiting for its port and for what it passes on."""
    ranks = len(hops)
    steps = (2 if both else 1) * (ranks - 1)
    times = [(latency_ns, Fraction(nbytes * 8, ranks * rate)) for latency_ns, rate in hops]
    expected = run_chains([[(rank, (rank + 1) % ranks, *times[rank]) for rank in range(ranks)]] * steps, ranks)
    paces = [Pace(latency_ns, Fraction(8, ranks * rate)) for latency_ns, rate in hops]
    assert max(pace.at(1, nbytes) for pace in envelope(around_ring(steps, paces))) == expected


@given(st.sampled_from(["halving_doubling", "tree"]), st.integers(1, 4), st.integers(2, 6), SIZES, LATENCIES)
def test_exchanges_and_trees_over_unequal_hops_take_what_their_messages_take(
    name: str, per_node: int, nodes: int, nbytes: int, latency_ns: int
) -> None:
    """Fast links inside nodes, slow ones between: an all-reduce by hand-made rounds."""
    links = Links(trainers_per_node=per_node, nics_per_node=per_node, intra=link(80, latency_ns // 2), inter=link(8, latency_ns))
    ranks = per_node * nodes
    if ranks < 2:
        return

    def message(sender: int, receiver: int, share: Fraction) -> tuple[int, int, int, Fraction]:
        inside = sender // per_node == receiver // per_node
        return sender, receiver, latency_ns // 2 if inside else latency_ns, share * nbytes / (10 if inside else 1)

    rounds = [[message(*pair, share) for pair in pairs] for share, pairs in by_hand(name, ranks)]
    assert total_ns(ALGORITHMS[name]("all_reduce", range(ranks), links).route(nbytes)) == run_chains(rounds, ranks, waits=True)


def by_hand(name: str, ranks: int) -> list[tuple[Fraction, list[tuple[int, int]]]]:
    """The share of the bytes and the pairs of every round of an all-reduce."""
    if name == "tree":
        powers = [2**power for power in range(20) if 2**power < ranks]
        down = [(Fraction(1), [(at, at + step) for at in range(0, ranks, 2 * step) if at + step < ranks]) for step in reversed(powers)]
        return [(share, [(b, a) for a, b in pairs]) for share, pairs in reversed(down)] + down
    core = 2 ** int(log2(ranks))
    extra = ranks - core
    members = [2 * index if index < extra else index + extra for index in range(core)]
    outside = [(2 * index + 1, 2 * index) for index in range(extra)]
    halves = [
        (Fraction(1, 2 ** (power + 1)), [(members[index], members[index ^ 2**power]) for index in range(core)])
        for power in range(core.bit_length() - 1)
    ]
    return [(Fraction(1), outside), *halves, *reversed(halves), (Fraction(1), [(b, a) for a, b in outside])]


def test_latencies_of_a_ring_add_up_and_only_its_slowest_port_counts() -> None:
    """2 nodes of 2, 1 us inside and 10 us between: a chunk of no size passes 1 + 10 + 1 + 10 + 1 + 10 us at most, not 6 x 10."""
    links = Links(trainers_per_node=2, intra=link(80, 1_000), inter=link(8, 10_000))
    assert total_ns(ALGORITHMS["ring"]("all_reduce", range(4), links).route(0)) == 3 * 11_000
    # 40 MB: the port between nodes is busy for 6 x 10 ms; what is not hidden is one message's latency
    assert total_ns(ALGORITHMS["ring"]("all_reduce", range(4), links).route(40_000_000)) == 6 * 10_000_000 + 10_000


def test_ranks_of_a_node_share_its_interface_in_a_round() -> None:
    """2 nodes of 2: halves go inside at 1 ns a byte, then both ranks send a quarter at 10 ns a byte at once: 500 + 5000, and back."""
    links = Links(trainers_per_node=2, intra=link(8), inter=link(0.8))
    found = ALGORITHMS["halving_doubling"]("all_reduce", range(4), links).route(1_000)
    assert found.cost.transfer_ns == 2 * (500 + 2 * 250 * 10)
    loads = dict(zip(found.ports, found.loads, strict=True))
    assert loads["inter", 0, "out"] == Fraction(2 * 5_000, 11_000)
    assert loads["intra", 3, "in"] == Fraction(2 * 500, 11_000)


def test_bruck_loads_every_rank_alike() -> None:
    """Seven ranks gather 700 bytes in rounds of 100, 200 and the missing 300: 600 ns, and every port is busy throughout."""
    found = route("halving_doubling", "all_gather", 7, 700, 5)
    assert (found.cost.latency_ns, found.cost.transfer_ns) == (15, 600)
    assert set(found.loads) == {Fraction(1)}
