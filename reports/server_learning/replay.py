"""An asynchronous job of Word2Vec, and the same again in one process: each gradient from the rows as they were when the trainer got them.

``python reports/server_learning/replay.py [EPOCHS]``, from the repository's root, prints how far the parameters are apart: what
rounding does, unless the servers do something else than stale SGD. ``noted.py`` says what came when.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import torch
from measure import Tensors, copies_of, data_of, learned_by
from tasks import DECAY_STEPS, SERVERS, TASKS, TRAINERS, batches_of

from fleetbench.workloads.models.registry import build_model
from fleetbench.workloads.models.sparse import skip_gram_loss

HERE = Path(__file__).parent
NAME, MODE, RATE, SEED = "word2vec", "asynchronous", 2.0, 1


def main(epochs: str) -> None:
    """One job."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        data, out = data_of(TASKS[NAME], SEED, Path(folder)), Path(folder, "out")
        out.mkdir()
        launch = ["-m", "fleetbench", "launch", "--servers", str(SERVERS), "--workers", str(TRAINERS), "--log-dir", f"{out}/log"]
        command = [*launch, str(HERE / "noted.py"), str(out), str(data), NAME, MODE, str(RATE), epochs, str(SEED)]
        subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
        order = json.loads((out / "order.json").read_text(encoding="utf-8"))
        reads = [json.loads((out / f"reads.{rank}.json").read_text(encoding="utf-8")) for rank in range(TRAINERS)]
        copies = {"server": copies_of(out)["server"], "replay": again(data, order, reads)}
        print(f"{len(order):,} updates; {sum(one != other for one, other in pairwise(order)):,} changes of trainer")
        for name, held in copies["server"].items():
            apart = (held - copies["replay"][name]).abs().max() / held.abs().max()
            print(f"{name}: apart by at most {apart:.1e} of the largest number")
        for whose, learned in learned_by(copies, NAME, SEED, data).items():
            print(f"{whose}: held-out loss {learned['loss']:.6f}")


def again(data: Path, order: list[int], reads: list[list[int]]) -> Tensors:
    """What plain tensors make of the same pushes in the same order.

    ``order``: the trainer of each update. ``reads``: of each trainer, the updates before each look-up, words and contexts in turn.
    """
    task = TASKS[NAME]
    model = build_model(task.workload.model, task.workload.model_options, task.workload.dtype, SEED)
    words, contexts = (model.get_parameter(name).detach() for name in ("words.weight", "contexts.weight"))
    readers = [batches_of(task, data, SEED, trainers=TRAINERS, rank=rank)[0] for rank in range(TRAINERS)]
    looked_up: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for rank, versions in enumerate(reads):
        for number, version in enumerate(versions):
            step, which = divmod(number, 2)
            looked_up[version].append((which, rank, step))
    middles: dict[tuple[int, int], torch.Tensor] = {}
    gradients: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}
    steps = [0] * TRAINERS
    for version in range(len(order) + 1):
        for which, rank, step in sorted(looked_up[version]):
            inputs = readers[rank].batch(step)[0].long()
            if which == 0:
                middles[rank, step] = words[inputs[:, 0]].clone().requires_grad_()
                continue
            middle, candidates = middles.pop((rank, step)), contexts[inputs[:, 1:]].clone().requires_grad_()
            loss = skip_gram_loss(torch.bmm(candidates, middle.unsqueeze(2)).squeeze(2), torch.zeros(0))
            gradients[rank, step] = (inputs, *torch.autograd.grad(loss, (middle, candidates)))
        if version < len(order):
            rank = order[version]
            inputs, of_middle, of_candidates = gradients.pop((rank, steps[rank]))
            rate = RATE * task.decay ** (steps[rank] * TRAINERS / DECAY_STEPS)
            words.index_add_(0, inputs[:, 0], of_middle, alpha=-rate)
            contexts.index_add_(0, inputs[:, 1:].flatten(), of_candidates.flatten(0, 1), alpha=-rate)
            steps[rank] += 1
    return {"words.weight": words, "contexts.weight": contexts}


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "2")
