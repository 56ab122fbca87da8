"""Own work: when a rank's buckets are ready, and how long a strategy's operations take, for every engine."""

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

from fleetbench.plan.build import Plan
from fleetbench.plan.events import BlockBegin, BucketReady
from fleetbench.plan.layers import LayerTable
from fleetbench.plan.operations import Operation
from sim.clock import half_up
from sim.scenario import Scenario


class OwnWork:
    """Durations in ns of a rank's own operations, asked for in the order in which a step executes them.

    ``update`` and ``merge`` take the layer table's time, divided by the number of ranks that shard it. A
    bucket's own update takes its share by elements, and a fragment's merge its share by bytes. An outer
    optimizer's step passes over memory 8 times and a merge 10 times, so the step takes 0.8 of the merge's
    time. Without momentum the step is only a factor in the merge, and takes no time.

    Copying all gradients takes ``pack``. Each dense bucket takes its share by bytes when its collective
    starts. If the gradients of several steps are summed, it takes its share when it is added to the sum and
    when it is taken from it. A bucket that was taken from the sum in this step is contiguous, and its
    collective starts without a copy.
    """

    def __init__(self, scenario: Scenario) -> None:
        plan, table, what = scenario.plan, scenario.table, scenario.strategy.combination
        local_ns = table.local_update if what.is_local and what.worker_trainers == 1 else None
        outer = what.outer
        outer_ns = _split(table.merge, [8, 2])[0] if outer is not None and outer.momentum else 0
        update_ns = half_up(Fraction(table.update if local_ns is None else local_ns, plan.shard_ranks))
        merge_ns, outer_ns = (half_up(Fraction(whole_ns, plan.shard_ranks)) for whole_ns in (table.merge, outer_ns))
        self._whole_ns = {"update": update_ns, "merge": merge_ns + table.resume, "outer": outer_ns}
        sizes = [sum(plan.buckets[bucket].nbytes for bucket in own) for own in plan.fragments]
        self._fragment_ns = {kind: _split(self._whole_ns[kind], sizes) for kind in ("merge", "outer")}
        self._update_ns = _split(table.update, [bucket.numel for bucket in plan.buckets])
        self._pack_ns = _split(table.pack, [0 if bucket.sparse else bucket.nbytes for bucket in plan.buckets])
        self._host_ns = table.host_per_collective
        self._sets_out = {(bucket, chain[0].kind, chain[0].group) for bucket, chain in plan.of_bucket.items() if chain}
        self._released: set[int] = set()

    def begin_step(self) -> None:
        """Begin a step, in which no bucket has been taken from a sum yet."""
        self._released = set()

    def joining(self, operation: Operation) -> int:
        """Return the time in ns before a rank joins a collective: the host's work, and the copy of the gradients."""
        bucket = operation.bucket
        if operation.payload != "gradient" or bucket is None or (bucket, operation.kind, operation.group) not in self._sets_out:
            return self._host_ns
        if bucket in self._released:
            self._released.remove(bucket)
            return self._host_ns
        return self._host_ns + self._pack_ns[bucket]

    def bucket_update(self, bucket: int) -> int:
        """Return the time in ns of a bucket's own update. All buckets together take the time of the whole update."""
        return self._update_ns[bucket]

    def local(self, operation: Operation) -> tuple[str | None, int]:
        """Return the name in the timeline and the time in ns of any other local operation.

        The name is ``None`` if the timeline does not show the operation.
        """
        bucket = operation.bucket
        if operation.kind in ("accumulate", "release") and bucket is not None:
            if operation.kind == "release":
                self._released.add(bucket)
            return None, self._pack_ns[bucket]
        if operation.fragment is not None and operation.kind in self._fragment_ns:
            return operation.kind, self._fragment_ns[operation.kind][operation.fragment]
        return operation.kind, self._whole_ns.get(operation.kind, 0)


def holds_rank(operation: Operation) -> bool:
    """Whether a rank waits at once for a collective: for the broadcast of rank 0's buffers.

    If buckets update on their own, no update follows this broadcast, so nothing else would wait for it.
    """
    return operation.kind == "broadcast" and operation.payload == "buffers"


def moments_of(plan: Plan, table: LayerTable) -> list[tuple[BlockBegin | BucketReady, int]]:
    """Return the plan's moments, each with its time in ns from the start of the forward at X = 0.

    Times never decrease from one moment to the next. A bucket is ready with its last gradient. A block begins
    with its first layer in the forward, and with its last one in the backward. The block of layers that
    belong to no other block begins with the forward.
    """
    begins_ns = [0, *accumulate(layer.forward for layer in table.layers)]
    ends_ns = [0, *accumulate(layer.backward for layer in reversed(table.layers))][::-1]
    of_layer = {gradient.name: place for place, layer in enumerate(table.layers) for gradient in layer.gradients}
    ready_ns = {gradient.name: gradient.ready for layer in table.layers for gradient in layer.gradients}

    def at(moment: BlockBegin | BucketReady) -> int:
        number = moment.bucket if isinstance(moment, BucketReady) else plan.blocks[moment.block].bucket
        own = plan.buckets[number].gradients
        if isinstance(moment, BucketReady):
            return table.forward_ns + max(ready_ns[name] for name in own)
        layers = [of_layer[name] for name in own]
        if moment.phase == "forward":
            return begins_ns[min(layers)] if plan.blocks[moment.block].name else 0
        return table.forward_ns + ends_ns[max(layers) + 1]

    return list(zip(plan.moments, accumulate(map(at, plan.moments), max), strict=True))


def _split(whole_ns: int, sizes: Sequence[int]) -> list[int]:
    """Split ``whole_ns`` in proportion to ``sizes``; the parts add up to the whole."""
    total = sum(sizes) or 1
    ends = [(2 * whole_ns * size + total) // (2 * total) for size in accumulate(sizes)]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
