"""Exchange: the operations that carry every bucket once.

Bucket i uses communicator i mod ``nccl_comm_num``, in the same order on all ranks. With
``sync_nccl_allreduce`` one bucket is in flight over all communicators. Without it, all-reduces of one
communicator start in that order, and several may be in flight (``fleetbench.plan.groups``). A bucket that
needs more than one all-reduce, or another type on the wire, runs alone on its communicator.

A bucket is one all-reduce, or in a hierarchy three operations: Fleet's reduce to a node's leader, all-reduce
among leaders, and broadcast; or a reduce-scatter inside the node, an all-reduce of every part between nodes,
and an all-gather, which uses every link of the node. All ranks gather the rows of a sparse gradient. Outer
differences in INT8 use an all-to-all and an all-gather, which together send as much as an all-reduce of the
same size.

In a worker of several trainers, they all-reduce gradients. Their parameters are equal, so each averages only
its part with the trainers at its place in other workers, and the worker gathers the parts. A communicator of
its own carries this, so that gradients pass it while it is in flight.
"""

import dataclasses
from collections.abc import Sequence

from fleetbench.errors import ConfigError
from fleetbench.plan.fusion import Bucket
from fleetbench.plan.layers import DTYPE_BYTES
from fleetbench.plan.operations import Collective, Operation, Operations
from fleetbench.strategy import DistributedStrategy

INT8_BLOCK = 256
"""Number of elements that share a scale in INT8."""
INT8_SCALE_BYTES = 4


def lay_out(buckets: Sequence[Bucket], strategy: DistributedStrategy, trainers: int, inner: int, within: bool = False) -> Operations:
    """Return the operations that exchange all buckets, with ids 0, 1, ....

    A single trainer has no operations. ``inner`` is the number of ranks inside a node of the hierarchy, or 0
    without a hierarchy. ``within``: whether gradients are exchanged within workers of several trainers, rather than
    what all trainers average.
    """
    between = strategy.worker_trainers > 1 and not within
    if trainers == 1:
        return ()
    lanes: dict[int, _Lane] = {}
    operations: list[Operation] = []
    for number, bucket in enumerate(buckets):
        if bucket.numel == 0:
            continue
        communicator = strategy.nccl_comm_num if between else number % strategy.nccl_comm_num
        lane = lanes.setdefault(0 if strategy.sync_nccl_allreduce else communicator, _Lane())
        dtype = wire_dtype(bucket, strategy)
        if within:
            chain = [_carry("all_reduce", "inner", bucket.numel, dtype)]
        elif between:
            chain = _between_workers(bucket.numel, dtype, strategy.worker_trainers)
        else:
            chain = _chain(bucket, dtype, strategy, trainers, inner)
        is_alone = strategy.sync_nccl_allreduce or not is_plain(chain, bucket.dtype)
        for operation in chain:
            after = lane.join(len(operations), is_alone=is_alone)
            placed = dataclasses.replace(operation, id=len(operations), communicator=communicator, after=after, bucket=bucket.id)
            operations.append(placed)
    return tuple(operations)


@dataclasses.dataclass(slots=True)
class _Lane:
    """Order of operations, some of which must run alone."""

    alone: tuple[int, ...] = ()
    """Id of the last operation that must run alone; empty before the first."""
    beside: list[int] = dataclasses.field(default_factory=list)
    """Ids of the operations after ``alone`` that may run at the same time."""

    def join(self, operation: int, *, is_alone: bool) -> tuple[int, ...]:
        """Add an operation, and return the ids that it must come after."""
        if not is_alone:
            self.beside.append(operation)
            return self.alone
        after = tuple(self.beside) or self.alone
        self.alone, self.beside = (operation,), []
        return after


def is_plain(chain: Sequence[Operation], dtype: str) -> bool:
    """Whether ``chain`` is a single all-reduce that sends a buffer of ``dtype`` in that type."""
    return len(chain) == 1 and chain[0].kind == "all_reduce" and chain[0].wire_dtype in (None, dtype)


def wire_dtype(bucket: Bucket, strategy: DistributedStrategy) -> str:
    """Return the type in which a bucket is sent: a smaller one if the strategy says so, never a larger one.

    Complex numbers and sparse gradients keep their type. Raises ``ConfigError`` for complex numbers that
    would be quantised.
    """
    is_complex = bucket.dtype.startswith("complex")
    if strategy.quantises:
        if is_complex:
            hint = "exchange them in full, or keep real and imaginary parts in two parameters"
            raise ConfigError("cannot be quantised", f"parameter {bucket.gradients[0]}", bucket.dtype, hint)
        return "int8"
    wanted = "float16" if strategy.fp16_allreduce else "bfloat16" if strategy.bf16_allreduce else bucket.dtype
    is_kept = bucket.sparse or is_complex or DTYPE_BYTES[wanted] >= DTYPE_BYTES[bucket.dtype]
    return bucket.dtype if is_kept else wanted


def _chain(bucket: Bucket, dtype: str, strategy: DistributedStrategy, trainers: int, inner: int) -> list[Operation]:
    """Return the operations that carry one bucket, one after the other; ids are assigned later."""
    if dtype == "int8":
        return [Operation(id=0, kind="all_reduce", nbytes=int8_nbytes(bucket.numel, trainers), wire_dtype=dtype)]
    if bucket.sparse:
        return [Operation(id=0, kind="all_gather", payload="rows", nbytes=bucket.nbytes, wire_dtype=dtype)]
    if not inner:
        return [_carry("all_reduce", "world", bucket.numel, dtype)]
    if strategy.hierarchical_variant == "leader":
        kinds: list[tuple[Collective, str]] = [("reduce", "inner"), ("all_reduce", "leaders"), ("broadcast", "inner")]
        return [_carry(kind, group, bucket.numel, dtype) for kind, group in kinds]
    part = -(-bucket.numel // inner)
    return [
        _carry("reduce_scatter", "inner", part * inner, dtype),
        _carry("all_reduce", "outer", part, dtype),
        _carry("all_gather", "inner", part * inner, dtype),
    ]


def _between_workers(numel: int, dtype: str, worker_trainers: int) -> list[Operation]:
    """Return the operations that average a bucket's parameters over workers, a part by each trainer of a worker."""
    part = -(-numel // worker_trainers)
    chain = [_carry("all_reduce", "outer", part, dtype), _carry("all_gather", "inner", part * worker_trainers, dtype)]
    return [dataclasses.replace(operation, payload="delta") for operation in chain]


def _carry(kind: Collective, group: str, numel: int, dtype: str) -> Operation:
    return Operation(id=0, kind=kind, group=group, nbytes=numel * DTYPE_BYTES[dtype], wire_dtype=dtype)


def int8_blocks(numel: int, trainers: int) -> int:
    """Return the number of blocks in each trainer's chunk of an INT8 exchange; the last chunks may be padding."""
    return -(-numel // (INT8_BLOCK * trainers))


def int8_nbytes(numel: int, trainers: int) -> int:
    """Return the bytes of ``numel`` elements in INT8 with scales and padding, in ``trainers`` chunks."""
    return trainers * int8_blocks(numel, trainers) * (INT8_BLOCK + INT8_SCALE_BYTES)
