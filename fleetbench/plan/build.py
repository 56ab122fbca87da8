"""Plan: the static part of a strategy's decisions, made once and equal on every rank."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fleetbench.digests import json_digest
from fleetbench.exclusions import check_workers
from fleetbench.plan.events import BlockBegin, BucketReady
from fleetbench.plan.exchange import lay_out
from fleetbench.plan.fusion import Bucket, Cost, fuse
from fleetbench.plan.groups import Parts, hierarchy_of, world_of
from fleetbench.plan.layers import Gradient
from fleetbench.plan.operations import Operation, Operations, tupled
from fleetbench.plan.outer import Fragments, runs_of_layers
from fleetbench.plan.sharding import REST, Block, grouped_by_block, groups_of, lay_out_blocks, refuse_sparse
from fleetbench.strategy import DistributedStrategy


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Static decisions of a strategy: its buckets, the operations of one exchange, and the process groups."""

    trainers: int
    """Number of trainers."""
    buckets: tuple[Bucket, ...]
    """Buckets in order of readiness."""
    exchange: Operations
    """Operations that exchange all buckets once. Their ids count from 0; each exchange in training gets new
    ids."""
    groups: tuple[tuple[str, Parts], ...]
    """Name and parts of each process group; see ``fleetbench.plan.groups``."""
    queue_depth: int = 1
    """Number of operations that a communicator carries at once; see ``fleetbench.plan.groups``."""
    fragments: tuple[tuple[int, ...], ...] = ()
    """Indices of the buckets of each fragment. Fragments follow one another in ``exchange``. Empty if all
    buckets are exchanged together."""
    num_state_slots: int = 0
    """Number of optimizer state tensors of each parameter's shape that trainers average; 0 if they average
    none."""
    buffers_nbytes: int = 0
    """Bytes of the exchanged buffers, such as batch-norm statistics. Trainers with local steps average them;
    otherwise rank 0 sends them in each update. 0 if neither happens."""

    blocks: tuple[Block, ...] = ()
    """Blocks of a sharded model in forward order; empty if every trainer has the whole model."""
    holds_scatters: bool = False
    """Whether the backward waits for each block's scatter."""
    holds_gathers: bool = False
    """Whether compute waits for each gather right after starting it."""

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
        """Digest of the whole plan, 16 hexadecimal digits; plans with equal digests run the same operations."""
        return json_digest(self.to_dict())[:16]

    @functools.cached_property
    def of_bucket(self) -> dict[int, Operations]:
        """Operations that exchange each bucket, by the bucket's index."""
        found: dict[int, list[Operation]] = {}
        for operation in self.exchange:
            assert operation.bucket is not None
            found.setdefault(operation.bucket, []).append(operation)
        return {bucket: tuple(operations) for bucket, operations in found.items()}

    def chain(self, bucket: int, payload: str) -> Operations:
        """Return the operations that carry a bucket's ``payload``: its gradient, or what trainers average."""
        own = self.of_bucket.get(bucket, ())
        apart = tuple(operation for operation in own if operation.payload == "delta")
        return (apart or own) if payload in ("delta", "state") else tuple(operation for operation in own if operation.payload != "delta")

    @functools.cached_property
    def averaging(self) -> Operations:
        """Operations of ``exchange`` that average parameters: those of ``delta``, or all if no others are told apart."""
        return tuple(operation for operation in self.exchange if operation.payload == "delta") or self.exchange

    @functools.cached_property
    def of_fragment(self) -> tuple[Operations, ...]:
        """Operations that exchange each fragment, by the fragment's index."""
        return tuple(tuple(operation for operation in self.averaging if operation.bucket in own) for own in self.fragments)

    def num_summed(self, chain: Operations) -> int:
        """Return the number of values of which ``chain`` gives the sum: that of the ranks whose values differ."""
        sums = [operation.group for operation in chain if operation.kind in ("all_reduce", "reduce", "reduce_scatter")]
        return math.prod(len(self.parts[group][0]) for group in sums)

    @functools.cached_property
    def leaves(self) -> tuple[int, ...]:
        """Ids in ``exchange`` of the operations that no other operation waits for."""
        waited = {other for operation in self.exchange for other in operation.after}
        return tuple(operation.id for operation in self.exchange if operation.id not in waited)

    @functools.cached_property
    def parts(self) -> dict[str, Parts]:
        """Parts of each process group, by the group's name."""
        return dict(self.groups)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data, for ``plan.json``."""
        return json.loads(json.dumps(dataclasses.asdict(self)))  # type: ignore[no-any-return]  # tuples become lists

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        """Read the plan that ``to_dict`` wrote."""
        fields = tupled(data)  # older plans lack ``queue_depth`` and ``fragments``
        buckets = tuple(Bucket(**bucket) for bucket in fields.pop("buckets"))
        exchange = tuple(Operation(**operation) for operation in fields.pop("exchange"))
        blocks = tuple(Block(**block) for block in fields.pop("blocks", ()))
        return cls(buckets=buckets, exchange=exchange, blocks=blocks, **fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Inputs of a plan in addition to the strategy and the gradients."""

    trainers: int
    """Number of trainers."""
    trainers_per_node: int = 1
    """Number of trainers per node."""
    queue_depth: int = 1
    """Number of operations that a communicator carries at once; see ``fleetbench.plan.groups``."""
    cost: Cost | None = None
    """Cost of an all-reduce over all trainers, which ``fusion = "merged_gradient"`` and ``"optimal"`` need;
    None if unknown."""
    num_state_slots: int = 0
    """Number of optimizer state tensors per parameter that trainers may average."""
    buffers_nbytes: int = 0
    """Bytes of all buffers, which rank 0 sends to the other trainers."""
    averaged_nbytes: int | None = None
    """Bytes sent to average the buffers: masks are not averaged, and short types are widened. None if equal
    to ``buffers_nbytes``."""
    holds_scatters: bool = False
    """Whether the backward of a sharded model waits for each block's scatter. With gloo it does, because
    ``fully_shard`` then has no streams and waits on the host's thread; gathers still overlap compute."""
    is_scripts: bool = False
    """Whether a script calls ``fully_shard`` itself. Its last block is then gathered again too, and with gloo
    compute waits for each gather."""
    order: tuple[str, ...] = ()
    """Names of the gradients in the model's order, which fragments follow. If empty, the reverse order of
    readiness."""


