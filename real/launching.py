"""Launching a user's script: ``fleetbench launch --nproc N train.py``."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from fleetbench.errors import ConfigError, EnvironmentLacks, WorkerFailed
from real.fleet import STORE
from real.launch import QUIET, end_agent, exit_codes, require_free, start_agent
from real.processes.agent import AgentConfig
from real.processes.diagnosis import first_to_blame, how_it_ended
from real.processes.stopped import StoppedWorkers

_POLL_S = 0.05
_LOOK_EVERY = 10
"""Polls between two looks at the workers' state."""


def launch_script(
    nproc: int,
    script: Sequence[str],
    *,
    log_dir: Path,
    port: int | None = None,
    environment: Mapping[str, str] | None = None,
    echo: Callable[[bytes], object] = sys.stdout.buffer.write,
) -> None:
    """Run ``script`` (a Python file and its arguments) as ``nproc`` trainers of this machine.

    Worker N's output is in ``log_dir/workerlog.N``; rank 0's is echoed. Ranks find each other
    through a file, or over TCP on ``port``. Raises ``ConfigError`` for a script that is not there,
    ``EnvironmentLacks`` for a port that is taken, ``WorkerFailed`` naming the rank that failed first.
    """
    if nproc < 1:
        raise ConfigError("must be at least 1", "--nproc", str(nproc), "for example --nproc 2")
    if not Path(script[0]).is_file():
        raise ConfigError("no such script", script[0], hint="give a Python file")
    if port is not None:
        require_free(port)
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentLacks(f"logs cannot be written: {error.strerror}", "--log-dir", str(log_dir), "name another folder") from error
    for old in log_dir.glob("workerlog.*"):
        old.unlink()
    folder = Path(tempfile.mkdtemp(prefix="fleetbench-"))
    try:
        _run(folder, nproc, script, log_dir, port, environment or {}, echo)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(
    folder: Path,
    nproc: int,
    script: Sequence[str],
    log_dir: Path,
    port: int | None,
    environment: Mapping[str, str],
    echo: Callable[[bytes], object],
) -> None:
    store = {} if port is not None else {STORE: str(folder / "store")}
    config = AgentConfig(
        nproc=nproc,
        command=[sys.executable, "-u", *script],
        log_dir=str(log_dir),
        failure=str(folder / "failure.json"),
        store=str(folder / "agent-store"),
        port=port,
        environment={**QUIET, **environment, **store},
    )
    agent = start_agent(config, folder)
    stopped = StoppedWorkers(agent.pid, nproc)
    try:
        _follow(agent, stopped, log_dir / "workerlog.0", echo)
    finally:
        end_agent(agent)
    if agent.returncode != 0:
        raise _failure(folder, log_dir, stopped.ranks)


def _follow(agent: subprocess.Popen[bytes], stopped: StoppedWorkers, path: Path, echo: Callable[[bytes], object]) -> None:
    """Echo what rank 0 writes until the agent ends."""
    source: BinaryIO | None = None
    number = 0
    try:
        while True:
            ended = agent.poll() is not None
            if source is None and path.exists():
                source = path.open("rb")
            if source is not None and (text := source.read()):
                echo(text)
            if ended:
                return
            if number % _LOOK_EVERY == 0:
                stopped.look()
            number += 1
            time.sleep(_POLL_S)
    finally:
        if source is not None:
            source.close()


def _failure(folder: Path, log_dir: Path, stopped: Collection[int]) -> WorkerFailed:
    codes = exit_codes(folder / "failure.json")
    if not codes:
        text = (folder / "agent.log").read_text(encoding="utf-8", errors="replace").strip()
        return WorkerFailed("the launcher ended without a worker's failure", value=text[-500:] or None)
    for rank in sorted(stopped):
        if codes.get(rank) == -signal.SIGKILL:  # which the agent sends to what hears nothing else
            return WorkerFailed(
                "was stopped and answered nobody, until it was killed", f"rank {rank}", hint="look for a SIGSTOP or a debugger"
            )
    rank = first_to_blame(codes)
    return WorkerFailed(how_it_ended(codes[rank]), f"rank {rank}", hint=f"its output: {log_dir / f'workerlog.{rank}'}")
