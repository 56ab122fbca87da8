"""One rank of the tests of global modes: trains under each of some strategies, in one of torch's modes.

``modes_rank.py RANK RANKS STORE OUTPUT FOLDER MODE``. Every training saves, loads, reports and evaluates.
"""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import training_problem as problem
from modes_cases import FAMILIES
from torch import nn
from torch.nn.functional import cross_entropy

from fleetbench.strategy import DistributedStrategy
from real.fleet import Fleet

STEPS = 9


def main() -> None:
    """Train every family."""
    rank, ranks, store, output, folder, mode = sys.argv[1:]
    os.environ |= {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks))
    torch.set_num_threads(1)
    saved = {}
    for number, (name, fields) in enumerate(FAMILIES.items()):
        torch.manual_seed(number)
        model = problem.model("float32", "looked" if name == "sparse" else "plain")
        if name != "sparse":
            model = nn.Sequential(model, nn.BatchNorm1d(problem.CLASSES, dtype=torch.float32))
        optimizer = problem.optimizer_of("sgd" if name == "sparse" else "momentum")(model)
        batches = [problem.own_batch(step, int(rank), int(ranks), "float32") for step in range(STEPS)]
        set_mode(mode)
        try:
            found = train(fields, model, optimizer, batches, Path(folder) / name, mode)
        except Exception as error:
            raise RuntimeError(f"{name} in mode {mode}") from error
        finally:
            set_mode("usual")
        saved |= {f"{name}/{key}": value for key, value in found.items()}
    np.savez(output, **saved)
    dist.destroy_process_group()


def set_mode(mode: str) -> None:
    """Let torch make tensors of another type, or elsewhere, where a script names none."""
    types = {"bfloat16 on meta": torch.bfloat16, "float64 and inference": torch.float64}
    torch.set_default_dtype(types.get(mode, torch.float32))
    torch.set_default_device("meta" if mode == "bfloat16 on meta" else None)


def train(
    fields: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[Any],
    folder: Path,
    mode: str,
) -> dict[str, npt.NDArray[np.generic]]:
    """Parameters after every step, and buffers at the end."""
    fleet = Fleet()
    fleet.init(DistributedStrategy.from_dict(fields), timeout_s=30)
    model = fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(optimizer)
    history = []
    for step, (inputs, labels) in enumerate(batches):
        loss = cross_entropy(model(inputs), labels)
        fleet.report(loss=float(loss.detach()) if step % 2 else loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(problem.flat(model).numpy().copy())
        if step % 3 == 0:
            with torch.inference_mode() if mode == "float64 and inference" else torch.no_grad():
                fleet.synchronize()
                model.eval()(inputs)
                model.train()
                fleet.end_epoch()
                fleet.save_persistables(folder)
                fleet.load_persistables(folder)
    buffers = [buffer.numpy().reshape(-1).copy() for buffer in model.buffers()]
    atexit.unregister(fleet._job.leave)  # type: ignore[union-attr]  # the process goes on to another training
    fleet._job.leave()  # type: ignore[union-attr]  # see above
    return {"history": np.array(history), "buffers": np.concatenate([np.zeros(0), *buffers])}


if __name__ == "__main__":
    main()
