"""Reach: which scenarios are recursions over maxima and sums, and why another is not.

Durations must not depend on what overlaps. Compute and collectives that slow each other must not be
under way together, and no two collectives may be that share a port.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from fleetbench.plan.operations import Operation
from sim.links import Port
from sim.scenario import Scenario
from sim.vector.layout import Layout
from sim.vector.program import Compute, Instruction, Join, Program, Share, Wait

OVERLAPPED = "compute and collectives under way together slow each other"
SHARED = "collectives in flight together share a link"


def overlaps(scenario: Scenario, programs: Iterable[Program]) -> str | None:
    """Why compute or collectives have no fixed durations; none where they have."""
    slows = scenario.table.contention or scenario.table.collective_contention
    if slows and not scenario.sequential and any(_joins_in_compute(program) or leaves_in_flight(program) for program in programs):
        return OVERLAPPED
    return None


def shares(layout: Layout, programs: Iterable[Program]) -> str | None:
    """Why collectives have no fixed durations; none where no two that share a port can be in flight together."""
    for program in programs:
        joins = program.joins
        if any(not _is_behind(layout, first, second.operation, joins) for first, second in pairwise(joins)):
            return SHARED
        if leaves_in_flight(program) and (
            layout.queue_depth > 1 or len({(join.operation.communicator, join.operation.group) for join in joins}) > 1
        ):
            return SHARED
    of_group: dict[str, dict[tuple[str, bool], Operation]] = {}
    for program in programs:
        for join in program.joins:
            operation = join.operation
            of_group.setdefault(operation.group, {})[operation.kind, operation.payload == "rows"] = operation
    if any(_meets_itself(layout, operations.values()) for operations in of_group.values()):
        return SHARED
    return None


def _joins_in_compute(program: Program) -> bool:
    for instruction in program.instructions:
        if isinstance(instruction, Join):
            return True
        if isinstance(instruction, Compute) and instruction.name == "backward":
            return False
    return False


def leaves_in_flight(program: Program) -> bool:
    """Whether a collective may go on into the next step: one that neither a wait nor what it waits for comes behind."""
    waited: set[int] = set()
    joined: dict[int, Operation] = {}
    for instruction in program.instructions:
        if isinstance(instruction, Join):
            joined[instruction.operation.id] = instruction.operation
        else:
            waited |= _waited(instruction, joined)
    grown = True
    while grown:
        behind = {other for operation in waited if operation in joined for other in joined[operation].after}
        grown = not behind <= waited
        waited |= behind
    return not set(joined) <= waited


def _waited(instruction: Instruction, joined: dict[int, Operation]) -> set[int]:
    if isinstance(instruction, Wait):
        return set(joined) if instruction.after is None else set(instruction.after)
    return set(instruction.after) if isinstance(instruction, Share) else set()


def _is_behind(layout: Layout, first: Join, second: Operation, joins: Iterable[Join]) -> bool:
    """Whether every part of ``second`` starts behind the ends of all parts of ``first`` that it could share a port with."""
    before = first.operation
    if before.group != second.group and not layout.groups.crossing(before.group, second.group).is_full:
        return False
    if first.holds or (layout.queue_depth == 1 and (before.communicator, before.group) == (second.communicator, second.group)):
        return True
    of = {join.operation.id: join.operation for join in joins}
    behind, waiting = set(), [second]
    while waiting:
        for other in waiting.pop().after:
            if other in of and other not in behind:
                behind.add(other)
                waiting.append(of[other])
    return before.id in behind


def _meets_itself(layout: Layout, operations: Iterable[Operation]) -> bool:
    """Whether two parts of a group share a port in these operations."""
    if len(layout.groups[next(iter(operations)).group].parts) == 1:
        return False
    ports: list[set[Port]] = [set() for _ in layout.groups[next(iter(operations)).group].parts]
    for operation in operations:
        for own, route in zip(ports, layout.ways(operation), strict=True):
            own.update(route.ports)
    return len(set[Port]().union(*ports)) < sum(map(len, ports))
