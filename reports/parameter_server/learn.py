"""One process of the part of testbed.py that compares losses: skip-gram at the fixed shapes, on pairs that can be learned.

``python learn.py OUT K_STEPS DIMENSION SECONDS CONFIGS RATE SEED``: CONFIGS are the other ``a_sync_configs`` as JSON, RATE is the
learning rate. No batch comes twice, so that a batch's loss before its step is that of unseen data. The server leaves its
parameters in OUT/checkpoint.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch

from fleetbench import DistributedStrategy, fleet
from fleetbench.workloads.models.sparse import SkipGram, skip_gram_loss

VOCABULARY, BATCH, NEGATIVES, EXPONENT, PLANTED = 20_000, 100, 5, 1.3, 0.5
MOST_STEPS = 30_000
HELD_OUT_BATCHES, HELD_OUT_SEED = 200, 10**6
TOLD_EVERY = 20
"""Steps."""


def words(generator: np.random.Generator, batches: int) -> torch.Tensor:
    """``(batches, BATCH, 2 + NEGATIVES)`` words of one Zipf law. With probability PLANTED a neighbour is its middle word's partner.

    Word 2 j is the partner of 2 j + 1, which is about as frequent.
    """
    law = np.cumsum(np.arange(1, VOCABULARY + 1, dtype=np.float64) ** -EXPONENT)
    found = np.searchsorted(law, generator.random((batches, BATCH, 2 + NEGATIVES)) * law[-1]).astype(np.int32)
    planted = generator.random((batches, BATCH)) < PLANTED
    found[..., 1] = np.where(planted, found[..., 0] ^ 1, found[..., 1])
    return torch.from_numpy(found)


@torch.no_grad()
def held_out_loss(model: SkipGram) -> float:
    """Mean loss over pairs that nobody trains on."""
    found = words(np.random.default_rng(HELD_OUT_SEED), HELD_OUT_BATCHES)
    return float(skip_gram_loss(model(found.flatten(0, 1).long()), torch.zeros(0)))


def main(out: str, k_steps: str, dimension: str, seconds: str, configs: str, rate: str, seed: str) -> None:  # as the command line has them
    """Train for so many seconds, or serve."""
    torch.set_num_threads(1)
    torch.manual_seed(int(seed))
    configured = {"k_steps": int(k_steps), **json.loads(configs)}
    fleet.init(DistributedStrategy.from_dict({"mode": "ps", "a_sync": True, "a_sync_configs": configured}))
    model = fleet.distributed_model(SkipGram(VOCABULARY, int(dimension)))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=float(rate)))
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    rank = fleet.worker_index()
    batches = words(np.random.default_rng([int(seed), rank]), MOST_STEPS)
    fleet.init_worker()
    fleet.barrier_worker()
    begin = time.perf_counter()
    curve, losses = [], []
    done = 0
    while (now := time.perf_counter() - begin) < float(seconds) and done < MOST_STEPS:
        loss = skip_gram_loss(model(batches[done].long()), torch.zeros(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
        done += 1
        if done % TOLD_EVERY == 0:
            curve.append([round(now, 4), round(sum(losses) / len(losses), 5)])
            losses.clear()
    fleet.synchronize()  # what is queued counts, and the time that it takes
    took = time.perf_counter() - begin
    fleet.save_persistables(Path(out, "checkpoint"))
    fleet.stop_worker()
    own = held_out_loss(model) if k_steps != "0" else None  # in the other modes a trainer holds fresh only what it has just looked up
    result = {"rank": rank, "steps": done, "seconds": took, "examples_per_s": done * BATCH / took, "curve": curve, "own_held_out": own}
    Path(out, f"trainer{rank}.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
