"""A plain script of FSDP2 for tests: ``fsdp_script.py FOLDER KIND [STEPS]``; each rank writes its losses below FOLDER.

At its end each rank writes the collectives of its last step, by name and bytes, too.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

folder, kind = Path(sys.argv[1]), sys.argv[2]
steps = int(sys.argv[3]) if len(sys.argv) > 3 else 100_000
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = os.environ.get("FLEETBENCH_STORE")
dist.init_process_group("gloo", **({} if store is None else {"init_method": f"file://{store}", "rank": rank, "world_size": world}))
torch.manual_seed(rank if kind == "unseeded" else 0)
torch.set_num_threads(1)


class Block(nn.Module):
    """Two layers beside a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As many numbers."""
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Three blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(32, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Fifty numbers for each token."""
        if kind == "slow" and rank == 1:
            time.sleep(0.1)
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).clone()  # a view would be warned of


WIRES = {
    "short sums": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
    "short": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    "long sums": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}
model, given = Net(), dict[str, Any]()
if kind == "kept":
    given = {"reshard_after_forward": False}
elif kind == "hybrid":
    given = {"mesh": init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicas", "shards"))}
elif kind == "mesh":
    given = {"mesh": init_device_mesh("cpu", (world,))}
elif kind in WIRES:
    given = {"mp_policy": WIRES[kind]}
PRINTED = os.environ.get("PRINTED_LINES")  # of an answer, in the place of the script's own calls
if PRINTED is not None:
    exec(PRINTED, {"model": model, "blocks": model.layers})  # noqa: S102  # what is printed is tested
elif kind == "first":
    model = FullyShardedDataParallel(model)
elif kind == "together":
    fully_shard([model.layers[0], model.layers[1]])
    fully_shard(model)
else:
    for each in model.layers:
        fully_shard(each, **given)
    fully_shard(model, **given)
beside = DistributedDataParallel(nn.Linear(4, 4)) if kind == "mixed" else None
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
another = None if beside is None else torch.optim.SGD(beside.parameters(), lr=0.01)
counts: Counter[str] = Counter()


def counted(name: str) -> None:
    """Count the calls of a function of ``torch.distributed``."""
    own = getattr(dist, name)

    def call(*arguments: Any, **named: Any) -> Any:
        tensor = next((each for each in (*arguments, *named.values()) if isinstance(each, torch.Tensor)), None)
        counts[f"{name} {0 if tensor is None else tensor.nbytes}"] += 1
        return own(*arguments, **named)

    setattr(dist, name, call)


for name in (
    "all_gather_single",
    "reduce_scatter_single",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_reduce",
):
    if hasattr(dist, name):
        counted(name)
with (folder / f"losses{rank}").open("a", encoding="ascii") as losses:
    for step in range(steps):
        counts.clear()
        tokens = torch.randint(0, 50, (4, 8), generator=torch.Generator().manual_seed(1000 * step + rank))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        if beside is not None and another is not None:
            beside(torch.ones(2, 4)).sum().backward()
            another.step()
        optimizer.step()
        optimizer.zero_grad()
        losses.write(f"{loss.item().hex()}\n")
        losses.flush()
(folder / f"counts{rank}").write_text("\n".join(f"{name} {number}" for name, number in sorted(counts.items())), encoding="ascii")
dist.destroy_process_group()
