"""Sharding: blocks, shard groups and replicas, and how blocks are gathered and scattered (ZeRO, FSDP, HSDP).

Of N trainers, D consecutive ones are a shard group, and trainers at the same place in their groups are
replicas of each other. A block's gradients are reduce-scattered within the shard group when its backward
ends, and each shard is all-reduced over its replicas; a trainer updates its shard. Under Local SGD a shard
group is a worker: it updates alone, and each shard is averaged over its replicas at the end of a round. A
block's parameters are gathered within the shard group before its forward, and in stage 3 again before its
backward, unless they were kept. While one block computes, the next one is gathered
(``torch.distributed.fsdp.fully_shard`` with its prefetch of one block).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fleetbench.errors import ConfigError
from fleetbench.plan.fusion import Bucket
from fleetbench.plan.groups import Parts, world_of
from fleetbench.plan.layers import DTYPE_BYTES, Gradient
from fleetbench.plan.operations import Collective, Operation, Operations, Payload
from fleetbench.sharding_configs import ShardingConfigs
from fleetbench.strategy import DistributedStrategy

REST = ""
"""Name of the block of all parameters outside of other blocks. It is gathered when the forward begins, and is
not freed."""
_FIELD = "strategy.sharding_configs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Parameters that are gathered together, and whose gradients are one bucket."""

    name: str
    """Name of the block's submodule; ``REST`` for the parameters in no other block."""
    bucket: int
    """Index of the bucket of the block's gradients."""
    nbytes: int
    """Bytes of the gathered parameters, padded so that all shards have the same size."""
    regathers: bool
    """Whether the parameters are gathered again before the block's backward."""


def block_of(name: str, given: Sequence[str] = ()) -> str:
    """Return the name of the block of the parameter ``name``: the smallest one in ``given`` that contains it.

    Without ``given``, it is the parameter's module in a list (``layers.3``), else its first module whose name
    ends in a number (``block3``), else ``REST``.
    """
    if given:
        inside = [block for block in given if name.startswith(f"{block}.")]
        return max(inside, key=len, default=REST)
    parts = name.split(".")[:-1]
    numbered = [index for index, part in enumerate(parts) if part.isdecimal()] or [
        index for index, part in enumerate(parts) if part[-1:].isdecimal()
    ]
    return ".".join(parts[: numbered[0] + 1]) if numbered else REST


def blocks_of(names: Iterable[str], given: Sequence[str] = ()) -> dict[str, list[str]]:
    """Return the names of each block's parameters, with blocks in forward order and ``REST`` first.

    ``names`` are in the model's order. Raises ``ConfigError`` if a block of ``given`` has no parameters of
    its own.
    """
    found: dict[str, list[str]] = {REST: [], **{name: [] for name in given}}
    for name in names:
        found.setdefault(block_of(name, given), []).append(name)
    empty = [name for name in given if not found[name]]
    if empty:
        hint = "name submodules as model.named_modules() does, each with parameters that are in no smaller one"
        raise ConfigError("has no parameters of its own", f"{_FIELD}.blocks", repr(empty[0]), hint)
    return {name: own for name, own in found.items() if own}


def degree_of(configs: ShardingConfigs, trainers: int) -> int:
    """Return the number of trainers per shard group.

    Raises ``ConfigError`` if it does not divide the number of trainers, or if ``reshard_after_forward`` does
    not divide it.
    """
    degree = configs.sharding_degree or trainers
    _refuse_uneven(degree, trainers, "sharding_degree", "trainers")
    if type(configs.reshard_after_forward) is int:
        _refuse_uneven(configs.reshard_after_forward, degree, "reshard_after_forward", "trainers of a shard group", least=2)
    return degree


def _refuse_uneven(number: int, whole: int, field: str, what: str, least: int = 1) -> None:
    if whole % number:
        divisors = ", ".join(str(each) for each in range(least, whole + 1) if whole % each == 0)
        hint = f"one of {divisors}" if whole >= least else "set true or false"
        raise ConfigError(f"does not divide the {whole} {what}", f"{_FIELD}.{field}", repr(number), hint)


def gathered_bytes(configs: ShardingConfigs, dtype: str) -> int:
    """Return the bytes of a gathered element whose parameter has type ``dtype``."""
    return DTYPE_BYTES[dtype] if configs.param_dtype == "own" else min(DTYPE_BYTES[dtype], DTYPE_BYTES[configs.param_dtype])


