"""Place: where a process runs, and what it shares with another one: a clock, process numbers."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from fleetbench.config import Config
from real.processes.orphan import process_state

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/pid")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place(Config):
    """A process, and the kernel that it runs on."""

    host: str
    boot: str = ""
    """The kernel's name for its own boot; empty where the system has none."""
    namespace: str = ""
    """Of process numbers."""
    pid: int

    @classmethod
    def here(cls) -> Place:
        """This process's."""
        return cls(host=socket.gethostname(), boot=_boot(), namespace=_namespace(), pid=os.getpid())

    @property
    def kernel(self) -> str:
        """Equal where two processes share a monotonic clock."""
        return self.boot or self.host

    def shares_numbers(self, other: Place) -> bool:
        """Whether a process number means the same to both."""
        return self.kernel == other.kernel and self.namespace == other.namespace

    def lives(self) -> bool:
        """Whether the process is there, and no zombie; only to be asked by one that shares its numbers."""
        return process_state(self.pid) not in ("", "Z", "X")


def _boot() -> str:
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _namespace() -> str:
    try:
        return str(_NAMESPACE.readlink())
    except OSError:
        return ""
