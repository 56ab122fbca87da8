"""GeoSGD by its published equations in one process, without servers, threads or messages: what the algorithm itself costs.

Run from the repository's root: ``python reports/server_learning/reference.py``. Results are appended to ``raw.jsonl``. Trainers take turns;
each exchanges behind exactly K of its own steps. See ``Trainer.exchange`` for the equations.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from measure import RAW, data_of, keep, kept, learned_by
from tasks import DECAY_STEPS, MODES, TASKS, TRAINERS, Task, batches_of

from real.models.registry import build_model, loss_of

NAME = "word2vec"


class Trainer:
    """A copy of the model that trains, and what it has last seen of the server."""

    def __init__(self, task: Task, data: Path, rank: int, rate: float, seed: int) -> None:
        workload = task.workload
        self.model = build_model(workload.model, workload.model_options, workload.dtype, seed)
        self.batches, self.sampler = batches_of(task, data, seed, trainers=TRAINERS, rank=rank)
        self._rate = [
            rate * task.decay ** (position * TRAINERS / DECAY_STEPS) for position in range(task.epochs * self.sampler.steps_per_epoch)
        ]
        self._compare = loss_of(workload.model)
        self.old = [parameter.detach().clone() for parameter in self.model.parameters()]
        self._touched = [torch.zeros(len(parameter), dtype=torch.bool) for parameter in self.old]

    def step(self, position: int) -> None:
        """One of plain SGD, which notes the rows that it touches."""
        inputs, labels = self.batches.batch(position)
        self._compare(self.model(inputs), labels).backward()
        with torch.no_grad():
            for parameter, touched in zip(self.model.parameters(), self._touched, strict=True):
                assert parameter.grad is not None
                gradient = parameter.grad.coalesce()
                parameter.index_add_(0, gradient.indices()[0], gradient.values(), alpha=-self._rate[position])
                touched[gradient.indices()[0]] = True
                parameter.grad = None

    @torch.no_grad()
    def exchange(self, server: list[torch.Tensor]) -> None:
        """Push and pull.

        Of touched rows: delta = (latest - old) / trainers; old += delta; server += delta. Of all: latest += server - old; old = server.
        """
        for parameter, old, held, touched in zip(self.model.parameters(), self.old, server, self._touched, strict=True):
            delta = (parameter - old) / TRAINERS * touched[:, None]
            held.add_(delta)
            parameter.add_(held - (old + delta))
            old.copy_(held)
            touched.zero_()


def main() -> None:
    """Every K and seed that ``raw.jsonl`` has, at the same learning rate."""
    torch.set_num_threads(1)
    runs = [one for one in kept(RAW) if one["kind"] == "run" and one["task"] == NAME and one["mode"].startswith("GeoSGD")]
    with tempfile.TemporaryDirectory() as folder:
        for one in runs:
            task, rate, seed = TASKS[NAME], one["rate"], one["seed"]
            data = data_of(task, seed, Path(folder))
            k_steps = MODES[one["mode"]]["a_sync_configs"]["k_steps"]
            trainers = [Trainer(task, data, rank, rate, seed) for rank in range(TRAINERS)]
            server = [held.clone() for held in trainers[0].old]
            num_steps = task.epochs * trainers[0].sampler.steps_per_epoch
            for position in range(num_steps):
                for trainer in trainers:
                    trainer.step(position)
                    if (position + 1) % k_steps == 0 or position + 1 == num_steps:
                        trainer.exchange(server)
            names = [name for name, _ in trainers[0].model.named_parameters()]
            copies = {"trainer 0": dict(trainers[0].model.state_dict()), "server": dict(zip(names, server, strict=True))}
            learned = learned_by(copies, NAME, seed, data)
            keep(RAW, {"kind": "reference", "task": NAME, "mode": one["mode"], "rate": rate, "seed": seed, "copies": learned})


if __name__ == "__main__":
    main()
