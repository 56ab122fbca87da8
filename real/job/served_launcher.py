"""Launching a job with parameter servers: ``fleetbench launch --servers ... --workers ... train.py``.

Every process runs the same script; variables say which of them it is (Paddle's, as its own launchers set them). The job fails with
the first process that fails. A launcher follows its own processes and ends all if one fails; servers and trainers of other hosts then
find their connections broken.
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
"""Variables of other launchers that would hide a process's role given by us."""


def launch_placed(
    placement: Placement,
    script: Sequence[str],
    *,
    log_dir: Path,
    startup_timeout_s: float = 300.0,
    echo: Echo = sys.stdout.buffer.write,
) -> None:
    """Run ``script`` (a Python file and its arguments) as this machine's servers and trainers; see ``run_processes``.

    ``startup_timeout_s``: for servers and trainers to come. Raises ``EnvironmentLacks`` for a server's address that is taken.
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
