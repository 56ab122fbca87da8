"""Elastic: torch's elastic agent for workers that meet over TCP, on one machine or several.

It is what torchrun runs. Workers that meet through a file are ``real.processes.agent``'s own.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fleetbench.children import bound
from real.processes.agent_config import AgentConfig
from real.processes.nodes import Board, Nodes, Verdict, Why
from real.processes.stopped import StoppedWorkers

_SHUTDOWN_S = 3  # a stopped process does not hear SIGTERM; SIGKILL follows
_PATIENCE_S = 8.0
"""For every agent to end its workers, those that need a SIGKILL included, and to say so."""
_LAST_WORDS_S = 4.0
"""The same where somebody waits for this agent to be gone."""


class _WorkerLogs(LogsSpecs):
    """One file a worker, ``workerlog.N``; its errors go there, too."""

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


def run_on_port(config: AgentConfig) -> dict[int, int]:
    """Run the workers of one machine to their end; exit codes of the ranks that failed first, none where all ended well."""
    return _run(config, {"rdzv_endpoint": f"127.0.0.1:{config.port}", "rdzv_configs": {"store_type": "tcp"}})


def run_among(nodes: Nodes, config: AgentConfig) -> int:
    """Run this node's workers; what became of all nodes goes to the file ``failure`` where they did not all end well."""
    told = threading.Event()
    stopped = StoppedWorkers(os.getpid(), config.nproc)

    def end_workers() -> None:
        told.set()
        stopped.look()
        os.kill(os.getpid(), signal.SIGTERM)

    rendezvous = {
        "rdzv_backend": "static",
        "rdzv_endpoint": f"{nodes.host}:{nodes.port}",
        "rdzv_configs": {"rank": nodes.rank, "timeout": int(nodes.startup_timeout_s)},
        "local_addr": None,
    }
    codes: Mapping[int, int] = {}
    try:
        board = Board(nodes)
        board.watch(end_workers)
        codes = _run(config, rendezvous, nodes.num)
        why: Why = "failed" if codes else "done"
    except SignalException:
        why = "told" if told.is_set() else "interrupted"
    except DistError as error:  # the nodes did not meet
        Path(config.failure).write_text(Verdict(apart=str(error).strip().splitlines()[0]).to_json(), encoding="utf-8")
        return 1
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # nobody is left to be ended by it
    board.end(why, codes, stopped.ranks)
    verdict = board.verdict(_LAST_WORDS_S if why == "interrupted" else _PATIENCE_S)
    if why == "done" and not verdict.codes and not verdict.gone and not verdict.interrupted:
        return 0
    Path(config.failure).write_text(verdict.to_json(), encoding="utf-8")
    return 1


def _run(config: AgentConfig, rendezvous: Mapping[str, Any], num_nodes: int = 1) -> dict[int, int]:
    """Exit codes of this node's ranks that failed first; none where all ended well."""
    launcher = LaunchConfig(
        **{
            "min_nodes": num_nodes,
            "max_nodes": num_nodes,
            "nproc_per_node": config.nproc,
            "run_id": "fleetbench",
            "role": "trainer",
            "rdzv_backend": "c10d",
            "max_restarts": 0,
            "monitor_interval": 0.05,
            "local_addr": "127.0.0.1",
            "logs_specs": _WorkerLogs(Path(config.log_dir)),
            "shutdown_timeout": _SHUTDOWN_S,
            **rendezvous,
        }
    )
    try:
        elastic_launch(launcher, sys.executable)(*bound(config.command, merge_streams=True)[1:])
    except ChildFailedError as error:
        first, *others = ((rank, failure.exitcode) for rank, failure in error.failures.items())
        return dict([first, *(other for other in others if other[1] != -signal.SIGTERM)])  # with which it ends the others
    return {}
