"""One rank that trains the character GPT of examples/ by several strategies: ``gpt_rank.py RANK RANKS STORE OUTPUT JOB``.

JOB is JSON: ``updates``, ``every`` and ``trainings``, each with a name, a strategy and a seed. Rank 0 writes a line for every
look at the held-out text: training, seed, update, held-out loss, and after the last update the bytes sent and whether all ranks hold the
same parameters. Looks come where a round ends, so that they disturb nothing.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from gpt_plain import GPT, read_pages  # after the path

from fleetbench.strategy import DistributedStrategy  # after the path
from real.communication.communicators import Communicators  # after the path
from real.engine.engine import Engine  # after the path

TIMEOUT = timedelta(seconds=300)
BATCH, LENGTH, WIDTH, LAYERS, LR, WARMUP = 8, 32, 48, 2, 3e-3, 20
"""Those of the example."""
Pages = tuple[int, torch.Tensor, torch.Tensor]
HELD_OUT_EVERY = 12
"""Of the held-out windows every so many are looked at; each rank takes its part of them."""


def build(seed: int, num_characters: int) -> GPT:
    """The model, whose initial parameters follow from the seed."""
    torch.manual_seed(seed)
    return GPT(num_characters, LENGTH, WIDTH, LAYERS)


def train(communicators: Communicators, pages: Pages, training: dict[str, Any], updates: int, every: int) -> Iterator[dict[str, Any]]:
    """One training; what was found at every look."""
    num_characters, text, held_out = pages
    rank, ranks = communicators.rank, communicators.trainers
    windows = held_out.unfold(0, LENGTH + 1, LENGTH + 1)[::HELD_OUT_EVERY][rank::ranks]
    model = build(training["seed"], num_characters)
    engine = Engine(model, DistributedStrategy.from_dict(training["strategy"]), communicators)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    engine.attach_optimizer(optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda update: min((update + 1) / WARMUP, 0.55 + 0.45 * math.cos(math.pi * update / updates))
    )
    generator = torch.Generator().manual_seed(1000 * training["seed"] + rank)
    offsets = torch.arange(LENGTH + 1)
    for update in range(1, updates + 1):
        starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=generator)
        model(text[starts + offsets]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if update % every == 0:
            found = torch.tensor([_held_out(model, windows) * len(windows), len(windows)], dtype=torch.float64)
            dist.all_reduce(found)
            yield {"name": training["name"], "seed": training["seed"], "update": update, "held_out": float(found[0] / found[1])}
    engine.stopwatch.finish()
    own = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    first = own.clone()
    dist.broadcast(first, src=0)
    same = torch.tensor(int(torch.equal(own, first)))
    dist.all_reduce(same, op=dist.ReduceOp.MIN)
    yield {
        "name": training["name"],
        "seed": training["seed"],
        "ranks_agree": bool(same),
        "bytes_sent": sum(timed.record.bytes_sent for timed in engine.stopwatch.steps),
        "parameters": own.numel(),
    }
    engine.close()


@torch.no_grad()
def _held_out(model: GPT, windows: torch.Tensor) -> float:
    model.eval()
    loss = model(windows).item()
    model.train()
    return loss


def main() -> None:
    """All trainings of the job."""
    rank, ranks, store, output, text = sys.argv[1:]
    job = json.loads(text)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks), timeout=TIMEOUT)
    communicators = Communicators("gloo", TIMEOUT)
    pages = read_pages()
    with Path(output).open("w", encoding="utf-8") as out:
        for training in job["trainings"]:
            for found in train(communicators, pages, training, job["updates"], training.get("every", job["every"])):
                out.write(json.dumps(found) + "\n")
                out.flush()
    dist.barrier()
    communicators.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
