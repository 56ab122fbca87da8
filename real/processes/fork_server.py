"""Fork server: one Python process that has imported what ranks import, and becomes them by forks.

Importing torch costs every rank seconds of a core, and a machine that starts many launches, one after another, most of
its time. A fork has it all at once. It is for programs of this project alone, on CPUs: a user's script may
set variables before it imports torch, and a process that has spoken to a GPU must not fork.

A server ends with the process that uses it, and its forks with the server.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from fleetbench.children import bound, end_with_parent, name_process
from fleetbench.errors import WorkerFailed
from real.processes.place import process_state

IMPORTED = ("torch", "torch._dynamo", "torch.distributed", "real.training", "real.collectives.rank", "real.emulated.training")
"""What ranks of an experiment import; torch's optimizers import its compiler."""
_OF_TESTS = "PYTEST_CURRENT_TEST"  # changes with every test, and says nothing to a rank
_POLL_S = 0.01
_PATIENCE_S = 120.0
"""For the imports, and for one fork."""


_STOPPED_S = 5.0
"""For a stopped server to go on."""


class Forked:
    """A process that a server has forked: what ``subprocess.Popen`` offers for one."""

    def __init__(self, pid: int, code_of: Callable[[int], int | None]) -> None:
        """``code_of``: the exit code of a process of that number, as ``poll`` has it."""
        self.pid = pid
        self.returncode: int | None = None
        self._code_of = code_of

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; none while it runs."""
        if self.returncode is None:
            self.returncode = self._code_of(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended. Raises ``subprocess.TimeoutExpired``."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(_POLL_S)
        return code

    def send_signal(self, which: int) -> None:
        """Send it a signal, if it has not ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, which)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The user's side. Life cycle: made; ``fork``, as often as wanted; ``close``, or the end of this process."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = _relevant(environment)
        self._forks: set[int] = set()
        self._codes: dict[int, int] = {}
        self._line = bytearray()
        self._lock = threading.Lock()
        self.was_stopped = False
        """Whether ``look`` has ended it because it was stopped (SIGSTOP)."""
        self._stopped_since: float | None = None
        self._process = subprocess.Popen(
            bound([sys.executable, "-P", "-m", "real.processes.fork_server", *IMPORTED]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(environment),
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    @property
    def lives(self) -> bool:
        """Whether it can fork."""
        return self._process.poll() is None

    @property
    def code(self) -> int | None:
        """Its exit code; none while it runs."""
        return self._process.poll()

    @property
    def is_used(self) -> bool:
        """Whether any of its forks lives."""
        return any(self.code_of(pid) is None for pid in self._forks)

    def look(self) -> None:
        """End a server that has been stopped for too long, which would never say that its forks have ended: they end with it."""
        now = time.monotonic()
        if process_state(self.pid) != "T":
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = now
        elif now - self._stopped_since > _STOPPED_S:
            self.was_stopped = True
            self._process.kill()
            self._process.wait()

    def fork(self, arguments: Sequence[str], log: Path, variables: Mapping[str, str] | None = None) -> Forked:
        """Start ``python ARGUMENTS`` (``-m MODULE ...`` or ``SCRIPT ...``) here, in a session of its own; its output goes to ``log``.

        ``variables`` of its own go before the server's; with a RANK among them it is called by it, as it has no command line of its own.
        Raises ``WorkerFailed`` where the server has ended, or does not answer.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            try:
                request = {"arguments": list(arguments), "log": str(log), "folder": str(Path.cwd()), "variables": dict(variables or {})}
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                self._process.stdin.flush()
                while select.select([self._process.stdout], [], [], _PATIENCE_S)[0] and (answer := self._hear()) is not None:
                    if "code" not in answer:
                        self._codes.pop(answer["pid"], None)  # of an earlier process of that number
                        self._forks.add(answer["pid"])
                        return Forked(answer["pid"], self.code_of)
            except BrokenPipeError:
                pass
            self._process.kill()
        raise WorkerFailed("the process that forks ranks has ended, or does not answer", "this node", hint="its errors are above")

    def code_of(self, pid: int) -> int | None:
        """The exit code of a fork; none while it runs. Forks end with their server, by SIGKILL."""
        assert self._process.stdout is not None
        with self._lock:
            while pid not in self._codes and select.select([self._process.stdout], [], [], 0)[0]:
                if self._hear() is None:
                    self._process.wait()
                    return -signal.SIGKILL
            return self._codes.get(pid)

    def close(self) -> None:
        """End the server, and with it what it has forked."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()

    def _hear(self) -> dict[str, int] | None:
        """The next that the server says; none after its end."""
        assert self._process.stdout is not None
        if not _complete(self._line, self._process.stdout.fileno()):
            return None
        said: dict[str, int] = json.loads(self._line)
        self._line.clear()
        if "code" in said:
            self._codes[said["pid"]] = said["code"]
        return said


shared: list[ForkServer] = []
"""This process's server, if it has one; a module's state, because launches that know nothing of each other are to share it."""


def fork_server(environment: Mapping[str, str]) -> ForkServer:
    """This process's server, a new one where the last has ended or was started with other variables: libraries read them as they load.

    One that is still used, by another launch of this process, ends with this process.
    """
    if shared and not (shared[0].lives and shared[0].environment == _relevant(environment)):
        last = shared.pop()
        if not last.is_used:
            last.close()
    if not shared:
        shared.append(ForkServer(environment))
        atexit.register(shared[0].close)
    return shared[0]


def _complete(line: bytearray, source: int) -> bool:
    """Read up to a line's end, and no further, so that ``select`` sees what there is; false where the source ends."""
    while not line.endswith(b"\n"):
        if not (text := os.read(source, 1)):
            return False
        line += text
    return True


def _relevant(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name != _OF_TESTS}


# In the server, and in its forks


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
    except BaseException:  # noqa: BLE001  # it is the end of a process
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # a full disk; a stream that was closed
                stream.flush()
        os._exit(code)


def _enter(log: int, parent: int) -> None:
    """The first that a fork does: a session of its own, output to the open file ``log``, no input, an end with ``parent``."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    for which in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(which, signal.default_int_handler if which == signal.SIGINT else signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    end_with_parent(parent)


def _serve(modules: Sequence[str]) -> None:
    for name in modules:
        importlib.import_module(name)
    wakes, waked = os.pipe()
    os.set_blocking(waked, False)
    signal.set_wakeup_fd(waked)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    me = os.getpid()
    while True:
        readable, _, _ = select.select([0, wakes], [], [])
        if wakes in readable:
            os.read(wakes, 4096)
            _say_ended()
        if 0 in readable:
            line = bytearray()
            if not _complete(line, 0):
                return
            request = json.loads(line)
            log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            pid = os.fork()
            if pid == 0:
                _enter(log, me)
                os.chdir(request["folder"])
                os.environ.update(request["variables"])
                if "RANK" in request["variables"]:
                    name_process(f"rank {request['variables']['RANK']}")
                _become(request["arguments"])
            os.close(log)
            _say({"pid": pid})


def _say_ended() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _say({"pid": pid, "code": os.waitstatus_to_exitcode(status)})


def _say(what: Mapping[str, int]) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


if __name__ == "__main__":
    _serve(sys.argv[1:])
