"""Launching a user's script: ``fleetbench launch --nproc N train.py``, on this machine or as one node of several."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from fleetbench.errors import ConfigError, EnvironmentLacks, FleetbenchError, WorkerFailed
from real.launch import QUIET, agent_failure, end_agent, exit_codes, require_free, start_agent
from real.processes.agent_config import AgentConfig
from real.processes.diagnosis import Failure, first_to_blame, how_it_ended, read_note
from real.processes.folders import make_folder
from real.processes.fork_server import Forked
from real.processes.interfaces import GLOO, interface_towards, is_loopback
from real.processes.nodes import Nodes, Verdict
from real.processes.roles import JOINED, STORE
from real.processes.stopped import STOPPED, StoppedAgent, StoppedWorkers

Echo = Callable[[bytes], object]
_POLL_S = 0.05
_LOOK_EVERY = 10
"""Polls between two looks at the workers' state."""
_OF_THE_USER = ("OMP_NUM_THREADS", "TORCH_CPP_LOG_LEVEL")
_STOPPED_HINT = "look for a SIGSTOP or a debugger"


def launch_script(
    nproc: int,
    script: Sequence[str],
    *,
    log_dir: Path,
    port: int | None = None,
    nodes: Nodes | None = None,
    echo: Echo = sys.stdout.buffer.write,
) -> bool:
    """Run ``script`` (a Python file and its arguments) as ``nproc`` trainers of this machine; whether any of them called ``fleet.init``.

    Worker N's output is in ``log_dir/workerlog.N``; rank 0's is echoed. Ranks find each other
    through a file, or over TCP on ``port``; with ``nodes``, this machine is one of several, on each of
    which the same is called. Raises ``ConfigError`` for a script that is not there,
    ``EnvironmentLacks`` for a port that is taken or nodes that do not meet, ``WorkerFailed`` naming
    the rank that failed first, or the node.
    """
    if nproc < 1:
        raise ConfigError("must be at least 1", "--nproc", str(nproc), "for example --nproc 2")
    if not Path(script[0]).is_file():
        raise ConfigError("no such script", script[0], hint="give a Python file")
    if nodes is not None and nodes.rank == 0:
        require_free(nodes.port, "--rdzv-endpoint")
    elif nodes is None and port is not None:
        require_free(port)
    network = _network(nodes) if nodes is not None else _own(QUIET)
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentLacks(f"logs cannot be written: {error.strerror}", "--log-dir", str(log_dir), "name another folder") from error
    for old in _old_logs(log_dir, nproc, nodes):
        old.unlink(missing_ok=True)
    folder = make_folder()
    try:
        store = {STORE: str(folder / "store")} if port is None and nodes is None else {}
        config = AgentConfig(
            nproc=nproc,
            command=[sys.executable, "-u", *script],
            log_dir=str(log_dir),
            failure=str(folder / "failure.json"),
            port=port,
            nodes=dataclasses.asdict(nodes) if nodes is not None else None,
            environment={**network, **store, JOINED: str(folder / "joined")},
        )
        _run(folder, config, echo)
        return (folder / "joined").exists()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _own(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables without those that the user has set, where that is the user's to decide."""
    return {name: value for name, value in variables.items() if name not in _OF_THE_USER or name not in os.environ}


def _network(nodes: Nodes) -> dict[str, str]:
    """What a launch on several machines sets: as on one, but the interface is the one that leads to node 0."""
    shared = _own({name: value for name, value in QUIET.items() if name in _OF_THE_USER})
    chosen = os.environ.get(GLOO)
    if chosen:
        return {**shared, GLOO: chosen}
    name = interface_towards(nodes.host, nodes.port, patience_s=nodes.startup_timeout_s)
    if name == "lo" and not is_loopback(nodes.host):
        hint = f"give node 0's address instead of its name, or set {GLOO}"
        raise EnvironmentLacks(
            "here this name is the loopback interface, where no other machine comes", "--rdzv-endpoint", repr(nodes.host), hint
        )
    return {**shared, **({GLOO: name} if name is not None else {})}


def _old_logs(log_dir: Path, nproc: int, nodes: Nodes | None) -> list[Path]:
    """Logs of an earlier launch that this node may remove: on a shared disk others lie beside them that are being written."""
    found = {int(path.suffix[1:]): path for path in log_dir.glob("workerlog.*") if path.suffix[1:].isdecimal()}
    if nodes is None:
        return list(found.values())
    own = range(nodes.rank * nproc, (nodes.rank + 1) * nproc)
    beyond = nodes.num * nproc
    return [path for rank, path in found.items() if rank in own or (nodes.rank == 0 and rank >= beyond)]


def _run(folder: Path, config: AgentConfig, echo: Echo) -> None:
    """Run the agent to its end. Raises what became of a launch that did not end well."""
    agent = start_agent(config, folder)
    log_dir = Path(config.log_dir)
    stopped, stopped_agent = StoppedWorkers(agent.pid, config.nproc), StoppedAgent(agent.pid)
    echoes = config.nodes is None or config.nodes["rank"] == 0
    try:
        _follow(agent, (stopped, stopped_agent), log_dir / "workerlog.0" if echoes else None, echo)
    finally:
        end_agent(agent)
    code = agent.wait()
    if code == 0:
        return
    error = _error_of(code, folder, config, stopped, stopped_agent)
    _show_traceback(error, log_dir, echo)
    raise error


def _error_of(code: int, folder: Path, config: AgentConfig, stopped: StoppedWorkers, stopped_agent: StoppedAgent) -> FleetbenchError:
    """What became of a launch that did not end well."""
    log_dir = Path(config.log_dir)
    failure = folder / "failure.json"
    if config.nodes is not None and failure.exists():
        verdict = Verdict.from_json(failure.read_text(encoding="utf-8"))
        return failure_among(verdict, stopped.ranks, Nodes(**config.nodes), log_dir, read_note(folder))
    if not failure.exists():
        return agent_failure(folder, str(log_dir), code, stopped_agent)
    return _failure(folder, log_dir, stopped.ranks)


def _show_traceback(error: FleetbenchError, log_dir: Path, echo: Echo) -> None:
    """Of the rank that is to blame, whole, if its output is here and has not been echoed, as rank 0's has."""
    found = re.match(r"rank (\d+)", error.where or "")
    if found is None or found[1] == "0":
        return
    log = log_dir / f"workerlog.{found[1]}"
    text = log.read_bytes() if log.is_file() else b""
    begin = text.find(b"Traceback (most recent call last):\n")
    if begin >= 0:
        echo(f"from {log}:\n".encode() + text[begin:])


def _follow(
    agent: subprocess.Popen[bytes] | Forked, watches: Sequence[StoppedWorkers | StoppedAgent], path: Path | None, echo: Echo
) -> None:
    """Echo what the worker of that log writes until the agent ends."""
    source: BinaryIO | None = None
    number = 0
    try:
        while True:
            ended = agent.poll() is not None
            if source is None and path is not None and path.exists():
                source = path.open("rb")
            if source is not None and (text := source.read()):
                echo(text)
            if ended:
                return
            if number % _LOOK_EVERY == 0:
                for watch in watches:
                    watch.look()
            number += 1
            time.sleep(_POLL_S)
    finally:
        if source is not None:
            source.close()


def failure_among(verdict: Verdict, stopped: Collection[int], nodes: Nodes, log_dir: Path, noted: Failure | None = None) -> FleetbenchError:
    """The error of a launch on several machines: who was stopped or killed, then which node is gone, then who failed first.

    ``stopped``: this node's own ranks that were stopped when they were last looked at. ``noted``: what a rank has said of its failure.
    """
    if verdict.apart is not None:
        hint = "start the same command on every node, with --node-rank 0, 1, ...; can they reach this port of node 0?"
        where = f"--rdzv-endpoint {nodes.host}:{nodes.port}"
        return EnvironmentLacks(f"{nodes.num} nodes did not meet within {nodes.startup_timeout_s:g} s", where, verdict.apart, hint)

    def place(rank: int) -> str:
        return f"rank {rank} on node {verdict.node_of.get(rank, nodes.rank)}"

    for rank in sorted({*verdict.stopped, *(rank for rank in stopped if verdict.codes.get(rank) == -signal.SIGKILL)}):
        return WorkerFailed(STOPPED, place(rank), hint=_STOPPED_HINT)
    struck = {rank: code for rank, code in verdict.codes.items() if code < 0 and code != -signal.SIGTERM}
    if not struck and verdict.gone:
        what = "its launcher ended without a word: it was killed, or the machine failed"
        return WorkerFailed(what, f"node {verdict.gone[0]}", hint="look at that node; its workers have ended, or will when they next meet")
    if not struck and verdict.interrupted:
        return WorkerFailed("the launch was ended there", f"node {verdict.interrupted[0]}", hint="start it again on every node")
    if not verdict.codes:
        return WorkerFailed("the launch ended without a worker's failure", f"node {nodes.rank}", hint=f"the workers' output: {log_dir}")
    rank, how = _blame(struck or verdict.codes, noted)
    return WorkerFailed(how, place(rank), hint=f"its output: {log_dir / f'workerlog.{rank}'} on that node")


def _failure(folder: Path, log_dir: Path, stopped: Collection[int]) -> WorkerFailed:
    codes = exit_codes(folder / "failure.json")
    for rank in sorted(stopped):
        if codes.get(rank, -signal.SIGKILL) == -signal.SIGKILL:  # which the agent sends to what hears nothing else
            return WorkerFailed(STOPPED, f"rank {rank}", hint=_STOPPED_HINT)
    rank, how = _blame(codes, read_note(folder))
    return WorkerFailed(how, f"rank {rank}", hint=f"its output: {log_dir / f'workerlog.{rank}'}")


def _blame(codes: Mapping[int, int], noted: Failure | None) -> tuple[int, str]:
    """Who failed, and how: a killed rank first, then the rank that reported a failure, then the first to end."""
    rank = first_to_blame(codes)
    if noted is None or (codes[rank] < 0 and codes[rank] != -signal.SIGTERM):
        return rank, how_it_ended(codes[rank])
    return noted.rank, noted.what.partition("\n")[0]
