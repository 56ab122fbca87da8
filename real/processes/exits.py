"""Exits: clean-up at the end of a process, and immediate exits. A fork does none of its parent's clean-up."""

import atexit
import ctypes
import multiprocessing
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import util
from types import TracebackType
from typing import NoReturn


def at_exit(run: Callable[[], object]) -> None:
    """Call ``run`` at this process's exit, but not at a fork's: a fork does not own threads and connections.

    A process of ``multiprocessing`` ends without the interpreter's exit hooks. There, ``run`` is
    one of its finalizers, and finds the exception that ends the process in ``sys.last_value``.
    """
    owner = os.getpid()

    def leave() -> None:
        ended_by = sys.exc_info()[1]
        if isinstance(ended_by, SystemExit) and ended_by.code:  # torch.multiprocessing.spawn exits so after an error
            ended_by = ended_by.__context__
        if isinstance(ended_by, Exception):
            sys.last_value = ended_by
        run()

    if multiprocessing.parent_process() is None:
        atexit.register(lambda: run() if os.getpid() == owner else None)
    else:
        util.Finalize(None, leave, exitpriority=0)


def keep_in_forks(*held: object) -> None:
    """Keep ``held`` alive in forks: destroying groups and stores waits for threads that a fork does not have."""

    def keep() -> None:
        for each in held:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))

    os.register_at_fork(after_in_child=keep)


def on_uncaught(tell: Callable[[BaseException], None]) -> None:
    """Call ``tell`` with the exception that ends this process, after it is printed; not in forks."""
    before, owner = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        try:
            before(kind, error, traceback)
        finally:
            if os.getpid() == owner:
                tell(error)

    sys.excepthook = hook


def end_now(code: int) -> NoReturn:
    """End the process immediately after flushing its output."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a full disk; a stream that was closed
            stream.flush()
    os._exit(code)
