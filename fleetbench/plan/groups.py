"""Groups: which ranks take part in a collective, and how many of a group's collectives run at once.

A group has a name and disjoint parts; the ranks of each part communicate with one another. ``world`` is one
part with all ranks. A hierarchy of I ranks per node (inner id = rank % I, outer id = rank // I) has the groups
``inner``, one part per node; ``leaders``, the ranks of inner id 0; and ``outer``, one part per inner id. Workers
of I trainers have ``inner``, one part per worker, and ``outer``.

A communicator is a first-in-first-out queue: its operations begin in the same order on all ranks. The backend
limits how many run at once. NCCL runs one, because a communicator's operations follow each other on a stream.
gloo runs two: a process group has two threads for each network device (``ProcessGroupGloo``'s
``options->threads``), and uses one device. DistributedDataParallel has the same number in flight on one
group.
"""

from fleetbench.exclusions import check_hierarchy

Parts = tuple[tuple[int, ...], ...]
"""Parts of one group; a rank is in at most one of them."""


def world_of(trainers: int) -> Parts:
    """Return one part with every rank."""
    return (tuple(range(trainers)),)


def hierarchy_of(trainers: int, inner: int) -> dict[str, Parts]:
    """Return the groups of a hierarchy of ``inner`` ranks per node.

    Raises ``ConfigError`` unless ``inner`` is at least 2 and divides ``trainers``.
    """
    check_hierarchy(trainers, inner)
    nodes = range(trainers // inner)
    return {
        "inner": tuple(tuple(range(node * inner, (node + 1) * inner)) for node in nodes),
        "leaders": (tuple(node * inner for node in nodes),),
        "outer": tuple(tuple(node * inner + index for node in nodes) for index in range(inner)),
    }


def part_of(parts: Parts, rank: int) -> tuple[int, ...]:
    """Return the part that contains ``rank``, or an empty tuple."""
    return next((part for part in parts if rank in part), ())


def queue_depth(backend: str) -> int:
    """Return the number of independent operations that one communicator of ``backend`` carries at once."""
    return 2 if backend == "gloo" else 1