def build_plan(strategy: DistributedStrategy, gradients: Sequence[Gradient], setting: Setting) -> Plan:
    """Plan the exchange of ``gradients``, given in order of readiness.

    A hierarchy within a single node is ignored, as in Fleet. Under Local SGD no gradient counts as sparse,
    because trainers exchange parameters. Raises ``ConfigError`` if the hierarchy or the workers do not divide the
    trainers, and for sparse gradients within workers.
    """
    check_workers(setting.trainers, strategy.worker_trainers)
    if strategy.is_local:
        if strategy.worker_trainers > 1:
            refuse_sparse(gradients, "workers of several trainers exchange dense ones")
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
    workers = strategy.worker_trainers > 1
    exchange = lay_out(buckets, strategy, setting.trainers, inner, within=True) if workers else ()
    fragments = [[bucket for bucket, (own, _) in zip(buckets, fused, strict=True) if own == index] for index in range(len(parts))]
    for fragment in fragments:
        laid_out = lay_out(fragment, strategy, setting.trainers, inner)
        exchange += tuple(operation.shifted(len(exchange)) for operation in laid_out)
    groups = {"world": world_of(setting.trainers)} | (hierarchy_of(setting.trainers, inner) if inner else {})
    if workers:
        apart = hierarchy_of(setting.trainers, strategy.worker_trainers)
        groups |= {"inner": apart["inner"], "outer": apart["outer"]}
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
    """Plan one bucket per block; the bucket of the parameters outside of blocks is the last.

    A communicator carries one collective at a time, even if the backend could carry more. Raises
    ``ConfigError`` for a degree that does not divide the trainers, and for gradients that cannot be sharded.
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
