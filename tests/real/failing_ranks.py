"""Two ranks of a script with fleet's four lines, of which one fails, over and over: ``failing_ranks.py FOLDER OUTPUT CASE...``.

This process imports torch once and forks the ranks of all cases, which then run at the same time and leave as any process
leaves. OUTPUT: a JSON object, for every case a list with an object for each rank: how it ended, when, and what it said.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # an optimizer imports it: once here, and not in each of two dozen forks
from torch import nn

from fleetbench import DistributedStrategy
from fleetbench.errors import ConfigError
from real.fleet import Fleet
from real.processes.diagnosis import NOTE_PATH
from real.processes.roles import STORE

TIMEOUT_S = 120.0
"""Of a collective where no case says another: nobody is to wait for it."""
SHORT_S = 3.0
LATE_S = 40.0
"""A rank that has not ended by then is killed."""
LIVES_ON = ("raised", "refused")
"""Cases whose rank 1 would not end by itself, and is killed once rank 0 has ended."""
STEPS = 5
FAULTY = 3
"""The step of the fault."""


class Branched(nn.Module):
    """Two layers, of which a step may leave one out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.skips = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Of shape ``(batch, 4)``."""
        outputs: torch.Tensor = self.second(inputs if self.skips else self.first(inputs))
        return outputs


class Script:
    """One rank's."""

    def __init__(self, folder: Path, timeout_s: float = TIMEOUT_S, **strategy: Any) -> None:
        self.folder = folder
        self.fleet = Fleet()
        self.fleet.init(DistributedStrategy(**strategy), timeout_s=timeout_s)
        self.rank = self.fleet.worker_index()
        self.model = Branched()
        self.fleet.distributed_model(self.model)
        self.optimizer = self.fleet.distributed_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.01))

    def train(self, fault: Callable[[], object]) -> None:
        """The usual loop, with a fault on rank 1 before a step."""
        for step in range(1, STEPS + 1):
            if step == FAULTY and self.rank == 1:
                fault()
            self.step()

    def step(self) -> None:
        """One."""
        self.model(torch.ones(2, 4)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self) -> None:
        """A checkpoint."""
        self.fleet.save_persistables(self.folder / "checkpoint")


def _odd() -> None:
    raise ValueError("the third layer is odd")


def no_fault(folder: Path) -> None:
    """Training and a save."""
    script = Script(folder)
    script.train(lambda: None)
    script.save()


def raised(folder: Path) -> None:
    """Rank 1 raises, and a thread of its own keeps its process."""
    script = Script(folder)
    if script.rank == 1:
        threading.Thread(target=time.sleep, args=(LATE_S,)).start()
    script.train(_odd)


def refused(folder: Path) -> None:
    """A backward is refused on rank 1, whose script goes on with something else."""
    script = Script(folder)
    try:
        script.train(lambda: setattr(script.model, "skips", True))
    except ConfigError:
        time.sleep(LATE_S)


def exited(folder: Path) -> None:
    """Rank 1 leaves by ``sys.exit``."""
    Script(folder, timeout_s=SHORT_S).train(lambda: sys.exit(3))


def preempted(folder: Path) -> None:
    """Both ranks leave by ``sys.exit``, one later than the other."""
    script = Script(folder)
    script.train(lambda: None)
    time.sleep(0.7 * script.rank)
    sys.exit(85)


def late_evaluation(folder: Path) -> None:
    """Rank 0 evaluates alone for longer than a collective may take, when rank 1 has come to its end."""
    script = Script(folder, timeout_s=SHORT_S)
    script.train(lambda: None)
    if script.rank == 0:
        time.sleep(2.5 * SHORT_S)


def left_early(folder: Path) -> None:
    """Rank 1 destroys its process group and leaves in the middle of the training."""
    script = Script(folder, timeout_s=SHORT_S)

    def leave() -> None:
        torch.distributed.destroy_process_group()
        sys.exit()

    script.train(leave)


def far_apart(folder: Path) -> None:
    """Rank 0 meets nobody for long when rank 1 raises."""
    script = Script(folder, localsgd=True, localsgd_configs={"k_steps": 100})
    script.train(_odd)
    time.sleep(LATE_S)


def swallowed(folder: Path) -> None:
    """Rank 1 is late, rank 0's collective runs into its timeout, and the script of both takes it for nothing."""
    script = Script(folder, timeout_s=2 * SHORT_S)
    try:
        script.train(lambda: time.sleep(2.7 * SHORT_S))  # so that both meet again at their exits
    except RuntimeError:
        return


def slow_save(folder: Path) -> None:
    """Rank 0 writes for longer than a collective may take."""
    script = Script(folder, timeout_s=SHORT_S)
    script.train(lambda: None)
    if script.rank == 0:
        _before_writing(lambda: time.sleep(2 * SHORT_S))
    script.save()


def _before_writing(fault: Callable[[], object]) -> None:
    write = torch.save
    happened = False

    def faulty(*arguments: Any, **named: Any) -> None:
        nonlocal happened
        if not happened:
            happened = True
            fault()
        write(*arguments, **named)

    torch.save = faulty  # type: ignore[assignment]  # until the process ends


def run(cases: list[str], folder: Path) -> dict[str, list[dict[str, Any]]]:
    """How every rank of every case ended; in a rank, this returns nothing, and the process ends as its case says."""
    places: dict[int, tuple[str, int]] = {}
    for case in cases:
        (folder / case).mkdir()
        for rank in (0, 1):
            pid = os.fork()
            if pid == 0:
                output = os.open(folder / case / f"{rank}.txt", os.O_CREAT | os.O_WRONLY)
                os.dup2(output, 1)
                os.dup2(output, 2)
                values = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, STORE: folder / case / "store"}
                os.environ.update({name: str(value) for name, value in values.items()} | {NOTE_PATH: str(folder / case / "note")})
                globals()[case](folder / case)
                sys.exit()
            places[pid] = (case, rank)
    found: dict[str, list[dict[str, Any]]] = {case: [{}, {}] for case in cases}
    begin = time.monotonic()
    while places:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            case, rank = places.pop(pid)
            text = (folder / case / f"{rank}.txt").read_text(encoding="utf-8")
            for late, place in places.items():
                if place == (case, 1) and case in LIVES_ON:
                    os.kill(late, signal.SIGKILL)
            found[case][rank] = {"code": os.waitstatus_to_exitcode(status), "after_s": time.monotonic() - begin, "text": text}
        elif time.monotonic() - begin > LATE_S:
            for late in places:
                os.kill(late, signal.SIGKILL)
        time.sleep(0.05)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.freeze()  # what was imported is neither collected nor copied when a fork ends: a third of the time
    ended = run(sys.argv[3:], Path(sys.argv[1]))
    Path(sys.argv[2]).write_text(json.dumps(ended), encoding="utf-8")
