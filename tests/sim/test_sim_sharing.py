"""Max-min fair sharing: the textbook's condition, its examples, and flows that need a part of a port."""

from __future__ import annotations

from collections.abc import Generator
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st
from sim_cases import link

from sim.clock import Clock
from sim.network.algorithms import ring
from sim.network.links import Links, Port
from sim.network.sharing import SharedPorts, fair_speeds
from sim.network.work import Flow

PORTS: tuple[Port, ...] = tuple(("inter", number, "out") for number in range(5))
CAPACITIES = st.lists(st.integers(1, 12), min_size=5, max_size=5)
PATHS = st.lists(st.sets(st.integers(0, 4), min_size=1), min_size=1, max_size=7)
TIMES = st.lists(st.integers(1, 4), min_size=7, max_size=7)


def flow(bits_per_s: Fraction, loads: list[Fraction]) -> Flow:
    """What a transfer brings to its ports."""
    return Flow(tuple(loads), bits_per_s, all(load == 1 for load in loads))


@given(CAPACITIES, PATHS, TIMES)
def test_speeds_are_max_min_fair(capacities: list[int], paths: list[set[int]], caps: list[int]) -> None:
    """Bertsekas and Gallager: rates are max-min fair where they are possible and each has a bottleneck.

    That is its own limit, or a full port on its way on which no other flow has more.
    """
    ports_of = {index: [PORTS[port] for port in sorted(path)] for index, path in enumerate(paths)}
    alone = {index: Fraction(min(caps[index], *(capacities[port] for port in path))) for index, path in enumerate(paths)}
    flows = {index: flow(alone[index], [alone[index] / capacities[port] for port in sorted(path)]) for index, path in enumerate(paths)}
    rates = {index: speed * alone[index] for index, speed in fair_speeds(ports_of, flows=flows).items()}
    used = {port: sum((rates[index] for index, path in enumerate(paths) if port in path), Fraction(0)) for port in range(5)}
    assert all(used[port] <= capacities[port] for port in range(5))
    for index, path in enumerate(paths):
        bottlenecks = [
            port
            for port in path
            if used[port] == capacities[port] and rates[index] == max(rates[other] for other, own in enumerate(paths) if port in own)
        ]
        assert bottlenecks or rates[index] == alone[index]


def test_the_textbooks_line_of_links() -> None:
    """Flow 0 over three links of 1, 2 and 1, and one flow on each: 1/2 for it, 1/2, 3/2 and 1/2 for the others."""
    capacities = [1, 2, 1]
    ports_of = {"all": list(PORTS[:3])} | {f"on {number}": [PORTS[number]] for number in range(3)}
    alone = {"all": 1, "on 0": 1, "on 1": 2, "on 2": 1}
    loads = {name: [Fraction(alone[name], capacities[port[1]]) for port in own] for name, own in ports_of.items()}
    flows = {name: flow(Fraction(alone[name]), loads[name]) for name in ports_of}
    rates = {name: speed * alone[name] for name, speed in fair_speeds(ports_of, flows=flows).items()}
    assert rates == {"all": Fraction(1, 2), "on 0": Fraction(1, 2), "on 1": Fraction(3, 2), "on 2": Fraction(1, 2)}


def test_who_is_slow_elsewhere_leaves_what_it_does_not_need() -> None:
    """A ring that node 2's interface holds at half the bandwidth keeps it beside one that has the other half of node 0's."""
    links = Links(trainers_per_node=1, intra=None, inter=link(8), inter_of={2: link(4)})
    slow, fast = ring("all_reduce", (0, 2), links).route(100), ring("all_reduce", (0, 1), links).route(100)
    speeds = fair_speeds({"slow": slow.ports, "fast": fast.ports}, flows={"slow": slow.flow, "fast": fast.flow})
    assert speeds == {"slow": 1, "fast": Fraction(1, 2)}
    again = {"slow": slow.ports, "fast": fast.ports, "third": fast.ports}
    speeds = fair_speeds(again, flows={"slow": slow.flow, "fast": fast.flow, "third": fast.flow})
    third = Fraction(1, 3)
    assert speeds == {"slow": 2 * third, "fast": third, "third": third}


def test_a_ring_inside_a_node_hardly_feels_one_that_crosses_nodes() -> None:
    """The world's ring needs a tenth of a trainer's link, so one inside the node has nine tenths of it."""
    links = Links(trainers_per_node=2, intra=link(80), inter=link(8))
    world, inside = ring("all_reduce", range(4), links).route(100), ring("all_reduce", (0, 1), links).route(100)
    speeds = fair_speeds({"world": world.ports, "inside": inside.ports}, flows={"world": world.flow, "inside": inside.flow})
    assert speeds == {"world": 1, "inside": Fraction(9, 10)}


def test_no_port_is_taken_more_than_whole() -> None:
    """Where a long latency between nodes is what a ring waits for, a slow link inside them is busy throughout, and not ten times."""
    links = Links(trainers_per_node=2, intra=link(0.8), inter=link(8, 10**6))
    found = ring("all_reduce", range(4), links).route(100)
    inside = {load for port, load in zip(found.ports, found.flow.loads, strict=True) if port[0] == "intra"}
    assert (found.cost.latency_ns, found.cost.transfer_ns) == (3 * 10**6, 3 * 250 + 3 * 25)
    assert inside == {Fraction(1)}


def test_what_is_known_of_flows_is_used_again_and_not_mixed_up() -> None:
    """Two flows at once, then two others of the same ports: the first pair ends at 150 and 200, the second by its own loads."""
    clock = Clock()
    ports = SharedPorts(clock)
    full, half = flow(Fraction(2), [Fraction(1)]), flow(Fraction(1), [Fraction(1, 2)])
    found: dict[str, int] = {}

    def one(name: str, start_ns: int, alone_ns: int, own: Flow) -> Generator[object, object, None]:
        yield clock.until(start_ns)
        yield ports.start(PORTS[:1], Fraction(alone_ns), flow=own).end
        found[name] = clock.now

    for name, start_ns, alone_ns, own in (
        ("a", 0, 100, full),
        ("b", 0, 100, half),
        ("c", 1_000, 100, full),
        ("d", 1_000, 100, full),
        ("e", 2_000, 100, full),
        ("f", 2_000, 100, half),
    ):
        clock.process(one(name, start_ns, alone_ns, own))
    clock.run()
    assert found == {"b": 100, "a": 150, "c": 1_200, "d": 1_200, "f": 2_100, "e": 2_150}
