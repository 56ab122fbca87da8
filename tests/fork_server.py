"""Fork server of the tests: one Python process that has imported the modules that ranks need, and forks ranks.

Importing torch takes every rank seconds of a core, and would take the tests most of their time. A fork has
everything at once.

A server ends with the process that uses it. It reads JSON messages from its standard input, each with the
file for the fork's output. A fork becomes a child of the using process, ends with it, and answers with its
process number.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from fleetbench.children import bound, end_with_parent
from fleetbench.errors import EnvironmentLacks, WorkerFailed
from real.processes.exits import at_exit, end_now
from real.processes.roles import STORE, TUNING
from real.processes.started import torchrun_variables

IMPORTED = ("torch", "torch._dynamo", "torch.distributed", "real.fleet", "real.emulated.emulated_training")
"""Modules that an experiment's ranks import; torch's optimizers import its compiler."""
_OF_A_RANK = {*torchrun_variables(0, 1), "MASTER_ADDR", "MASTER_PORT", STORE, TUNING}
"""Variables that a launch gives to its ranks alone."""
_OF_TESTS = "PYTEST_CURRENT_TEST"  # changes with every test, and says nothing to a rank
_PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 15, 36  # linux/prctl.h
_POLL_S = 0.01
_ADOPTING = threading.Lock()
_PATIENCE_S = 120.0
"""Seconds for the imports, and for one fork."""
_LONGEST = 1 << 20
"""Largest message with a request to fork, in bytes."""
_NUMBER = 32
"""Bytes of a process number."""


class Forked:
    """A child that a server has forked, with the interface of ``subprocess.Popen``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return its exit code, negative for a signal; none while it runs."""
        if self._code is None and (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            self._code = os.waitstatus_to_exitcode(ended[1])
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for it and return its exit code. Raises ``subprocess.TimeoutExpired``."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(_POLL_S)
        return code

    def kill(self) -> None:
        """Kill it, if it has not ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class ForkServer:
    """The user's side.

    Life cycle: created; ``fork`` any number of times; ``close``, or the end of this process.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = _relevant(environment)
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(_PATIENCE_S)
        with other:
            self._process = subprocess.Popen(
                bound([sys.executable, "-P", __file__, *IMPORTED]),
                stdin=other.fileno(),
                stdout=subprocess.DEVNULL,
                env=dict(environment),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process number of the server."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Exit code of the server; none while it runs."""
        return self._process.poll()

    def fork(self, arguments: Sequence[str], log: Path, variables: Mapping[str, str] | None = None) -> Forked:
        """Start ``python ARGUMENTS`` (``-m MODULE ...`` or ``SCRIPT ...``) here, in its own session.

        Its output goes to ``log``. ``variables`` override the server's; if RANK is among them, it names the
        process, which has no command line of its own. Raises ``EnvironmentLacks`` if the log cannot be
        written, ``WorkerFailed`` if the server has ended or does not answer.
        """
        try:
            output = log.open("wb")
        except OSError as error:
            raise EnvironmentLacks(f"it cannot be written: {error.strerror}", "a process's log", str(log), "is its disk full?") from None
        wanted = {"arguments": list(arguments), "folder": str(Path.cwd()), "variables": dict(variables or {})}
        pid = b""
        with _ADOPTING, output:
            _control(_PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._socket, [json.dumps(wanted).encode()], [output.fileno()])
                pid = self._socket.recv(_NUMBER)
            except OSError:  # it has ended, or does not answer
                pass
            finally:
                _control(_PR_SET_CHILD_SUBREAPER, 0)
                if not pid:
                    self.close()  # the next fork server is another one
        if pid:
            return Forked(int(pid))
        raise WorkerFailed("the process that forks ranks has ended, or does not answer", "this node", hint="its errors are above")

    def close(self) -> None:
        """End the server; its forks continue."""
        self._process.kill()
        self._process.wait()
        self._socket.close()


shared: list[ForkServer] = []
"""This process's server, if it has one, shared by independent launches."""


def fork_server(environment: Mapping[str, str]) -> ForkServer:
    """Return this process's server.

    A new one if the last has ended or had other variables, which libraries read on import.
    """
    if shared and (shared[0].code is not None or shared[0].environment != _relevant(environment)):
        shared.pop().close()
    if not shared:
        shared.append(ForkServer(environment))
        at_exit(shared[0].close)
    return shared[0]


def forking_workers(start: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``start_process`` that forks programs of this project (``python -P -m MODULE``), which need not import torch."""

    def fork(command: Sequence[str], log: Path, environment: Mapping[str, str], **options: Any) -> Any:
        if list(command[:3]) != [sys.executable, "-P", "-m"]:
            return start(command, log, environment, **options)
        own = {name: environment[name] for name in _OF_A_RANK & environment.keys()}
        base = {name: value for name, value in environment.items() if name not in own}
        return fork_server(base).fork(command[2:], log, own)

    return fork


def _control(option: int, argument: int | bytes) -> None:
    ctypes.CDLL(None).prctl(option, argument, 0, 0, 0)


def _relevant(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name != _OF_TESTS}


# In the server, and in its forks


def _serve(modules: Sequence[str]) -> None:
    """Fork on requests from the socket, which is the standard input, until its other end is closed."""
    sys.path.append(str(Path(__file__).parent))  # for scripts of the tests that fork further
    for name in modules:
        importlib.import_module(name)
    gc.freeze()  # a fork's garbage collection leaves what was imported alone, and its pages shared
    for imported in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # no list of them is public
        imported.atexit = False  # torch takes its operators apart one by one, for longer than a fork takes to start
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends it at once, as SIGTERM does
    user, asked = os.getppid(), socket.socket(fileno=0)
    while True:
        text, files, _, _ = socket.recv_fds(asked, _LONGEST, 1)
        if not text:
            return
        _fork(json.loads(text), files[0], asked, user)


def _fork(wanted: Mapping[str, Any], output: int, asked: socket.socket, user: int) -> None:
    """Fork a request, in its own session without input. ``user`` adopts it, and gets its number."""
    with warnings.catch_warnings():  # Python 3.12 and later warn of the threads that libraries start as they load, which wait for work
        warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
        if child := os.fork():
            os.close(output)
            os.waitpid(child, 0)
            return
        parent = os.getpid()
        if os.fork():
            os._exit(0)
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    end_with_parent(user)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    asked.send(str(os.getpid()).encode())
    for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), output, output)):
        os.dup2(file, number)
    os.chdir(wanted["folder"])
    os.environ.update(wanted["variables"])
    if "RANK" in wanted["variables"]:
        _control(_PR_SET_NAME, f"rank {wanted['variables']['RANK']}".encode())
    become(wanted["arguments"])


def become(arguments: Sequence[str]) -> NoReturn:
    """Continue as ``python ARGUMENTS``, in a process that was forked for it."""
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
        atexit._run_exitfuncs()  # as the interpreter does, which ``end_now`` leaves out
        end_now(code)


if __name__ == "__main__":
    _serve(sys.argv[1:])
