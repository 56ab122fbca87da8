"""Exchange: the operations that carry every bucket once.

Bucket i travels on communicator i mod ``nccl_comm_num``, in one order on all ranks. With
``sync_nccl_allreduce`` one bucket is in flight over all communicators; without it, one per
communicator.
"""

from __future__ import annotations

from collections.abc import Sequence

from fleetbench.errors import ConfigError
from fleetbench.plan.fusion import Bucket
from fleetbench.plan.operations import Operation, Operations
from fleetbench.strategy import DistributedStrategy


def lay_out(buckets: Sequence[Bucket], strategy: DistributedStrategy, trainers: int) -> Operations:
    """One all-reduce a bucket, with ids 0, 1, ... relative to the exchange; none for one trainer.

    Raises ``ConfigError`` for what is not exchanged yet: a hierarchy, and a sparse gradient, whose
    dense all-reduce would carry rows that nobody touched.
    """
    if strategy.use_hierarchical_allreduce:
        raise ConfigError("is not planned yet", "strategy.use_hierarchical_allreduce", "true", "leave it off")
    if trainers == 1:
        return ()
    for bucket in buckets:
        if bucket.sparse:
            raise ConfigError(
                "sparse gradients are not exchanged yet",
                f"gradient {', '.join(bucket.gradients)}",
                f"{bucket.numel} elements",
                "build the embedding with sparse=False",
            )
    communicators = strategy.nccl_comm_num
    last_on: dict[int, int] = {}
    operations = []
    for bucket in buckets:
        communicator = bucket.id % communicators
        lane = 0 if strategy.sync_nccl_allreduce else communicator
        operations.append(
            Operation(
                id=bucket.id,
                kind="all_reduce",
                bucket=bucket.id,
                nbytes=bucket.nbytes,
                wire_dtype=bucket.dtype,
                communicator=communicator,
                after=(last_on[lane],) if lane in last_on else (),
            )
        )
        last_on[lane] = bucket.id
    return tuple(operations)
