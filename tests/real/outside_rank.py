"""One rank of the test of weights changed from outside: ``outside_rank.py RANK RANKS STORE OUTPUT NAMES FOLDER``.

Saves the parameters after every step and at the end, or the error; and what is saved below FOLDER directly after weights were loaded.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import training_problem as problem
from outside_cases import CASES, FAMILIES, READ, STEPS, WAYS, Case
from torch.nn.functional import cross_entropy

from fleetbench.errors import ConfigError
from fleetbench.strategy import DistributedStrategy
from real.checkpoints.meeting import Meeting
from real.checkpoints.saving import save
from real.communication.communicators import Communicators
from real.engine.engine import Engine


def train(case: Case, communicators: Communicators) -> Any:
    """Parameters ``(steps + 1, parameters)``, or the error's text."""
    family = FAMILIES[case.family]
    network = problem.model("float64")
    engine = Engine(network, DistributedStrategy.from_dict(family.strategy), communicators)
    moment, history = family.moments[case.moment], []
    try:
        if case.moment == "before the optimizer":
            WAYS[case.way](network)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.02, momentum=0.5)
        engine.attach_optimizer(optimizer)
        if case.moment == "after it":
            WAYS[case.way](network)
        for step in range(1, STEPS + 1):
            inputs, labels = problem.own_batch(step, communicators.rank, communicators.trainers, "float64")
            cross_entropy(network(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            history.append(problem.flat(network).numpy().copy())
            if step == moment:
                WAYS[case.way](network)
        engine.flush(end=True)
        history.append(problem.flat(network).numpy().copy())
    except ConfigError as error:
        return np.array(str(error))
    finally:
        engine.close()
    return np.array(history)


def read(number: int, communicators: Communicators, meeting: Meeting, folder: Path) -> Any:
    """Parameters ``(3, parameters)`` directly after a load: as they are saved, as they are then, and as trainers agree on them."""
    name, moment = READ[number]
    network = problem.model("float64")
    engine = Engine(network, DistributedStrategy.from_dict(FAMILIES[name].strategy), communicators)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.02, momentum=0.5)
    engine.attach_optimizer(optimizer)
    for step in range(1, FAMILIES[name].moments[moment] + 1):
        inputs, labels = problem.own_batch(step, communicators.rank, communicators.trainers, "float64")
        cross_entropy(network(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    WAYS["load_state_dict"](network)
    save([engine], meeting, folder / str(number), extra=None)
    (file,) = (folder / str(number)).glob("save-*/model.pt")
    saved = torch.load(file)
    found = [torch.cat([saved[key].reshape(-1) for key, _ in network.named_parameters()]), problem.flat(network)]
    engine.end_epoch()
    engine.flush()
    found.append(problem.flat(network))
    engine.close()
    return torch.stack(found).numpy()


def main() -> None:
    """The cases of these names and the readings of these numbers, a list as JSON, in one order on all ranks."""
    rank, ranks, store, output, names, folder = sys.argv[1:]
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks), timeout=timeout)
    torch.set_num_threads(1)
    communicators = Communicators("gloo", timeout)
    chosen = json.loads(names)
    found = {str(case): train(case, communicators) for case in CASES if str(case) in chosen}
    meeting = Meeting(timeout)
    found |= {str(number): read(number, communicators, meeting, Path(folder)) for number in range(len(READ)) if number in chosen}
    np.savez(output, **found)
    communicators.barrier()
    communicators.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
