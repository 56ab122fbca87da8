"""Place: where a process runs, what it shares with another (a clock, process numbers), and whether it lives.

Temporary folders record their owner: the next start removes those of killed processes. Output of a failed
worker is kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fleetbench.config import Config, decode, encode
from fleetbench.errors import ConfigError, WorkerFailed

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/pid")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place(Config):
    """A process, and the kernel that it runs on."""

    host: str
    boot: str = ""
    """Identifier of the kernel's boot; empty if the system has none."""
    namespace: str = ""
    """Namespace of process numbers."""
    pid: int
    started: int = 0
    """Start time in the kernel's ticks, which together with ``pid`` identifies the process; 0 if unknown."""

    @classmethod
    def here(cls) -> Place:
        """Return this process's place."""
        boot = namespace = ""
        with contextlib.suppress(OSError):  # Linux alone has them
            boot, namespace = _BOOT.read_text(encoding="ascii").strip(), str(_NAMESPACE.readlink())
        pid = os.getpid()
        return cls(host=socket.gethostname(), boot=boot, namespace=namespace, pid=pid, started=start_ticks(pid) or 0)

    @property
    def kernel(self) -> str:
        """Key of the kernel, equal for two processes with one monotonic clock."""
        return self.boot or self.host

    def shares_numbers(self, other: Place) -> bool:
        """Whether a process number refers to the same process in both places."""
        return self.kernel == other.kernel and self.namespace == other.namespace

    def lives(self) -> bool:
        """Whether the process exists and is no zombie; only valid if process numbers are shared."""
        return process_state(self.pid) not in ("", "Z", "X") and self.started in (0, start_ticks(self.pid))


def processes_with(is_it: Callable[[bytes], bool]) -> Iterator[int]:
    """Yield the ids of processes that were started with a variable, ``NAME=value``, for which ``is_it`` is true.

    Processes whose environment this user may not read are left out.
    """
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended, or is not ours to read
                if any(map(is_it, (path / "environ").read_bytes().split(b"\0"))):
                    yield int(path.name)


def process_state(pid: int) -> str:
    """Return the kernel's state letter of a process (R, S, T, Z, ...); empty if there is no such process."""
    return (_stat(pid) or [""])[0]


def start_ticks(pid: int) -> int | None:
    """Return the start time of a process (proc_pid_stat(5), field 22); ``None`` if there is no such process."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on, which follow the program's name."""
    try:
        return Path("/proc", str(pid), "stat").read_text(encoding="utf-8", errors="replace").rpartition(") ")[2].split()
    except OSError:
        return []


PREFIX = "fleetbench-"
OWNER = "owner.json"
"""Name of the file in a job's folder that identifies the process that owns the folder."""


def make_folder(within: Path | None = None) -> Path:
    """Create a folder for only this user, below ``within`` or the temporary folder, where ``sweep`` cleans up first."""
    root = Path(tempfile.gettempdir()) if within is None else within
    sweep(root)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
    try:
        (folder / OWNER).write_text(json.dumps(encode(Place.here())), encoding="utf-8")
    except OSError:  # for example because the disk is full
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a folder that is removed at the end."""
    folder = make_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def leave_folder(folder: Path, error: BaseException | None) -> None:
    """Remove a folder. After ``WorkerFailed``, whose hint names output in it, keep the folder permanently."""
    if isinstance(error, WorkerFailed):
        (folder / OWNER).unlink(missing_ok=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)


def sweep(root: Path) -> None:
    """Remove this user's folders below ``root`` whose processes have ended; those of other machines stay."""
    here = Place.here()
    for path in root.glob(f"{PREFIX}*/{OWNER}"):
        with contextlib.suppress(OSError, ValueError, ConfigError):  # another user's, or damaged
            if path.is_symlink() or not path.is_file() or path.lstat().st_uid != os.geteuid():
                continue
            owner = decode(json.loads(path.read_text(encoding="utf-8")), Place, str(path))
            if owner.shares_numbers(here) and not owner.lives():
                shutil.rmtree(path.parent, ignore_errors=True)  # not a link to a folder
