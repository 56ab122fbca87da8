"""Child processes that the kernel kills when the process that started them ends, however it ends.

``python children.py PARENT [--gently] PROGRAM ARGUMENT...`` becomes that program. It imports nothing of the
project's, so that it costs milliseconds and needs no import path.
"""

import ctypes
import errno
import os
import shutil
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36  # linux/prctl.h
_GENTLY = "--gently"


def bound(command: Sequence[str], *, gently: bool = False) -> list[str]:
    """The command line that runs ``command`` as a child that does not outlive this process.

    Linux takes the end of the thread that starts the child for the end of the parent: start it from a thread that
    waits for it. ``gently``: by SIGTERM, for launchers of others, which end their
    processes then; killed, they would leave them. Raises ``OSError`` for a program that is not there or may not be run.
    """
    if shutil.which(command[0]) is None:
        code = errno.EACCES if os.path.exists(command[0]) else errno.ENOENT  # noqa: PTH110  # this file imports little, so that it starts fast
        raise OSError(code, os.strerror(code), command[0])
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *([_GENTLY] * gently), *command]


def end_with_parent(parent: int, how: signal.Signals = signal.SIGKILL) -> None:
    """From now on this process receives ``how`` when its parent ends; at once if that is no longer ``parent``.

    An execve keeps the setting, a fork does not. Only Linux has it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(how), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), how)


def adopt(*, on: bool) -> None:
    """Whether processes of this one's children become its own children where their parents end. Only Linux has it."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


def name_process(name: str) -> None:
    """What ``ps`` and ``top`` call this process: up to 15 bytes, for one that has no command line of its own. Only Linux has it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


if __name__ == "__main__":
    program = sys.argv[2:]
    gently = program[0] == _GENTLY
    if gently:
        del program[0]
    end_with_parent(int(sys.argv[1]), signal.SIGTERM if gently else signal.SIGKILL)
    try:
        os.execvp(program[0], program)  # noqa: S606  # the same process goes on as the program
    except OSError as error:
        sys.exit(f"{program[0]} cannot be started: {error.strerror}")
