"""Launching: ``fleetbench launch --servers ... --workers ... train.py``, here or as one host of several.

Every process runs the same script; variables say which of them it is (Paddle's, as its own launchers
set them). Unlike trainers that meet in collectives, these need not all live: a server that dies ends the
job or is started again, a trainer that dies is the servers' to judge. A launcher stays until the job has ended
everywhere, and learns from the job's board what it does not see itself.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from fleetbench.errors import ConfigError, EnvironmentLacks, FleetbenchError, WorkerFailed
from real.job.workers import QUIET
from real.processes.diagnosis import STOPPED, how_it_ended
from real.processes.interfaces import GLOO
from real.processes.roles import STARTUP
from real.servers.board import ADDRESS, Board, Entry, Holder
from real.servers.hosts import Placement, on_this_machine, require_addresses
from real.servers.security import TOKEN, encrypts, new_token, token_of
from real.servers.started import Started, end, start

_OTHER_ROLES = ("RANK", "PADDLE_TRAINER_ENDPOINTS")
"""Variables of other launchers, by which a process would not know its role from ours."""
_POLL_S = 0.05
_GRACE_S = 5.0
"""For processes that have nothing left to do, and for what the timeout of somebody else must bring about."""
_SERVER_GRACE_S = 300.0
"""For servers to write their last checkpoint once all trainers have ended; as long as they wait for one that never comes."""
_PARTING_S = 3.0
"""For servers of this host to end by themselves where its part has ended early."""


def launch_served(
    servers: int,
    workers: int,
    script: Sequence[str],
    *,
    log_dir: Path,
    restarts: int = 0,
    environment: Mapping[str, str] | None = None,
    echo: Callable[[bytes], object] = sys.stdout.buffer.write,
) -> None:
    """``launch_placed`` with ``servers`` servers and ``workers`` trainers of this machine alone."""
    launch_placed(on_this_machine(servers, workers), script, log_dir=log_dir, restarts=restarts, environment=environment, echo=echo)


def launch_placed(
    placement: Placement,
    script: Sequence[str],
    *,
    log_dir: Path,
    restarts: int = 0,
    environment: Mapping[str, str] | None = None,
    startup_timeout_s: float = 300.0,
    echo: Callable[[bytes], object] = sys.stdout.buffer.write,
) -> None:
    """Run ``script`` (a Python file and its arguments) as this machine's servers and trainers, until the job has ended on all hosts.

    Server N's output is in ``log_dir/serverlog.N``, trainer N's in ``workerlog.N``; trainer 0's is echoed where it runs. A
    server that dies is started again up to ``restarts`` times. ``startup_timeout_s``: for servers, trainers and the launchers of
    other hosts to come. Raises ``ConfigError`` for a script that is not there or a job of several hosts without a token,
    ``EnvironmentLacks`` for a server's address that is taken, ``WorkerFailed`` naming the server, rank or host that ended the job;
    trainers that were lost in a job that went on without them are named on stderr.
    """
    if not Path(script[0]).is_file():
        raise ConfigError("no such script", script[0], hint="give a Python file")
    token = token_among_hosts(os.environ) if placement.is_spread else new_token()
    require_addresses(placement)
    _prepare_logs(log_dir, placement)
    quiet = {name: value for name, value in QUIET.items() if name not in os.environ and not (placement.is_spread and name == GLOO)}
    inherited = {name: value for name, value in os.environ.items() if name not in _OTHER_ROLES}
    common = {**inherited, **quiet, TOKEN: token, **(environment or {}), ADDRESS: placement.board, STARTUP: str(startup_timeout_s)}
    common |= {"PADDLE_PSERVERS_IP_PORT_LIST": ",".join(placement.endpoints), "PADDLE_TRAINERS_NUM": str(len(placement.workers))}
    encrypted = encrypts(common, placement.endpoints)
    others = [host for host in placement.hosts if host not in placement.own]
    holder = None
    if 0 in placement.own_servers:
        holder = Holder(placement.board, token, others, encrypted=encrypted, startup_timeout_s=startup_timeout_s)
    board = Board(placement.board, token, placement.own_name, encrypted=encrypted, startup_timeout_s=startup_timeout_s)
    job = Job(placement, board, holder, restarts)
    try:
        job.start([sys.executable, "-u", *script], common, log_dir)
        job.follow(echo)
    except BaseException as error:
        job.part(error)
        raise
    finally:
        end(job.processes)
        board.close(holder)
        if holder is not None:
            holder.close()


def token_among_hosts(environment: Mapping[str, str]) -> str:
    """The job's token, which nobody can draw for all hosts but the user. Raises ``ConfigError`` where there is none."""
    try:
        return token_of(environment)
    except ConfigError as error:
        draw = "python3 -c 'import secrets; print(secrets.token_urlsafe(32))'"
        hint = f"draw one with {draw}, and on every host export {TOKEN}=..., not on a command line, which others can read"
        raise ConfigError("several hosts need one secret, of at least 16 characters, the same on each", TOKEN, hint=hint) from error


