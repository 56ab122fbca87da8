"""A step that grows as a model converges: the loop of train.py in one process, in plain torch, as ``converging.json`` has it.

Run from the repository's root: ``python reports/your_script/converging.py``. CPU milliseconds a step, by blocks of 500 steps, with
numbers below float32's normal ones as they come, and flushed to zero.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
import train
from torch.nn.functional import cross_entropy

from fleetbench.store import machine, versions

BLOCK, BLOCKS = 500, 10


def blocks_ms(*, flushed: bool) -> list[float]:
    """Of a whole training."""
    torch.set_flush_denormal(flushed)
    model = train.network()
    optimizer = train.optimizer_of(model)
    found = []
    for block in range(BLOCKS):
        begin_s = time.process_time()
        for step in range(block * BLOCK, (block + 1) * BLOCK):
            data, target = train.batch(step, 0, 2)
            cross_entropy(model(data), target).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(1e3 * (time.process_time() - begin_s) / BLOCK)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    turns = [{"flushed": flushed, "ms": blocks_ms(flushed=flushed)} for flushed in (False, True, True, False)]
    Path(__file__).with_name("converging.json").write_text(
        json.dumps({"machine": machine(), "versions": versions(), "turns": turns}, indent=1) + "\n", encoding="utf-8"
    )
    for turn in turns:
        print("flushed" if turn["flushed"] else "as it comes", " ".join(f"{ms:.2f}" for ms in turn["ms"]))
