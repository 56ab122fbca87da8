"""Child processes that the kernel kills when the process that started them ends, however it ends.

``python children.py PARENT [--gently] PROGRAM ARGUMENT...`` becomes that program. It imports nothing from the
project, so it starts within milliseconds and needs no import path.
"""

import ctypes
import errno
import os
import shutil
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_GENTLY = "--gently"


def bound(command: Sequence[str], *, gently: bool = False) -> list[str]:
    """Return the command line that runs ``command`` as a child that does not outlive this process.

    On Linux, the child ends when the *thread* that started it ends, so start it from a thread that waits for
    it. ``gently`` ends it by SIGTERM, for launchers that then end their own processes; SIGKILL would leave
    those running. Raises ``OSError`` if the program does not exist or is not executable.
    """
    if shutil.which(command[0]) is None:
        code = errno.EACCES if os.path.exists(command[0]) else errno.ENOENT  # noqa: PTH110  # this file imports little, so that it starts fast
        raise OSError(code, os.strerror(code), command[0])
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *([_GENTLY] * gently), *command]


def end_with_parent(parent: int, how: signal.Signals = signal.SIGKILL) -> None:
    """Make this process receive the signal ``how`` when process ``parent``, its parent, ends or has ended.

    The setting survives execve but not fork. It exists only on Linux.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(how), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), how)


if __name__ == "__main__":
    program = sys.argv[2:]
    gently = program[0] == _GENTLY
    if gently:
        del program[0]
    end_with_parent(int(sys.argv[1]), signal.SIGTERM if gently else signal.SIGKILL)
    try:
        os.execvp(program[0], program)  # noqa: S606  # the same process continues as the program
    except OSError as error:
        sys.exit(f"{program[0]} cannot be started: {error.strerror}")