class Job:
    """What one launcher knows of a job. Life cycle: made; ``start``; ``follow``, to the end; ``part``, where that came early."""

    def __init__(self, placement: Placement, board: Board, holder: Holder | None = None, restarts: int = 0) -> None:
        self.processes: list[Started] = []
        """This machine's."""
        self.codes: dict[str, int] = {}
        """Exit codes by name, of all hosts."""
        self.lost: dict[str, Entry] = {}
        """Trainers that servers have gone on without."""
        self.failure: Entry | None = None
        self.gone: set[str] = set()
        """Hosts whose launchers are."""
        self._placement = placement
        self._places = placement.places
        self._names = {kind: [name for name in self._places if name.startswith(kind)] for kind in ("server", "rank")}
        self._board, self._holder, self._restarts = board, holder, restarts
        self._since: dict[str, float] = {}

    def start(self, command: list[str], common: Mapping[str, str], log_dir: Path) -> None:
        """Start this machine's processes."""
        for number in self._placement.own_servers:
            host, _, port = self._placement.endpoints[number].rpartition(":")
            which = {"TRAINING_ROLE": "PSERVER", "POD_IP": host, "PADDLE_PORT": port}
            self.processes.append(start("server", number, command, {**common, **which}, log_dir / f"serverlog.{number}"))
        for rank in self._placement.own_trainers:
            which = {"TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": str(rank)}
            self.processes.append(start("trainer", rank, command, {**common, **which}, log_dir / f"workerlog.{rank}"))

    def follow(self, echo: Callable[[bytes], object]) -> None:
        """Until all have ended, or those that have not will not. Raises what became of a job that did not end well."""
        first = next((process for process in self.processes if process.name == "rank 0"), None)
        source = None if first is None else first.log.open("rb")
        try:
            while True:
                self._turn()
                for process in self.processes:
                    if process.code is None and (code := process.popen.poll()) is not None:
                        self._see_end(process, code)
                if source is not None and (text := source.read()):
                    echo(text)
                if self._is_over():
                    break
                time.sleep(_POLL_S)
        finally:
            if source is not None:
                source.close()
        for _ in range(4 if any(self.codes.values()) else 0):  # what a process told before it ended may be on its way
            time.sleep(_POLL_S)
            self._turn()
        for sentence in self.judge():
            _say(sentence)

    def part(self, error: BaseException) -> None:
        """Let the other hosts know that this one's part has ended, and why."""
        if not self._placement.is_spread:
            return
        if isinstance(error, FleetbenchError) and error.where is not None:
            self._board.write(Entry(kind="failed", name=error.where.partition(" on ")[0], why=error.what))
        else:
            self._board.write(Entry(kind="failed", name=f"host {self._placement.own_name}", why="the launch was ended there"))
        deadline = time.monotonic() + _PARTING_S
        servers = [process.popen for process in self.processes if process.kind == "server"]
        while time.monotonic() < deadline and any(popen.poll() is None for popen in servers):  # they first tell all who train
            self._turn()
            time.sleep(_POLL_S)

    # What happens

    def _turn(self) -> None:
        if self._holder is not None:
            self._holder.turn()
        for entry in self._board.turn():
            if entry.kind == "ended":
                self.codes[entry.name] = entry.code
            elif entry.kind == "lost":
                self.lost[entry.name] = entry
            elif entry.kind == "gone":
                self.gone.add(entry.name)
            elif self.failure is None:
                self.failure = entry
        if self._board.is_silent:
            self.gone.add(self._places["server 0"])

    def _see_end(self, process: Started, code: int) -> None:
        how, is_server = how_it_ended(code), process.kind == "server"
        if is_server and code < 0 and process.starts <= self._restarts and self._somebody_trains():
            _say(f"{process.name} {how}, and is started again")
            process.start_again()
            return
        process.code = self.codes[process.name] = code
        self._board.write(Entry(kind="ended", name=process.name, code=code))
        if is_server and code < 0:
            hint = f"its output: {process.log}; fleetbench launch --restart-servers 3 starts it again, from its checkpoint"
            raise WorkerFailed(how, self._placement.located(process.name), hint=hint)
        if is_server and code:  # it may have told more by itself, before
            self._board.write(Entry(kind="failed", name=process.name, why=how))
        elif code:
            _say(f"{process.name} {how}")

    def _lives(self, name: str) -> bool:
        """Whether a process has not ended, as far as is known here."""
        return name not in self.codes and self._places[name] not in self.gone

    def _somebody_trains(self) -> bool:
        """Whether there are trainers for whom a server would be started again, or ends by itself later."""
        return any(self._lives(name) and name not in self.lost for name in self._names["rank"])

    # Whether it is over

    def _is_over(self) -> bool:
        """Whether there is nothing left to wait for."""
        living = [process for process in self.processes if process.code is None]
        servers_live = any(map(self._lives, self._names["server"]))
        has_failed = self.failure is not None or any(self.codes.get(name, 1) and not self._lives(name) for name in self._names["server"])
        holds = {"failed": has_failed, "no server lives": not servers_live, "nobody trains": not self._somebody_trains()}
        now = time.monotonic()
        self._since = {what: self._since.get(what, now) for what, is_so in holds.items() if is_so}
        for_s = {what: now - since for what, since in self._since.items()}
        if not living and (has_failed or not servers_live):
            return True
        if has_failed:  # our trainers may still tell what happened, and servers that were left in order still write
            writes = not any(self.codes.get(name, 1) for name in self._names["rank"])
            return for_s["failed"] > (_SERVER_GRACE_S if writes and self._has_running_server(living) else _GRACE_S)
        if not servers_live:
            return all(self._is_given_up(process, for_s["no server lives"]) for process in living)
        is_held = bool(living) and not self._has_running_server(living) and any(process.kind == "server" for process in living)
        return for_s.get("nobody trains", 0.0) > (_GRACE_S if is_held else _SERVER_GRACE_S)

    @staticmethod
    def _has_running_server(living: Sequence[Started]) -> bool:
        return any(process.kind == "server" and not process.is_stopped for process in living)

    def _is_given_up(self, trainer: Started, without_servers_s: float) -> bool:
        """Whether a trainer that lives after all servers' good end is not waited for.

        Who has left may have work of its own. Who has not is lost to the servers, and raises once it finds them silent; one that
        does not even do that hangs.
        """
        if trainer.is_stopped or trainer.name not in self.lost:
            return trainer.is_stopped and without_servers_s > _GRACE_S
        return without_servers_s > self.lost[trainer.name].seconds + _GRACE_S

    # What became of it

    def judge(self) -> list[str]:
        """Sentences on trainers without which the job went on. Raises ``WorkerFailed`` naming whoever ended a job that did not end well.

        Named is whom the servers or another launcher name; then a server that is stopped or whose launcher is gone; then, of the
        trainers, who was killed, who was stopped, who failed, who was lost. All launchers of a job name the same.
        """
        trainers = {name: self.codes.get(name) for name in self._names["rank"]}
        has_raised = any((code or 0) > 0 for code in trainers.values())
        has_trained = any(code == 0 or code is None for code in trainers.values())
        if self.failure or has_raised or not has_trained or any(self.codes.get(name) != 0 for name in self._names["server"]):
            name, how = next(self._blamed())
            raise WorkerFailed(how, self._placement.located(name), hint=self._hint(name))
        return [f"{self._placement.located(name)} {how}; the others trained on without it" for name, how in self._left_behind()]

    def _blamed(self) -> Iterator[tuple[str, str]]:
        """Names, and how it went with them, the first to blame first."""
        own = {process.name: process for process in self.processes}
        stopped = [name for name, process in own.items() if process.is_stopped]
        ended = {name: self.codes[name] for kind in ("rank", "server") for name in self._names[kind] if self.codes.get(name)}
        if self.failure is not None:
            name = self.failure.name
            has_own_cause = name in own and ended.get(name, 0) < 0
            yield name, STOPPED if name in stopped else how_it_ended(ended[name]) if has_own_cause else self.failure.why
        yield from ((name, STOPPED) for name in stopped if name.startswith("server"))
        for number, name in enumerate(self._names["server"]):
            if name not in self.codes and not self._lives(name):
                yield name, f"has not answered at {self._placement.endpoints[number]}, nor has its launcher"
        yield from ((name, how_it_ended(code)) for name, code in ended.items() if code < 0)
        yield from ((name, STOPPED) for name in stopped)
        yield from ((name, how_it_ended(code)) for name, code in ended.items())
        yield from ((name, entry.why) for name, entry in self.lost.items())
        yield from ((name, "did not end") for name in (*own, *self._places) if name not in self.codes)
        yield "this host", "nobody has trained"

    def _hint(self, name: str) -> str:
        own = {process.name: process for process in self.processes}
        process = own.get(name)
        if process is None:
            return "start it again on every host" if name.startswith("host ") else "its output is in the log folder of its host"
        if process.is_stopped:
            return "look for a SIGSTOP or a debugger"
        unended = [other for other in own.values() if other.kind == "trainer" and other.code is None and other is not process]
        others = "".join(f"; {other.name} did not end at all: {other.log}" for other in unended if process.code and self.failure is None)
        return f"its output: {process.log}{others}"

    def _left_behind(self) -> Iterator[tuple[str, str]]:
        """Trainers that were killed, here or elsewhere, fell silent or did not end."""
        own = {process.name: process for process in self.processes}
        for name in self._names["rank"]:
            code, why = self.codes.get(name), self.lost[name].why if name in self.lost else ""
            if code is not None and code < 0:
                yield name, how_it_ended(code)
            elif code is None and name in own:
                yield name, f"{why}, did not end and was killed" if why else "did not end and was killed"
            elif code is None and why:
                yield name, why


def _prepare_logs(log_dir: Path, placement: Placement) -> None:
    """Make the folder, and remove an earlier launch's logs: this machine's alone where others may see the same disk."""
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentLacks(f"logs cannot be written: {error.strerror}", "--log-dir", str(log_dir), "name another folder") from error
    kinds = (
        ("serverlog", placement.own_servers, len(placement.endpoints)),
        ("workerlog", placement.own_trainers, len(placement.workers)),
    )
    for kind, own, num in kinds:
        for old in log_dir.glob(f"{kind}.*"):
            number = old.suffix[1:]
            if not placement.is_spread or (number.isdecimal() and (int(number) in own or (0 in own and int(number) >= num))):
                old.unlink(missing_ok=True)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201  # the launcher's word
