"""A training of several ranks that is killed in its saves, over and over, at every place where a save touches the disk.

``killed_saves.py RANKS FOLDER OUTPUT PLACE...``. This process imports torch once and forks the ranks, which is why there can be
so many trainings. Each one loads the last save, compares itself with the training that nobody disturbed, trains on,
and saves after every step; in its second save one rank kills itself before the call of some number of
some function. OUTPUT: a JSON list, an object for each training.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import training_problem as problem
from torch.nn.functional import cross_entropy

from fleetbench.strategy import DistributedStrategy
from real.checkpoints import checkpoint
from real.checkpoints.meeting import Meeting
from real.checkpoints.saving import load, save
from real.communication.communicators import Communicators
from real.engine.engine import Engine

LAST = 200
"""Steps of the undisturbed training, more than all others need."""
TIMEOUT_S = 20.0
LIFE_S = 60
"""No training takes so long: a rank that hangs ends then."""
PLACES: dict[str, tuple[Any, str]] = {
    "fsync": (os, "fsync"),
    "replace": (Path, "replace"),
    "rmtree": (checkpoint.shutil, "rmtree"),
    "mkdir": (Path, "mkdir"),
    "torn": (torch, "save"),
}
"""Before which calls a rank kills itself; ``torn``: after half of a file."""


class Trainee:
    """One rank's training: fragments of merges, so that rounds, flights and sums are open after most steps."""

    def __init__(self, rank: int, ranks: int, store: Path) -> None:
        timeout = timedelta(seconds=TIMEOUT_S)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timeout)
        torch.set_num_threads(1)
        self.communicators = Communicators("gloo", timeout)
        self.communicators.barrier()
        self.meeting = Meeting(timeout)
        self.rank, self.ranks = rank, ranks
        self.model = problem.model("float64", "normed")
        self.optimizer = problem.optimizer_of("momentum")(self.model)
        local = {"k_steps": 4, "fragments": 2, "overlap_steps": 1, "mixing": 0.25, "outer_lr": 0.7, "outer_momentum": 0.9}
        strategy = {"localsgd": True, "localsgd_configs": local, "gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}
        self.engine = Engine(self.model, DistributedStrategy.from_dict(strategy), self.communicators)
        self.engine.attach_optimizer(self.optimizer)

    def step(self, number: int) -> None:
        """One step of the usual loop, and a random number, as dropout would draw it."""
        inputs, labels = problem.own_batch(number % 50, self.rank, self.ranks, "float64")
        cross_entropy(self.model(inputs + 0.01 * torch.rand_like(inputs)), labels).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def bits(self) -> torch.Tensor:
        """Parameters, statistics and momentum."""
        state = [value for entry in self.optimizer.state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
        return torch.cat([tensor.detach().reshape(-1).double() for tensor in (*self.model.state_dict().values(), *state)])


def forked(ranks: int, run: Callable[[int, Path], None], folder: Path) -> list[int]:
    """Run ``run(rank, store)`` in a process a rank; how each ended, as ``os.waitstatus_to_exitcode`` has it."""
    store = folder / f"store-{time.monotonic_ns()}"
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            code = 1
            signal.alarm(LIFE_S)
            try:
                sys.stderr = (folder / f"rank-{rank}.txt").open("w", encoding="utf-8")
                run(rank, store)
                code = 0
            except Exception as error:  # noqa: BLE001  # what the others of a killed rank end with
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            finally:
                os._exit(code)
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def undisturbed(ranks: int, folder: Path) -> None:
    """Keep what every rank is after every step, where nobody saves."""

    def run(rank: int, store: Path) -> None:
        torch.manual_seed(rank)
        trainee = Trainee(rank, ranks, store)
        history = []
        for number in range(1, LAST + 1):
            trainee.step(number)
            history.append(trainee.bits())
        torch.save(history, folder / f"history-{rank}.pt")

    assert forked(ranks, run, folder) == [0] * ranks


def struck(folder: Path, path: Path, ranks: int, *, victim: int, place: str, number: int) -> dict[str, Any]:
    """One training from the last save on, killed in its second save; what came of it."""
    found: dict[str, Any] = {"victim": victim, "place": place, "number": number}

    def run(rank: int, store: Path) -> None:
        goes_on = path.exists()
        torch.manual_seed(rank + 1000 * goes_on)  # whoever goes on takes random numbers from the save
        history = torch.load(folder / f"history-{rank}.pt", weights_only=True)
        trainee = Trainee(rank, ranks, store)
        done = 0
        if goes_on:
            done = load([trainee.engine], trainee.meeting, path, resynchronize=False).step
            _compare(trainee, history, done, "loaded")
        (folder / f"loaded-{rank}.txt").write_text(str(done), encoding="utf-8")
        for step in (done + 1, done + 2):
            trainee.step(step)
            _compare(trainee, history, step, "trained")
            if step == done + 2 and rank == victim:
                _arm(place, number)
            save([trainee.engine], trainee.meeting, path, extra=None)
            (folder / f"saved-{rank}.txt").write_text(str(step), encoding="utf-8")

    found["ended"] = forked(ranks, run, folder)
    for name in ("rank", "loaded", "saved"):
        found[name] = [(folder / f"{name}-{rank}.txt").read_text(encoding="utf-8") for rank in range(ranks)]
    return found


def _compare(trainee: Trainee, history: list[torch.Tensor], step: int, what: str) -> None:
    if not torch.equal(trainee.bits(), history[step - 1]):
        raise AssertionError(f"{what} step {step} has other bits than the undisturbed training")


def _arm(place: str, number: int) -> None:
    """Kill this process at the call of that number."""
    owner, name = PLACES[place]
    call, count = getattr(owner, name), 0

    def strike(*arguments: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        if count == number:
            if place.startswith("torn"):
                call(*arguments, **named)
                path = arguments[1] if isinstance(arguments[1], Path) else Path(arguments[1].name)
                if path != arguments[1]:
                    arguments[1].flush()
                os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **named)

    setattr(owner, name, strike)


def strikes(ranks: int, folder: Path, path: Path, places: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Every rank, every one of the places, every call, until a save has no more of them."""
    for victim in range(ranks):
        for place in places:
            number = 1
            while True:
                found = struck(folder, path, ranks, victim=victim, place=place, number=number)
                yield found
                if found["ended"][victim] != -signal.SIGKILL:
                    break
                number += 1


def main() -> None:
    """See the module."""
    ranks, folder, output = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    gc.freeze()  # a fork's collections leave what was imported alone
    undisturbed(ranks, folder)
    found = list(strikes(ranks, folder, folder / "checkpoint", sys.argv[4:]))
    output.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
