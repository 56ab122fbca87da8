"""How fast virtual trainers train, and what memory they take, beside bare loops of torch in turns; one core.

python reports/virtual_trainers/measure.py                  # every cell, each in a process of its own; a line each to raw.jsonl
python reports/virtual_trainers/measure.py digits_mlp table          # the cells of a workload, and the table
python reports/virtual_trainers/measure.py "mlp 64-32-10" 32 local   # one cell
python reports/virtual_trainers/measure.py --table          # six K and five bandwidths: the table of time to target
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from fleetbench.experiment import Experiment
from fleetbench.plan.layers import Gradient, Layer, LayerTable
from fleetbench.profile import Profile, compute_key
from fleetbench.quantities import Nanoseconds
from fleetbench.store import commit
from fleetbench.workloads.models.registry import build_model, loss_of
from sim.learning.virtual_training import VirtualTraining, train
from sim.many.sweep import sweep

HERE = Path(__file__).parent
SAMPLES, BATCH = 65_536, 32
ROUNDS = {32: 4, 1024: 3}
SLOW, SLOW_ROUNDS = ("bert, 2 layers of 32", 1024), 2
"""A round of this workload with so many trainers takes more than a minute."""
WORKER_STEPS = {"mlp 64-32-10": 16_384, "digits_mlp": 4096, "digits_cnn": 2048, "word2vec": 8192, "bert, 2 layers of 32": 1024}
"""Of a round and a rival; no fewer than four of each trainer, so that local steps average once."""
WORKLOADS: dict[str, dict[str, Any]] = {
    "mlp 64-32-10": {"model": "mlp", "model_options": {"features": 64, "hidden": 32, "depth": 1}, "data_options": {"samples": SAMPLES}},
    "digits_mlp": {"model": "digits_mlp", "data_options": {"samples": SAMPLES}},
    "digits_cnn": {"model": "digits_cnn", "model_options": {"channels": 4, "hidden": 32}, "data_options": {"samples": SAMPLES}},
    "word2vec": {"model": "word2vec", "model_options": {"vocab": 500, "dim": 16}, "data_options": {"samples": SAMPLES}},
    "bert, 2 layers of 32": {
        "model": "bert_base",
        "model_options": {"vocab": 64, "hidden": 32, "layers": 2, "heads": 2, "ffn": 64, "positions": 16},
        "data_options": {"samples": SAMPLES, "length": 16},
    },
}
STRATEGIES: dict[str, dict[str, Any]] = {"synchronous": {}, "local": {"localsgd": True, "localsgd_configs": {"k_steps": 4}}}
K, BANDWIDTHS = "1,2,4,8,16,32", "100 Mbit/s,300 Mbit/s,1 Gbit/s,3 Gbit/s,10 Gbit/s"


def experiment(workload: str, trainers: int, strategy: str, steps: int) -> Experiment:
    """A cell's experiment; nothing is evaluated before the end."""
    shared = {"data": "synthetic", "batch_size": BATCH, "steps": steps, "eval_every": steps, "lr": 0.01, "uneven_data": "pad"}
    cluster = {"nodes": trainers, "trainers_per_node": 1, "inter": {"bandwidth": "1 Gbit/s", "latency": "20 us"}}
    data = {"workload": {**shared, **WORKLOADS[workload]}, "cluster": cluster, "strategy": STRATEGIES[strategy], "run": {"warmup_steps": 0}}
    return Experiment.from_dict(data)


def bare_stacked(own: Experiment, trainers: int) -> Callable[[], None]:
    """A step of SGD by baddbmm and one backward over stacked layers, on one batch that stays; of other models by vmap of grad."""
    workload = own.workload
    model = build_model(workload.model, workload.model_options, "float32", 0)
    stacked = {name: value.detach().expand(trainers, *value.shape).clone().requires_grad_() for name, value in model.named_parameters()}
    inputs, labels = batch_of(workload.model, workload.model_options, trainers)
    values = list(stacked.values())

    def update(gradients: Any) -> None:
        with torch.no_grad():
            for value, gradient in zip(values, gradients, strict=True):
                value.sub_(gradient, alpha=workload.lr)

    def layers() -> None:
        hidden = inputs.reshape(trainers, BATCH, -1)
        for number in range(0, len(values), 2):
            hidden = torch.baddbmm(values[number + 1].unsqueeze(1), hidden, values[number].transpose(1, 2))
            hidden = torch.relu(hidden) if number + 2 < len(values) else hidden
        losses = cross_entropy(hidden.reshape(trainers * BATCH, -1), labels.reshape(-1), reduction="none")
        update(torch.autograd.grad(losses.view(trainers, BATCH).mean(1).sum(), values))

    if "mlp" in workload.model:
        return layers
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.sparse = False
    compare = loss_of(workload.model)

    def loss(own_values: dict[str, torch.Tensor], some: torch.Tensor, their: torch.Tensor) -> torch.Tensor:
        return compare(torch.func.functional_call(model, own_values, (some,)), their)

    of_all = torch.vmap(torch.func.grad(loss))
    return lambda: update(of_all({name: value.detach() for name, value in stacked.items()}, inputs, labels).values())


def bare_loop(own: Experiment, trainers: int) -> Callable[[], None]:
    """A step of torch's SGD on every replica of the model, one after the other, on one batch that stays."""
    workload = own.workload
    models = [build_model(workload.model, workload.model_options, "float32", 0) for _ in range(trainers)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=workload.lr) for model in models]
    inputs, labels = batch_of(workload.model, workload.model_options, trainers)
    compare = loss_of(workload.model)

    def step() -> None:
        for model, optimizer, some, their in zip(models, optimizers, inputs, labels, strict=True):
            optimizer.zero_grad()
            compare(model(some), their).backward()
            optimizer.step()

    return step