def groups_of(configs: ShardingConfigs, trainers: int) -> dict[str, Parts]:
    """Return the group ``world``, and ``shard``, ``replica`` and ``reshard`` if they differ from larger groups.

    Raises ``ConfigError`` as ``degree_of`` does.
    """
    degree = degree_of(configs, trainers)
    found = {"world": world_of(trainers)}
    if degree < trainers:
        found["shard"] = _neighbours(trainers, degree)
    if 1 < degree < trainers:
        found["replica"] = tuple(tuple(range(place, trainers, degree)) for place in range(degree))
    if type(configs.reshard_after_forward) is int and configs.reshard_after_forward < degree:
        found["reshard"] = _neighbours(trainers, configs.reshard_after_forward)
    return found


def _neighbours(trainers: int, number: int) -> Parts:
    return tuple(tuple(range(first, first + number)) for first in range(0, trainers, number))


def grouped_by_block(gradients: Sequence[Gradient], strategy: DistributedStrategy, order: Sequence[str]) -> dict[str, list[Gradient]]:
    """Return the gradients of each block in order of readiness, with blocks in forward order.

    ``order`` lists the names of the gradients in the model's order; if it is empty, the reverse order of
    ``gradients`` is used. Raises ``ConfigError`` for a sparse gradient, or a block with several dtypes.
    """
    refuse_sparse(gradients, "sharding is of dense ones")
    names = list(order or [gradient.name for gradient in reversed(gradients)])
    found: dict[str, list[Gradient]] = {name: [] for name in blocks_of(names, strategy.sharding_configs.blocks)}
    for gradient in gradients:
        found[block_of(gradient.name, strategy.sharding_configs.blocks)].append(gradient)
    for name, own in found.items():
        kinds = {gradient.dtype for gradient in own}
        if len(kinds) > 1:
            where = f"block {name}" if name else "the parameters outside of blocks"
            hint = "give all parameters of a block one type, or name smaller blocks in sharding_configs.blocks"
            raise ConfigError("has parameters of several types, and is gathered as a whole", where, ", ".join(sorted(kinds)), hint)
    return {name: own for name, own in found.items() if own}


def refuse_sparse(gradients: Sequence[Gradient], why: str) -> None:
    """Raise ``ConfigError`` for a sparse gradient, with the reason."""
    sparse = next((gradient.name for gradient in gradients if gradient.sparse), None)
    if sparse is not None:
        hint = f"make the embedding dense (sparse=False): {why}"
        raise ConfigError(f"has a sparse gradient, and {why}", f"parameter {sparse}", hint=hint)


def lay_out_blocks(
    named: Sequence[tuple[str, Bucket]], strategy: DistributedStrategy, trainers: int, *, keeps_last: bool = True
) -> tuple[tuple[Block, ...], Operations]:
    """Return the blocks in forward order, and the operations that exchange their buckets, in bucket order.

    With ``keeps_last``, the last block is kept from its forward to its backward, which follows at once.
    Raises ``ConfigError`` as ``degree_of`` does, and for local steps of a single shard group.
    """
    configs, degree = strategy.sharding_configs, degree_of(strategy.sharding_configs, trainers)
    if strategy.is_local and degree == trainers:
        what, hint = "makes all trainers one worker, which has no other to average with", "give a worker fewer than all trainers"
        raise ConfigError(what, f"{_FIELD}.sharding_degree", str(configs.sharding_degree), hint)
    shard = "world" if degree == trainers else "shard"
    wire = "float16" if strategy.fp16_allreduce else "bfloat16" if strategy.bf16_allreduce else None
    operations: list[Operation] = []
    for _, bucket in sorted(named, key=lambda one: one[1].id):
        dtype = bucket.dtype if wire is None or DTYPE_BYTES[wire] >= DTYPE_BYTES[bucket.dtype] else wire
        part, after = -(-bucket.numel // degree), tuple[int, ...]()
        chain: list[tuple[Collective, str, int, Payload | None]] = []
        if degree > 1:
            chain.append(("reduce_scatter", shard, part * degree, None))
        if degree < trainers:
            chain.append(("all_reduce", "replica" if degree > 1 else "world", part, "delta" if strategy.is_local else None))
        for kind, group, numel, payload in chain:
            nbytes, number = numel * DTYPE_BYTES[dtype], len(operations)
            carried = Operation(
                id=number,
                kind=kind,
                payload=payload,
                group=group,
                nbytes=nbytes,
                wire_dtype=dtype,
                bucket=bucket.id,
                after=() if payload else after,
            )
            operations.append(carried)
            after = (number,)
    again = configs.stage == 3 and configs.reshard_after_forward is not False and degree > 1
    last = len(named) - 1
    blocks = tuple(
        Block(
            name=name,
            bucket=bucket.id,
            nbytes=-(-bucket.numel // degree) * degree * gathered_bytes(configs, bucket.dtype),
            regathers=again and name != REST and not (keeps_last and place == last),
        )
        for place, (name, bucket) in enumerate(named)
    )
    return blocks, tuple(operations)
