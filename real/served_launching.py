"""Launching: ``fleetbench launch --servers ... --workers ... train.py``, here or as one host of several.

Every process runs the same script; variables say which of them it is (Paddle's, as its own launchers
set them). Unlike trainers that meet in collectives, these need not all live: a server that dies ends the
job or is started again, a trainer that dies is the servers' to judge. A launcher stays until the job has ended
everywhere, and says to servers, and hears from them, what its own eyes do not see.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fleetbench.errors import ConfigError, EnvironmentLacks, FleetbenchError, WorkerFailed
from real.launch import QUIET
from real.processes.diagnosis import how_it_ended
from real.processes.interfaces import GLOO
from real.processes.roles import STARTUP
from real.served_verdict import Heard, judge
from real.servers.hosts import Placement, on_this_machine, require_addresses
from real.servers.launcher_link import LauncherLink
from real.servers.news import Failure, News
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
"""For servers to hear that this host's part has ended early, also those that are just coming up."""


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
    server that dies is started again up to ``restarts`` times. ``startup_timeout_s``: for servers and trainers to come, and for
    what became of trainers here to reach servers of other hosts. Raises ``ConfigError`` for a script that is not there or a job
    of several hosts without a token, ``EnvironmentLacks`` for a server's address that is taken, ``WorkerFailed``
    naming the server, rank or host that ended the job; trainers that were lost in a job that went on without them are named
    on stderr.
    """
    if not Path(script[0]).is_file():
        raise ConfigError("no such script", script[0], hint="give a Python file")
    token = token_among_hosts(os.environ) if placement.is_spread else new_token()
    require_addresses(placement)
    _prepare_logs(log_dir, placement)
    quiet = {name: value for name, value in QUIET.items() if name not in os.environ and not (placement.is_spread and name == GLOO)}
    inherited = {name: value for name, value in os.environ.items() if name not in _OTHER_ROLES}
    common = {**inherited, **quiet, TOKEN: token, **(environment or {})}
    common |= {"PADDLE_PSERVERS_IP_PORT_LIST": ",".join(placement.endpoints), "PADDLE_TRAINERS_NUM": str(len(placement.workers))}
    common[STARTUP] = str(startup_timeout_s)
    link = LauncherLink(placement.endpoints, token, encrypted=encrypts(common, placement.endpoints))
    job = _Job(placement, link, restarts, startup_timeout_s)
    try:
        job.start([sys.executable, "-u", *script], common, log_dir)
        job.follow(echo)
    except BaseException as error:
        job.part(error)
        raise
    finally:
        end(job.processes)
        job.link.close()


def token_among_hosts(environment: Mapping[str, str]) -> str:
    """The job's token, which nobody can draw for all hosts but the user. Raises ``ConfigError`` where there is none."""
    try:
        return token_of(environment)
    except ConfigError as error:
        draw = "python3 -c 'import secrets; print(secrets.token_urlsafe(32))'"
        hint = f"draw one with {draw}, and on every host export {TOKEN}=..., not on a command line, which others can read"
        raise ConfigError("several hosts need one secret, of at least 16 characters, the same on each", TOKEN, hint=hint) from error


