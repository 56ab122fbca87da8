"""Plan: the static part of what a strategy decides, made once and the same on every rank."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fleetbench.digests import json_digest
from fleetbench.plan.events import BlockBegin, BucketReady
from fleetbench.plan.exchange import lay_out
from fleetbench.plan.fusion import Bucket, Cost, fuse
from fleetbench.plan.groups import Parts, hierarchy_of, world_of
from fleetbench.plan.layers import Gradient
from fleetbench.plan.operations import Operation, Operations, tupled
from fleetbench.plan.outer import Fragments, runs_of_layers
from fleetbench.plan.sharding import REST, Block, grouped_by_block, groups_of, lay_out_blocks
from fleetbench.strategy import DistributedStrategy


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Buckets in order of readiness and the operations of one exchange."""

    trainers: int
    buckets: tuple[Bucket, ...]
    exchange: Operations
    """Ids count from 0; a strategy shifts them to its own."""
    groups: tuple[tuple[str, Parts], ...]
    """Names of process groups with their parts; see ``fleetbench.plan.groups``."""
    queue_depth: int = 1
    """Operations that a communicator carries at once; see ``fleetbench.plan.groups``."""
    fragments: tuple[tuple[int, ...], ...] = ()
    """Buckets of each fragment, whose exchanges follow one another in ``exchange``; empty: all buckets are exchanged together."""
    num_state_slots: int = 0
    """Tensors that the optimizer keeps for each parameter, in the parameter's shape."""
    buffers_nbytes: int = 0
    """Batch-norm statistics and such, all together: averaged with local steps, else sent by rank 0 after each exchange; 0: neither."""

    blocks: tuple[Block, ...] = ()
    """Blocks of a sharded model, in the order of the forward; empty where every trainer has all of the model."""
    holds_scatters: bool = False
    """The backward waits for each block's scatter."""
    holds_gathers: bool = False
    """Compute waits for each gather from its begin."""

    @functools.cached_property
    def shard_ranks(self) -> int:
        """Trainers that share out one model; 1 where it is not sharded."""
        if not self.blocks:
            return 1
        return len(self.parts.get("shard", self.parts["world"])[0])

    @functools.cached_property
    def moments(self) -> tuple[BlockBegin | BucketReady, ...]:
        """The events between a step's begin and the end of its backward, in order."""
        waiting = [BlockBegin(block, "backward") for block in reversed(range(len(self.blocks)))]
        block_of = {block.bucket: number for number, block in enumerate(self.blocks)}
        found: list[BlockBegin | BucketReady] = [BlockBegin(block, "forward") for block in range(len(self.blocks))]
        for bucket in self.buckets:
            while waiting and waiting[0].block >= block_of[bucket.id]:
                found.append(waiting.pop(0))
            found.append(BucketReady(bucket.id))
        return tuple(found)

    @functools.cached_property
    def digest(self) -> str:
        """Sixteen hexadecimal digits over all of the plan; equal plans run the same operations."""
        return json_digest(self.to_dict())[:16]

    @functools.cached_property
    def of_bucket(self) -> dict[int, Operations]:
        """The exchange's operations by bucket."""
        found: dict[int, list[Operation]] = {}
        for operation in self.exchange:
            assert operation.bucket is not None
            found.setdefault(operation.bucket, []).append(operation)
        return {bucket: tuple(operations) for bucket, operations in found.items()}

    @functools.cached_property
    def of_fragment(self) -> tuple[Operations, ...]:
        """The exchange's operations by fragment."""
        return tuple(tuple(operation for operation in self.exchange if operation.bucket in own) for own in self.fragments)

    @functools.cached_property
    def leaves(self) -> tuple[int, ...]:
        """Relative ids of the operations that no other waits for."""
        waited = {other for operation in self.exchange for other in operation.after}
        return tuple(operation.id for operation in self.exchange if operation.id not in waited)

    @functools.cached_property
    def parts(self) -> dict[str, Parts]:
        """The groups by name."""
        return dict(self.groups)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for ``plan.json``."""
        return json.loads(json.dumps(dataclasses.asdict(self)))  # type: ignore[no-any-return]  # tuples become lists

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        """The plan that ``to_dict`` wrote."""
        fields = tupled(data)  # of older plans without ``queue_depth`` and ``fragments``
        buckets = tuple(Bucket(**bucket) for bucket in fields.pop("buckets"))
        exchange = tuple(Operation(**operation) for operation in fields.pop("exchange"))
        blocks = tuple(Block(**block) for block in fields.pop("blocks", ()))
        return cls(buckets=buckets, exchange=exchange, blocks=blocks, **fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a plan depends on besides strategy and gradients."""

    trainers: int
    trainers_per_node: int = 1
    queue_depth: int = 1
    """Operations that a communicator carries at once; see ``fleetbench.plan.groups``."""
    cost: Cost | None = None
    """Of an all-reduce over all trainers; ``fusion = "merged_gradient"`` and ``"optimal"`` need it."""
    num_state_slots: int = 0
    buffers_nbytes: int = 0
    """Bytes of all buffers, which rank 0 sends to the others."""
    averaged_nbytes: int | None = None
    """Bytes that an average of the buffers carries: masks stay, and short numbers are widened. None: ``buffers_nbytes``."""
    holds_scatters: bool = False
    """The backward of a sharded model waits for each block's scatter: ``fully_shard`` hands it to the host's thread where there are no
    streams, so with gloo; a gather is then handed over beside compute."""
    is_scripts: bool = False
    """A script calls ``fully_shard`` itself: its last block is gathered again too, and with gloo compute waits for each gather."""
    order: tuple[str, ...] = ()
    """Names of the gradients as the model has them, which its fragments follow; none: in the reverse order of readiness."""


