"""Launching a user's script: ``fleetbench launch --nproc N train.py``, on this machine or as one node of several."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fleetbench.errors import ConfigError, EnvironmentLacks, FleetbenchError, WorkerFailed
from real.job.workers import QUIET, Workers, require_free, uninterrupted
from real.processes.diagnosis import STOPPED, Failure, first_to_blame, how_it_ended, read_note
from real.processes.folders import make_folder
from real.processes.interfaces import GLOO, interface_towards, is_loopback
from real.processes.nodes import Board, End, Nodes, Why
from real.processes.roles import JOINED, STORE

Echo = Callable[[bytes], object]
_POLL_S = 0.05
_LOOK_EVERY = 10
"""Polls between two looks at the workers' state."""
_OF_THE_USER = ("OMP_NUM_THREADS", "TORCH_CPP_LOG_LEVEL")
_PATIENCE_S = 8.0
"""For every node to end its workers, those that need a SIGKILL included, and to say so."""
_LAST_WORDS_S = 4.0
"""The same where somebody waits for this launcher to be gone."""
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
        workers, environment = Workers(log_dir, nproc), {**network, JOINED: str(folder / "joined")}
        command = [sys.executable, "-u", *script]
        if nodes is not None:
            _run_among(nodes, workers, command, environment, folder, echo)
        else:
            store = {STORE: str(folder / "store")} if port is None else {}
            workers.start(command, {**environment, **store}, port=port)
            codes = _follow(workers, log_dir / "workerlog.0", echo)
            if codes:
                raise _shown(_failure(folder, codes, workers), log_dir, echo)
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


def _run_among(nodes: Nodes, workers: Workers, command: Sequence[str], environment: Mapping[str, str], folder: Path, echo: Echo) -> None:
    """Run this node's workers, to the end of all nodes'. Raises what became of a launch that did not end well."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch, which would say each time that node 0 does not listen yet
    board, nums = _met(nodes, workers.num)
    first, world = sum(nums[: nodes.rank]), str(sum(nums))
    variables = {"MASTER_ADDR": nodes.host, "MASTER_PORT": str(nodes.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    variables |= {"WORLD_SIZE": world, "ROLE_WORLD_SIZE": world, "GROUP_RANK": str(nodes.rank), "GROUP_WORLD_SIZE": str(nodes.num)}
    log = None if nodes.rank else workers.log_dir / "workerlog.0"
    codes: dict[int, int] = {}
    why: Why = "interrupted"
    patience_s = _LAST_WORDS_S
    try:
        workers.start(command, {**environment, **variables}, first=first)
        board.watch()
        codes = _follow(workers, log, echo, board.told.is_set)
        why = "failed" if codes else "told" if any(workers.codes().values()) else "done"
        patience_s = _PATIENCE_S
    finally:
        with uninterrupted():
            workers.end()
            board.end(why, codes, workers.stopped)
            ends = board.ends(patience_s)
    if len(ends) < nodes.num or any(end.why != "done" for end in ends.values()):
        raise _shown(failure_among(ends, nodes, workers.log_dir, read_note(folder)), workers.log_dir, echo)


def _met(nodes: Nodes, num: int) -> tuple[Board, list[int]]:
    """All nodes, and how many workers each has; ``num`` is this one's."""
    from torch.distributed import DistError

    try:
        board = Board(nodes)
        return board, board.meet(num)
    except DistError as error:
        raise apart(nodes, str(error).strip().splitlines()[0]) from error


def apart(nodes: Nodes, why: str) -> EnvironmentLacks:
    """The error of nodes that did not meet."""
    hint = "start the same command on every node, with --node-rank 0, 1, ...; can they reach this port of node 0?"
    what, where = f"{nodes.num} nodes did not meet within {nodes.startup_timeout_s:g} s", f"--rdzv-endpoint {nodes.host}:{nodes.port}"
    return EnvironmentLacks(what, where, why, hint)


