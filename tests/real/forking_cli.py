"""``fleetbench ARGUMENTS...`` in a fork that has imported torch, whose launches fork their ranks in turn: none of them imports it again."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from fork_server import Forked, become

import real.processes.started
from fleetbench.children import end_with_parent
from fleetbench.cli.main import main


def fork(command: Sequence[str], log: Path, environment: Mapping[str, str], **_: object) -> Forked:
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
        become([word for word in command[1:] if word not in ("-u", "-P")])
    os.close(output)
    return Forked(pid)


tempfile.tempdir = None  # what was imported may have asked for it, under other variables
real.processes.started.start_process = fork
sys.exit(main(sys.argv[1:]))
