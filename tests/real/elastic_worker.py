"""One elastic worker: ``elastic_worker.py FOLDER JOB``; it saves its parameters after every step.

JOB is JSON: the strategy's ``localsgd_configs``, ``steps``, ``merge`` (micro-batches of an update), ``alike`` (all come with
the same parameters), and ``acts``, what ranks do in their first life, by rank: lists of a step and ``synchronize``, ``die``,
``die in exchange`` or ``stop`` (for three seconds). With ``steps`` of 0, all end nine steps after a worker that was started again, or had
stopped, has joined the two others.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import training_problem as problem
from torch.nn.functional import cross_entropy

from fleetbench import DistributedStrategy, fleet
from real.elastic.gathering import Gathering


def die(*_: Any) -> None:
    """End as by the kernel's hand."""
    os.kill(os.getpid(), signal.SIGKILL)


folder, job = Path(sys.argv[1]), json.loads(sys.argv[2])
rank, life = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
acts = dict(job["acts"].get(str(rank), ())) if life == 0 else {}
merge = job.get("merge", 1)
merged = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": merge}} if merge > 1 else {}
fleet.init(DistributedStrategy(localsgd=True, localsgd_configs=job["configs"], **merged), timeout_s=40)
network = problem.model("float64")
with torch.no_grad():
    for parameter in network.parameters():  # the first worker's are those of all
        parameter.add_(0 if job.get("alike") else rank + 10 * life)
network.register_buffer("begun_by", torch.tensor(rank))
network = fleet.distributed_model(network)
assert life or int(network.begun_by) == 0, "all begin with the first worker's buffers, too"
optimizer = fleet.distributed_optimizer(torch.optim.AdamW(network.parameters(), lr=0.01))
np.save(folder / f"{rank}-{life}-{fleet.num_steps()}.npy", problem.flat(network).numpy())
step = fleet.num_steps()
end = job["steps"] or (step + 9 if life else 10_000)
while step < end:
    step += 1
    if acts.get(step) == "die":
        die()
    if acts.get(step) == "die in exchange":
        Gathering.total = die  # type: ignore[method-assign]  # the others are in it, too
    if acts.get(step) == "stop":
        subprocess.Popen(["sh", "-c", f"sleep 3; kill -CONT {os.getpid()}"])  # noqa: S607  # any shell
        os.kill(os.getpid(), signal.SIGSTOP)
    inputs, labels = problem.own_batch(step, rank, 3, "float64")
    cross_entropy(network(inputs), labels).backward()
    optimizer.step()
    optimizer.zero_grad()
    if acts.get(step) == "synchronize":
        fleet.synchronize()
    np.save(folder / f"{rank}-{life}-{step}.npy", problem.flat(network).numpy())
    if end == 10_000:
        time.sleep(0.02)
        if step > 6 and fleet.worker_num() == 3:
            end = step + 9
    (folder / f"{rank}-{life}-{step}.txt").write_text(f"{fleet.worker_index()} {fleet.worker_num()} {fleet.num_steps()}")
