"""Fusion: which gradients are sent together.

Fleet's pass, which its logs call ``fuse_all_reduce_op_pass``: sparse gradients are set apart. Whole layers
join the current group in order, and a group closes *after* the layer that takes it to its caps, which are
therefore soft. A group of several types is split by type. Without its last layer, a group is within both caps.
"""

import functools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from fleetbench.errors import ConfigError
from fleetbench.plan.layers import DTYPE_BYTES, INDEX_BYTES, Gradient
from fleetbench.plan.mg_wfbp import best_partition, merge
from fleetbench.plan.overlap import Exchange, overlap
from fleetbench.quantities import MIB
from fleetbench.strategy import DistributedStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Gradients of one type that one collective carries."""

    id: int
    """Index of the bucket in order of readiness."""
    gradients: tuple[str, ...]
    """Names of the gradients. Fleet's rule orders layers by their first gradient, and the gradients of a
    layer by readiness. Other rules order all gradients by readiness.

    The bucket is ready with the last of its gradients. If the backward interleaves layers, that need not be
    the last name.
    """
    numel: int
    """Number of elements."""
    dtype: str
    """Type of the elements."""
    sparse: bool = False
    """Whether the bucket is one sparse gradient."""
    touched: int = 0
    """Number of elements of a sparse gradient that a step touches; 0 if unknown, which counts as all."""
    width: int = 0
    """Number of elements per row of a sparse gradient; 0 if unknown."""

    @property
    def nbytes(self) -> int:
        """Size in bytes before conversion for the wire; for a sparse gradient, of the touched rows and indices."""
        touched = self.touched or self.numel
        return touched * DTYPE_BYTES[self.dtype] + (touched // self.width * INDEX_BYTES if self.width else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Time of one all-reduce over all trainers: T(S) = alpha + S / B."""

    latency_ns: float
    """Latency alpha, in ns."""
    ns_per_byte: float
    """Inverse bandwidth 1 / B, in ns per byte."""
    lines: tuple[tuple[float, float], ...] = ()
    """Latency in ns and inverse bandwidth in ns per byte of each chain of messages; T(S) is the longest time.
    Empty if only the two values above are known."""
    slowest: float = 1.0
    """Ratio of the slowest trainer's compute time to that in the layer table. It delays the trainer's
    gradients."""
    start_ns: float = 0.0
    """Compute time in ns that starting one all-reduce takes."""
    compute_slowdown: float = 0.0
    """Slowdown of compute while an all-reduce is in flight; see ``plan.overlap``."""
    own_slowdown: float = 0.0
    """Slowdown of an all-reduce while the backward runs; see ``plan.overlap``."""


def fuse(gradients: Sequence[Gradient], strategy: DistributedStrategy, cost: Cost | None = None) -> tuple[Bucket, ...]:
    """Return buckets in order of readiness, with every gradient in exactly one.

    Raises ``ConfigError`` if the strategy's fusion needs ``cost`` and it is None.
    """
    dense = [gradient for gradient in gradients if not gradient.sparse]
    if not strategy.fuse_all_reduce_ops:
        groups = [[gradient] for gradient in dense]
    elif strategy.fuses_by_cost:
        groups = _by_cost(dense, strategy, cost)
    elif strategy.fusion == "ddp":
        groups = _as_ddp(dense, strategy)
    elif strategy.fusion == "by_number":
        groups = _by_number(dense, strategy)
    else:
        groups = [part for group in _by_caps(dense, strategy) for part in _grouped(group, "dtype")]
    groups += [[gradient] for gradient in gradients if gradient.sparse]
    position = {gradient.name: index for index, gradient in enumerate(gradients)}
    groups.sort(key=lambda group: max(position[gradient.name] for gradient in group))
    return tuple(
        Bucket(
            id=index,
            gradients=tuple(gradient.name for gradient in group),
            numel=sum(gradient.numel for gradient in group),
            dtype=group[0].dtype,
            sparse=group[0].sparse,
            touched=group[0].touched,
            width=group[0].width,
        )
        for index, group in enumerate(groups)
    )


def _by_cost(gradients: Sequence[Gradient], strategy: DistributedStrategy, cost: Cost | None) -> list[list[Gradient]]:
    """Group by MG-WFBP or the best partition, in order of readiness.

    A group of several types is split by type.
    """
    if cost is None:
        raise ConfigError(
            "needs the cost of an all-reduce", "strategy.fusion", repr(strategy.fusion), "declare cluster.inter, or take a profile first"
        )
    ready_ns = [gradient.ready for gradient in gradients]
    widest = 2 if strategy.fp16_allreduce or strategy.bf16_allreduce else 8
    nbytes = [gradient.numel * min(widest, DTYPE_BYTES[gradient.dtype]) for gradient in gradients]
    if strategy.fusion == "optimal":
        ready = tuple(cost.slowest * each for each in ready_ns)
        groups = _best_partition(ready, tuple(nbytes), tuple(gradient.dtype for gradient in gradients), cost)
    else:
        groups = merge(ready_ns, nbytes, cost.latency_ns, cost.ns_per_byte)
    return [part for group in groups for part in _grouped((gradients[index] for index in group), "dtype")]


