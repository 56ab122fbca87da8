"""Steps: the operations of one step, for any combination.

Accumulation determines whether the step ends an update, cadence whether trainers synchronise after it. The
plan's exchange has the operations of a bucket, and the scaler makes an update wait for an overflow check.
"""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from fleetbench.plan.build import Plan
from fleetbench.plan.combination import Combination
from fleetbench.plan.events import BackwardEnd, BucketReady, Event, StepBegin
from fleetbench.plan.exchange import is_plain
from fleetbench.plan.operations import Operation, Operations, Payload

SCALAR_NBYTES = 4
AGREEMENT_NBYTES = 24
"""Bytes of each trainer's progress, learning rate and loss, in FP64."""


@dataclass(frozen=True, slots=True)
class StepKind:
    """Properties that distinguish one step from another."""

    closes: bool
    """Whether the step ends an update."""
    merged: int
    """Number of steps whose gradients are in the current update so far, including this step."""
    meets: bool
    """Whether trainers with local steps average after the step."""
    asks_loss: bool
    """Whether trainers average their losses as well."""
    starts: int | None = None
    """Index of the fragment whose exchange starts after this step, if any."""
    merges: int | None = None
    """Index of the fragment that is merged after this step, if any."""
    flight: int | None = None
    """Id of the first operation of the merged fragment's exchange, relative to the step's first operation.
    None if the exchange starts after this step."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepOperations:
    """Operations of one step, by event. Ids count from 0 at the step's first operation.

    A strategy has one such object for each kind of step.
    """

    on_begin: Operations = ()
    """Operations at the start of the step."""
    on_forward: tuple[Operations, ...] = ()
    """Operations before each block's forward, by block; empty if the model is not sharded."""
    on_backward: tuple[Operations, ...] = ()
    """Operations before each block's backward, by block; empty if the model is not sharded."""
    on_bucket: tuple[Operations, ...]
    """Operations when each bucket is ready, by bucket."""
    on_backward_end: Operations
    """Operations at the end of the backward."""
    on_finite: Operations = ()
    """Operations after an observed ``found_inf`` of 0."""
    on_overflow: Operations = ()
    """Operations after an observed ``found_inf`` other than 0."""

    @property
    def flight(self) -> int:
        """Id of the operation after the update, the first of a fragment's exchange."""
        kinds = [operation.kind for operation in self.on_backward_end]
        return self.on_backward_end[0].id + kinds.index("update") + 1

    @property
    def num_operations(self) -> int:
        """Number of operations in a step in which nothing is observed."""
        in_compute = (*self.on_forward, *self.on_backward, *self.on_bucket)
        return len(self.on_begin) + sum(map(len, in_compute)) + len(self.on_backward_end)

    def told(self, plan: Plan, step: int) -> list[tuple[Event, Operations]]:
        """Return each event of the step with its operations, for a step in which nothing is observed."""
        found: list[tuple[Event, Operations]] = [(StepBegin(step), self.on_begin)]
        for moment in plan.moments:
            if isinstance(moment, BucketReady):
                found.append((moment, self.on_bucket[moment.bucket]))
            else:
                found.append((moment, (self.on_forward if moment.phase == "forward" else self.on_backward)[moment.block]))
        return [*found, (BackwardEnd(), self.on_backward_end)]


@dataclass(slots=True)
class _Builder:
    """Creates operations with consecutive ids, and remembers the new ids of the plan's exchange."""

    plan: Plan
    next_id: int = 0
    ids: dict[int, int] = field(default_factory=dict)
    scattered: int | None = None
    """Id of the last reduce-scatter of a sharded model's gradients."""

    def operation(self, kind: str, *, after: Iterable[int] = (), **what: object) -> Operation:
        operation = Operation(id=self.next_id, kind=kind, after=tuple(after), **what)  # type: ignore[arg-type]  # callers pass valid kinds
        self.next_id += 1
        return operation

    def small(self, payload: Payload, nbytes: int, after: Iterable[int]) -> Operations:
        """Return an all-reduce of ``nbytes`` bytes over all trainers, outside any bucket; for one trainer, none."""
        if self.plan.trainers == 1:
            return ()
        return (self.operation("all_reduce", payload=payload, nbytes=nbytes, after=after),)

    def carry(self, operations: Iterable[Operation], payload: Payload, after: tuple[int, ...] = (), factor: int = 1) -> Operations:
        """Return operations of the plan with new ids; those that depend on no other wait for ``after``."""
        carried = []
        for operation in operations:
            waits = tuple(self.ids[other] for other in operation.after) or after
            self.ids[operation.id] = self.next_id
            carried.append(
                dataclasses.replace(
                    operation,
                    id=self.next_id,
                    payload=payload if operation.payload in (None, "delta") else operation.payload,
                    nbytes=operation.nbytes * factor,
                    after=waits,
                )
            )
            self.next_id += 1
        return tuple(carried)

    @property
    def leaves(self) -> tuple[int, ...]:
        """Ids of the exchange's operations that no other waits for."""
        return tuple(self.ids[leaf] for leaf in self.plan.leaves if leaf in self.ids)


