"""Kernel: the system calls on namespaces that Python 3.11 does not have."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

NEW_MOUNTS = 0x00020000
NEW_USER = 0x10000000
NEW_NET = 0x40000000
_PRIVATE = (1 << 18) | (1 << 14)  # MS_PRIVATE | MS_REC
_DETACH = 2


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _called(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def unshare(flags: int) -> None:
    """Move this thread into new namespaces of the kinds in ``flags``."""
    _called(_library().unshare(ctypes.c_int(flags)), "unshare")


def enter(file: int, kind: int) -> None:
    """Move this thread into the namespace that the open ``file`` is, of the ``kind`` it must be."""
    _called(_library().setns(ctypes.c_int(file), ctypes.c_int(kind)), "setns")


def become_root_of_a_new_user_namespace() -> None:
    """This process is the root of a new user namespace, in which its user is user 0; needs a process with one thread."""
    user, group = os.geteuid(), os.getegid()
    unshare(NEW_USER)
    own = Path("/proc/self")
    (own / "setgroups").write_text("deny", encoding="ascii")
    (own / "uid_map").write_text(f"0 {user} 1", encoding="ascii")
    (own / "gid_map").write_text(f"0 {group} 1", encoding="ascii")


def private_mounts() -> None:
    """Mounts of this process are seen by nobody else from now on."""
    unshare(NEW_MOUNTS)
    _called(_library().mount(b"none", b"/", None, ctypes.c_ulong(_PRIVATE), None), "mount")


def mount_sysfs() -> None:
    """Show the current network namespace's devices in /sys; only after ``private_mounts``."""
    _library().umount2(b"/sys", ctypes.c_int(_DETACH))  # that of the namespace before, or the machine's own in our private view
    _called(_library().mount(b"sysfs", b"/sys", b"sysfs", ctypes.c_ulong(0), None), "mount")


def new_network() -> int:
    """Move this thread into a new network namespace; a file that keeps it alive."""
    unshare(NEW_NET)
    return current_network()


def current_network() -> int:
    """A file that is, and keeps alive, this thread's network namespace."""
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
