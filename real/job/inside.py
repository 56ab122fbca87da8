"""Inside: the driver is one of a job's processes; a launcher has started one process per trainer.

All of them run the same command, ``fleetbench tune EXPERIMENT.toml -- python train.py``, and their
environment says which trainer each is. Rank 0 drives as it would outside, and launches its own trainer. The
others ``serve``: they start theirs whenever a launch's folder appears, and end with the driver. All files
are in one folder, which rank 0 makes below ``--out`` and which every node must see. It is removed with the
driver, unless a worker failed: then it stays, for the trainers' output. The trainers of a launch find each
other through a file in its folder, so that launches cannot mix.

Life cycle: ``met`` (rank 0 has sent the folder's path) -> launches, one after another -> ``ended``: the driver
says stop, or is gone.
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from fleetbench.children import end_with_parent
from fleetbench.errors import EnvironmentLacks, WorkerFailed
from real.job.driver_watch import Watch
from real.job.folder import DriverSide, RankSide
from real.processes.attached import attached_environment
from real.processes.place import PREFIX, leave_folder, make_folder
from real.processes.roles import SEED, STORE, TUNING, Role, role_of
from real.processes.started import end, start, uninterrupted

SHARED = "FLEETBENCH_INSIDE"
"""Environment variable of a driver inside a job, with the path of the folder that all processes of the job see."""

_MEET = timedelta(minutes=5)
_POLL_S = 0.1


def role_inside() -> Role | None:
    """Return this process's role if it was started as one of several; ``None`` if it drives from outside."""
    role = role_of(os.environ)
    return role if role.trainers > 1 else None


@contextlib.contextmanager
def driving(role: Role, out: Path) -> Iterator[None]:
    """Let sessions of a user's script use the job's other processes as trainers; called on rank 0.

    Raises ``EnvironmentLacks`` if the processes do not meet.
    """
    out.mkdir(parents=True, exist_ok=True)
    board = DriverSide(make_folder(out.resolve()))
    board.make()
    board.show_life()
    try:
        _meet(role, board.path)
        os.environ[SHARED] = str(board.path)
        yield
    finally:
        os.environ.pop(SHARED, None)
        error = sys.exc_info()[1]
        with uninterrupted():
            board.stop()
            board.abort()
            leave_folder(board.path, error)


def serve(role: Role, command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the trainers of a rank other than 0, until the driver stops or has removed its folder.

    Return the exit code. ``environment``: variables of the trainers, which override this process's own. Raises
    ``WorkerFailed`` if the driver is gone.
    """
    board = RankSide(_meet(role, None))
    watch = Watch(board)
    done: set[Path] = set()
    try:
        while not board.is_over():
            if not watch.driver_lives():
                hint = "its output says why; start the job again: it goes on"
                raise WorkerFailed("is gone, and nobody drives any more", "rank 0", hint=hint)
            found: list[Path] = []
            with contextlib.suppress(OSError):  # a folder may disappear during the search
                found = sorted(path.parent for path in board.path.glob(f"{PREFIX}*/*/driver.json"))
            for folder in found:
                if folder not in done and not RankSide(folder).is_aborted():
                    done.add(folder)
                    _train(role, command, environment, folder, watch)
            time.sleep(_POLL_S)
    finally:
        if not board.is_over() and not watch.driver_lives():
            shutil.rmtree(board.path, ignore_errors=True)  # as rank 0 would have done
    return 0


def trainer_environment(folder: Path, role: Role | None = None) -> dict[str, str]:
    """Return a trainer's variables in the launch of ``folder``: seed, attachment to the job, and role.

    ``role``: by default this process's, inside a job; outside one, the command's launcher sets the role.
    """
    seed = {SEED: (folder / "seed").read_text(encoding="ascii")} if (folder / "seed").exists() else {}
    seed |= attached_environment(folder)
    if role is None:
        if SHARED not in os.environ:
            return seed
        role = role_of(os.environ)
    return seed | {
        "RANK": str(role.rank),
        "WORLD_SIZE": str(role.trainers),
        "LOCAL_RANK": str(role.local_rank),
        "LOCAL_WORLD_SIZE": str(role.trainers_per_node or 1),
        STORE: str(folder / "store"),
    }


def _train(role: Role, command: Sequence[str], environment: Mapping[str, str], folder: Path, watch: Watch) -> None:
    """Run this rank's trainer of one launch to its end; report a failure to the driver."""
    side = RankSide(folder)
    try:
        own = {**os.environ, **environment, **trainer_environment(folder, role), TUNING: str(folder)}
        trainer = start("trainer", role.rank, list(command), own, folder / f"rank{role.rank}.log")
    except OSError as error:
        if not folder.exists():  # the launch is over
            return
        what, where = f"cannot be started: {error.strerror}", f"the command of rank {role.rank}"
        raise EnvironmentLacks(what, where, command[0], "is it on every node?") from None
    try:
        while (code := trainer.popen.poll()) is None and not watch.must_end() and not side.is_aborted():
            time.sleep(_POLL_S)
        if code:
            side.ended(role.rank, code)
    finally:
        end([trainer])


def _meet(role: Role, shared: Path | None) -> Path:
    """Let all ranks of the job meet once, and return the folder, whose path rank 0 sends.

    From then on, a rank that torchrun has started ends with torchrun's agent.
    """
    import torch.distributed as dist

    from real.processes.joining import join

    if role.launcher == "torchrun":
        end_with_parent(os.getppid(), signal.SIGTERM)
    try:
        join(role, _MEET, "gloo")
        store = dist.distributed_c10d._get_default_store()  # noqa: SLF001  # torch has no other name for it
        if role.rank == 0:
            store.set("folder", str(shared))
        path = Path(store.get("folder").decode())
        dist.barrier()
        dist.destroy_process_group()
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        hint = "fleetbench doctor on each node lists its interfaces; gloo takes that of the host name, or the one in GLOO_SOCKET_IFNAME"
        raise EnvironmentLacks("the job's processes did not meet", f"rank {role.rank}", reason, hint) from error
    if not (path / "driver.json").is_file():
        raise EnvironmentLacks("not every node sees the folder", "--out", str(path), "give one on a disk that all nodes share")
    return path