def operations_of(plan: Plan, what: Combination, step: StepKind) -> StepOperations:
    """Return the operations of a step."""
    build = _Builder(plan)
    begin = (build.operation("hold", payload="buffers"),) if what.holds_statistics and not step.closes else ()
    begun = _until_backward_end(what, step, build, begin)
    if not step.closes:
        return dataclasses.replace(begun, on_backward_end=(build.operation("skip", after=build.ids.values()),))
    end = _closing(what, build)
    waits = (end[-1].id,) if end else build.leaves
    if not what.scales:
        return dataclasses.replace(begun, on_backward_end=(*end, *_update(what, step, build, "update", waits)))
    if (what.is_local or what.sharding) and (asked := build.small("found_inf", SCALAR_NBYTES, waits)):
        end, waits = (*end, *asked), (asked[0].id,)
    finite = _update(what, step, dataclasses.replace(build, ids=dict(build.ids)), "update", waits)
    overflow = _update(what, step, build, "skip", waits)
    return dataclasses.replace(begun, on_backward_end=end, on_finite=finite, on_overflow=overflow)


@dataclass(slots=True)
class _Gates:
    """Gathers the blocks of a sharded model, each while the block before it computes.

    Stages 1 and 2 keep all parameters from an update's first forward to its last backward; stage 3 keeps
    those that it does not gather again.
    """

    build: _Builder
    what: Combination
    step: StepKind
    gathered: dict[int, int] = field(default_factory=dict)
    """Ids of running gathers, by block."""

    def before(self, block: int, phase: str) -> Operations:
        """Return the operations before a block: wait for its parameters, and start gathering the next block.

        Before the first block's forward, its own gather starts as well. If compute waits for every gather,
        only the block's own gather starts.
        """
        if self.build.plan.holds_gathers:
            own = self._gather(phase, block)
            return (*own, self.build.operation("gate", after=(own[0].id,))) if own else ()
        first = self._gather(phase, 0) if (block, phase) == (0, "forward") else ()
        after = self.gathered.pop(block, None)
        gate = () if after is None else (self.build.operation("gate", after=(after,)),)
        return (*first, *gate, *self._gather(phase, block + (1 if phase == "forward" else -1)))

    def _gather(self, phase: str, block: int) -> Operations:
        blocks, sharding, parts = self.build.plan.blocks, self.what.sharding, self.build.plan.parts
        assert sharding is not None
        if block not in range(len(blocks)) or self.build.plan.shard_ranks == 1:
            return ()
        own = blocks[block]
        is_again = phase == "backward"
        if not (own.regathers if is_again else sharding.stage == 3 or self.step.merged == 1):
            return ()
        group = "reshard" if is_again and "reshard" in parts else "shard" if "shard" in parts else "world"
        gather = self.build.operation("all_gather", payload="parameters", bucket=own.bucket, nbytes=own.nbytes, group=group)
        self.gathered[block] = gather.id
        return (gather,)


def _until_backward_end(what: Combination, step: StepKind, build: _Builder, begin: Operations) -> StepOperations:
    """Return the operations until the end of the backward, with ids in the order of the plan's moments."""
    gates = _Gates(build, what, step) if build.plan.blocks else None
    in_compute: dict[str, dict[int, Operations]] = {"forward": {}, "backward": {}, "bucket": {}}
    for moment in build.plan.moments:
        if isinstance(moment, BucketReady):
            in_compute["bucket"][moment.bucket] = _bucket(what, step, build, moment.bucket)
        else:
            assert gates is not None
            in_compute[moment.phase][moment.block] = gates.before(moment.block, moment.phase)
    forward, backward, bucket = (tuple(own[number] for number in sorted(own)) for own in in_compute.values())
    return StepOperations(on_begin=begin, on_forward=forward, on_backward=backward, on_bucket=bucket, on_backward_end=())


