"""Buckets of DistributedDataParallel: which gradients are sent together, and when each bucket is ready."""

from __future__ import annotations

from operator import attrgetter
from typing import NamedTuple

from fleetbench.plan.fusion import fuse
from fleetbench.plan.layers import Gradient
from fleetbench.quantities import Nanoseconds
from fleetbench.strategy import DistributedStrategy
from fleetbench.why.observed import Readiness

FIRST_CAP_MB, CAP_MB = 1.0, 25.0
"""Torch's default caps of the first bucket and of the others, in MiB."""


class DdpBucket(NamedTuple):
    """A bucket: gradients that are sent together."""

    nbytes: int
    """Bytes of the gradients, each rounded down to a multiple of 4."""
    ready_ns: int
    """Nanoseconds from the start of the backward until the last gradient is ready."""


def buckets_of(found: Readiness, cap_mb: float | None) -> list[DdpBucket]:
    """Return the buckets that DDP forms after its first step, by the rule of ``fleetbench.plan.fusion``.

    ``cap_mb`` is the cap of a bucket in MiB. None means torch's default, with a smaller first bucket; with 0,
    each gradient gets its own bucket.
    """
    known = zip(found.names, found.nbytes, found.ready_ns, strict=True)
    gradients = sorted((Gradient(name=name, numel=size // 4, ready=Nanoseconds(ns)) for name, size, ns in known), key=attrgetter("ready"))
    first, cap = (FIRST_CAP_MB, CAP_MB) if cap_mb is None else (0.0, cap_mb or 1e-6)  # 0 is no cap in the plan; in DDP no two gradients fit
    strategy = DistributedStrategy(fusion="ddp", first_bucket_size_in_MB=first, fuse_grad_size_in_MB=cap)
    ready = {gradient.name: gradient.ready for gradient in gradients}
    return [DdpBucket(bucket.nbytes, max(map(ready.__getitem__, bucket.gradients))) for bucket in fuse(gradients, strategy)]
