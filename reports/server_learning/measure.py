"""Train Word2Vec and Wide & Deep alone and over a parameter server, in every mode and from several seeds; keep what each has learned.

Run from the repository's root: ``python reports/server_learning/measure.py [--task word2vec wide_deep] [--seeds N]``. Results are
appended to ``raw.jsonl`` as they come, and what it has is not measured again. ``tables.py`` makes the tables and the figure of
README.md from it.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pairs import PAIRS, SHOWN, STRANGERS, scores
from safetensors.torch import load_file
from sklearn.metrics import roc_auc_score
from tasks import ALONE, SERVERS, TASKS, TRAINERS, Task, rate_of

from fleetbench.store import commit, machine, versions
from fleetbench.workloads.data.data import held_out, prepare
from fleetbench.workloads.models.registry import build_model, loss_of
from real.servers.checkpoints import load_shard

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "tests" / "real"))

from held_out_metrics import nearest, planted_auc  # noqa: E402  # what the tests check

RAW = HERE / "raw.jsonl"
CHOOSING_SEED = 100
"""Of the runs that choose the learning rate; the others count from 1."""
NUM_SHOWN = 5

Entry = dict[str, Any]
Tensors = dict[str, torch.Tensor]


def main() -> None:
    """Measure, and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", type=int, help="default: what the task says")
    parser.add_argument("--raw", type=Path, default=RAW, help="where results are appended")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.task:
        ground = {"started": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", "commit": commit(), "machine": machine(), "versions": versions()}
        keep(options.raw, {"kind": "ground", "task": name, **ground})
        done = [one for one in kept(options.raw) if one["task"] == name]
        for entry in of_task(name, options.seeds or TASKS[name].seeds, done):
            keep(options.raw, {"task": name, **entry})


def of_task(name: str, seeds: int, done: Sequence[Entry]) -> Iterator[Entry]:
    """First rate and epochs, of the single process; then every mode with them, from every seed. What is ``done`` is not done again."""
    task = TASKS[name]
    tried = {one["rate"]: one["losses"] for one in done if one["kind"] == "tried"}
    ran = {(one["mode"], one["seed"]) for one in done if one["kind"] == "run"}
    with tempfile.TemporaryDirectory() as folder:
        for rate in (rate for rate in task.rates if rate not in tried):
            found = _run(name, ALONE, rate, task.most_epochs, CHOOSING_SEED, data_of(task, CHOOSING_SEED, Path(folder)))
            tried[rate] = found["losses"]
            yield {"kind": "tried", **found}
        losses = {(rate, epoch): loss for rate, its in tried.items() for epoch, loss in enumerate(its, 1)}
        chosen, epochs = min((one for one in losses if math.isfinite(losses[one])), key=losses.__getitem__)
        for seed in range(1, 1 + seeds):
            for mode in (mode for mode in task.modes if (mode, seed) not in ran):
                data = data_of(task, seed, Path(folder))
                yield {"kind": "run", **_run(name, mode, rate_of(mode, chosen), epochs, seed, data)}


def data_of(task: Task, seed: int, folder: Path) -> Path:
    """The folder of a seed's data; made if it is not there."""
    drawn = seed if task.data_seed is None else task.data_seed
    data = folder / str(drawn)
    if not data.exists():
        prepare(task.workload, drawn, data)
    return data


def _run(name: str, mode: str, rate: float, epochs: int, seed: int, data: Path) -> Entry:
    """One job, as a user starts it, and what it has learned."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        command = [str(HERE / "train.py"), folder, str(data), name, mode, str(rate), str(epochs), str(seed)]
        if mode != ALONE:
            launch = ["-m", "fleetbench", "launch", "--servers", str(SERVERS), "--workers", str(TRAINERS), "--log-dir", f"{folder}/log"]
            command = [*launch, *command]
        subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
        took = time.monotonic() - begin
        copies = copies_of(Path(folder))
        served = Path(folder, "server.json")
        server = json.loads(served.read_text(encoding="utf-8")) if served.exists() else None
    learned = learned_by(copies, name, seed, data)
    ran = {"mode": mode, "rate": rate, "epochs": epochs, "seed": seed, "took_s": round(took, 1), "server": server}
    by_epoch = [learned.pop(whose)["loss"] for whose in copies if whose.startswith("epoch")]
    return {**ran, "losses": by_epoch, "copies": learned}


def learned_by(copies: Mapping[str, Tensors], name: str, seed: int, data: Path) -> Entry:
    """What each copy of the parameters of a task's model has learned."""
    workload = TASKS[name].workload
    model = build_model(workload.model, workload.model_options, workload.dtype, seed)
    learned = {}
    for whose, tensors in copies.items():
        model.load_state_dict({own: tensors[own].view_as(value) for own, value in model.state_dict().items()})
        learned[whose] = _learned(model, name, data)
    return learned


def copies_of(folder: Path) -> dict[str, Tensors]:
    """The parameters that a job has left: of the single process; or of the server, and in GeoSGD of trainer 0."""
    by_epoch = [folder / f"epoch{epoch}.safetensors" for epoch in range(1, 1 + len(list(folder.glob("epoch*.safetensors"))))]
    found = {path.stem: load_file(path) for path in by_epoch}
    if by_epoch:
        found["own"] = found[by_epoch[-1].stem]
    if (folder / "trainer0.safetensors").exists():
        found["trainer 0"] = load_file(folder / "trainer0.safetensors")
    saved = load_shard(folder / "checkpoint", 0, SERVERS)
    if saved is not None:
        shard, _ = saved
        spec = shard.spec
        names, sizes = zip(*(text.rsplit(" ", 1) for text in spec.dense), strict=True) if spec.dense else ((), ())
        dense = torch.from_numpy(shard.dense).split(list(map(int, sizes))) if sizes else ()
        found["server"] = dict(zip(names, dense, strict=True))
        found["server"] |= {table.name: torch.from_numpy(rows) for table, rows in zip(spec.shards.tables, shard.tables, strict=True)}
    return found


def _learned(model: torch.nn.Module, name: str, data: Path) -> Entry:
    """What a model is worth on what nobody learned from, and of words, how near those are that ought to be."""
    inputs, labels = held_out(data)
    with torch.no_grad():
        outputs = torch.cat([model.eval()(some) for some in inputs.split(512)])
    loss = float(loss_of(name)(outputs, labels))
    if name != "word2vec":
        return {
            "loss": loss,
            "auc": float(roc_auc_score(labels.numpy(), outputs.numpy())),
            "best_auc": planted_auc(np.load(data / "planted_eval.npy")),
        }
    names = json.loads((data / "words.json").read_text(encoding="utf-8"))
    vectors = model.get_parameter("words.weight").detach()[: len(names)]
    return {
        "loss": loss,
        "words": len(names),
        "pairs": scores(vectors, names, PAIRS),
        "strangers": scores(vectors, names, STRANGERS),
        "nearest": {word: [names[row] for row in nearest(vectors, names.index(word), NUM_SHOWN)] for word in SHOWN},
    }


def kept(raw: Path) -> list[Entry]:
    """All that was measured so far."""
    return [] if not raw.exists() else [json.loads(line) for line in raw.read_text(encoding="utf-8").splitlines()]


def keep(raw: Path, entry: Entry) -> None:
    """Append an entry, and say it."""
    entry = {**entry, "at": f"{datetime.now(UTC):%H:%M:%S}"}
    with raw.open("a", encoding="utf-8") as out:
        out.write(json.dumps(entry) + "\n")
    print(
        {key: value for key, value in entry.items() if key in ("kind", "task", "mode", "rate", "epochs", "seed", "took_s", "losses")},
        flush=True,
    )
    for whose, learned in entry.get("copies", {}).items():
        print("   ", whose, {key: value for key, value in learned.items() if key != "nearest"}, flush=True)


if __name__ == "__main__":
    main()
