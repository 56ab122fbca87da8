"""Agent: torch's elastic agent for one launch, in a process of its own.

``python -m real.agent CONFIG.json``. It starts the workers, and when one fails it ends the others
and writes who failed first, and how, to the file that the configuration names.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path

from real.processes.orphan import PARENT, end_with_parent

if __name__ == "__main__":  # before torch, whose import takes seconds in which the driver may die
    end_with_parent(signal.SIGTERM)  # which makes the elastic agent end its workers first

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

_SHUTDOWN_S = 3  # a stopped process does not hear SIGTERM; SIGKILL follows


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """What the agent launches, and how its workers find each other."""

    nproc: int
    command: list[str]
    """Program and arguments of a worker."""
    log_dir: str
    """Worker N writes to ``workerlog.N`` there."""
    failure: str
    """File that receives ``{rank: exit code}`` of the workers that failed first."""
    store: str
    """File of the agent's rendezvous, for a launch that opens no port."""
    port: int | None = None
    """Rendezvous over TCP on this port instead; torch's store listens on every interface."""
    environment: dict[str, str] = field(default_factory=dict)


class _WorkerLogs(LogsSpecs):
    """One file a worker, ``workerlog.N``; ``merge_streams`` sends its errors there, too."""

    def __init__(self, folder: Path) -> None:
        super().__init__(log_dir=str(folder))
        self._folder = folder

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        self._folder.mkdir(parents=True, exist_ok=True)
        files = {rank: str(self._folder / f"workerlog.{env['RANK']}") for rank, env in envs.items()}
        errors = {rank: str(self._folder / f".error.{env['RANK']}.json") for rank, env in envs.items()}
        nowhere = dict.fromkeys(envs, os.devnull)
        return LogsDest(files, nowhere, {}, {}, errors)

    @property
    def root_log_dir(self) -> str:
        return str(self._folder)


def launch(config: AgentConfig) -> int:
    """Run the workers to their end; 0, or 1 when one failed."""
    os.environ.update(config.environment)
    os.environ[PARENT] = str(os.getpid())
    rendezvous = {"rdzv_endpoint": config.store, "rdzv_configs": {"store_type": "file"}}
    if config.port is not None:
        rendezvous = {"rdzv_endpoint": f"127.0.0.1:{config.port}", "rdzv_configs": {"store_type": "tcp"}}
    launcher = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=config.nproc,
        run_id="fleetbench",
        role="trainer",
        rdzv_backend="c10d",
        max_restarts=0,
        monitor_interval=0.05,
        local_addr="127.0.0.1",
        logs_specs=_WorkerLogs(Path(config.log_dir)),
        shutdown_timeout=_SHUTDOWN_S,
        **rendezvous,  # type: ignore[arg-type]  # two shapes of the same arguments
    )
    try:
        elastic_launch(launcher, sys.executable)("-P", "-m", "real.processes.merge_streams", *config.command)
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        Path(config.failure).write_text(json.dumps(codes), encoding="utf-8")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(launch(AgentConfig(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))))