def average_of(plan: Plan, what: Combination) -> Operations:
    """Return the operations that average parameters between steps."""
    return _average(what, _Builder(plan), (), asks_loss=False)


def remainder_of(plan: Plan, what: Combination, step: StepKind) -> Operations:
    """Return the operations of an update between steps, with the gradients summed so far."""
    build = _Builder(plan)
    operations: list[Operation] = []
    for bucket in plan.buckets:
        operations += _release(what, step, build, bucket.id)
    end = _closing(what, build)
    waits = (end[-1].id,) if end else build.leaves
    return (*operations, *end, *_update(what, step, build, "update", waits))


def _closing(what: Combination, build: _Builder) -> Operations:
    """Return the operations between the last bucket and the update: flags of unused parameters, and buffers."""
    operations = _unused(what, build)
    if build.plan.buffers_nbytes and build.plan.trainers > 1 and not what.is_local:
        after = (operations[-1].id,) if operations else build.leaves
        operations += (build.operation("broadcast", payload="buffers", nbytes=build.plan.buffers_nbytes, after=after),)
    return operations


def _bucket(what: Combination, step: StepKind, build: _Builder, bucket: int) -> Operations:
    if what.sharding is not None and what.sharding.stage > 1:  # shards are summed in every step, and all-reduced once per update
        chain = [one for one in build.plan.chain(bucket, "gradient") if step.closes or one.kind == "reduce_scatter"]
        return _scattered(build, lambda: build.carry(chain, "gradient"))
    sums = (build.operation("accumulate", bucket=bucket),) if what.merges else ()
    if not step.closes:
        return sums
    return (*sums, *_scattered(build, lambda: _release(what, step, build, bucket)))


def _scattered(build: _Builder, carry: Callable[[], Operations]) -> Operations:
    """Return the operations that carry a bucket, with the gates of a sharded model's backward.

    The backward waits for this bucket's scatter (``holds_scatters``) or for the previous one, because
    ``fully_shard`` keeps one block's gradients in flight (``reduce_scatter_max_input_buffers``).
    """
    if not build.plan.blocks:
        return carry()
    if build.plan.holds_scatters:
        carried = carry()
        return (*carried, build.operation("gate", after=(carried[-1].id,))) if carried else ()
    gate = () if build.scattered is None else (build.operation("gate", after=(build.scattered,)),)
    carried = carry()
    build.scattered = next((one.id for one in carried if one.kind == "reduce_scatter"), None)
    return (*gate, *carried)


def _release(what: Combination, step: StepKind, build: _Builder, bucket: int) -> Operations:
    """Return a bucket's operations from its complete gradient to its update."""
    divisor = step.merged if what.averages_gradient else 1
    released = (build.operation("release", bucket=bucket, divisor=divisor),) if what.merges else ()
    if not what.exchanges_gradients:
        return released
    carried = build.carry(build.plan.chain(bucket, "gradient"), "gradient")
    if released and carried:
        carried = (dataclasses.replace(carried[0], after=(*carried[0].after, released[0].id)), *carried[1:])
    updated = (build.operation("update", bucket=bucket, after=(carried[-1].id,) if carried else ()),) if what.updates_by_bucket else ()
    return (*released, *carried, *updated)


def _update(what: Combination, step: StepKind, build: _Builder, kind: str, after: Iterable[int]) -> Operations:
    if what.updates_by_bucket:
        return ()
    update = build.operation(kind, after=after)
    if step.starts is not None:
        started = _set_out(build, step.starts, (update.id,))
        if step.merges is None:
            return (update, *started)
        return (update, *started, *_land(what, build, step.merges, build.leaves, mixes=True))
    if step.merges is not None:
        assert step.flight is not None
        return (update, *_land(what, build, step.merges, leaves_of(build.plan, step.merges, step.flight), mixes=True))
    if not step.meets:
        return (update,)
    return (update, *_average(what, build, (update.id,), asks_loss=step.asks_loss))


