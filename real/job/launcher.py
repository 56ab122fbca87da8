"""Launching: ``fleetbench launch`` of a user's script, on this machine or on each of several hosts, of which this is one.

A launcher starts its host's processes, follows them and ends them. The launchers of one job tell each other on a board what they
see, so that all of them name the same process. Jobs with parameter servers are in ``real.job.served_launcher``.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fleetbench.errors import EnvironmentLacks, WorkerFailed
from real.job.folder import RankSide
from real.processes.diagnosis import STOPPED, Failure, first_to_blame, how_it_ended, read_note
from real.processes.place import make_folder
from real.processes.roles import JOINED, TUNING
from real.processes.started import LOCAL, QUIET, Started, end, meeting_variables, require_free, start, torchrun_variables, uninterrupted
from real.servers.board import Board, Entry, Holder
from real.servers.hosts import Placement

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # missing from __all__ only

Echo = Callable[[bytes], object]
POLL_S = 0.05
ENDED_THERE = "the launch was ended there"
_MOST_RANKS = 2**16  # of a node
_TOKEN = "no secret: as open as torch's store"  # noqa: S105  # of a collective job's board
_OF_THE_USER = ("OMP_NUM_THREADS", "TORCH_CPP_LOG_LEVEL")
_PATIENCE_S = 12.0
"""For every node to end its ranks and to say so, or to be gone."""
_LAST_WORDS_S = 4.0
"""The same where somebody waits for this launcher to be gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Where this machine stands among those of a launch."""

    num: int
    rank: int
    host: str
    """Name or address of node 0, as every node sees it."""
    port: int
    startup_timeout_s: float = 300.0
    """Until all launchers have met."""

    @property
    def names(self) -> list[str]:
        """``node 0``, ``node 1``, ..."""
        return [f"node {node}" for node in range(self.num)]


class Job(ABC):
    """What one launcher knows of a job. Life cycle: made; ``processes`` started; ``follow``, until the job is over; judged."""

    def __init__(self, placement: Placement, board: Board | None = None) -> None:
        self.processes: list[Started] = []
        """This machine's."""
        self.codes: dict[str, int] = {}
        """Exit codes by name, of all hosts, in the order in which they were heard of."""
        self.lost: dict[str, Entry] = {}
        """Trainers that servers have gone on without."""
        self.stopped: set[str] = set()
        """Ranks that did not run (SIGSTOP) when their launcher ended them."""
        self.failure: Entry | None = None
        self.gone: set[str] = set()
        """Hosts whose launchers are."""
        self.done: set[str] = set()
        """Hosts whose launchers have said all."""
        self.placement, self.board = placement, board
        self.places = placement.places

    def follow(self, echo: Echo) -> None:
        """Until the job is over here. ``echo`` gets the output of rank 0, where it runs here."""
        with ExitStack() as stack:
            logs = [stack.enter_context(process.log.open("rb")) for process in self.processes if process.name == "rank 0"]
            is_over = False
            while not is_over:
                self.turn()
                for process in self.processes:
                    if process.code is None and (code := process.popen.poll()) is not None:
                        self.see_end(process, code)
                is_over = self.is_over()
                for log in logs:
                    if text := log.read():
                        echo(text)
                time.sleep(POLL_S)

    def turn(self) -> None:
        """Read what others have told."""
        if self.board is None:
            return
        for entry in self.board.turn():
            self.hear(entry)
        if self.board.is_silent:
            self.gone.add(self.placement.hosts[0])

    def hear(self, entry: Entry) -> None:
        """Note one entry of the board."""
        if entry.kind == "ended":
            self.codes.pop(entry.name, None)
            self.codes[entry.name] = entry.code
        elif entry.kind == "lost":
            self.lost[entry.name] = entry
        elif entry.kind == "gone":
            self.gone.add(entry.name)
        elif entry.kind == "done":
            self.done.add(entry.name)
        elif entry.why == STOPPED:
            self.stopped.add(entry.name)
        elif entry.kind == "failed" and self.failure is None:
            self.failure = entry

    def tell(self, entry: Entry) -> None:
        """Tell the other launchers, where there are any."""
        if self.board is not None:
            self.board.write(entry)

    def see_end(self, process: Started, code: int) -> None:
        """A process of this machine has ended."""
        process.code = self.codes[process.name] = code
        self.tell(Entry(kind="ended", name=process.name, code=code))

    @abstractmethod
    def is_over(self) -> bool:
        """Whether there is nothing left to wait for."""


