"""Launching a job with parameter servers: ``fleetbench launch --servers ... --workers ... train.py``, here or as one host of several.

Every process runs the same script; variables say which of them it is (Paddle's, as its own launchers
set them). Unlike trainers that meet in collectives, these need not all live: a server that dies ends the
job or is started again, a trainer that dies is the servers' to judge. A launcher stays until its own processes have ended. It tells all
servers how these ended, and reads on its host's board what they say of the job.
"""

import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from fleetbench.errors import FleetbenchError, WorkerFailed
from real.job.launcher import POLL_S, Echo, follow, logs_in
from real.processes.diagnosis import STOPPED, how_it_ended
from real.processes.joining import GLOO
from real.processes.place import temporary_folder
from real.processes.roles import STARTUP
from real.processes.started import QUIET, Started, end, start, start_process
from real.servers.board import BOARD, Board, Entry, Messenger
from real.servers.hosts import Placement, host_of, require_addresses
from real.servers.server_options import AGAIN

ENDED_THERE = "the launch was ended there"
_OTHER_ROLES = ("RANK", "PADDLE_TRAINER_ENDPOINTS")
"""Variables of other launchers, by which a process would not know its role from ours."""
_GRACE_S = 5.0
"""For processes that have nothing left to do, and for what follows from the timeout of another process."""
_SERVER_GRACE_S = 300.0
"""For servers to write their last checkpoint once all trainers have ended; as long as they wait for one that never comes."""
_PARTING_S = 3.0
"""For servers of this host to end by themselves where its part has ended early."""


def launch_placed(
    placement: Placement,
    script: Sequence[str],
    *,
    log_dir: Path,
    restarts: int = 0,
    startup_timeout_s: float = 300.0,
    echo: Echo = sys.stdout.buffer.write,
) -> None:
    """Run ``script`` (a Python file and its arguments) as this machine's servers and trainers, until they have ended.

    Server N's output is in ``log_dir/serverlog.N``, trainer N's in ``workerlog.N``; trainer 0's is echoed where it runs. A
    server that dies is started again up to ``restarts`` times. ``startup_timeout_s``: for servers and trainers to come. Raises
    ``EnvironmentLacks`` for a server's address that is taken, ``WorkerFailed`` naming the server, rank or host that ended the job;
    trainers that were lost in a job that went on without them are named on stderr.
    """
    require_addresses(placement)
    quiet = {name: value for name, value in QUIET.items() if name not in os.environ and not (placement.is_spread and name == GLOO)}
    inherited = {name: value for name, value in os.environ.items() if name not in _OTHER_ROLES}
    common = {**inherited, **quiet, STARTUP: str(startup_timeout_s)}
    common |= {"PADDLE_PSERVERS_IP_PORT_LIST": ",".join(placement.endpoints), "PADDLE_TRAINERS_NUM": str(len(placement.workers))}
    elsewhere = [endpoint for endpoint in placement.endpoints if host_of(endpoint) not in placement.own]
    with logs_in(log_dir, placement) as logs, temporary_folder() as folder:
        messenger = Messenger(elsewhere)
        path = folder / "board"
        job = ServedJob(placement, Board(path), messenger, restarts)
        try:
            job.run([sys.executable, "-u", *script], {**common, BOARD: str(path)}, logs, echo)
            for sentence in job.judge():
                _say(sentence)
        finally:
            end(job.processes)
            messenger.close()


