"""A command whose scripts train by a file's strategy: ``fleetbench launch --strategy FILE -- COMMAND``."""

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fleetbench.children import bound
from fleetbench.errors import EnvironmentLacks, WorkerFailed
from real.processes.attached import attached_environment, check_ordered, refuse_unattached
from real.processes.diagnosis import how_it_ended
from real.processes.place import temporary_folder
from real.processes.started import uninterrupted

_GRACE_S = 120.0
"""Seconds that an interrupted command has to end."""
_ELSEWHERE = ("srun", "mpirun", "mpiexec", "ssh", "kubectl")
"""Commands whose processes may run on other hosts, without this host's temporary folder."""


def run_command(command: Sequence[str], strategy: Path) -> None:
    """Run the command; its models train by the strategy.

    Raises ``WorkerFailed`` if it fails, and ``ConfigError`` if it succeeds but no model has used the
    strategy.
    """
    check_ordered(strategy)
    with temporary_folder() as folder:
        try:
            process = subprocess.Popen(bound(command, gently=True), env={**os.environ, **attached_environment(folder, strategy)})
        except OSError as error:
            what = f"cannot be started: {error.strerror}"
            raise EnvironmentLacks(what, "the command", command[0], "put a program with its arguments after --") from None
        try:
            code = process.wait()
        except KeyboardInterrupt:
            with uninterrupted(), suppress(subprocess.TimeoutExpired):
                process.send_signal(signal.SIGTERM)  # a terminal has only sent SIGINT
                process.wait(_GRACE_S)
            raise
        finally:
            process.kill()
            process.wait()
        if code:
            raise WorkerFailed(how_it_ended(code), "the command", hint="its output says why")
        refuse_unattached(folder, strategy, is_elsewhere=Path(command[0]).name in _ELSEWHERE)
