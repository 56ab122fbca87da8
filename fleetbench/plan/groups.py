"""Groups: which ranks meet in a collective.

A group is a partition's parts, by name. ``world`` is everybody. A hierarchy of I ranks a node
(inner id = rank % I, outer id = rank // I) has ``inner``, a node's ranks; ``leaders``, the ranks of
inner id 0; and ``outer``, one part for every inner id.
"""

from __future__ import annotations

from fleetbench.errors import ConfigError

Parts = tuple[tuple[int, ...], ...]
"""The parts of one group; a rank is in one of them at most."""


def world_of(trainers: int) -> Parts:
    """One part with every rank."""
    return (tuple(range(trainers)),)


def hierarchy_of(trainers: int, inner: int) -> dict[str, Parts]:
    """The groups of a hierarchy of ``inner`` ranks a node.

    Raises ``ConfigError`` where the world does not divide by it, or nothing is left to do in it.
    """
    where, hint = "strategy.hierarchical_inner_ranks", f"a number above 1 that divides the {trainers} trainers"
    if inner < 2:
        raise ConfigError("a hierarchy needs more than one rank inside", where, str(inner), hint)
    if trainers % inner:
        raise ConfigError(f"does not divide the {trainers} trainers", where, str(inner), hint)
    nodes = range(trainers // inner)
    return {
        "inner": tuple(tuple(range(node * inner, (node + 1) * inner)) for node in nodes),
        "leaders": (tuple(node * inner for node in nodes),),
        "outer": tuple(tuple(node * inner + index for node in nodes) for index in range(inner)),
    }


def part_of(parts: Parts, rank: int) -> tuple[int, ...]:
    """The part that ``rank`` is in; empty where it is in none."""
    return next((part for part in parts if rank in part), ())
