"""Supported: which scenarios the array engine runs, and why it leaves another to the reference.

No two collectives may be in flight together that share a port, unless they are the parts of one that start and end together. Collectives
that compute slows have ended before compute of the next step.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import takewhile

from fleetbench.plan.operations import Operation
from sim.arrays.layout import Layout, share_ports
from sim.arrays.program import Compute, Head, Instruction, Join, Program, Share, Wait, Work
from sim.network.links import Port
from sim.scenario import Scenario

OVERLAPPED = "compute and collectives under way together slow each other"
BEYOND = "times may leave 64 bits"
SHARED = "collectives in flight together share a link"


class Unsupported(Exception):  # noqa: N818  # it is an answer: another engine runs it
    """The vector engine does not run this scenario; the text says why."""


def overlaps(scenario: Scenario, programs: Iterable[Program]) -> bool:
    """Whether compute and collectives are under way together that slow each other."""
    slows = scenario.table.contention or scenario.table.collective_contention
    sequential = scenario.strategy.combination.is_sequential
    return bool(slows) and not sequential and any(_joins_in_compute(program) or leaves_in_flight(program) for program in programs)


def refuse_slowed(layout: Layout, programs: Iterable[Program]) -> None:
    """Raise ``Unsupported`` where collectives that compute slows depend on more than one step, or their parts share ports and end apart."""
    for program in programs:
        before_compute = takewhile(lambda line: not isinstance(line, Head), program.instructions)
        is_gated = any(isinstance(line, Wait) and line.gates for line in program.instructions)  # a rank at a gate slows nothing
        if is_gated or leaves_in_flight(program) or any(isinstance(line, Join) for line in before_compute):
            raise Unsupported(OVERLAPPED)
        if any(share_ports(layout.ways(join.operation)) for join in program.joins):
            raise Unsupported(SHARED)


def shares(layout: Layout, programs: Sequence[Program]) -> bool:
    """Whether two collectives that share a port may be in flight together, so that their durations are not fixed."""
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
    of_group: dict[str, dict[tuple[str, bool], Operation]] = {}
    for program in programs:
        for join in program.joins:
            operation = join.operation
            of_group.setdefault(operation.group, {})[operation.kind, operation.payload == "rows"] = operation
    for group, operations in of_group.items():
        if _meets_itself(layout, operations.values()):
            lines = [(program.instructions, join) for program in programs for join in program.joins if join.operation.group == group]
            if layout.routes.links.in_flight or not all(_starts_together(layout, own, join) for own, join in lines):
                return True
    return False


def _starts_together(layout: Layout, lines: Sequence[Instruction], join: Join) -> bool:
    """Whether all parts of a collective start at once: when another has ended in which each has met all others.

    That one must end later than anybody joins this one, and those before it in its own group, whose parts may end apart, have ended then.
    """
    group, busy_ns = join.operation.group, join.takes_ns
    joined = {line.operation.id: line.operation for line in lines[: lines.index(join)] if isinstance(line, Join)}
    own = [before.id for before in joined.values() if before.group == group]
    if own and own[-1] not in with_those_before(join.operation.after, joined):
        return False
    for line in reversed(lines[: lines.index(join)]):
        if not isinstance(line, Join):
            return False
        before = line.operation
        if before.id in join.operation.after:
            is_full = before.group == group or layout.is_full(before.group, group)
            is_later = line.holds or bool(layout.takes_ns(before).min() >= busy_ns)
            return is_full and is_later and join.operation.after == (before.id,)
        busy_ns += line.takes_ns
    return False


def most_ns(layout: Layout, programs: Iterable[Program]) -> int:
    """Upper bound of a step's time besides compute and its head: its own work, and all collectives one after the other."""
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
    """Whether a collective may go on into the next step: one that neither a wait nor what it waits for comes after."""
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
    """Operations, and all that they come after."""
    found = set(operations)
    for operation in reversed(joined.values()):  # none comes after a later one
        if operation.id in found:
            found.update(operation.after)
    return found


def _on_common_ports(layout: Layout, joins: Sequence[Join]) -> Iterator[tuple[Join, Join]]:
    """Each collective after the last one of every group before it, where the two have a port in common."""
    last: dict[str, tuple[Join, frozenset[Port]]] = {}
    for join in joins:
        own = layout.ports(join.operation)
        for before, ports in last.values():
            if not ports.isdisjoint(own):
                yield before, join
        last[join.operation.group] = join, own


def _is_behind(layout: Layout, first: Join, second: Operation, joins: Iterable[Join]) -> bool:
    """Whether every part of ``second`` starts after the ends of all parts of ``first`` that it could share a port with."""
    before = first.operation
    if before.group != second.group and not layout.is_full(before.group, second.group):
        return False
    if first.holds or (layout.queue_depth == 1 and (before.communicator, before.group) == (second.communicator, second.group)):
        return True
    return before.id in second.after or before.id in with_those_before(second.after, {join.operation.id: join.operation for join in joins})


def _meets_itself(layout: Layout, operations: Iterable[Operation]) -> bool:
    """Whether two parts of a group share a port in these operations."""
    if len(layout.groups[next(iter(operations)).group].parts) == 1:
        return False
    ports: list[set[Port]] = [set() for _ in layout.groups[next(iter(operations)).group].parts]
    for operation in operations:
        for own, route in zip(ports, layout.ways(operation), strict=True):
            own.update(route.ports)
    return len(set[Port]().union(*ports)) < sum(map(len, ports))
