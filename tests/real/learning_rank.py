"""One rank of the virtual trainers' tests: trains every case as ``fleetbench real`` does, and saves what it has learnt.

``learning_rank.py RANK RANKS STORE OUTPUT STEPS NAMES``: the cases of these names, a list as JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from learning_cases import cases

from fleetbench.experiment import Experiment
from fleetbench.workloads.data.data import prepare
from fleetbench.workloads.training import evaluated
from real.communication.communicators import Communicators
from real.leg import Leg
from real.training import ComputedTraining


def main() -> None:
    """Run every case, and save under ``CASE/...``."""
    rank, ranks, store, output, steps, names = sys.argv[1:]
    timeout = timedelta(seconds=100)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks), timeout=timeout)
    torch.set_num_threads(1)
    communicators = Communicators("gloo", timeout)
    saved: dict[str, Any] = {}
    known = cases(int(ranks), int(steps))
    for name, experiment in ((name, known[name]) for name in json.loads(names)):
        try:
            saved |= {f"{name}/{key}": value for key, value in _train(experiment, communicators).items()}
        except Exception as error:
            raise RuntimeError(f"case {name!r}") from error
    np.savez(output, **saved)
    communicators.barrier()
    communicators.close()
    dist.destroy_process_group()


def _train(experiment: Experiment, communicators: Communicators) -> dict[str, Any]:
    run, workload = experiment.run, experiment.workload
    leg = Leg(strategy=experiment.strategy, steps=workload.steps, warmup_steps=run.warmup_steps, start="initial", evaluate=True)
    with tempfile.TemporaryDirectory(prefix="fleetbench-") as name:
        prepare(workload, run.seed, Path(name))
        training = ComputedTraining(experiment, Path(name), communicators)
        part = training.run(leg, lambda _step: None)
        training.close()
    records = [step["record"] for step in part["steps"]]
    return {
        "losses": np.array([record["loss"] for record in records]),
        "local_steps": np.array([record["local_steps"] or 0 for record in records]),
        "held_out": np.array(part["held_out"]),
        "final_loss": np.array(part["final_loss"]),
        "learnt": torch.cat([tensor.detach().reshape(-1) for tensor in evaluated(training.model)]).numpy(),
    }


if __name__ == "__main__":
    main()
