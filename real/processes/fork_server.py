"""Fork server: one Python process that has imported what ranks import, and becomes them by forks.

Importing torch costs every rank seconds of a core, and a machine that starts many launches, one after another, most of
its time. A fork has it all at once. It is for programs of this project alone, on CPUs and Linux: a user's script may
set variables before it imports torch, and a process that has spoken to a GPU must not fork.

A server ends with the process that uses it, and its forks with the server. What to fork is a JSON message on its standard input, with
which come the file of its output and a socket of that fork's own: on this the server writes the number of the process and, later, its
exit code.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
import warnings
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from fleetbench.children import bound, end_with_parent, name_process
from fleetbench.errors import EnvironmentLacks, WorkerFailed
from real.processes.exits import at_exit, end_now
from real.processes.place import process_state

IMPORTED = ("torch", "torch._dynamo", "torch.distributed", "real.fleet", "real.emulated.emulated_training")
"""What ranks of an experiment import; torch's optimizers import its compiler."""
_OF_TESTS = "PYTEST_CURRENT_TEST"  # changes with every test, and says nothing to a rank
_POLL_S = 0.01
_PATIENCE_S = 120.0
"""For the imports, and for one fork."""
_LONGEST = 1 << 20
"""Bytes of a message that says what to fork."""
_NUMBER = 32
"""Bytes of a process number or an exit code."""


