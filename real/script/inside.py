"""Inside: the driver is one of the processes that somebody has started already, one for each trainer.

All of them run one command, ``fleetbench tune EXPERIMENT.toml -- python train.py``, and their environment
says which trainer each is. Rank 0 drives as it would outside; what it launches is its own trainer.
The others ``serve``: they start theirs whenever a launch's tuning directory appears, and end with the
driver. All of it lies below one folder, which rank 0 makes below ``--out``: every node must see it.
Trainers of a launch meet through a file in its directory, so that launches do not meet each other.

``met`` (rank 0 has told the folder) -> launches, one after another -> ``ended``: the driver says stop, or is gone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

from fleetbench.errors import EnvironmentLacks, WorkerFailed
from real.processes.orphan import PARENT
from real.processes.roles import STORE, Role, role_of
from real.script.folder import DriverSide, ScriptSide
from real.script.variable import TUNING
from real.script.watch import Watch

SHARED = "FLEETBENCH_INSIDE"
"""Environment variable of a driver inside: the folder that all processes of the job see."""

_MEET = timedelta(minutes=5)
_BEAT_S = 2.0
_POLL_S = 0.1
_FAREWELL_S = 10.0
"""For those who serve to see that it is over, before their folder goes."""
_LEAVE_S = 15.0
"""For a trainer to end when its launch has: it looks twice a second."""


def role_inside() -> Role | None:
    """This process's role where it was started as one of several; none where it was not, and drives from outside."""
    role = role_of(os.environ)
    return role if role.trainers > 1 else None


@contextlib.contextmanager
def driving(role: Role, out: Path) -> Iterator[None]:
    """Rank 0's part: inside the context, sessions of a user's script have the job's other processes for their trainers.

    Raises ``EnvironmentLacks`` where the processes do not meet.
    """
    out.mkdir(parents=True, exist_ok=True)
    shared = Path(tempfile.mkdtemp(prefix=".inside-", dir=out.resolve()))
    board = DriverSide(shared)
    ended = threading.Event()
    try:
        board.make()
        _meet(role, shared)
        threading.Thread(target=_beat, args=(board, ended), name="driver-beat", daemon=True).start()
        os.environ[SHARED] = str(shared)
        try:
            yield
        finally:
            del os.environ[SHARED]
            board.stop()
            _wait_for_farewells(board, role.trainers - 1)
    finally:
        ended.set()
        shutil.rmtree(shared, ignore_errors=True)


def serve(role: Role, command: Sequence[str]) -> int:
    """Every other rank's part, until the driver says stop; the exit code. Raises ``WorkerFailed`` where the driver is gone."""
    board = ScriptSide(_meet(role, None))
    watch = Watch(board)
    done: set[Path] = set()
    while not (board.legs / "stop").exists():
        if watch.must_end():
            raise WorkerFailed("is gone, and nobody drives any more", "rank 0", hint="its output says why; start the job again: it goes on")
        for found in sorted(board.path.glob("fleetbench-*/*/driver.json")):
            if found.parent not in done:
                done.add(found.parent)
                if ScriptSide(found.parent).is_aborted():
                    continue
                _train(role, command, found.parent, watch)
        time.sleep(_POLL_S)
    with contextlib.suppress(OSError):  # the folder may be gone already
        (board.ranks / f"ended{role.rank}").touch()
    return 0


def trainer_environment(folder: Path) -> dict[str, str]:
    """What a trainer of the launch with this tuning directory is told of its role; nothing where the driver is outside."""
    if SHARED not in os.environ:
        return {}
    return _environment(role_of(os.environ), folder)


def _environment(role: Role, folder: Path) -> dict[str, str]:
    return {
        "RANK": str(role.rank),
        "WORLD_SIZE": str(role.trainers),
        "LOCAL_RANK": str(role.local_rank),
        "LOCAL_WORLD_SIZE": str(role.trainers_per_node or 1),
        STORE: str(folder / "store"),
        PARENT: str(os.getpid()),
    }


def _train(role: Role, command: Sequence[str], folder: Path, watch: Watch) -> None:
    """Run this rank's trainer of one launch to its end; how a killed one ended goes to the launch's log, as torch's agent says it."""
    log = folder / f"rank{role.rank}.log"
    environment = {**os.environ, **_environment(role, folder), TUNING: str(folder)}
    try:
        with log.open("wb") as output:
            trainer = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment)
    except FileNotFoundError as error:
        if not folder.exists():  # the launch is over
            return
        raise EnvironmentLacks(f"cannot be started: {error.strerror}", "the command", command[0], "is it on every node?") from None
    side = ScriptSide(folder)
    over_s: float | None = None
    try:
        while trainer.poll() is None:
            if watch.must_end() or side.is_aborted():
                over_s = over_s or time.monotonic()
                if time.monotonic() - over_s > _LEAVE_S:
                    break
            time.sleep(_POLL_S)
    finally:
        if trainer.poll() is None:
            trainer.kill()
        code = trainer.wait()
    if code < 0 and over_s is None:
        with contextlib.suppress(OSError), (folder / "command.log").open("a", encoding="utf-8") as output:
            output.write(f"rank {role.rank}: exitcode  : {code} (pid: {trainer.pid})\n")


def _meet(role: Role, shared: Path | None) -> Path:
    """All ranks of the job meet once, and rank 0 tells them the folder."""
    import torch
    import torch.distributed as dist

    from real.processes.joining import join

    try:
        join(role, _MEET, "gloo")
        text = torch.frombuffer(bytearray(str(shared).encode()), dtype=torch.uint8)
        size = torch.tensor([text.numel()])
        dist.broadcast(size, 0)
        told = text if role.rank == 0 else torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(told, 0)
        path = Path(bytes(told.tolist()).decode())
        sees = torch.tensor([int((path / "driver.json").is_file())])
        dist.all_reduce(sees, op=dist.ReduceOp.MIN)
        dist.barrier()
        dist.destroy_process_group()
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        hint = "fleetbench doctor, started alike, looks why"
        raise EnvironmentLacks("the job's processes did not meet", f"rank {role.rank}", reason, hint) from error
    if not int(sees):
        raise EnvironmentLacks("not every node sees the folder", "--out", str(path), "give one on a disk that all nodes share")
    return path


def _beat(board: DriverSide, ended: threading.Event) -> None:
    number = 0
    while not ended.wait(_BEAT_S):
        number += 1
        with contextlib.suppress(OSError):
            board.beat(number)


def _wait_for_farewells(board: DriverSide, num: int) -> None:
    deadline = time.monotonic() + _FAREWELL_S
    while len(list(board.ranks.glob("ended*"))) < num and time.monotonic() < deadline:
        time.sleep(_POLL_S)
