"""A process whose parent is gone ends, so that a killed driver leaves nothing behind."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import threading
import time
from pathlib import Path

PARENT = "FLEETBENCH_PARENT"
"""Environment variable with the process id of who started this process, or the wrapper between the two."""
_POLL_S = 0.5


def end_with_parent(how: signal.Signals = signal.SIGKILL, folder: Path | None = None) -> None:
    """Watch the parent from a daemon thread; once it is gone, send ``how`` to this process.

    The parent is the one that ``PARENT`` names: by the time this is called it may be gone already.
    ``folder`` is the parent's: without it, this process takes the folder away as it ends.
    """
    parent = int(os.environ.get(PARENT) or os.getppid())

    def lives() -> bool:
        return os.getppid() == parent or process_state(parent) not in ("", "Z", "X")

    def clear_up() -> None:
        if folder is not None and not lives():  # an agent that fails leaves its parent what explains it
            shutil.rmtree(folder, ignore_errors=True)

    def watch() -> None:
        while lives():
            time.sleep(_POLL_S)
        if signal.getsignal(how) is signal.SIG_DFL:  # which leaves no time for what is done at exit
            clear_up()
        os.kill(os.getpid(), how)

    if folder is not None:
        atexit.register(clear_up)
    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def process_state(pid: int) -> str:
    """The kernel's letter for what a process does (R, S, T, Z, ...); empty where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(") ")[2][:1]
    except OSError:
        return ""
