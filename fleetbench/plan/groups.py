"""Groups: which ranks take part in a collective, and how many of a group's collectives run at once.

A group is a partition's parts, by name. ``world`` has all ranks. A hierarchy of I ranks per node (inner id =
rank % I, outer id = rank // I) has ``inner``, a node's ranks; ``leaders``, the ranks of inner id 0; and
``outer``, one part for every inner id.

A communicator is a first-in-first-out queue: its operations begin in one order on all ranks, and as many may
run at once as the backend carries. NCCL carries one, because a communicator's operations follow each other on
a stream. gloo carries two: a process group has two threads for each network device (``ProcessGroupGloo``'s
``options->threads``), and uses one device. DistributedDataParallel has the same number in flight on one
group.
"""

from fleetbench.strategy import check_hierarchy

Parts = tuple[tuple[int, ...], ...]
"""Parts of one group; a rank is in at most one of them."""


def world_of(trainers: int) -> Parts:
    """Return one part with every rank."""
    return (tuple(range(trainers)),)


def hierarchy_of(trainers: int, inner: int) -> dict[str, Parts]:
    """Return the groups of a hierarchy of ``inner`` ranks per node.

    Raises ``ConfigError`` if it is not possible.
    """
    check_hierarchy(trainers, inner)
    nodes = range(trainers // inner)
    return {
        "inner": tuple(tuple(range(node * inner, (node + 1) * inner)) for node in nodes),
        "leaders": (tuple(node * inner for node in nodes),),
        "outer": tuple(tuple(node * inner + index for node in nodes) for index in range(inner)),
    }


def part_of(parts: Parts, rank: int) -> tuple[int, ...]:
    """Return the part that contains ``rank``, or an empty one."""
    return next((part for part in parts if rank in part), ())


def queue_depth(backend: str) -> int:
    """Return how many independent operations one communicator of ``backend`` carries at once."""
    return 2 if backend == "gloo" else 1
