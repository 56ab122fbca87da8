"""Virtual trainers on a CUDA device beside the same on one core of the CPU.

``python reports/gpu/virtual.py parity`` and ``speed`` print rows as JSON. Parity: what is learnt in float64, in both ways of computing.
Speed: steps of a trainer a second in float32, and which way is chosen.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from fleetbench.experiment import Experiment
from sim.learning.prepared import one_thread
from sim.learning.virtual_training import VirtualTraining

LOCAL = {"localsgd": True, "localsgd_configs": {"k_steps": 4}}
OUTER = {"localsgd": True, "localsgd_configs": {"k_steps": 4, "outer_lr": 0.7, "outer_momentum": 0.9}}
STRATEGIES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "local": LOCAL,
    "outer": OUTER,
    "merged": {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}},
    "half the rate": {**LOCAL, "lr_scale": 0.5},
}
CNN = {"model": "digits_cnn", "data": "digits", "lr": 0.05, "optimizer": "momentum"}
SHORT = {"vocab": 256, "hidden": 32, "layers": 2, "heads": 2, "positions": 32}
GPT = {"model": "gpt", "data": "synthetic", "data_options": {"length": 16, "samples": 4096}, "lr": 1e-3, "optimizer": "adam"}
MIXED = {"amp": True, "amp_configs": {"dtype": "fp16"}}
SPEED: dict[str, dict[str, Any]] = {
    "digits_cnn": {**CNN, "batch_size": 32},
    "gpt 4x256, 8 x 128": {
        **GPT,
        "batch_size": 8,
        "data_options": {"length": 128, "samples": 1024},
        "model_options": {"vocab": 256, "hidden": 256, "layers": 4, "heads": 4, "positions": 128},
    },
    "resnet50, 8 x 64 x 64": {
        "model": "resnet50",
        "data": "synthetic",
        "data_options": {"image_size": 64, "samples": 512},
        "batch_size": 8,
    },
}


def training(
    workload: dict[str, Any], strategy: dict[str, Any], trainers: int, way: str | None, device: str, folder: Path
) -> VirtualTraining:
    """So many trainers on one node; where no ``way`` is given, they choose it, and the device."""
    run = {"warmup_steps": 0, "device": "cuda" if way is None else "cpu"}
    data = {"workload": workload, "strategy": strategy, "cluster": {"trainers_per_node": trainers}, "run": run}
    return VirtualTraining(Experiment.from_dict(data), folder, way, device=device)


def parity() -> list[dict[str, Any]]:
    """The largest difference of what is learnt, to that of a loop on the CPU."""
    rows = []
    both = {"digits_cnn": CNN, "gpt": {**GPT, "model_options": SHORT}}
    for model, (name, strategy) in ((model, chosen) for model in both for chosen in STRATEGIES.items()):
        workload = {**both[model], "dtype": "float64", "batch_size": 4, "steps": 16, "eval_every": 8}
        learnt = {}
        for way, device in (("loop", "cpu"), ("loop", "cuda"), ("graph", "cuda")):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    run = training(workload, strategy, 4, way, device, Path(folder))
                except (RuntimeError, UserWarning) as error:  # vmap cannot stack every model
                    rows.append({"model": model, "strategy": name, "way": f"{way} on {device}", "skipped": str(error)[:200]})
                    continue
                found = run.run()
            learnt[way, device] = torch.cat([run.replicas.evaluated().cpu(), torch.tensor([found.final_loss])])
        first = learnt["loop", "cpu"]
        for (way, device), values in learnt.items():
            error = float(((values - first).abs() / (1 + first.abs())).max())
            rows.append({"model": model, "strategy": name, "way": f"{way} on {device}", "error": error, "equal": error < 1e-9})
    return rows


def mixed() -> list[dict[str, Any]]:
    """Held-out losses of mixed precision, whose roundings differ by device."""
    workload = {**CNN, "batch_size": 8, "steps": 32, "eval_every": 16}
    rows = []
    for device in ("cpu", "cuda"):
        with tempfile.TemporaryDirectory() as folder:
            found = training(workload, MIXED, 4, "loop", device, Path(folder)).run()
        rows.append({"strategy": "mixed precision, fp16", "device": device, "final_loss": found.final_loss, "held_out": found.held_out})
    return rows


def timed(workload: dict[str, Any], trainers: int, steps: int, way: str | None, device: str) -> dict[str, Any]:
    """By two whole trainings, so that what each takes beside its steps, such as two evaluations, is not counted."""
    seconds = []
    for number in (steps, 2 * steps):
        own = {**workload, "steps": number, "eval_every": number, "uneven_data": "pad"}
        with tempfile.TemporaryDirectory() as folder:
            run = training(own, LOCAL, trainers, way, device, Path(folder))
            begin = time.perf_counter()
            run.run()
            seconds.append(time.perf_counter() - begin)
        torch.cuda.empty_cache()
    rate = steps * trainers / (seconds[1] - seconds[0])
    return {"trainers": trainers, "steps": steps, "asked": way, "way": run.way, "seconds": seconds, "steps_a_second": rate}


def speed() -> list[dict[str, Any]]:
    """Eight trainers, and many."""
    rows = []
    plan = (("digits_cnn", 8, 40, 100), ("digits_cnn", 128, 8, 100), ("gpt 4x256, 8 x 128", 8, 3, 20), ("resnet50, 8 x 64 x 64", 8, 2, 20))
    for name, trainers, on_core, on_device in plan:
        for way, device, steps in (("loop", "cpu", on_core), ("loop", "cuda", on_device), ("graph", "cuda", on_device)):
            try:
                rows.append({"workload": name, **timed(SPEED[name], trainers, steps, way, device)})
            except (RuntimeError, UserWarning) as error:
                rows.append({"workload": name, "trainers": trainers, "asked": f"{way} on {device}", "skipped": str(error)[:200]})
            # which the section's error shows, if its time ends before the last
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    rows.append({"workload": "gpt 4x256, 8 x 128", **timed(SPEED["gpt 4x256, 8 x 128"], 8, 20, None, "cpu")})
    return rows


if __name__ == "__main__":
    with one_thread():
        print(json.dumps({"speed": speed()} if sys.argv[1] == "speed" else {"parity": parity(), "mixed": mixed()}))
