"""Supported: which scenarios the array engine runs, and why it leaves others to the reference engine.

The reference engine runs a scenario in these cases:

- Times may leave 64 bits.
- Compute slows collectives that depend on more than one step or on gates.
- Collectives in flight together share a link while they and compute slow each other, or in an order that
  ``shared_links`` cannot determine.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import takewhile

from fleetbench.plan.operations import Operation
from sim.arrays.layout import Layout
from sim.arrays.program import Compute, Head, Join, Program, Share, Wait, Work
from sim.network.links import Port
from sim.scenario import Scenario

OVERLAPPED = "compute and collectives under way together slow each other"
BEYOND = "times may leave 64 bits"
SHARED = "collectives in flight together share a link"


class Unsupported(Exception):  # noqa: N818  # it is an answer: another engine runs it
    """The vector engine does not run this scenario; the text is the reason."""


def overlaps(scenario: Scenario, programs: Iterable[Program]) -> bool:
    """Whether compute and collectives that slow each other may run at the same time."""
    slows = scenario.table.contention or scenario.table.collective_contention
    sequential = scenario.strategy.combination.is_sequential
    return bool(slows) and not sequential and any(_joins_in_compute(program) or leaves_in_flight(program) for program in programs)


def refuse_slowed(programs: Iterable[Program]) -> None:
    """Raise ``Unsupported`` if the array engine cannot carry collectives that compute slows.

    It cannot if they start before the step's compute, may outlast the step, or meet gates.
    """
    for program in programs:
        before_compute = takewhile(lambda line: not isinstance(line, Head), program.instructions)
        is_gated = any(isinstance(line, Wait) and line.gates for line in program.instructions)  # a rank at a gate slows nothing
        if is_gated or leaves_in_flight(program) or any(isinstance(line, Join) for line in before_compute):
            raise Unsupported(OVERLAPPED)


def shares(layout: Layout, programs: Sequence[Program]) -> bool:
    """Whether two collectives that share a port may be in flight together, so that their times are not fixed."""
    for program in programs:
        joins = program.joins
        if any(not _is_behind(layout, first, second.operation, joins) for first, second in _on_common_ports(layout, joins)):
            return True
        if (
            leaves_in_flight(program)
            and not program.lands
            and (layout.queue_depth > 1 or len({(join.operation.communicator, join.operation.group) for join in joins}) > 1)
        ):
            return True
    of_group: dict[str, list[Operation]] = {}
    for join in (join for program in programs for join in program.joins):
        of_group.setdefault(join.operation.group, []).append(join.operation)
    return any(_meets_itself(layout, operations) for operations in of_group.values())


def most_ns(layout: Layout, programs: Iterable[Program]) -> int:
    """Return an upper bound in ns of a step without compute and head: own work, then one collective at a time."""
    links = layout.routes.links
    slower = [Fraction(1)]
    if links.measured is not None:
        slower += [Fraction(links.measured.link.bandwidth, own.bandwidth) for own in links.in_flight]
        slower += [Fraction(own.latency, links.measured.link.latency or 1) for own in links.in_flight]
    found = []
    for program in programs:
        own_ns = sum(line.takes_ns for line in program.instructions if isinstance(line, Join | Work | Share))
        alone_ns = sum(int(layout.takes_ns(join.operation).sum()) for join in program.joins)
        found.append(own_ns + math.ceil(alone_ns * max(slower)))
    return max(found)


def _joins_in_compute(program: Program) -> bool:
    lines = takewhile(lambda line: not isinstance(line, Compute) or line.name != "backward", program.instructions)
    return any(isinstance(line, Join) for line in lines)


def leaves_in_flight(program: Program) -> bool:
    """Whether a collective may continue into the next step.

    It may if the step waits neither for it nor for a collective that comes after it.
    """
    waited: set[int] = set()
    joined: dict[int, Operation] = {}
    for line in program.instructions:
        if isinstance(line, Join):
            joined[line.operation.id] = line.operation
            waited |= {line.operation.id} if line.holds else set()
        elif isinstance(line, Share | Wait):
            waited |= set(joined) if line.after is None else set(line.after)
    return not set(joined) <= with_those_before(waited, joined)


def with_those_before(operations: Iterable[int], joined: dict[int, Operation]) -> set[int]:
    """Return the operations, and all in ``joined`` that they come after, directly or not."""
    found = set(operations)
    for operation in reversed(joined.values()):  # an operation only comes after earlier ones
        if operation.id in found:
            found.update(operation.after)
    return found


def _on_common_ports(layout: Layout, joins: Sequence[Join]) -> Iterator[tuple[Join, Join]]:
    """Yield each collective with the last one of every group before it, if the two share a port."""
    last: dict[str, tuple[Join, frozenset[Port]]] = {}
    for join in joins:
        own = layout.ports(join.operation)
        for before, ports in last.values():
            if not ports.isdisjoint(own):
                yield before, join
        last[join.operation.group] = join, own


def _is_behind(layout: Layout, first: Join, second: Operation, joins: Iterable[Join]) -> bool:
    """Whether each part of ``second`` starts after all parts of ``first`` that may share a port with it have ended."""
    before = first.operation
    if before.group != second.group and not layout.is_full(before.group, second.group):
        return False
    if first.holds or (layout.queue_depth == 1 and (before.communicator, before.group) == (second.communicator, second.group)):
        return True
    return before.id in second.after or before.id in with_those_before(second.after, {join.operation.id: join.operation for join in joins})


def _meets_itself(layout: Layout, operations: Sequence[Operation]) -> bool:
    """Whether two parts of the operations' group share a port, in any of these operations."""
    ports: list[set[Port]] = [set() for _ in layout.groups[operations[0].group].parts]
    kinds = {(operation.kind, operation.payload == "rows"): operation for operation in operations}
    for operation in kinds.values():
        for own, route in zip(ports, layout.ways(operation), strict=True):
            own.update(route.ports)
    return len(set[Port]().union(*ports)) < sum(map(len, ports))