class Forked:
    """A process that a server has forked: what ``subprocess.Popen`` offers for one."""

    def __init__(self, server: ForkServer, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self._server, self._connection = server, connection
        self._code: int | None = None

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; none while it runs. It ends with its server, by SIGKILL."""
        self._server.look()  # one that is stopped tells of no end
        if self._code is None and select.select([self._connection], [], [], 0)[0]:
            self._code = int(self._connection.recv(_NUMBER) or -signal.SIGKILL)
            self._connection.close()
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended. Raises ``subprocess.TimeoutExpired``."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(_POLL_S)
        return code

    def kill(self) -> None:
        """End it, if it has not ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class ForkServer:
    """The user's side. Life cycle: made; ``fork``, as often as wanted; ``close``, or the end of this process."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = _relevant(environment)
        self._forks: list[Forked] = []
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            self._process = subprocess.Popen(
                bound([sys.executable, "-P", "-m", "real.processes.fork_server", *IMPORTED]),
                stdin=other.fileno(),
                stdout=subprocess.DEVNULL,
                env=dict(environment),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Its exit code; none while it runs, and can fork."""
        return self._process.poll()

    @property
    def is_used(self) -> bool:
        """Whether any of its forks lives."""
        return any(fork.poll() is None for fork in self._forks)

    def look(self) -> None:
        """End a server that is stopped, which would never say that its forks have ended: they end with it."""
        if process_state(self.pid) == "T":
            self.close()

    def fork(self, arguments: Sequence[str], log: Path, variables: Mapping[str, str] | None = None) -> Forked:
        """Start ``python ARGUMENTS`` (``-m MODULE ...`` or ``SCRIPT ...``) here, in a session of its own; its output goes to ``log``.

        ``variables`` of its own go before the server's; with a RANK among them it is called by it, as it has no command line of its own.
        Raises ``EnvironmentLacks`` where the log cannot be written, ``WorkerFailed`` where the server has ended, or does not answer.
        """
        try:
            output = log.open("wb")
        except OSError as error:
            raise EnvironmentLacks(f"it cannot be written: {error.strerror}", "a process's log", str(log), "is its disk full?") from None
        wanted = {"arguments": list(arguments), "folder": str(Path.cwd()), "variables": dict(variables or {})}
        connection, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(_PATIENCE_S)
        with contextlib.suppress(OSError):  # it has ended, or does not answer
            with output, other:
                socket.send_fds(self._socket, [json.dumps(wanted).encode()], [other.fileno(), output.fileno()])
            if pid := connection.recv(_NUMBER):
                self._forks = [fork for fork in self._forks if fork.poll() is None]
                self._forks.append(Forked(self, int(pid), connection))
                return self._forks[-1]
        connection.close()
        self.close()  # the next fork server is another one
        raise WorkerFailed("the process that forks ranks has ended, or does not answer", "this node", hint="its errors are above")

    def close(self) -> None:
        """End the server, and with it what it has forked."""
        self._process.kill()
        self._process.wait()
        self._socket.close()


shared: list[ForkServer] = []
"""This process's server, if it has one; a module's state, because launches that know nothing of each other are to share it."""


def can_fork() -> bool:
    """Whether this system can tell a fork server of the end of a fork: Linux 5.3 or later."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def fork_server(environment: Mapping[str, str]) -> ForkServer:
    """This process's server, a new one where the last has ended or was started with other variables: libraries read them as they load.

    One that is still used, by another launch of this process, ends with this process.
    """
    if shared and (shared[0].code is not None or shared[0].environment != _relevant(environment)):
        last = shared.pop()
        if not last.is_used:
            last.close()
    if not shared:
        shared.append(ForkServer(environment))
        at_exit(shared[0].close)
    return shared[0]


def _relevant(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name != _OF_TESTS}


# In the server, and in its forks


def _serve(modules: Sequence[str]) -> None:
    """Fork what is asked for on the socket, which is the standard input, until its other end is closed."""
    for name in modules:
        importlib.import_module(name)
    gc.freeze()  # a fork's garbage collection leaves what was imported alone, and its pages shared
    for imported in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # noqa: SLF001  # no list of them is public
        imported.atexit = False  # torch takes its operators apart one by one, for longer than a fork takes to start
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends it at once, and forks with it, as SIGTERM does
    asked = socket.socket(fileno=0)
    forks: dict[int, tuple[int, socket.socket]] = {}  # process and connection of each, by the file that is readable once it has ended
    while True:
        for ready in select.select([0, *forks], [], [])[0]:
            if ready in forks:
                pid, connection = forks.pop(ready)
                os.close(ready)
                _say(connection, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                connection.close()
                continue
            text, files, _, _ = socket.recv_fds(asked, _LONGEST, 2)
            if not text:
                return
            connection = socket.socket(fileno=files[0])
            pid = _fork(json.loads(text), files[1], [connection, *(other for _, other in forks.values())])
            forks[os.pidfd_open(pid)] = pid, connection
            _say(connection, pid)


def _say(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the one that asked for this fork has ended
        connection.send(str(number).encode())


def _fork(wanted: Mapping[str, Any], output: int, connections: Sequence[socket.socket]) -> int:
    """Fork what is wanted, in a session of its own, without input; it ends with this process. Returns its number.

    ``connections``: this process's alone, so that their other ends hear of its end.
    """
    parent = os.getpid()
    with warnings.catch_warnings():  # Python 3.12 and later warn of the threads that libraries start as they load, which wait for work
        warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        end_with_parent(parent)
        for connection in connections:
            connection.close()
        os.chdir(wanted["folder"])
        os.environ.update(wanted["variables"])
        if "RANK" in wanted["variables"]:
            name_process(f"rank {wanted['variables']['RANK']}")
        _become(wanted["arguments"])
    os.close(output)
    return pid


def _become(arguments: Sequence[str]) -> NoReturn:
    """Go on as ``python ARGUMENTS``, in a process that was forked for it."""
    code = 1
    try:
        if arguments[0] == "-m":
            sys.argv = list(arguments[1:])
            sys.modules.pop(arguments[1], None)  # it runs as __main__, whoever has imported it
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(arguments)
            sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
            runpy.run_path(arguments[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(end.code + "\n")
    except BaseException as error:  # noqa: BLE001  # it is the end of a process
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        atexit._run_exitfuncs()  # noqa: SLF001  # as the interpreter does, which ``end_now`` leaves out
        end_now(code)


if __name__ == "__main__":
    _serve(sys.argv[1:])
