"""A command whose scripts train by a file's strategy: ``fleetbench launch --strategy FILE -- COMMAND``."""

import os
from collections.abc import Sequence
from pathlib import Path

from fleetbench.errors import WorkerFailed
from real.processes.attached import attached_environment, check_ordered, refuse_unattached
from real.processes.diagnosis import how_it_ended
from real.processes.place import temporary_folder
from real.processes.started import users_launcher

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
        environment = {**os.environ, **attached_environment(folder, strategy)}
        with users_launcher(command, _GRACE_S, env=environment) as process:
            code = process.wait()
        if code:
            raise WorkerFailed(how_it_ended(code), "the command", hint="its output says why")
        refuse_unattached(folder, strategy, is_elsewhere=Path(command[0]).name in _ELSEWHERE)