class CollectiveJob(Job):
    """Ranks that meet in collectives: where one fails, all end. States: following -> all ended here -> all heard of -> judged."""

    def run(self, start_ranks: Callable[[], None], echo: Echo) -> None:
        """Start this machine's ranks, follow them, and end what is left; then wait until other nodes have said all."""
        patience_s = _LAST_WORDS_S
        why = ENDED_THERE
        try:
            start_ranks()
            self.follow(echo)
            patience_s, why = _PATIENCE_S, ""
        finally:
            with uninterrupted():
                self.stopped |= {process.name for process in self.processes if process.is_stopped}
                end(self.processes)
                if why or not self._has_ended_well:
                    self._say_last_words(why, patience_s)

    @property
    def _has_ended_well(self) -> bool:
        return len(self.codes) == len(self.placement.workers) and not any(self.codes.values())

    def see_end(self, process: Started, code: int) -> None:
        """See ``Job``; a driver that has started this launcher is told, too."""
        super().see_end(process, code)
        if code and TUNING in os.environ:
            side = RankSide(Path(os.environ[TUNING]))
            with suppress(OSError):  # the folder may be gone
                if not side.is_aborted():  # what ends of an abort is not to blame
                    side.ended(process.rank, code)

    def is_over(self) -> bool:
        """Whether a rank has failed anywhere, a node's launch was ended, or all ranks have ended that anybody can tell of.

        A launcher that is stopped or cut off ends nothing; the ranks of one that was killed end with it, and the others fail.
        """
        if any(self.codes.values()) or self.failure is not None or self.stopped or self._has_ended_well:
            return True
        return bool(self.gone) and all(process.code is not None for process in self.processes)

    def _say_last_words(self, why: str, patience_s: float) -> None:
        """Tell the other nodes how it ended here, and hear how it ended there. ``why``: this node's own end; empty for that of another."""
        if self.board is None:
            return
        own = self.placement.own_name
        for name in self.stopped & {process.name for process in self.processes}:
            self.tell(Entry(kind="failed", name=name, why=STOPPED))
        if why:
            self.tell(Entry(kind="failed", name=own, why=why))
        self.tell(Entry(kind="done", name=own))
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline and not self.board.is_silent and set(self.placement.hosts) - self.gone - self.done:
            self.turn()
            time.sleep(POLL_S)

    def judge(self, log_dir: Path, noted: Failure | None = None) -> WorkerFailed | None:
        """The error of a launch that did not end well. ``noted``: what a rank has said of its failure.

        Named is who was stopped, then who was killed, then a node that is gone or whose launch was ended, then who failed first: when a
        rank fails, ranks elsewhere fail in their collectives a moment later.
        """
        if self._has_ended_well:
            return None
        placement = self.placement
        failed = {name: code for name, code in self.codes.items() if code}
        struck = {name: code for name, code in failed.items() if code < 0 and code != -signal.SIGTERM}
        gone = [host for host in placement.hosts if host in self.gone - self.done]
        for name in sorted(self.stopped, key=_rank_of):
            return WorkerFailed(STOPPED, placement.located(name), hint="look for a SIGSTOP or a debugger")
        if gone and not struck:
            what = "its launcher ended without a word: it was killed, or the machine failed"
            return WorkerFailed(what, gone[0], hint="look at that node; its workers have ended, or will when they next meet")
        if self.failure is not None and not struck:
            return WorkerFailed(self.failure.why, self.failure.name, hint="start it again on every node")
        if not failed:
            return None
        first = self.places[next(iter(failed))]
        codes = struck or {name: code for name, code in failed.items() if self.places[name] == first}
        rank = first_to_blame({_rank_of(name): code for name, code in codes.items()})
        code = codes[f"rank {rank}"]
        how = how_it_ended(code)
        if noted is not None and (code >= 0 or code == -signal.SIGTERM):  # not where it was killed
            rank, how = noted.rank, noted.what.partition("\n")[0]
        on_node = " on that node" if placement.is_spread else ""
        return WorkerFailed(how, placement.located(f"rank {rank}"), hint=f"its output: {log_dir / f'workerlog.{rank}'}{on_node}")