class _Job:
    """What one launcher sees of a job. Life cycle: made; ``start``; ``follow``, to the end; ``part``, where that came early."""

    def __init__(self, placement: Placement, link: LauncherLink, restarts: int, startup_timeout_s: float) -> None:
        self.placement = placement
        self.link = link
        self.processes: list[Started] = []
        self._restarts = restarts
        self._startup_timeout_s = startup_timeout_s
        self._begin = time.monotonic()
        self._since: dict[str, float] = {}
        self._remarked: set[int] = set()

    @property
    def _servers(self) -> dict[int, Started]:
        return {process.rank: process for process in self.processes if process.kind == "server"}

    @property
    def _trainers(self) -> list[Started]:
        return [process for process in self.processes if process.kind == "trainer"]

    def start(self, command: list[str], common: Mapping[str, str], log_dir: Path) -> None:
        """Start this machine's processes."""
        for number in self.placement.own_servers:
            host, _, port = self.placement.endpoints[number].rpartition(":")
            which = {"TRAINING_ROLE": "PSERVER", "POD_IP": host, "PADDLE_PORT": port}
            self.processes.append(start("server", number, command, {**common, **which}, log_dir / f"serverlog.{number}"))
        for rank in self.placement.own_trainers:
            which = {"TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": str(rank)}
            self.processes.append(start("trainer", rank, command, {**common, **which}, log_dir / f"workerlog.{rank}"))

    def follow(self, echo: Callable[[bytes], object]) -> None:
        """Until all have ended, or those that have not will not. Raises what became of a job that did not end well."""
        first = next((process for process in self._trainers if process.rank == 0), None)
        source = None if first is None else first.log.open("rb")
        try:
            while True:
                self.link.turn()
                for process in self.processes:
                    if process.code is None and process.popen.poll() is not None:
                        self._see_end(process)
                self._remark_on_others()
                if source is not None and (text := source.read()):
                    echo(text)
                if self._is_over():
                    break
                time.sleep(_POLL_S)
        finally:
            if source is not None:
                source.close()
        for sentence in judge(self.processes, self._heard(), self.placement):
            _say(sentence)

    def part(self, error: BaseException) -> None:
        """Let the other hosts know that this one's part has ended, and why."""
        if not self.placement.is_spread:
            return
        if isinstance(error, FleetbenchError) and error.where is not None:
            self.link.fail(Failure(where=error.where.partition(" on ")[0], what=error.what))
        else:
            self.link.fail(Failure(where=f"host {self.placement.own_name}", what="the launch was ended there"))
        deadline = time.monotonic() + _PARTING_S
        while time.monotonic() < deadline:
            self.link.turn()
            if self.link.has_been_heard and all(server.popen.poll() is not None for server in self._servers.values()):
                return  # servers of ours end by themselves, once they have told all who train
            time.sleep(_POLL_S)

    # What happens

    def _see_end(self, process: Started) -> None:
        code = process.code = process.popen.returncode
        if code == 0:
            if process.kind == "trainer":  # it may never have joined, or left while a server was away
                self.link.lose(process.rank, code)
            return
        how = how_it_ended(code)
        if process.kind == "trainer":
            _say(f"{process.name} {how}")
            if code > 0 and (silent := self._silent(0.5)):  # which this trainer has met before its launcher calls it so
                server, _ = next(iter(silent.items()))
                self.link.fail(Failure(where=f"server {server}", what=f"has not answered at {self.placement.endpoints[server]}"))
            self.link.lose(process.rank, code)
        elif code < 0 and process.starts <= self._restarts and self._somebody_trains():
            _say(f"{process.name} {how}, and is started again")
            process.start_again()
            self.link.begins_again(process.rank)
        elif code < 0:
            hint = f"its output: {process.log}; fleetbench launch --restart-servers 3 starts it again, from its checkpoint"
            raise WorkerFailed(how, self.placement.located(process.name), hint=hint)
        elif self.link.failure is None:
            self.link.fail(Failure(where=process.name, what=how))

    def _somebody_trains(self) -> bool:
        """Whether there are trainers for whom a server would be started again."""
        if any(process.code is None for process in self._trainers):
            return True
        gone = self.link.left | self.link.lost.keys()
        return any(rank not in gone for rank in range(len(self.placement.workers)) if rank not in self.placement.own_trainers)

    def _remark_on_others(self) -> None:
        """Say which trainers of other hosts are lost, as soon as servers do."""
        lost = {rank: one for rank, one in self.link.lost.items() if rank not in self.placement.own_trainers}
        for rank in lost.keys() - self._remarked:
            _say(f"{self.placement.located(f'rank {rank}')} {lost[rank].why}")
        self._remarked = set(lost)

    # Whether it is over

    def _is_over(self) -> bool:
        """Whether there is nothing left to wait for."""
        has_failed = bool(self.link.failure or any(process.code for process in self._servers.values()) or self._silent(1.0))
        servers_have_ended = all(self._has_ended(server) for server in range(len(self.placement.endpoints)))
        holds = {
            "failed": has_failed,
            "no server lives": servers_have_ended,
            "no trainer of ours lives": all(process.code is not None for process in self._trainers),
            "ours have ended well": all(process.code == 0 for process in self.processes),
        }
        now = time.monotonic()
        self._since = {what: self._since.get(what, now) for what, is_so in holds.items() if is_so}
        for_s = {what: now - since for what, since in self._since.items()}
        if all(process.code is not None for process in self.processes) and (servers_have_ended or has_failed):
            return True
        if has_failed:  # our trainers may still tell what happened, and servers still write
            return for_s["failed"] > (_SERVER_GRACE_S if self._writes() else _GRACE_S)
        if servers_have_ended:
            return all(self._is_given_up(process, for_s["no server lives"]) for process in self._trainers if process.code is None)
        has_all_trainers = len(self.placement.own_trainers) == len(self.placement.workers)
        return has_all_trainers and for_s.get("no trainer of ours lives", 0.0) > _SERVER_GRACE_S

    def _has_ended(self, server: int) -> bool:
        """Whether a server has ended; of other hosts' as it says itself, unless it came and went unheard and nothing here is amiss."""
        if server in self._servers:
            return self._servers[server].code is not None
        news = self.link.news_of(server)
        if news is None:  # one that has not come yet is still to be told of trainers that have ended here
            return self.link.has_met(server) and time.monotonic() - self._since.get("ours have ended well", math.inf) > 2 * _GRACE_S
        return news.state == "ended"

    def _writes(self) -> bool:
        """Whether a server of ours, behind the last trainer's leave, may be writing its last checkpoint."""
        news = [self.link.news_of(server) for server, process in self._servers.items() if process.code is None and not process.is_stopped]
        return any(one is not None and one.state == "stopping" and one.failure is None for one in news)

    def _is_given_up(self, trainer: Started, without_servers_s: float) -> bool:
        """Whether a trainer that lives behind all servers' good end is not waited for.

        Who has left may have work of its own. Who has not is lost to the servers, and raises once it finds them silent; one that
        does not even do that hangs. Where no server has said who has left, only one that is stopped is not waited for.
        """
        if without_servers_s <= _GRACE_S:
            return False
        if trainer.is_stopped:
            return True
        if trainer.rank not in self.link.lost:
            return False
        return without_servers_s > self.link.silence_s + _GRACE_S

    def _silent(self, share: float) -> dict[int, float | None]:
        """Servers that are gone without a word: silent for this share of the time that anybody may be, and a grace."""
        found: dict[int, float | None] = {}
        none_lives = all(process.code is not None for process in self.processes)
        no_trainer_lives = all(process.code is not None for process in self._trainers)
        for server in range(len(self.placement.endpoints)):
            news, silent_s = self.link.news_of(server), self.link.silent_s(server)
            if self._has_ended(server):
                continue
            own = self._servers.get(server)
            is_held = own is not None and own.is_stopped and no_trainer_lives  # trainers would miss it by themselves
            if news is None or silent_s is None:
                if is_held or (own is None and none_lives and time.monotonic() - self._begin > self._startup_timeout_s):
                    found[server] = None
            elif silent_s > (_GRACE_S if is_held else self._patience_s(news, share)):
                found[server] = silent_s
        return found

    def _patience_s(self, news: News, share: float) -> float:
        """For how long a server that has spoken may be silent; one that does not serve any more writes its checkpoint."""
        return share * (news.silence_s + _GRACE_S) if news.state == "serving" else _SERVER_GRACE_S

    def _heard(self) -> Heard:
        has_news = any(self.link.news_of(server) for server in range(len(self.placement.endpoints)))
        left = frozenset(self.link.left) if has_news else None
        return Heard(failure=self.link.failure, left=left, lost=self.link.lost, silent=self._silent(1.0))


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
