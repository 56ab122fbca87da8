"""Inside: the driver is one of the processes that somebody has started already, one for each trainer.

All of them run one command, ``fleetbench tune EXPERIMENT.toml -- python train.py``, and their environment
says which trainer each is. Rank 0 drives as it would outside; what it launches is its own trainer.
The others ``serve``: they start theirs whenever a launch's tuning directory appears, and end with the
driver. All of it lies below one folder, which rank 0 makes below ``--out``: every node must see it. It
goes with the driver, but for the trainers' output where a worker failed; what a killed driver left goes
when the next one starts.
Trainers of a launch meet through a file in its directory, so that launches do not meet each other.

``met`` (rank 0 has told the folder) -> launches, one after another -> ``ended``: the driver says stop, or is gone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

from fleetbench.children import bound, end_with_parent
from fleetbench.errors import EnvironmentLacks, FleetbenchError, WorkerFailed
from real.job.folder import DriverSide, RankSide
from real.job.workers import uninterrupted
from real.processes.folders import PREFIX, sweep
from real.processes.roles import STORE, TUNING, Role, role_of
from real.script.watch import Watch

SHARED = "FLEETBENCH_INSIDE"
"""Environment variable of a driver inside: the folder that all processes of the job see."""

_MEET = timedelta(minutes=5)
_BEAT_S = 2.0
_POLL_S = 0.1
_LEAVE_S = 15.0
"""For a trainer to end when its launch has: it looks twice a second."""
_FAREWELL_S = _LEAVE_S + 5.0
"""For those who serve to see that it is over, before their folder goes."""
_HIDDEN = ".inside-"
_FORGOTTEN_S = 3600.0
"""So long without a beat is a driver of another host gone for good."""


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
    _sweep(out)
    shared = Path(tempfile.mkdtemp(prefix=_HIDDEN, dir=out.resolve()))
    board = DriverSide(shared)
    ended = threading.Event()
    keep = False
    try:
        board.make()
        _meet(role, shared)
        threading.Thread(target=_beat, args=(board, ended), name="driver-beat", daemon=True).start()
        os.environ[SHARED] = str(shared)
        try:
            yield
        except FleetbenchError as error:
            keep = isinstance(error, WorkerFailed)  # whose hint names a file below
            _dismiss(board, role.trainers - 1)
            raise
        else:
            _dismiss(board, role.trainers - 1)
        finally:
            del os.environ[SHARED]
    finally:
        ended.set()
        with uninterrupted():
            if keep:
                _keep_output(board)
            else:
                shutil.rmtree(shared, ignore_errors=True)


def serve(role: Role, command: Sequence[str]) -> int:
    """Every other rank's part, until the driver says stop; the exit code. Raises ``WorkerFailed`` where the driver is gone."""
    board = RankSide(_meet(role, None))
    watch = Watch(board)
    done: set[Path] = set()
    try:
        while not (board.legs / "stop").exists():
            if watch.must_end():
                hint = "its output says why; start the job again: it goes on"
                raise WorkerFailed("is gone, and nobody drives any more", "rank 0", hint=hint)
            for folder in _launches(board):
                if folder not in done:
                    done.add(folder)
                    _train(role, command, folder, watch)
            time.sleep(_POLL_S)
    finally:
        if watch.must_end() and not board.is_aborted():
            shutil.rmtree(board.path, ignore_errors=True)  # as rank 0 would have done
    with contextlib.suppress(OSError):  # the folder may be gone already
        (board.ranks / f"ended{role.rank}").touch()
    return 0


def _launches(board: RankSide) -> list[Path]:
    """Tuning directories of launches that are not over."""
    try:
        found = [path.parent for path in board.path.glob(f"{PREFIX}*/*/driver.json")]
    except OSError:  # one went while we looked
        return []
    return sorted(folder for folder in found if not RankSide(folder).is_aborted())


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
    }


def _train(role: Role, command: Sequence[str], folder: Path, watch: Watch) -> None:
    """Run this rank's trainer of one launch to its end; the driver is told of one that fails."""
    log = folder / f"rank{role.rank}.log"
    side = RankSide(folder)
    try:
        environment = {**os.environ, **side.environment(), **_environment(role, folder), TUNING: str(folder)}
        with log.open("wb") as output:
            trainer = subprocess.Popen(bound(command), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment)
    except OSError as error:
        if not folder.exists():  # the launch is over
            return
        what, where = f"cannot be started: {error.strerror}", f"the command of rank {role.rank}"
        raise EnvironmentLacks(what, where, command[0], "is it on every node?") from None
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
    if code != 0 and over_s is None and not side.is_aborted():
        with contextlib.suppress(OSError):  # it may be over by now
            side.ended(role.rank, code)


def _meet(role: Role, shared: Path | None) -> Path:
    """All ranks of the job meet once, and rank 0 tells them the folder. Each ends with torchrun's agent from now on."""
    import torch
    import torch.distributed as dist

    from real.processes.joining import join

    if role.launcher == "torchrun":
        end_with_parent(os.getppid(), signal.SIGTERM)
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


def _dismiss(board: DriverSide, num: int) -> None:
    """Tell those who serve that it is over, and wait until they know."""
    board.stop()
    deadline = time.monotonic() + _FAREWELL_S
    while len(list(board.ranks.glob("ended*"))) < num and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _keep_output(board: DriverSide) -> None:
    """Remove all but what trainers have written."""
    for path in board.path.iterdir():
        if not path.name.startswith(PREFIX):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def _sweep(out: Path) -> None:
    """Remove what drivers have left below ``out`` that were killed; output that was kept has no driver any more, and stays."""
    with contextlib.suppress(OSError):  # another start may sweep there, too
        sweep(out, f"{_HIDDEN}*/driver.json", lambda shared: time.time() - (shared / "driver").stat().st_mtime > _FORGOTTEN_S)