def launch_script(
    nproc: int,
    script: Sequence[str],
    *,
    log_dir: Path,
    nodes: Nodes | None = None,
    echo: Echo = sys.stdout.buffer.write,
) -> bool:
    """Run ``script`` (a Python file and its arguments) as ``nproc`` trainers of this machine; whether any of them called ``fleet.init``.

    Worker N's output is in ``log_dir/workerlog.N``; rank 0's is echoed. Ranks find each other
    through a file; with ``nodes``, this machine is one of several, on each of which the same is called, and they do so over TCP.
    Raises ``EnvironmentLacks`` for a port that is taken or nodes that do not meet, ``WorkerFailed`` naming
    the rank that failed first, or the node.
    """
    if nodes is not None and nodes.rank == 0:
        require_free(nodes.port, "--rdzv-endpoint")
    network = _own({name: value for name, value in QUIET.items() if nodes is None or name in _OF_THE_USER})
    folder = make_folder()
    try:
        with ExitStack() as stack:
            if nodes is None:
                job = CollectiveJob(Placement(endpoints=(), workers=("",) * nproc, own=frozenset([""])))
                meeting = meeting_variables(folder)
            else:
                store = _store() if nodes.rank == 0 else None  # where trainers meet; kept to the end
                board = _board(nodes)
                stack.callback(board.close)
                job, meeting = _met(nodes, nproc, board, store)
            common = {**os.environ, **network, **meeting, JOINED: str(folder / "joined")}

            def start_ranks() -> None:
                prepare_logs(log_dir, job.placement)
                own, hosts = job.placement.own_trainers, job.placement.hosts
                node = {"node": hosts.index(job.placement.own_name), "nodes": len(hosts), "local_trainers": len(own)}
                for rank in own:
                    variables = {**common, **torchrun_variables(rank, len(job.placement.workers), local_rank=rank - own[0], **node)}
                    log = log_dir / f"workerlog.{rank}"
                    job.processes.append(start("trainer", rank, [sys.executable, "-u", *script], variables, log))

            job.run(start_ranks, echo)
        if (error := job.judge(log_dir, read_note(folder))) is not None:
            raise _shown(error, log_dir, echo)
        return (folder / "joined").exists()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _own(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables without those that the user has set, where that is the user's to decide."""
    return {name: value for name, value in variables.items() if name not in _OF_THE_USER or name not in os.environ}


def _store() -> TCPStore:
    """The store at which the trainers of several nodes meet, on a free port of this machine."""
    import torch.distributed as dist

    return dist.TCPStore(LOCAL, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]  # missing from __all__ only


def _board(nodes: Nodes) -> Board:
    """What the launchers write for each other, at the rendezvous."""
    own, patience_s = nodes.names[nodes.rank], nodes.startup_timeout_s
    holder = None
    if nodes.rank == 0:
        anywhere = f"0.0.0.0:{nodes.port}"  # as torch's store listens
        holder = Holder(anywhere, _TOKEN, nodes.names[1:], encrypted=False, startup_timeout_s=patience_s)
    return Board(f"{nodes.host}:{nodes.port}", _TOKEN, own, encrypted=False, startup_timeout_s=patience_s, holder=holder)


def _met(nodes: Nodes, nproc: int, board: Board, store: TCPStore | None) -> tuple[CollectiveJob, dict[str, str]]:
    """Wait for all nodes: their job, and where its trainers meet, at node 0's ``store``. Raises ``EnvironmentLacks`` without them."""
    own = nodes.names[nodes.rank]
    board.write(Entry(kind="here", name=own, code=nproc, why="" if store is None else str(store.port)))
    try:
        here, early = _all_here(nodes, board)
    except BaseException:  # the others would start, and wait for this node's ranks in their first collective
        board.write(Entry(kind="failed", name=own, why=ENDED_THERE))
        raise
    workers = tuple(name for name in nodes.names for _ in range(here[name].code))
    job = CollectiveJob(Placement(endpoints=(), workers=workers, own=frozenset([own])), board)
    for entry in early.values():
        job.hear(entry)
    meeting = {"MASTER_ADDR": nodes.host, "MASTER_PORT": here["node 0"].why, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return job, meeting


def _all_here(nodes: Nodes, board: Board) -> tuple[dict[str, Entry], dict[str, Entry]]:
    """By node: that it has come, and that it has given up since. Raises ``EnvironmentLacks`` where one does not come."""
    here: dict[str, Entry] = {}
    early: dict[str, Entry] = {}
    deadline = time.monotonic() + nodes.startup_timeout_s
    while missing := [name for name in nodes.names if name not in here]:
        if time.monotonic() > deadline:
            raise apart(nodes, f"without {', '.join(missing)}")
        for entry in board.turn():
            if entry.kind == "here" and 0 < entry.code < _MOST_RANKS:
                here[entry.name] = entry
                early.pop(entry.name, None)  # it was started again
            else:
                early[entry.name] = entry
        time.sleep(POLL_S)
    return here, early


def apart(nodes: Nodes, why: str) -> EnvironmentLacks:
    """The error of nodes that did not meet."""
    hint = "start the same command on every node, with --node-rank 0, 1, ...; can they reach this port of node 0?"
    what, where = f"{nodes.num} nodes did not meet within {nodes.startup_timeout_s:g} s", f"--rdzv-endpoint {nodes.host}:{nodes.port}"
    return EnvironmentLacks(what, where, why, hint)


def prepare_logs(log_dir: Path, placement: Placement) -> None:
    """Make the folder, and remove an earlier launch's logs: this machine's alone where others may see the same disk.

    The machine that has the first trainer or server removes logs of numbers beyond the job's. Raises ``EnvironmentLacks`` where there
    can be no folder.
    """
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentLacks(f"logs cannot be written: {error.strerror}", "--log-dir", str(log_dir), "name another folder") from error
    kinds = {
        "serverlog": (placement.own_servers, len(placement.endpoints)),
        "workerlog": (placement.own_trainers, len(placement.workers)),
    }
    for kind, (own, num) in kinds.items():
        for old in log_dir.glob(f"{kind}.*"):
            number = old.suffix[1:]
            if not placement.is_spread or (number.isdecimal() and (int(number) in own or (0 in own and int(number) >= num))):
                old.unlink(missing_ok=True)


def _shown(error: WorkerFailed, log_dir: Path, echo: Echo) -> WorkerFailed:
    """The error, once the traceback of the rank to blame is shown, if its output is here and has not been echoed, as rank 0's has."""
    found = re.match(r"rank ([1-9]\d*)", error.where or "")
    log = log_dir / f"workerlog.{found[1]}" if found is not None else None
    text = log.read_bytes() if log is not None and log.is_file() else b""
    begin = text.find(b"Traceback (most recent call last):\n")
    if begin >= 0:
        echo(f"from {log}:\n".encode() + text[begin:])
    return error


def _rank_of(name: str) -> int:
    return int(name.removeprefix("rank "))
