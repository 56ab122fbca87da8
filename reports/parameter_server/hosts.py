"""Hosts: one script as the servers and trainers of a testbed, each process on its host, as a Paddle launcher would start it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fleetbench.children import bound
from real.processes.started import QUIET
from real.testbed.testbed import Testbed

_POLL_S = 0.05
_LAST_LINES = 5


def run_on_hosts(testbed: Testbed, trainers: int, script: Sequence[str], log_dir: Path, *, patience_s: float) -> None:
    """Run ``script`` (a Python file and its arguments) on all servers of the testbed and on its first trainers' hosts.

    Raises ``RuntimeError`` with the last words of a process that did not end well, or not within ``patience_s``.
    """
    topology = testbed.topology
    common = {**os.environ, **QUIET, **testbed.environment}
    common |= {"PADDLE_PSERVERS_IP_PORT_LIST": ",".join(topology.server_endpoints), "PADDLE_TRAINERS_NUM": str(trainers)}
    places = []
    for server, endpoint in enumerate(topology.server_endpoints):
        host, _, port = endpoint.rpartition(":")
        role = {"TRAINING_ROLE": "PSERVER", "POD_IP": host, "PADDLE_PORT": port}
        places.append((f"serverlog.{server}", topology.server_hosts[server], role))
    places += [
        (f"workerlog.{rank}", topology.host_of(rank), {"TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": str(rank)})
        for rank in range(trainers)
    ]
    log_dir.mkdir()
    processes: list[tuple[Path, subprocess.Popen[bytes]]] = []
    try:
        for name, host, role in places:
            with (log_dir / name).open("ab") as log:
                command = testbed.command([sys.executable, "-u", *script], [host])
                popen = subprocess.Popen(
                    bound(command),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**common, **role},
                    start_new_session=True,  # Ctrl-C reaches this process alone
                )
            processes.append((log_dir / name, popen))
        _wait(processes, time.monotonic() + patience_s)
    finally:
        for _, popen in processes:
            popen.kill()
            popen.wait()


def _wait(processes: Sequence[tuple[Path, subprocess.Popen[bytes]]], deadline: float) -> None:
    while any(popen.poll() is None for _, popen in processes):
        bad = [path for path, popen in processes if popen.returncode not in (None, 0)]
        late = [path for path, popen in processes if popen.poll() is None] if time.monotonic() > deadline else []
        for path in (*bad, *late):
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            raise RuntimeError(f"{path.name} {'failed' if bad else 'has not ended'}: {' | '.join(lines[-_LAST_LINES:])}")
        time.sleep(_POLL_S)
