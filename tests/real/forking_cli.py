"""``fleetbench ARGUMENTS...`` in a fork that has imported torch, whose launches fork their ranks in turn: none of them imports it again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import real.job.session
import real.processes.started
from fleetbench.children import end_with_parent
from fleetbench.cli.main import main
from real.processes.fork_server import _become


class Child:
    """A rank: what ``subprocess.Popen`` offers for one."""

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None

    def poll(self) -> int | None:
        """Its exit code; none while it runs."""
        if self.returncode is None and (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.returncode = os.waitstatus_to_exitcode(ended[1])
        return self.returncode

    def wait(self, timeout: float = 60.0) -> int:
        """Its exit code, once it has ended."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.01)
        return code


def fork(command: Sequence[str], log: Path, environment: Mapping[str, str], **_: object) -> Child:
    """In the place of ``real.processes.started.start_process``."""
    assert command[0] == sys.executable
    parent, output = os.getpid(), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    if not (pid := os.fork()):
        end_with_parent(parent)
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the launcher has its own
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.environ.clear()
        os.environ.update(environment)
        _become([word for word in command[1:] if word not in ("-u", "-P")])
    os.close(output)
    return Child(pid)


tempfile.tempdir = None  # what was imported may have asked for it, under other variables
real.processes.started.start_process = fork
real.job.session.can_fork = lambda: False  # by a server that would import torch
sys.exit(main(sys.argv[1:]))
