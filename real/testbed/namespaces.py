"""Namespaces: making and entering them; Python 3.11 has neither call (3.12 has ``os.unshare`` and ``os.setns``).

``python -m real.testbed.namespaces MAP.json PROGRAM ARGUMENT...`` becomes the program inside a host of the testbed. Where the map has
several hosts, the worker's RANK says which. Only the network is the host's: files, users' rights and processes stay those of the machine.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path

_NEW_USER, _NEW_NET = 0x10000000, 0x40000000  # linux/sched.h


def _call(name: str, *numbers: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*numbers) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), name)


def current_network() -> int:
    """A file that is, and keeps alive, this thread's network namespace."""
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def new_network() -> int:
    """Move this thread into a new network namespace; a file that keeps it alive."""
    _call("unshare", _NEW_NET)
    return current_network()


def enter_network(file: int) -> None:
    """Move this thread into the network namespace that the open ``file`` is."""
    _call("setns", file, _NEW_NET)


def enter_host(map_file: Path) -> None:
    """Move this process (of one thread) into the network of the map's only host, or of its RANK's."""
    plan = json.loads(map_file.read_text(encoding="utf-8"))
    files = plan["files"]
    file = files[0] if len(files) == 1 else files[int(os.environ["RANK"])]
    keeper = Path("/proc", str(plan["keeper"]))
    try:
        network = os.open(keeper / "fd" / str(file), os.O_RDONLY | os.O_CLOEXEC)
        user = os.open(keeper / "ns" / "user", os.O_RDONLY | os.O_CLOEXEC) if plan["rootless"] else None
    except OSError as error:
        sys.exit(f"the testbed is gone: {error}")
    if user is not None:
        _call("setns", user, _NEW_USER)
    enter_network(network)


if __name__ == "__main__":
    enter_host(Path(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606  # the same process goes on as the program