class ServedJob:
    """A job with servers, as one host sees it. Life cycle: made; ``run``, to the end of its processes; ``judge``."""

    def __init__(self, placement: Placement, board: Board, messenger: Messenger, restarts: int = 0) -> None:
        self.processes: list[Started] = []
        """This machine's."""
        self.codes: dict[str, int] = {}
        """Exit codes by name, in the order in which they were heard of."""
        self.lost: dict[str, Entry] = {}
        """Trainers that servers have gone on without."""
        self.failure: Entry | None = None
        self.blamed: Entry | None = None
        """Whom the first trainer of this host names that ended because of another process."""
        self.placement = placement
        self._board, self._messenger = board, messenger
        self._restarts = restarts
        self._servers = [name for name in placement.places if name.startswith("server")]
        self._trainers = [name for name in placement.places if name.startswith("rank")]
        self._since: dict[str, float] = {}

    def run(self, command: list[str], common: Mapping[str, str], log_dir: Path, echo: Echo) -> None:
        """Start this machine's processes, and follow them to their end."""
        for number in self.placement.own_servers:
            host, _, port = self.placement.endpoints[number].rpartition(":")
            which = {"TRAINING_ROLE": "PSERVER", "POD_IP": host, "PADDLE_PORT": port}
            self.processes.append(start("server", number, command, {**common, **which}, log_dir / f"serverlog.{number}"))
        for rank in self.placement.own_trainers:
            which = {"TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": str(rank)}
            self.processes.append(start("trainer", rank, command, {**common, **which}, log_dir / f"workerlog.{rank}"))
        try:
            follow(self.processes, echo, self.see_end, self.is_over, self.turn)
        except BaseException as error:
            self._part(error)
            raise
        self.turn()  # what a process told before it ended

    def turn(self) -> None:
        """Read what others have told."""
        for entry in self._board.turn():
            self.hear(entry)

    def hear(self, entry: Entry) -> None:
        """Note one entry of the board; how processes ended is seen."""
        if entry.kind == "lost":
            self.lost[entry.name] = entry
        elif entry.kind == "failed":
            self.failure = self.failure or entry
        elif entry.kind == "blamed":
            self.blamed = self.blamed or entry

    def tell(self, entry: Entry) -> None:
        """Tell all servers."""
        self._board.write(entry)
        self._messenger.tell(entry)

    def _part(self, error: BaseException) -> None:
        """Let servers know that this host's part has ended, and why; they tell all who train."""
        if not self.placement.is_spread:
            return
        if isinstance(error, FleetbenchError) and error.where is not None:
            self.tell(Entry(kind="failed", name=error.where.partition(" on ")[0], why=error.what))
        else:
            self.tell(Entry(kind="failed", name=f"host {self.placement.own_name}", why=ENDED_THERE))
        deadline = time.monotonic() + _PARTING_S
        servers = [process.popen for process in self.processes if process.kind == "server"]
        while time.monotonic() < deadline and any(popen.poll() is None for popen in servers):  # they first tell all who train
            self.turn()
            time.sleep(POLL_S)

    def see_end(self, process: Started, code: int) -> None:
        """A process of this machine has ended: a killed server is started again, where that is asked for and of use."""
        how, is_server = how_it_ended(code), process.kind == "server"
        if is_server and code < 0 and process.starts <= self._restarts and self._is_trained():
            _say(f"{process.name} {how}, and is started again")
            process.environment[AGAIN] = "1"
            process.popen, process.starts = start_process(process.command, process.log, process.environment), process.starts + 1
            return
        process.code = self.codes[process.name] = code
        self.tell(Entry(kind="ended", name=process.name, code=code))
        if is_server and code < 0:
            hint = f"its output: {process.log}; fleetbench launch --restart-servers 3 starts it again, from its checkpoint"
            raise WorkerFailed(how, self.placement.located(process.name), hint=hint)
        if is_server and code:  # it may have told more by itself, before
            self.tell(Entry(kind="failed", name=process.name, why=how))
        elif code:
            _say(f"{process.name} {how}")

    def _is_trained(self) -> bool:
        """Whether a trainer lives, as far as is known: killed servers are started again for it, and end by themselves later."""
        return any(name not in self.codes and name not in self.lost for name in self._trainers)

    def is_over(self) -> bool:
        """Whether there is nothing left to wait for: all have ended, or have had their time since the job failed or had no more to do."""
        living = [process for process in self.processes if process.code is None]
        if not living:
            return True
        servers_live = any(name not in self.codes for name in self._servers)
        has_failed = self.failure is not None or any(self.codes.get(name) for name in self._servers)
        if servers_live and not has_failed and self._is_trained():
            return False
        now, since = time.monotonic(), "failed" if has_failed else "no trainer left" if servers_live else "no server lives"
        held_s = now - self._since.setdefault(since, now)
        return held_s > max(self._patience_s(process, has_failed=has_failed) for process in living)

    def _patience_s(self, process: Started, *, has_failed: bool) -> float:
        """For how long a process is waited for then.

        A server writes its last checkpoint, unless trainers have failed. A trainer that has left may have work of its own; one that
        has not is lost to the servers, and raises once it finds them silent.
        """
        if process.kind == "server" and not process.is_stopped:
            return _GRACE_S if has_failed and any(self.codes.get(name, 1) for name in self._trainers) else _SERVER_GRACE_S
        if process.is_stopped or has_failed:
            return _GRACE_S
        return self.lost[process.name].seconds + _GRACE_S if process.name in self.lost else math.inf

    def judge(self) -> list[str]:
        """Sentences on trainers without which the job went on. Raises ``WorkerFailed`` for a job that did not end well.

        The error names what the servers name; then a server that is stopped; then, of the trainers, who was killed, who was stopped, who
        failed, or whom that one names, who was lost.
        """
        own = [process.name for process in self.processes]
        codes = [self.codes.get(name) for name in own if name in self._trainers]
        has_raised = any((code or 0) > 0 for code in codes)
        servers = [self.codes.get(name) for name in own if name in self._servers]
        has_trained = any(not code for code in codes) or bool(self.placement.is_spread and servers)
        if self.failure or has_raised or not has_trained or any(code != 0 for code in servers):
            name, how = next(self._blamed())
            raise WorkerFailed(how, self.placement.located(name), hint=self._hint(name))
        return [f"{self.placement.located(name)} {how}; the others trained on without it" for name, how in self._left_behind()]

    def _blamed(self) -> Iterator[tuple[str, str]]:
        """Names, and how it went with them, the first to blame first."""
        own = [process.name for process in self.processes]
        stopped = [process.name for process in self.processes if process.is_stopped]
        ended = {name: self.codes[name] for name in (*self._trainers, *self._servers) if self.codes.get(name)}
        if self.failure is not None:
            name = self.failure.name
            has_own_cause = name in own and ended.get(name, 0) < 0
            yield name, STOPPED if name in stopped else how_it_ended(ended[name]) if has_own_cause else self.failure.why
        yield from ((name, STOPPED) for name in stopped if name.startswith("server"))
        yield from ((name, how_it_ended(code)) for name, code in ended.items() if code < 0)
        yield from ((name, STOPPED) for name in stopped)
        if self.blamed is not None:
            yield self.blamed.name, self.blamed.why
        yield from ((name, how_it_ended(code)) for name, code in ended.items())
        yield from ((name, entry.why) for name, entry in self.lost.items())
        yield from ((name, "did not end") for name in own if name not in self.codes)
        yield "this host", "no trainer has trained"

    def _hint(self, name: str) -> str:
        process = next((process for process in self.processes if process.name == name), None)
        if process is None:
            return "start it again on every host" if name.startswith("host ") else "its output is in the log folder of its host"
        if process.is_stopped:
            return "look for a SIGSTOP or a debugger"
        unended = [other for other in self.processes if other.kind == "trainer" and other.code is None and other is not process]
        others = "".join(f"; {other.name} did not end at all: {other.log}" for other in unended if process.code and self.failure is None)
        return f"its output: {process.log}{others}"

    def _left_behind(self) -> Iterator[tuple[str, str]]:
        """Trainers that were killed, here or elsewhere, fell silent or did not end."""
        own = [process.name for process in self.processes]
        for name in self._trainers:
            code, why = self.codes.get(name), self.lost[name].why if name in self.lost else ""
            if code is not None and code < 0:
                yield name, how_it_ended(code)
            elif code is None and name in own:
                yield name, f"{why}, did not end and was killed" if why else "did not end and was killed"
            elif code is None and why:
                yield name, why


def _say(text: str) -> None:
    with suppress(OSError):  # the terminal may be gone
        print(text, file=sys.stderr, flush=True)  # noqa: T201  # the launcher's word
