"""Launching a job with parameter servers: ``fleetbench launch --servers ... --workers ... train.py``.

Every process runs the same script, and finds its role in the environment variables of Paddle's launchers. The job fails
with the first process that fails: the launcher of its host ends all processes there, and servers and trainers of other
hosts then find their connections broken.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from real.job.launcher import Echo, quiet, run_processes
from real.processes.joining import GLOO
from real.processes.place import temporary_folder
from real.processes.roles import STARTUP
from real.processes.started import Kind
from real.servers.hosts import Placement, require_addresses

_OTHER_ROLES = ("RANK", "PADDLE_TRAINER_ENDPOINTS")
"""Variables of other launchers that would hide the role that this launcher gives a process."""


def launch_placed(
    placement: Placement,
    script: Sequence[str],
    *,
    log_dir: Path,
    startup_timeout_s: float = 300.0,
    echo: Echo = sys.stdout.buffer.write,
) -> None:
    """Run ``script`` (a Python file and its arguments) as this machine's servers and trainers; see ``run_processes``.

    ``startup_timeout_s``: seconds that servers and trainers wait for each other to start. Raises ``EnvironmentLacks``
    for a server's address that is taken, or that other hosts cannot reach.
    """
    require_addresses(placement)
    processes: list[tuple[Kind, int, Mapping[str, str]]] = []
    for number in placement.own_servers:
        host, _, port = placement.endpoints[number].rpartition(":")
        processes.append(("server", number, {"TRAINING_ROLE": "PSERVER", "POD_IP": host, "PADDLE_PORT": port}))
    trainer = {"TRAINING_ROLE": "TRAINER"}
    processes += [("trainer", rank, {**trainer, "PADDLE_TRAINER_ID": str(rank)}) for rank in placement.own_trainers]
    common = {name: value for name, value in os.environ.items() if name not in _OTHER_ROLES}
    common |= {name: value for name, value in quiet().items() if not (placement.is_spread and name == GLOO)}
    common |= {"PADDLE_PSERVERS_IP_PORT_LIST": ",".join(placement.endpoints), "PADDLE_TRAINERS_NUM": str(len(placement.workers))}
    common[STARTUP] = str(startup_timeout_s)
    with temporary_folder() as folder:
        run_processes(
            script,
            processes,
            common,
            folder,
            log_dir=log_dir,
            echo=echo,
            located=placement.located,
            is_spread=placement.is_spread,
        )
