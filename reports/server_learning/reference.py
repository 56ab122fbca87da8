"""Both asynchronous modes by their equations in one process, without servers, threads or messages: what the algorithms themselves cost.

Run from the repository's root: ``python reports/server_learning/reference.py [RAW]``. For each of Word2Vec's runs in ``raw.jsonl``, what
its equations reach is appended there. Trainers take turns. In GeoSGD each exchanges behind exactly K of its own steps, and goes on for
``MORE_EPOCHS``, with the loss of the server's parameters behind each epoch. Asynchronously each gradient is applied as many updates
late as a draw from what the run's server counted says.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import RAW, Tensors, data_of, keep, kept, learned_by
from tasks import DECAY_STEPS, MODES, TASKS, TRAINERS, Task, batches_of

from fleetbench.workloads.models.registry import build_model, loss_of

NAME = "word2vec"
MORE_EPOCHS = 4
Gradient = list[tuple[torch.Tensor, torch.Tensor]]
"""Of each table: distinct rows, and the change of each."""


class Trainer:
    """A model that trains on one trainer's batches, and in GeoSGD what it has last seen of the server."""

    def __init__(self, task: Task, data: Path, rank: int, rate: float, seed: int) -> None:
        workload = task.workload
        self.model = build_model(workload.model, workload.model_options, workload.dtype, seed)
        self.tables = list(self.model.parameters())
        self.old = [table.detach().clone() for table in self.tables]
        self._batches, sampler = batches_of(task, data, seed, trainers=TRAINERS, rank=rank)
        self.steps_per_epoch = sampler.steps_per_epoch
        self._rate, self._decay = rate, task.decay
        self._compare = loss_of(workload.model)
        self._touched = [torch.zeros(len(table), dtype=torch.bool) for table in self.tables]

    def change(self, position: int) -> Gradient:
        """What plain SGD adds for the batch at ``position``: - rate * gradient."""
        inputs, labels = self._batches.batch(position)
        rate = self._rate * self._decay ** (position * TRAINERS / DECAY_STEPS)
        gradients = torch.autograd.grad(self._compare(self.model(inputs), labels), self.tables)
        return [(one.coalesce().indices()[0], one.coalesce().values() * -rate) for one in gradients]

    @torch.no_grad()
    def add(self, change: Gradient) -> None:
        """Make a change, and note its rows."""
        for table, touched, (rows, values) in zip(self.tables, self._touched, change, strict=True):
            table.index_add_(0, rows, values)
            touched[rows] = True

    @torch.no_grad()
    def exchange(self, server: list[torch.Tensor]) -> None:
        """Push and pull.

        Of touched rows: delta = (latest - old) / trainers; old += delta; server += delta. Of all: latest += server - old; old = server.
        """
        for latest, old, held, touched in zip(self.tables, self.old, server, self._touched, strict=True):
            delta = (latest - old) / TRAINERS * touched[:, None]
            held.add_(delta)
            latest.add_(held - (old + delta))
            old.copy_(held)
            touched.zero_()


def geo_sgd(
    trainers: list[Trainer], run: Mapping[str, Any], loss_of_server: Callable[[Tensors], float]
) -> tuple[dict[str, Tensors], list[float]]:
    """Trainer 0's copy and the server's behind the run's epochs and a last exchange; the loss of the server's behind every epoch."""
    k_steps, steps_per_epoch = MODES[run["mode"]]["a_sync_configs"]["k_steps"], trainers[0].steps_per_epoch
    names = [name for name, _ in trainers[0].model.named_parameters()]
    server = [held.clone() for held in trainers[0].old]
    copies: dict[str, Tensors] = {}
    losses = []
    for position in range((run["epochs"] + MORE_EPOCHS) * steps_per_epoch):
        epoch, rest = divmod(position + 1, steps_per_epoch)
        ends = epoch == run["epochs"] and rest == 0
        for trainer in trainers:
            trainer.add(trainer.change(position))
            if (position + 1) % k_steps == 0 or ends:
                trainer.exchange(server)
        if rest == 0:
            losses.append(loss_of_server(dict(zip(names, server, strict=True))))
        if ends:
            held = {"trainer 0": trainers[0].tables, "server": server}
            copies = {whose: {name: its.detach().clone() for name, its in zip(names, own, strict=True)} for whose, own in held.items()}
    return copies, losses


def delayed(trainers: list[Trainer], run: Mapping[str, Any]) -> dict[str, Tensors]:
    """The server's parameters, from which all trainers compute."""
    for trainer in trainers[1:]:
        for mine, shared in zip(trainer.tables, trainers[0].tables, strict=True):
            mine.data = shared.data
    counted = {int(lag): num for lag, num in run["server"]["staleness"].items()}
    num_updates = TRAINERS * run["epochs"] * trainers[0].steps_per_epoch
    shares = np.array(list(counted.values())) / sum(counted.values())
    lags = np.random.default_rng(run["seed"]).choice(list(counted), num_updates, p=shares)
    due: defaultdict[int, list[Gradient]] = defaultdict(list)
    for update, lag in enumerate(lags):
        position, rank = divmod(update, TRAINERS)
        due[min(update + int(lag), num_updates - 1)].append(trainers[rank].change(position))
        for change in due.pop(update, ()):
            trainers[0].add(change)
    return {"server": dict(trainers[0].model.state_dict())}


def main() -> None:
    """Every run of an asynchronous mode that has no reference yet."""
    torch.set_num_threads(1)
    raw = Path(sys.argv[1]) if len(sys.argv) > 1 else RAW
    found = [one for one in kept(raw) if one["task"] == NAME and one["kind"] in ("run", "reference")]
    done = {(one["mode"], one["seed"]) for one in found if one["kind"] == "reference"}
    task = TASKS[NAME]
    with tempfile.TemporaryDirectory() as folder:
        for run in (one for one in found if one["server"] is not None and (one["mode"], one["seed"]) not in done):
            seed = run["seed"]
            data = data_of(task, seed, Path(folder))
            trainers = [Trainer(task, data, rank, run["rate"], seed) for rank in range(TRAINERS)]
            losses: list[float] = []
            if run["mode"] == "asynchronous":
                copies = delayed(trainers, run)
            else:
                copies, losses = geo_sgd(trainers, run, functools.partial(_loss, seed=seed, data=data))
            learned = learned_by(copies, NAME, seed, data)
            keep(raw, {**run, "kind": "reference", "took_s": None, "server": None, "losses": losses, "copies": learned})


def _loss(parameters: Tensors, seed: int, data: Path) -> float:
    return float(learned_by({"server": parameters}, NAME, seed, data)["server"]["loss"])


if __name__ == "__main__":
    main()
