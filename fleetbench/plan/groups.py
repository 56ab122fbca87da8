"""Groups: which ranks meet in a collective, and how many of a group's collectives are under way at once.

A group is a partition's parts, by name. ``world`` is everybody. A hierarchy of I ranks a node
(inner id = rank % I, outer id = rank // I) has ``inner``, a node's ranks; ``leaders``, the ranks of
inner id 0; and ``outer``, one part for every inner id.

A communicator is a first-in-first-out queue: its operations begin in one order on all ranks, and as
many may be under way as the backend carries. NCCL carries one, because a communicator's operations
follow each other on a stream. gloo carries two: a process group has two threads for each network
device (``ProcessGroupGloo``'s ``options->threads``), and takes one device. That is what
DistributedDataParallel has in flight on one group.
"""

from fleetbench.strategy import check_hierarchy

Parts = tuple[tuple[int, ...], ...]
"""The parts of one group; a rank is in one of them at most."""


def world_of(trainers: int) -> Parts:
    """One part with every rank."""
    return (tuple(range(trainers)),)


def hierarchy_of(trainers: int, inner: int) -> dict[str, Parts]:
    """The groups of a hierarchy of ``inner`` ranks a node. Raises ``ConfigError`` where there is none."""
    check_hierarchy(trainers, inner)
    nodes = range(trainers // inner)
    return {
        "inner": tuple(tuple(range(node * inner, (node + 1) * inner)) for node in nodes),
        "leaders": (tuple(node * inner for node in nodes),),
        "outer": tuple(tuple(node * inner + index for node in nodes) for index in range(inner)),
    }


def part_of(parts: Parts, rank: int) -> tuple[int, ...]:
    """The part that ``rank`` is in; empty where it is in none."""
    return next((part for part in parts if rank in part), ())


def queue_depth(backend: str) -> int:
    """Operations that one communicator of ``backend`` carries at once, where none comes after another."""
    return 2 if backend == "gloo" else 1