def build_plan(strategy: DistributedStrategy, gradients: Sequence[Gradient], setting: Setting) -> Plan:
    """Plan the exchange of ``gradients``, given in order of readiness.

    A hierarchy over one node is no hierarchy, as in Fleet. Raises ``ConfigError`` where it does
    not divide the world. Local SGD carries parameters, so nothing there is sparse.
    """
    if strategy.is_local:
        gradients = [dataclasses.replace(one, sparse=False, touched=0, width=0) if one.sparse else one for one in gradients]
    if strategy.sharding:
        return _sharded(strategy, gradients, setting)
    rounds, inner = Fragments.of(strategy), strategy.hierarchical_inner_ranks or setting.trainers_per_node
    if not strategy.use_hierarchical_allreduce or setting.trainers in (1, inner):
        inner = 0
    parts = [gradients] if rounds is None else runs_of_layers(gradients, rounds.number, setting.order)
    position = {gradient.name: index for index, gradient in enumerate(gradients)}
    fused = [(index, bucket) for index, part in enumerate(parts) for bucket in fuse(part, strategy, setting.cost)]
    fused.sort(key=lambda item: max(position[name] for name in item[1].gradients))
    buckets = tuple(dataclasses.replace(bucket, id=number) for number, (_, bucket) in enumerate(fused))
    exchange: Operations = ()
    fragments = [[bucket for bucket, (own, _) in zip(buckets, fused, strict=True) if own == index] for index in range(len(parts))]
    for fragment in fragments:
        laid_out = lay_out(fragment, strategy, setting.trainers, inner)
        exchange += tuple(operation.shifted(len(exchange)) for operation in laid_out)
    groups = {"world": world_of(setting.trainers)} | (hierarchy_of(setting.trainers, inner) if inner else {})
    buffers_nbytes = setting.buffers_nbytes if strategy.broadcast_buffers else 0
    if strategy.is_local:
        averaged = setting.buffers_nbytes if setting.averaged_nbytes is None else setting.averaged_nbytes
        buffers_nbytes = averaged if strategy.averaging.buffers == "average" else 0
    return Plan(
        trainers=setting.trainers,
        buckets=buckets,
        exchange=exchange,
        groups=tuple(groups.items()),
        queue_depth=setting.queue_depth,
        fragments=() if rounds is None else tuple(tuple(bucket.id for bucket in fragment) for fragment in fragments),
        num_state_slots=setting.num_state_slots if strategy.averages_state else 0,
        buffers_nbytes=buffers_nbytes,
    )


def _sharded(strategy: DistributedStrategy, gradients: Sequence[Gradient], setting: Setting) -> Plan:
    """A bucket a block, that of what lies in none last; a communicator carries one collective at a time, whatever the backend could.

    Raises ``ConfigError`` for a degree that does not divide the trainers, and for what cannot be sharded.
    """
    position = {gradient.name: index for index, gradient in enumerate(gradients)}
    named = [
        (name, Bucket(id=0, gradients=tuple(each.name for each in own), numel=sum(each.numel for each in own), dtype=own[0].dtype))
        for name, own in grouped_by_block(gradients, strategy, setting.order).items()
    ]
    in_order = sorted(named, key=lambda one: (one[0] == REST, max(position[name] for name in one[1].gradients)))
    ids = {name: number for number, (name, _) in enumerate(in_order)}
    named = [(name, dataclasses.replace(bucket, id=ids[name])) for name, bucket in named]
    blocks, exchange = lay_out_blocks(named, strategy, setting.trainers, keeps_last=not setting.is_scripts)
    return Plan(
        trainers=setting.trainers,
        buckets=tuple(sorted((bucket for _, bucket in named), key=lambda bucket: bucket.id)),
        exchange=exchange,
        groups=tuple(groups_of(strategy.sharding_configs, setting.trainers).items()),
        queue_depth=1,
        buffers_nbytes=setting.buffers_nbytes if strategy.broadcast_buffers else 0,
        blocks=blocks,
        holds_scatters=setting.holds_scatters,
        holds_gathers=setting.holds_scatters and setting.is_scripts,
    )
