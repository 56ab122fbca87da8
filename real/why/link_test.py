"""Link test as its own job: each rank, wherever a launcher starts it, runs this module."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from fleetbench.config import Config, decode, encode
from fleetbench.errors import ConfigError, FleetbenchError, WorkerFailed
from fleetbench.why.interfaces import this_host, with_gpus
from fleetbench.why.links import Links, Remark, remarks_of_links
from fleetbench.why.nccl_log import Transports, read_nccl_log, remarks
from real.job.launcher import launch_script
from real.processes.diagnosis import how_it_ended
from real.processes.joining import GLOO, join, own_name_is_loopback
from real.processes.place import temporary_folder
from real.processes.roles import role_of
from real.processes.started import users_launcher

MODULE = "real.why.link_test"
_RESULT = "fleetbench-links "
"""Text before rank 0's result in its output. A launcher may print more before it on the same line."""
_TAKE_A_MODULE = re.compile(r"torchrun|accelerate|torch\.distributed\.(run|launch)")
"""Launchers that accept ``-m MODULE`` after their options."""
_PYTHON = re.compile(r"python[\d.]*")
_TIMEOUT = timedelta(minutes=5)
"""Time limit for ranks to meet, and for a collective."""
_GRACE_S = 30.0
"""Seconds for an interrupted launcher to end."""

Heard = Callable[[str], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkReport(Config):
    """Findings of the link test."""

    links: Links
    transports: Transports | None = None
    """Transports that NCCL reported; ``None`` with gloo."""

    @property
    def remarks(self) -> tuple[Remark, ...]:
        """Statements on what slows the exchange, with remedies."""
        has_infiniband = any(host.has_infiniband for host in self.links.hosts)
        of_nccl = remarks(self.transports, len(self.links.hosts), has_infiniband) if self.transports else ()
        return (*remarks_of_links(self.links), *of_nccl)


def run_here(nproc: int, heard: Heard) -> LinkReport:
    """Test the links between ``nproc`` ranks on this machine; call ``heard`` with rank 0's other lines of output.

    Raises ``WorkerFailed`` with the rank that failed.
    """
    output = bytearray()
    try:
        with temporary_folder() as folder:
            launch_script(nproc, ["-P", "-m", MODULE], log_dir=folder, echo=output.extend)
    except WorkerFailed as failed:
        raise WorkerFailed(failed.what, failed.where, hint="its output is above") from None
    finally:
        found = [_result(line, heard) for line in output.decode(errors="replace").splitlines()]
    return next(tested for tested in found if tested is not None)


def run_with(command: Sequence[str], heard: Heard) -> LinkReport | None:
    """Test the links between the ranks that a launcher starts; call ``heard`` with its other lines of output.

    Returns ``None`` if rank 0 is on a node with its own launcher. Raises ``EnvironmentLacks`` for a program
    that cannot be started, ``WorkerFailed`` if it fails.
    """
    pipe = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True, "errors": "replace"}
    with users_launcher(with_module(command), _GRACE_S, **pipe) as process:
        assert process.stdout is not None
        with process.stdout:
            found = [_result(line.rstrip("\n"), heard) for line in process.stdout]
        code = process.wait()
    if code:
        hint = f"its output says why; ranks that do not meet may need {GLOO}"
        raise WorkerFailed(how_it_ended(code), "the command", hint=hint)
    return next((tested for tested in found if tested is not None), None)


def with_module(command: Sequence[str]) -> list[str]:
    """Return the launcher's command line with this module, run by Python if the launcher needs a program."""
    names = [Path(word).name for word in command if not word.startswith("-")]
    takes_module = any(map(_TAKE_A_MODULE.fullmatch, names)) or any(map(_PYTHON.fullmatch, names[-1:]))
    return [*command, *([] if takes_module else [sys.executable, "-u", "-P"]), "-m", MODULE]


def _result(line: str, heard: Heard) -> LinkReport | None:
    before, mark, text = line.partition(_RESULT)
    if not mark:
        heard(before)
        return None
    return decode(json.loads(text), LinkReport, "the result of rank 0")


def main() -> None:
    """Run one rank. Raises ``ConfigError`` if the launcher has started only this one."""
    role = role_of(os.environ)
    if role.trainers < 2:
        what = "links need two ranks, and the launcher's environment names one"
        hint = "start it with torchrun or srun; or fleetbench doctor --network --nproc 2"
        raise ConfigError(what, "the link test", hint=hint)
    import torch
    import torch.distributed as dist

    from real.communication.communicators import device_of
    from real.why.links import device_of_group, gathered, measure_links

    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "nccl.log")
        os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(log)}
        os.environ.pop("NCCL_DEBUG_SUBSYS", None)
        if torch.cuda.is_available():
            device_of("cuda", role.local_rank)
        is_spread = role.trainers_per_node != role.trainers
        is_lost = is_spread and GLOO not in os.environ and own_name_is_loopback()
        join(role, _TIMEOUT, takes_interface=is_lost)
        if is_lost and dist.get_backend() == "gloo":
            why = f"the name of {socket.gethostname()} resolves to its loopback, which gloo takes by itself"
            note = f"note: {why}: scripts need {GLOO}={os.environ.get(GLOO)}"
            print(note, file=sys.stderr, flush=True)  # noqa: T201  # a note to the user
        own = this_host() if role.local_rank else with_gpus(this_host())
        links = measure_links(host=own)
        said = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    world = dist.group.WORLD
    logs = gathered(world, device_of_group(world), said)
    if role.rank == 0:
        told = _RESULT + json.dumps({"links": encode(links), "transports": encode(read_nccl_log("\n".join(logs)))})
        print(told, flush=True)  # noqa: T201  # the command reads it from the launcher's output
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except FleetbenchError as refused:
        sys.exit(f"error: {refused}")