@functools.lru_cache(maxsize=64)  # strategies that differ only in their communicators have the same partition
def _best_partition(ready_ns: Sequence[float], nbytes: Sequence[int], dtypes: Sequence[str], cost: Cost) -> list[list[int]]:
    """Return the partition with which backward and exchange end first.

    This is exact if all-reduces neither delay nor slow compute. If they do, the result is the best of the exact
    partitions for increasing latencies, down to a single group, and of partitions by size.
    """
    lines = cost.lines or ((cost.latency_ns, cost.ns_per_byte),)
    found = [best_partition(ready_ns, nbytes, dtypes, lines)]
    if not ready_ns or not (cost.start_ns or cost.compute_slowdown or cost.own_slowdown):
        return found[0]
    more_ns = max(cost.start_ns, cost.latency_ns, ready_ns[-1] / 256, 1.0)
    while len(found[-1]) > 1:
        found.append(best_partition(ready_ns, nbytes, dtypes, [(latency_ns + more_ns, rate) for latency_ns, rate in lines]))
        more_ns *= 4
    found += [_by_bytes(nbytes, sum(nbytes) / 2**halved) for halved in range(len(nbytes).bit_length() + 1)]
    found.append([[index] for index in range(len(nbytes))])

    def end_s(groups: Sequence[Sequence[int]]) -> float:
        kinds = [(group, kind) for group in groups for kind in dict.fromkeys(dtypes[index] for index in group)]
        parts = [[index for index in group if dtypes[index] == kind] for group, kind in kinds]
        parts.sort(key=max)
        sizes = [sum(nbytes[index] for index in part) for part in parts]
        exchange = Exchange(
            ready_s=tuple(1e-9 * ready_ns[part[-1]] for part in parts),
            takes_s=tuple(1e-9 * max(latency_ns + rate * size for latency_ns, rate in lines) for size in sizes),
            backward_s=1e-9 * ready_ns[-1],
            start_s=(1e-9 * cost.start_ns,) * len(parts),
        )
        went = overlap(exchange, cost.compute_slowdown, cost.own_slowdown)
        return went.backward_s + went.stall_s

    return min(found, key=end_s)


def _by_bytes(nbytes: Sequence[int], cap: float) -> list[list[int]]:
    """Return runs of gradients, each closed by the gradient with which it reaches ``cap`` bytes."""
    groups: list[list[int]] = [[]]
    filled = 0
    for index, size in enumerate(nbytes):
        groups[-1].append(index)
        filled += size
        if filled >= cap and index + 1 < len(nbytes):
            groups.append([])
            filled = 0
    return groups


def _by_caps(gradients: Sequence[Gradient], strategy: DistributedStrategy) -> list[list[Gradient]]:
    if strategy.fuse_grad_size_in_MB == 0:
        return [list(gradients)] if gradients else []
    max_bytes = strategy.fuse_grad_size_in_MB * MIB
    max_count = strategy.fuse_grad_count if strategy.fuse_grad_count > 1 else len(gradients)
    groups: list[list[Gradient]] = []
    current: list[Gradient] = []
    for layer in _grouped(gradients, "layer"):
        current += layer
        if len(current) > max_count or sum(gradient.nbytes for gradient in current) >= max_bytes:
            groups.append(current)
            current = []
    return [*groups, current] if current else groups


def _as_ddp(gradients: Sequence[Gradient], strategy: DistributedStrategy) -> list[list[Gradient]]:
    """Return the buckets that DDP uses from its second step on, with separate buckets for each dtype.

    A bucket is closed as soon as it reaches its cap: ``first_bucket_size_in_MB``, if set, for the first bucket of
    each dtype, and ``fuse_grad_size_in_MB`` for all others.

    Source: ``compute_bucket_assignment_by_size`` in torch/csrc/distributed/c10d/reducer.cpp.
    """
    cap = strategy.fuse_grad_size_in_MB or math.inf
    first = strategy.first_bucket_size_in_MB or cap
    groups: list[list[Gradient]] = []
    opened: dict[str, list[Gradient]] = {}
    num_closed: Counter[str] = Counter()
    for gradient in gradients:
        current = opened.setdefault(gradient.dtype, [])
        current.append(gradient)
        if sum(each.nbytes for each in current) >= (cap if num_closed[gradient.dtype] else first) * MIB:
            groups.append(opened.pop(gradient.dtype))
            num_closed[gradient.dtype] += 1
    return [*groups, *opened.values()]


def _grouped(gradients: Iterable[Gradient], name: Literal["layer", "dtype"]) -> list[list[Gradient]]:
    """Group gradients by owning module or type, in the order of first appearance."""
    groups: dict[str, list[Gradient]] = {}
    for gradient in gradients:
        groups.setdefault(getattr(gradient, name), []).append(gradient)
    return list(groups.values())


def _by_number(gradients: Sequence[Gradient], strategy: DistributedStrategy) -> list[list[Gradient]]:
    """Group by Fleet's other pass: a fixed number of gradients per bucket and type, then a small last bucket."""
    last: list[Gradient] = []
    size = 0
    first = list(gradients)
    while first and size + first[-1].nbytes <= strategy.last_comm_group_size_MB * MIB:
        size += first[-1].nbytes
        last.insert(0, first.pop())
    groups: list[list[Gradient]] = []
    for part in _grouped(first, "dtype"):
        step = strategy.fuse_grad_size_in_num
        groups += [part[start : start + step] for start in range(0, len(part), step)]
    return groups + _grouped(last, "dtype")
