"""Agent: what starts and ends the workers of one launch, in a process of its own.

``python -m real.processes.agent CONFIG.json``. When a worker fails, it ends the others and writes who failed first, and
how, to the file that the configuration names. On several machines torch's elastic agent does it, because the machines
must meet first; here that is not needed, nor the seconds that importing it takes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn

from fleetbench.children import bound, name_process
from real.processes.agent_config import AgentConfig
from real.processes.fork_server import Forked, become, enter
from real.processes.nodes import Nodes

_POLL_S = 0.05
_SHUTDOWN_S = 3.0
"""For a worker that was told to end, by SIGTERM; one that is stopped does not hear it."""


def launch(config: AgentConfig) -> int:
    """Run the workers to their end; 0, or 1 when one failed."""
    os.environ.update(config.environment)
    if config.nodes is None and config.port is None:
        codes = _supervised(config)
    else:
        from real.processes.elastic import run_among, run_on_port  # imports torch

        if config.nodes is not None:
            return run_among(Nodes(**config.nodes), config)
        codes = run_on_port(config)
    if codes:
        Path(config.failure).write_text(json.dumps(codes), encoding="utf-8")
    return 1 if codes else 0


def _supervised(config: AgentConfig) -> dict[int, int]:
    try:
        return supervise(config)
    except Told as told:  # its exit code says which signal ended it
        signal.signal(told.which, signal.SIG_DFL)
        os.kill(os.getpid(), told.which)
        raise


class Told(BaseException):
    """This process was told to end, by a signal."""

    def __init__(self, which: int) -> None:
        super().__init__(which)
        self.which = signal.Signals(which)


def supervise(config: AgentConfig) -> dict[int, int]:
    """Run the workers to their end; exit codes of those that failed before the others were told to end, none where all ended well.

    Raises ``Told`` for a signal to this process, once the workers are gone.
    """
    for which in (signal.SIGTERM, signal.SIGINT):
        signal.signal(which, _raise_told)
    Path(config.log_dir).mkdir(parents=True, exist_ok=True)
    workers: list[subprocess.Popen[bytes] | Forked] = []
    try:
        port = str(_free_port())
        for rank in range(config.nproc):
            workers.append(_start(config, rank, port))  # noqa: PERF401  # those that were started are ended, if one cannot be
        while True:
            codes = {rank: code for rank, worker in enumerate(workers) if (code := worker.poll()) is not None}
            failed = {rank: code for rank, code in codes.items() if code != 0}
            if failed or len(codes) == len(workers):
                return failed
            time.sleep(_POLL_S)
    finally:
        for which in (signal.SIGTERM, signal.SIGINT):
            signal.signal(which, signal.SIG_IGN)  # the workers' end is under way
        _end(workers)


def _start(config: AgentConfig, rank: int, port: str) -> subprocess.Popen[bytes] | Forked:
    """One worker, with the variables that torchrun gives to each."""
    size, place = str(config.nproc), str(rank)
    variables = {"RANK": place, "LOCAL_RANK": place, "ROLE_RANK": place, "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ROLE_NAME": "trainer"}
    variables |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), size)
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "fleetbench"}
    variables["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    log = os.open(Path(config.log_dir, f"workerlog.{rank}"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        if not config.forks:
            return subprocess.Popen(
                bound(config.command, merge_streams=True),
                stdin=subprocess.DEVNULL,
                stdout=log,
                start_new_session=True,
                env={**os.environ, **variables},
            )
        parent, pid = os.getpid(), os.fork()
        if pid:
            return Forked(pid, _code_of)
        enter(log, parent)
        name_process(f"rank {rank}")
        os.environ.update(variables)
        become(config.command[config.command.index("-m") :])
    finally:
        os.close(log)


def _code_of(pid: int) -> int | None:
    """The exit code of a worker that this process has forked, negative for a signal; none while it runs."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _end(workers: list[subprocess.Popen[bytes] | Forked]) -> None:
    """End those that live, and what they have started: told first, then killed."""
    for how, patience_s in ((signal.SIGTERM, _SHUTDOWN_S), (signal.SIGKILL, _SHUTDOWN_S)):
        deadline = time.monotonic() + patience_s
        for worker in workers:
            if worker.poll() is None:
                _signal(worker.pid, how)
        while any(worker.poll() is None for worker in workers) and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def _signal(pid: int, how: signal.Signals) -> None:
    """To a worker's group; to itself alone, where it has not come to lead one yet."""
    for send in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            send(pid, how)
            return


def _free_port() -> int:
    """For a script that calls ``init_process_group`` by itself; nothing of ours listens there."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _raise_told(which: int, _frame: FrameType | None) -> NoReturn:
    raise Told(which)


if __name__ == "__main__":
    sys.exit(launch(AgentConfig(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))))
