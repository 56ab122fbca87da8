"""Own work: when a rank's buckets are ready, and what a strategy's operations take of it, the same in every engine."""

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
    """What one rank is busy with, in ns, as it executes a step's operations in their order.

    ``update`` and ``merge`` take what the layer table says, what goes over a shard its share, a bucket's own update its share by
    elements, and a fragment's merge its share by bytes. A step of an outer optimizer goes over memory 8 times where a merge does 10
    times; without momentum it is the merge's factor, and takes nothing. Copying all gradients takes ``pack``, of which each dense bucket
    has its share by bytes: when it sets out, or when it is added to the sum of several steps and when it is taken from it. A bucket that
    was taken from the sum in a step lies together, and sets out without a copy.
    """

    def __init__(self, scenario: Scenario) -> None:
        plan, table = scenario.plan, scenario.table
        local_ns = table.local_update if scenario.strategy.combination.is_local else None
        outer = scenario.strategy.combination.outer
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
        """No bucket has been taken from a sum."""
        self._released = set()

    def joining(self, operation: Operation) -> int:
        """Before a collective is joined: the host's part in it, and the copy of the gradients that set out with it."""
        bucket = operation.bucket
        if operation.payload != "gradient" or bucket is None or (bucket, operation.kind, operation.group) not in self._sets_out:
            return self._host_ns
        if bucket in self._released:
            self._released.remove(bucket)
            return self._host_ns
        return self._host_ns + self._pack_ns[bucket]

    def bucket_update(self, bucket: int) -> int:
        """A bucket's own update; those of all buckets are the whole one."""
        return self._update_ns[bucket]

    def local(self, operation: Operation) -> tuple[str | None, int]:
        """Any other operation of the rank's own: what the timeline calls it, if it shows it, and what it takes."""
        bucket = operation.bucket
        if operation.kind in ("accumulate", "release") and bucket is not None:
            if operation.kind == "release":
                self._released.add(bucket)
            return None, self._pack_ns[bucket]
        if operation.fragment is not None and operation.kind in self._fragment_ns:
            return operation.kind, self._fragment_ns[operation.kind][operation.fragment]
        return operation.kind, self._whole_ns.get(operation.kind, 0)


def holds_rank(operation: Operation) -> bool:
    """Whether a rank waits at once for a collective: for rank 0's buffers, which no update follows where buckets update on their own."""
    return operation.kind == "broadcast" and operation.payload == "buffers"


def moments_of(plan: Plan, table: LayerTable) -> list[tuple[BlockBegin | BucketReady, int]]:
    """The plan's moments, with the time from the start of the forward until each of them and all before it, in ns at X = 0.

    A bucket is ready with its last gradient. A block begins with its first layer in the forward, and with its last one in the backward;
    that of what lies in no other block, with the forward.
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
    """Shares by size; together they are the whole."""
    total = sum(sizes) or 1
    ends = [(2 * whole_ns * size + total) // (2 * total) for size in accumulate(sizes)]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
