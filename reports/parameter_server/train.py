"""One process of a speed run: skip-gram at fixed shapes, with ids from a Zipf law; writes what its trainer did as JSON.

python train.py OUT K_STEPS DIMENSION SECONDS CONFIGS: CONFIGS are the other ``a_sync_configs`` as JSON.
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

VOCABULARY, BATCH, NEGATIVES, EXPONENT, BATCHES, WARM_UP = 20_000, 100, 5, 1.3, 1000, 50


def main(out: str, k_steps: str, dimension: str, seconds: str, configs: str) -> None:
    """Train for so many seconds."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    configured = {"k_steps": int(k_steps), **json.loads(configs)}
    fleet.init(DistributedStrategy.from_dict({"mode": "ps", "a_sync": True, "a_sync_configs": configured}))
    model = fleet.distributed_model(SkipGram(VOCABULARY, int(dimension)))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.025))
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    rank = fleet.worker_index()
    ranks = np.arange(1, VOCABULARY + 1, dtype=np.float64)
    law = ranks**-EXPONENT
    ids = np.random.default_rng(rank).choice(VOCABULARY, (BATCHES, BATCH, 2 + NEGATIVES), p=law / law.sum())
    batches = torch.from_numpy(ids).unbind()

    def step(number: int) -> torch.Tensor:
        loss = skip_gram_loss(model(batches[number % BATCHES]), torch.zeros(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    for number in range(WARM_UP):
        step(number)
    fleet.synchronize()
    fleet.barrier_worker()
    begin = time.perf_counter()
    done = 0
    while time.perf_counter() - begin < float(seconds):
        loss = step(done)
        done += 1
    computed = time.perf_counter() - begin
    fleet.synchronize()  # what is queued counts, and the time that it takes
    took = time.perf_counter() - begin
    result = {
        "rank": rank,
        "steps": done,
        "seconds": took,
        "computed_s": computed,
        "examples_per_s": done * BATCH / took,
        "loss": float(loss),
    }
    Path(out, f"trainer{rank}.json").write_text(json.dumps(result), encoding="utf-8")
    fleet.stop_worker()


if __name__ == "__main__":
    main(*sys.argv[1:])