def _shown(error: FleetbenchError, log_dir: Path, echo: Echo) -> FleetbenchError:
    """The error, once the traceback of the rank to blame is shown, if its output is here and has not been echoed, as rank 0's has."""
    found = re.match(r"rank (\d+)", error.where or "")
    log = log_dir / f"workerlog.{found[1]}" if found is not None and found[1] != "0" else None
    text = log.read_bytes() if log is not None and log.is_file() else b""
    begin = text.find(b"Traceback (most recent call last):\n")
    if begin >= 0:
        echo(f"from {log}:\n".encode() + text[begin:])
    return error


def _follow(workers: Workers, log: Path | None, echo: Echo, is_told: Callable[[], bool] = lambda: False) -> dict[int, int]:
    """Echo a worker's output until all have ended, one has failed, or this node is told to end; exit codes of those that failed first."""
    source = None if log is None else log.open("rb")
    try:
        for number in itertools.count():
            codes = workers.codes()
            is_over = workers.is_over(codes) or is_told()
            if is_over or number % _LOOK_EVERY == 0:
                workers.look()
            if is_over:
                workers.end()
            if source is not None and (text := source.read()):
                echo(text)
            if is_over:
                break
            time.sleep(_POLL_S)
        return {rank: code for rank, code in codes.items() if code}
    finally:
        workers.end()
        if source is not None:
            source.close()


def failure_among(ends: Mapping[int, End], nodes: Nodes, log_dir: Path, noted: Failure | None = None) -> WorkerFailed:
    """The error of a launch on several machines: who was stopped or killed, then which node is gone, then who failed first.

    ``ends``: how nodes ended; one without an end is gone. ``noted``: what a rank has said of its failure. Codes count of whatever was
    killed on any node and of the node that spoke first, for when a rank fails, ranks elsewhere fail in their collectives a moment later.
    """
    node_of = {rank: node for node, end in ends.items() for rank in (*end.codes, *end.stopped)}
    failed = sorted((end for end in ends.values() if end.why == "failed"), key=lambda end: end.order)
    struck = {rank: code for end in failed for rank, code in end.codes.items() if code < 0 and code != -signal.SIGTERM}
    codes = {**(failed[0].codes if failed else {}), **struck}
    gone = [node for node in range(nodes.num) if node not in ends]
    interrupted = [node for node, end in sorted(ends.items()) if end.why == "interrupted"]
    for rank in sorted(rank for end in ends.values() for rank in end.stopped):
        return WorkerFailed(STOPPED, f"rank {rank} on node {node_of[rank]}", hint=_STOPPED_HINT)
    if not struck and gone:
        what = "its launcher ended without a word: it was killed, or the machine failed"
        return WorkerFailed(what, f"node {gone[0]}", hint="look at that node; its workers have ended, or will when they next meet")
    if not struck and interrupted:
        return WorkerFailed("the launch was ended there", f"node {interrupted[0]}", hint="start it again on every node")
    if not codes:
        return WorkerFailed("the launch ended without a worker's failure", f"node {nodes.rank}", hint=f"the workers' output: {log_dir}")
    rank, how = _blame(struck or codes, noted)
    hint = f"its output: {log_dir / f'workerlog.{rank}'} on that node"
    return WorkerFailed(how, f"rank {rank} on node {node_of.get(rank, nodes.rank)}", hint=hint)


def _failure(folder: Path, codes: Mapping[int, int], workers: Workers) -> WorkerFailed:
    for rank in sorted(workers.stopped):
        if codes.get(rank, -signal.SIGKILL) == -signal.SIGKILL:  # which ``Workers`` sends to what hears nothing else
            return WorkerFailed(STOPPED, f"rank {rank}", hint=_STOPPED_HINT)
    rank, how = _blame(codes, read_note(folder))
    return WorkerFailed(how, f"rank {rank}", hint=f"its output: {workers.log_dir / f'workerlog.{rank}'}")


def _blame(codes: Mapping[int, int], noted: Failure | None) -> tuple[int, str]:
    """Who failed, and how: a killed rank first, then the rank that reported a failure, then the first to end."""
    rank = first_to_blame(codes)
    if noted is None or (codes[rank] < 0 and codes[rank] != -signal.SIGTERM):
        return rank, how_it_ended(codes[rank])
    return noted.rank, noted.what.partition("\n")[0]
