"""Sweep: take away what a driver that was killed has left, and only that.

A keeper ends with its driver, and the namespaces with the keeper. What a SIGKILL does leave is the
driver's folder below the temporary one, and a keeper that was stopped at that moment. Each testbed
therefore writes into its folder who holds it; a folder whose holder is gone is swept by the next one.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

from real.testbed.client import start_ticks

_OWNER = "owner.json"


def sign(folder: Path, keeper: int, keeper_started: int) -> None:
    """Write into ``folder`` whose it is."""
    data = {"driver": [os.getpid(), start_ticks(os.getpid())], "keeper": [keeper, keeper_started], "where": _where()}
    partial = folder / f"{_OWNER}.partial"
    partial.write_text(json.dumps(data), encoding="utf-8")
    partial.replace(folder / _OWNER)


def sweep(root: Path | None = None) -> list[Path]:
    """Remove the folders below ``root`` (the temporary folder) whose drivers are gone, and keepers of theirs; those removed."""
    removed = []
    for path in sorted((root or Path(tempfile.gettempdir())).glob(f"fleetbench-*/{_OWNER}")):
        owner = _read(path)
        if owner is None or owner["where"] != _where() or _lives(*owner["driver"]):
            continue
        pid, started = owner["keeper"]
        if _lives(pid, started) and _is_keeper(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(path.parent, ignore_errors=True)
        removed.append(path.parent)
    return removed


def _read(path: Path) -> dict[str, Any] | None:
    """Who holds a folder; none where it is not one of this user's, or cannot be read."""
    try:
        status = path.parent.lstat()
        if path.parent.is_symlink() or path.is_symlink() or status.st_uid != os.geteuid() or path.stat().st_uid != os.geteuid():
            return None
        owner = json.loads(path.read_text(encoding="utf-8"))
        return {"where": owner["where"], "driver": tuple(map(int, owner["driver"])), "keeper": tuple(map(int, owner["keeper"]))}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _where() -> list[str]:
    """Process numbers mean something within one boot and one process namespace only: elsewhere a folder is left alone."""
    return [Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip(), str(Path("/proc/self/ns/pid").readlink())]


def _lives(pid: int, started: int) -> bool:
    return start_ticks(pid) == started


def _is_keeper(pid: int) -> bool:
    try:
        return b"real.testbed.keeper" in Path("/proc", str(pid), "cmdline").read_bytes()
    except OSError:
        return False
