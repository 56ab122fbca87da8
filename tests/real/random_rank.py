"""One rank of the random cases: ``random_rank.py RANK RANKS STORE ORDERS ANSWERS``, told through the pipe ORDERS what to do.

A line is an order: ``{"do": "train", "case": ...}`` trains a case under fleet, ``{"do": "compare"}`` trains it
by its truths and compares. Each is answered by a line in the pipe ANSWERS.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from living_fleet import be_rank, in_flight, leave
from random_cases import Case
from random_loops import Loop, Trainer, WrittenOut, autocast
from random_models import Network, flat_of, hook, network_of, optimizer_of
from torch.nn.parallel import DistributedDataParallel

from fleetbench.errors import FleetbenchError
from fleetbench.strategy import DistributedStrategy
from real.communication.communicators import CollectiveFailed
from real.fleet import Fleet

TIMEOUT_S = 20.0
"""Of a collective under fleet: who has lost the others says so after it."""


class Rank:
    """A process that trains case after case, each with a fleet of its own."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank = rank
        self._fleet = Fleet()
        self._case = Case()
        self._trained: list[torch.Tensor] = []
        be_rank(rank, ranks)

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        """Do what is ordered."""
        if order["do"] == "compare":
            try:
                return self._compare()
            except Exception as error:  # noqa: BLE001  # a truth that cannot be had is a failure of the test, and named
                return {"end": "raised", "what": f"{type(error).__name__}: {error}"[:300]}
        leave(self._fleet)
        self._fleet = Fleet()
        self._case = Case.of(order["case"])
        try:
            self._trained = self._under_fleet()
        except FleetbenchError as error:
            what = f"{error.where}: {error.what}"
            return {"end": "refused", "what": what, "error": str(error), "in_flight": in_flight(self._fleet)}
        except CollectiveFailed as error:
            return {"end": "lost", "what": str(error)[:200]}
        except Exception as error:  # noqa: BLE001  # any other is a finding, and named
            end = "refused" if "mark a variable ready only once" in str(error) else "raised"  # by the Reducer, as under DDP
            return {"end": end, "what": f"{type(error).__name__}: {error}"[:300], "error": str(error)}
        return {"end": "trained"}

    def _under_fleet(self) -> list[torch.Tensor]:
        case, fleet = self._case, self._fleet
        network = network_of(case, self.rank, offset=0.1 * self.rank)  # fleet starts all ranks from rank 0's
        optimizer = optimizer_of(case, network)
        kind, _, where = case.hook.partition(" ")
        if where == "before":
            hook(network, kind)
        fleet.init(DistributedStrategy.from_dict(case.strategy), timeout_s=TIMEOUT_S)
        model = fleet.distributed_model(network)
        if where == "after":
            hook(network, kind)
        trainer = Trainer(case, network, fleet.distributed_optimizer(optimizer), model)
        trainer.no_sync = fleet.no_sync
        trainer.tell = lambda loss: fleet.report(loss=loss)
        trainer.end_epoch = fleet.end_epoch
        trainer.synchronize = fleet.synchronize
        trainer.give = fleet.distributed_optimizer
        Loop(case, trainer).run()
        return trainer.history

    def _compare(self) -> dict[str, Any]:
        case = self._case
        truth = self._by(case, ddp=False)
        found = {"off": _distance(case, self._trained, truth)}
        if can_ddp(case):
            try:
                found["truths"] = _distance(case, self._by(case, ddp=True), truth)
            except RuntimeError as error:
                if not any(what in str(error) for what in REFUSED_BY_DDP):
                    raise  # DDP refuses some loops that are right: then the algorithm written out is the only truth
        return found

    def _by(self, case: Case, *, ddp: bool) -> list[torch.Tensor]:
        network = network_of(case, self.rank)
        optimizer = optimizer_of(case, network)
        if case.hook:
            hook(network, case.hook.split()[0])
        if ddp:
            model = DistributedDataParallel(network, find_unused_parameters=case.finds_unused)
            trainer = Trainer(case, network, optimizer, model)
            trainer.no_sync = model.no_sync
        else:
            trainer = WrittenOut(case, network, optimizer, _under_autocast(case, network))
        Loop(case, trainer).run()
        return trainer.history


REFUSED_BY_DDP = ("Expected to have finished reduction in the prior iteration", "Expected to mark a variable ready only once")
"""A parameter that a backward outside of ``no_sync`` does not reach, although one inside has; reentrant checkpoints beside unused ones."""


def can_ddp(case: Case) -> bool:
    """Whether DistributedDataParallel can train it, and to the same end: synchronously, every backward after a forward of its own.

    A backward that keeps its graph (``create_graph``) makes it hang, in torch 2.13 on gloo.
    """
    kinds = {kind for kind, _ in case.backwards}
    if case.finds_unused and "two forwards" in kinds:  # it takes a parameter for ready before its second gradient
        return False
    is_left_out = case.drops == "forward" or case.evaluates  # a forward without backward, after which it exchanges inside no_sync
    if is_left_out and not all(synced for _, synced in case.backwards):
        return False
    return not case.is_local and case.merge == 1 and not case.amp and not kinds & {"two losses", "one of two losses", "create graph"}


def _under_autocast(case: Case, network: Network) -> Any:
    if not case.amp:
        return network

    def forward(x: torch.Tensor) -> Any:
        with autocast(case):
            output = network(x)
        if isinstance(output, dict):
            return {"scores": output["scores"].float(), "hidden": (output["hidden"][0].float(),)}
        return output.float()

    return forward


def _distance(case: Case, found: list[torch.Tensor], truth: list[torch.Tensor]) -> float:
    """The largest difference of a parameter at any step; what has rounded gradients: as a share of how far training went.

    Infinite where one is no number and the other is.
    """
    mine, theirs = torch.stack(found), torch.stack(truth)
    if not torch.equal(mine.isfinite(), theirs.isfinite()):
        return float("inf")
    difference = (mine - theirs).nan_to_num(0.0, 0.0, 0.0)
    if not case.wire and not case.amp:
        return float((difference.abs() / (1.0 + theirs.nan_to_num(0.0, 0.0, 0.0).abs())).max())
    start = flat_of(network_of(case, 0).parameters())
    moved = (theirs - start).nan_to_num(0.0, 0.0, 0.0)
    return float(difference.norm(dim=1).max() / moved.norm(dim=1).max().clamp(min=1e-9))


def main() -> None:
    """Answer orders until there are none."""
    rank, ranks, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    warnings.simplefilter("ignore")  # a loop may deserve a warning, and trains all the same
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    worker = Rank(rank, ranks)
    with Path(sys.argv[5]).open("w", encoding="utf-8", buffering=1) as answers, Path(sys.argv[4]).open(encoding="utf-8") as orders:
        answers.write(json.dumps({"end": "ready"}) + "\n")
        answers.writelines(json.dumps(worker.answer(json.loads(line))) + "\n" for line in orders)
    os._exit(0)  # whatever state the last case has left


if __name__ == "__main__":
    main()
