"""Buckets of DistributedDataParallel: which gradients are sent together, and when each bucket is ready."""

from __future__ import annotations

from typing import NamedTuple

from fleetbench.quantities import MIB
from fleetbench.why.observed import Readiness

FIRST_CAP_MB, CAP_MB = 1.0, 25.0
"""Torch's default caps of the first and of other buckets, in MiB."""


class DdpBucket(NamedTuple):
    """Gradients that are sent together."""

    nbytes: int
    """Bytes of the gradients."""
    ready_ns: int
    """Nanoseconds from the start of the backward until the last gradient is ready."""


def buckets_of(found: Readiness, cap_mb: float | None) -> list[DdpBucket]:
    """Return the buckets that DDP forms after its first step.

    ``cap_mb`` is in MiB; none: torch's default, with a smaller first bucket. Gradients are added in the order
    in which they are ready; a bucket is closed as soon as it has as many bytes as its cap. Source:
    ``compute_bucket_assignment_by_size`` in torch/csrc/distributed/c10d/reducer.cpp.
    """
    order = sorted(range(len(found.names)), key=lambda index: found.ready_ns[index])
    caps = [cap_mb] if cap_mb is not None else [FIRST_CAP_MB, CAP_MB]
    buckets: list[DdpBucket] = []
    nbytes, ready_ns = 0, 0
    for index in order:
        nbytes += found.nbytes[index]
        ready_ns = max(ready_ns, found.ready_ns[index])
        if nbytes >= caps[min(len(buckets), len(caps) - 1)] * MIB:
            buckets.append(DdpBucket(nbytes, ready_ns))
            nbytes = 0
    return [*buckets, DdpBucket(nbytes, ready_ns)] if nbytes else buckets
