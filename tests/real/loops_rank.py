"""One rank of the tests of loops: trains cases, and saves its parameters after every ``optimizer.step()``.

``loops_rank.py RANK RANKS STORE OUTPUT NAMES``: the cases of these names, a list as JSON.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from datetime import timedelta

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import training_problem as problem
from counting import counted
from loop_cases import Case, cases
from torch.nn.parallel import DistributedDataParallel
from training_loops import Script

from fleetbench.strategy import DistributedStrategy
from real.communication.communicators import Communicators
from real.engine.engine import Engine


def main() -> None:
    """Run the cases."""
    rank, ranks, store, output, names = sys.argv[1:]
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks), timeout=timeout)
    torch.set_num_threads(1)
    communicators = Communicators("gloo", timeout)
    saved, chosen = {}, json.loads(names)
    for case in (case for case in cases() if case.name in chosen):
        try:
            saved |= {f"{case.name}/{name}": value for name, value in train(case, communicators).items()}
        except Exception as error:
            raise RuntimeError(f"case {case.name!r}") from error
    np.savez(output, **saved)
    communicators.barrier()
    communicators.close()
    dist.destroy_process_group()


def train(case: Case, communicators: Communicators) -> dict[str, npt.NDArray[np.generic]]:
    """The parameters after every ``optimizer.step()``, and how many collectives each step took."""
    what = case.truth
    network = problem.model(what.dtype, what.model)
    if isinstance(network, problem.Gated):
        network.rank = communicators.rank
    optimizer = problem.optimizer_of("sgd" if what.model == "looked" else "momentum")(network)
    model, no_sync, engine = network, nullcontext, None
    history, counts = [], []

    def meet() -> None:
        if engine is not None:
            engine.flush()
            engine.end_epoch()
            assert engine.progress("a save").state.next_step == 1 + len(counts)

    if case.strategy is None:
        model = DistributedDataParallel(network, find_unused_parameters=what.model == "gated")
        no_sync = model.no_sync
    else:
        engine = Engine(network, DistributedStrategy.from_dict(case.strategy), communicators)
        engine.attach_optimizer(optimizer)
        no_sync = engine.no_sync
    script = Script(model, optimizer, communicators.rank, communicators.trainers, no_sync, what.dtype, meet)
    with counted() as collectives:
        for exchanged in case.loop(script):
            if not exchanged:
                history.append(problem.flat(network).numpy().copy())
            if exchanged is False:
                counts.append(len(collectives))
            if not exchanged:
                collectives.clear()
    found = {"history": np.array(history), "collectives": np.array(counts)}
    if engine is not None:
        found["buckets"] = np.array(len(engine.plan.buckets))
        engine.close()
    return found


if __name__ == "__main__":
    main()