def _average(what: Combination, build: _Builder, after: tuple[int, ...], *, asks_loss: bool) -> Operations:
    """Return the operations that average parameters, then everything else one by one, and then merge."""
    plan = build.plan
    operations = [*(() if what.outer is None else _differ(build, None, after)), *_exchange(build, after)]
    after = build.leaves or after
    if what.averages_state and plan.num_state_slots:
        operations += build.carry(plan.averaging, "state", after, plan.num_state_slots)
        after = build.leaves or after
    if what.averages_buffers and plan.buffers_nbytes:
        operations += build.small("buffers", plan.buffers_nbytes, after)
        after = (operations[-1].id,) if plan.trainers > 1 else after
    if what.adaptive is not None and (asks_loss or plan.trainers > 1):  # a single trainer has the requested loss itself
        payload: Payload = "loss" if asks_loss else "agreement"
        operations.append(build.operation("all_gather", payload=payload, nbytes=AGREEMENT_NBYTES * plan.trainers, after=after))
        after = (operations[-1].id,)
    if what.outer is not None:
        operations.append(build.operation("outer", after=after))
        after = (operations[-1].id,)
    merge = build.operation("merge", after=after)
    reset = (build.operation("reset", payload="state", after=(merge.id,)),) if what.resets_state else ()
    return (*operations, merge, *reset)


def _differ(build: _Builder, fragment: int | None, after: tuple[int, ...]) -> Operations:
    """Return the operation that computes the difference if there is only one trainer, else none."""
    return (build.operation("difference", payload="delta", fragment=fragment, after=after),) if build.plan.trainers == 1 else ()


def _exchange(build: _Builder, after: tuple[int, ...]) -> Operations:
    """Return the operations that exchange the whole model, one fragment after the other."""
    operations: list[Operation] = []
    for part in build.plan.of_fragment or (build.plan.averaging,):
        operations += build.carry(part, "delta", after)
        after = tuple(build.ids[operation.id] for operation in part if operation.id in build.plan.leaves) or after
    return tuple(operations)


def _set_out(build: _Builder, fragment: int, after: tuple[int, ...]) -> Operations:
    """Return the operations that exchange a fragment with its current parameters."""
    build.ids.clear()
    return (*_differ(build, fragment, after), *build.carry(build.plan.of_fragment[fragment], "delta", after))


def _land(what: Combination, build: _Builder, fragment: int, after: tuple[int, ...], *, mixes: bool) -> Operations:
    """Return the operations that merge a fragment whose exchange ends with the operations ``after``."""
    assert what.fragments is not None
    stepped = () if what.outer is None else (build.operation("outer", fragment=fragment, after=after),)
    payload: Payload | None = "mixture" if mixes and what.fragments.mixing else None
    after = (stepped[0].id,) if stepped else after
    return (*stepped, build.operation("merge", payload=payload, fragment=fragment, after=after))


def leaves_of(plan: Plan, fragment: int, flight: int) -> tuple[int, ...]:
    """Return the ids of the last operations of a fragment's exchange, whose first operation is ``flight``."""
    exchange = plan.of_fragment[fragment]
    return tuple(flight + place for place, operation in enumerate(exchange) if operation.id in plan.leaves)


def agreement_of(plan: Plan, what: Combination, *, landing: int | None, flight: int | None, agreed: int | None) -> Operations:
    """Return the operations by which all trainers agree between steps.

    They merge the fragment ``landing``, whose exchange is running, then exchange and merge all others except
    ``agreed``.
    """
    build, operations = _Builder(plan), list[Operation]()
    if landing is not None and flight is not None:
        operations += _land(what, build, landing, leaves_of(plan, landing, flight), mixes=False)
    for fragment in range(len(plan.fragments)):
        if fragment not in (landing, agreed):
            operations += _set_out(build, fragment, (operations[-1].id,) if operations else ())
            operations += _land(what, build, fragment, build.leaves, mixes=False)
    return tuple(operations)


def _unused(what: Combination, build: _Builder) -> Operations:
    """Return the all-reduce of one flag per parameter, if gradients are averaged and some may be missing."""
    if not what.finds_unused or what.is_local:
        return ()
    return build.small("unused", sum(len(bucket.gradients) for bucket in build.plan.buckets), build.leaves)


def exchanges_plainly(plan: Plan, what: Combination) -> bool:
    """Whether the backward exchanges every bucket by one all-reduce over all ranks, in the gradients' own type.

    Each all-reduce waits only for its turn on its communicator, and nothing else depends on when a bucket is
    ready.
    """
    if what.is_local or what.merges or what.updates_by_bucket or what.is_sequential or what.finds_unused:
        return False
    chains = [(plan.of_bucket.get(bucket.id, ()), bucket) for bucket in plan.buckets]
    is_free = len({one.communicator for one in plan.exchange}) == 1 or not any(one.after for one in plan.exchange)
    return is_free and all(is_plain(chain, own.dtype) and chain[0].group == "world" and not own.sparse for chain, own in chains)
