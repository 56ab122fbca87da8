"""Readiness: when a step's buckets are ready."""

from __future__ import annotations

from itertools import accumulate

from fleetbench.plan.build import Plan
from fleetbench.plan.layers import LayerTable


def bucket_readiness(plan: Plan, table: LayerTable) -> list[int]:
    """From the start of the forward until each bucket and all before it are ready, in ns at X = 0."""
    ready_ns = {gradient.name: gradient.ready for layer in table.layers for gradient in layer.gradients}
    forward_ns = table.forward_ns
    own = (max(ready_ns[name] for name in bucket.gradients) for bucket in plan.buckets)
    return [forward_ns + latest for latest in accumulate(own, max)]
