"""Memory of one trainer under a strategy, computed from that of a trainer with the whole model."""

from collections.abc import Mapping, Sequence

from fleetbench.measurements import Memory
from fleetbench.plan.build import Plan
from fleetbench.plan.combination import Combination
from fleetbench.plan.layers import DTYPE_BYTES
from fleetbench.plan.sharding import gathered_bytes


def trainer_bytes(memory: Memory, plan: Plan, what: Combination) -> dict[str, int]:
    """Return the bytes of each kind of content on the trainer that uses most; their sum is its peak.

    ``other`` is the part of the measured peak that no content explains. A trainer in a shard group of D has a
    D-th of the optimizer's state, of the parameters and of the gradients; only sums of stage 1 over several
    steps are whole. ``gathered`` are parameters in addition to the trainer's shard: all of them or, in stage
    3 with resharding, those that are never freed and those of two blocks, the current and the next one. The
    gradients of two blocks, the current one and the one before it, are whole until they are scattered. This
    is how ``torch.distributed.fsdp.fully_shard`` frees them. Local steps keep copies of the parameters.
    """
    parts = {"parameters": memory.parameters, "gradients": memory.gradients, "optimizer state": memory.optimizer_state}
    found: dict[str, int] = {**parts}
    degree, sharding = plan.shard_ranks, what.sharding
    if sharding is not None and degree > 1:
        dtypes = [plan.buckets[block.bucket].dtype for block in plan.blocks]
        parts_of_own = [gathered_bytes(sharding, dtype) / DTYPE_BYTES[dtype] for dtype in dtypes]
        own = [block.nbytes / part for block, part in zip(plan.blocks, parts_of_own, strict=True)]
        # frozen parameters have no gradients, but are gathered
        whole = [round(nbytes * memory.parameters / max(sum(own), 1)) for nbytes in own]
        gathered = [round(size * part) for size, part in zip(whole, parts_of_own, strict=True)]
        freed = [size for size, block in zip(gathered, plan.blocks, strict=True) if block.regathers]
        stays = [size for size, block in zip(gathered, plan.blocks, strict=True) if not block.regathers]
        found["optimizer state"], found["parameters"] = (-(-size // degree) for size in (memory.optimizer_state, memory.parameters))
        if sharding.stage > 1 or not what.merges:
            found["gradients"] = -(-memory.gradients // degree) + _largest(whole, 2) * memory.gradients // max(memory.parameters, 1)
        spread = sharding.reshard_after_forward if "reshard" in plan.parts else 0  # number of ranks over which freed parameters are spread
        found["gathered"] = sum(stays) + _largest(freed, 2)
        if spread:
            found["gathered"] += (sum(freed) - _largest(freed, 2)) // spread
    if what.num_copies:
        found["copies of local steps"] = what.num_copies * found["parameters"]
    return {**found, **_rest(memory, parts)}


def _rest(memory: Memory, parts: Mapping[str, int]) -> dict[str, int]:
    """Return bytes that sharding does not divide: activations, and the unexplained rest of the peak."""
    other = memory.peak - sum(parts.values()) - memory.activations
    return {"activations": memory.activations, **({"other": other} if other > 0 else {})}


def _largest(sizes: Sequence[int], number: int) -> int:
    return sum(sorted(sizes)[-number:])