def batch_of(model: str, options: dict[str, Any], trainers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random inputs in the model's shape, and labels."""
    torch.manual_seed(0)
    shape = (trainers, BATCH)
    if model == "word2vec":
        return torch.randint(0, options["vocab"], (*shape, 7)), torch.zeros(shape)
    if model == "bert_base":
        return torch.randint(0, options["vocab"], (*shape, 16)), torch.randint(0, 2, shape)
    return torch.randn(*shape, 8, 8), torch.randint(0, 10, shape)


def virtual(own: Experiment, way: str) -> tuple[float, int]:
    """Seconds of a step of a training, reading and deciding included, and the memory that was announced.

    Without the first step, which bare loops do before the clock begins, and without the last one, which evaluates.
    """
    ends: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        training = VirtualTraining(own, Path(folder), way)
        training.run(lambda _done, _all: ends.append(time.perf_counter()))
    return (ends[-2] - ends[0]) / (len(ends) - 2), training.num_bytes


def cell(workload: str, trainers: int, strategy: str) -> dict[str, Any]:
    """Steps a second of every rival, in turns; the median of the rounds."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    steps = max(4, WORKER_STEPS[workload] // trainers)
    own = experiment(workload, trainers, strategy, steps + 2)
    rivals: dict[str, Callable[[], float]] = {}
    for name, step in (("bare stacked", bare_stacked(own, trainers)), ("bare loop", bare_loop(own, trainers))):
        rivals[name] = lambda step=step: _per_step(step, steps)  # type: ignore[misc]  # a default binds the loop's variable
    known: dict[str, int] = {}
    for way in ("loop",) if "bert" in workload else ("graph", "loop"):  # vmap has no rule for the encoder's attention

        def timed(way: str = way) -> float:
            seconds, known[way] = virtual(own, way)
            return seconds

        rivals[way] = timed
    found: dict[str, list[float]] = {name: [] for name in rivals}
    for number in range(SLOW_ROUNDS if (workload, trainers) == SLOW else ROUNDS[trainers]):
        for name in list(rivals)[:: 1 if number % 2 == 0 else -1]:
            found[name].append(trainers / rivals[name]())
    medians = {name: statistics.median(values) for name, values in found.items()}
    return {
        "cell": [workload, trainers, strategy],
        "worker_steps_per_s": {name: [round(value) for value in values] for name, values in found.items()},
        "of_bare_stacked": round(max(medians[way] for way in known) / medians["bare stacked"], 3),
        "of_bare_loop": round(max(medians[way] for way in known) / medians["bare loop"], 3),
        "announced_mb": {way: round(nbytes / 1e6, 1) for way, nbytes in known.items()},
        "peak_mb_of_all_rivals": round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024),
    }


def _per_step(step: Callable[[], None], steps: int) -> float:
    step()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - begin) / steps


def table() -> dict[str, Any]:
    """Seconds for the time to target of six K at five bandwidths: six trainings of 32 trainers, thirty simulations."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        own = experiment("mlp 64-32-10", 32, "local", 200)
        layers = tuple(
            Layer(
                name=str(place),
                gradients=(Gradient(name=f"{place}.weight", numel=numel, ready=Nanoseconds(200_000 + 200_000 * (1 - number))),),
                forward=Nanoseconds(100_000),
                backward=Nanoseconds(200_000),
            )
            for number, (place, numel) in enumerate(((1, 2080), (3, 330)))
        )
        tables = (LayerTable(key=compute_key(own), layers=layers),)
        Profile(machine="declared", created="never", tables=tables).save(folder / "profile.toml")
        own.save(folder / "e.toml")
        fixed = [f"workload.profile={folder / 'profile.toml'}", "workload.eval_every=10", "workload.target_loss=1.9", "workload.lr=0.1"]
        begin = time.perf_counter()
        said: list[str] = []
        found = sweep(
            lambda more: Experiment.load(folder / "e.toml", [*fixed, *more]),
            [f"strategy.localsgd_configs.k_steps={K}", f"cluster.inter.bandwidth={BANDWIDTHS}"],
            processes=1,
            learn=partial(train, say=said.append),
        )
        seconds = time.perf_counter() - begin
    reached = int(found.table["time_to_target_s"].notna().sum())
    return {"cell": ["table", 32, "local"], "seconds": round(seconds, 2), "trainings": len(said), "points": 30, "reached": reached}


def main() -> None:
    """One cell, or those of some workloads, or all."""
    if len(sys.argv) == 4 and sys.argv[2].isdigit():
        print(json.dumps(cell(sys.argv[1], int(sys.argv[2]), sys.argv[3])))
        return
    if sys.argv[1:] == ["--table"]:
        print(json.dumps(table()))
        return
    chosen = sys.argv[1:] or [*WORKLOADS, "table"]
    cells = [[name, str(trainers), strategy] for name in WORKLOADS if name in chosen for trainers in ROUNDS for strategy in STRATEGIES]
    for arguments in [*cells, *([["--table"]] if "table" in chosen else [])]:
        ended = subprocess.run([sys.executable, __file__, *arguments], check=True, capture_output=True, text=True)
        line = {
            **json.loads(ended.stdout),
            "load": round(os.getloadavg()[0], 1),
            "commit": commit(),
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
        }
        print(line, flush=True)
        with (HERE / "raw.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
