"""Plan: the static part of a strategy's decisions, made once and equal on every rank."""

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
    """Number of trainers."""
    buckets: tuple[Bucket, ...]
    """Buckets in order of readiness."""
    exchange: Operations
    """Operations of one exchange. Ids count from 0; a strategy shifts them."""
    groups: tuple[tuple[str, Parts], ...]
    """Names of process groups with their parts; see ``fleetbench.plan.groups``."""
    queue_depth: int = 1
    """Number of operations that a communicator carries at once; see ``fleetbench.plan.groups``."""
    fragments: tuple[tuple[int, ...], ...] = ()
    """Buckets of each fragment, whose exchanges follow one another in ``exchange``; empty if all buckets are
    exchanged together."""
    num_state_slots: int = 0
    """Number of tensors that the optimizer keeps for each parameter, in the parameter's shape."""
    buffers_nbytes: int = 0
    """Bytes of all buffers, such as batch-norm statistics. With local steps they are averaged, else sent by
    rank 0 after each exchange; 0: neither."""

    blocks: tuple[Block, ...] = ()
    """Blocks of a sharded model in forward order; empty if every trainer has the whole model."""
    holds_scatters: bool = False
    """Whether the backward waits for each block's scatter."""
    holds_gathers: bool = False
    """Whether compute waits for each gather as soon as it starts."""

    @functools.cached_property
    def shard_ranks(self) -> int:
        """Number of trainers that share one model; 1 if it is not sharded."""
        if not self.blocks:
            return 1
        return len(self.parts.get("shard", self.parts["world"])[0])

    @functools.cached_property
    def moments(self) -> tuple[BlockBegin | BucketReady, ...]:
        """Events between the start of a step and the end of its backward, in order."""
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
        """Sixteen hexadecimal digits over the whole plan; equal plans run the same operations."""
        return json_digest(self.to_dict())[:16]

    @functools.cached_property
    def of_bucket(self) -> dict[int, Operations]:
        """Operations of the exchange by bucket."""
        found: dict[int, list[Operation]] = {}
        for operation in self.exchange:
            assert operation.bucket is not None
            found.setdefault(operation.bucket, []).append(operation)
        return {bucket: tuple(operations) for bucket, operations in found.items()}

    @functools.cached_property
    def of_fragment(self) -> tuple[Operations, ...]:
        """Operations of the exchange by fragment."""
        return tuple(tuple(operation for operation in self.exchange if operation.bucket in own) for own in self.fragments)

    @functools.cached_property
    def leaves(self) -> tuple[int, ...]:
        """Relative ids of the operations that no other waits for."""
        waited = {other for operation in self.exchange for other in operation.after}
        return tuple(operation.id for operation in self.exchange if operation.id not in waited)

    @functools.cached_property
    def parts(self) -> dict[str, Parts]:
        """Groups by name."""
        return dict(self.groups)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for ``plan.json``."""
        return json.loads(json.dumps(dataclasses.asdict(self)))  # type: ignore[no-any-return]  # tuples become lists

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        """Read the plan that ``to_dict`` wrote."""
        fields = tupled(data)  # of older plans without ``queue_depth`` and ``fragments``
        buckets = tuple(Bucket(**bucket) for bucket in fields.pop("buckets"))
        exchange = tuple(Operation(**operation) for operation in fields.pop("exchange"))
        blocks = tuple(Block(**block) for block in fields.pop("blocks", ()))
        return cls(buckets=buckets, exchange=exchange, blocks=blocks, **fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Inputs of a plan besides strategy and gradients."""

    trainers: int
    """Number of trainers."""
    trainers_per_node: int = 1
    """Number of trainers per node."""
    queue_depth: int = 1
    """Number of operations that a communicator carries at once; see ``fleetbench.plan.groups``."""
    cost: Cost | None = None
    """Cost of an all-reduce over all trainers; ``fusion = "merged_gradient"`` and ``"optimal"`` need it."""
    num_state_slots: int = 0
    """Number of tensors that the optimizer keeps for each parameter."""
    buffers_nbytes: int = 0
    """Bytes of all buffers, which rank 0 sends to the others."""
    averaged_nbytes: int | None = None
    """Bytes that an average of the buffers carries: masks are not averaged, and short types are widened.
    None: ``buffers_nbytes``."""
    holds_scatters: bool = False
    """Whether the backward of a sharded model waits for each block's scatter. ``fully_shard`` does so on the
    host's thread without streams, so with gloo; gathers then still overlap compute."""
    is_scripts: bool = False
    """Whether a script calls ``fully_shard`` itself. Its last block is then gathered again too, and with gloo
    compute waits for each gather."""
    order: tuple[str, ...] = ()
    """Names of the gradients in the model's order, which fragments follow; none: the reverse order of
    readiness."""


def build_plan(strategy: DistributedStrategy, gradients: Sequence[Gradient], setting: Setting) -> Plan:
    """Plan the exchange of ``gradients``, given in order of readiness.

    A hierarchy over one node is ignored, as in Fleet. Raises ``ConfigError`` if it does not divide the world.
    Local SGD exchanges parameters, so no gradient is sparse there.
    """
    if strategy.is_local:
        gradients = [dataclasses.replace(gradient, sparse=False, touched=0) if gradient.sparse else gradient for gradient in gradients]
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
    """Plan a bucket per block, with the parameters outside of blocks last.

    A communicator carries one collective at a time, whatever the backend could carry. Raises ``ConfigError``
    for a degree that does not divide the trainers, and for what cannot be sharded.
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
