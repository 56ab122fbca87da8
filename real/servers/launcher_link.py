"""LauncherLink: a launcher's connections to all servers of its job. It says what became of its own processes, and hears of the others.

Every question carries all that the launcher has to say, so that it reaches a server however late that comes up, and
also the server's next life.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from socket import AF_INET6

import zmq

from real.servers.addresses import family_of
from real.servers.news import Failure, Lost, News, Notice
from real.servers.security import guard_client, new_session
from real.servers.wire import Head, WireError, decode, encode

_ASK_S = 0.5
_LINGER_MS = 500
_STOOD_STILL_S = 2.0
"""Between two turns: it was this process that did not run."""


@dataclass(slots=True)
class _Server:
    socket: zmq.Socket[bytes]
    session: int
    monitor: zmq.Socket[bytes]
    has_met: bool = False
    """It has let this launcher in, at some time."""
    asked_at: float | None = None
    """None: at once."""
    heard_at: float | None = None
    news: News | None = None


class LauncherLink:
    """Life cycle: made; ``turn`` often, ``lose`` and ``fail`` when there is something to say; ``close``. It never waits."""

    def __init__(self, endpoints: Sequence[str], token: str, *, encrypted: bool) -> None:
        self._lost: dict[int, int] = {}
        self._failure: Failure | None = None
        self._turned_at = time.monotonic()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._servers = []
        for endpoint in endpoints:
            socket = self._context.socket(zmq.DEALER)
            guard_client(socket, token, encrypted=encrypted)
            socket.ipv6 = family_of(endpoint) == AF_INET6
            monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            socket.connect(f"tcp://{endpoint}")
            self._servers.append(_Server(socket, new_session(), monitor))

    def lose(self, rank: int, code: int) -> None:
        """Trainer ``rank``, this launcher's own, has ended with ``code``."""
        self._lost[rank] = code
        self._ask_at_once()

    def fail(self, failure: Failure) -> None:
        """The job cannot go on; what was said first counts."""
        if self._failure is None:
            self._failure = failure
            self._ask_at_once()

    def turn(self) -> None:
        """Ask whom it is time to ask, and hear what has come."""
        now = time.monotonic()
        if (still_s := now - self._turned_at) > _STOOD_STILL_S:
            for server in self._servers:
                server.heard_at = None if server.heard_at is None else server.heard_at + still_s
        self._turned_at = now
        for server in self._servers:
            while server.monitor.poll(0):
                server.monitor.recv_multipart()
                server.has_met = True
            self._hear(server)
            has_ended = server.news is not None and server.news.state == "ended"
            if server.asked_at is None or (now - server.asked_at > _ASK_S and not has_ended):
                server.asked_at = now
                self._ask(server, knows_end=has_ended)

    def begins_again(self, server: int) -> None:
        """What a server has said is of a life that is over."""
        self._servers[server].heard_at = self._servers[server].news = None

    def close(self) -> None:
        """Say that nobody asks any more, and hang up; what was said still goes out, for a moment, to those who were met."""
        for server in self._servers:
            self._ask(server, knows_end=True)
            server.socket.disable_monitor()
            server.monitor.close(linger=0)
            server.socket.close(_LINGER_MS if server.has_met else 0)
        self._context.term()

    # What is known

    def news_of(self, server: int) -> News | None:
        """The last that it has said."""
        return self._servers[server].news

    def has_met(self, server: int) -> bool:
        """Whether it was ever up while this launcher lived: what was said by then has reached it."""
        return self._servers[server].has_met

    def silent_s(self, server: int) -> float | None:
        """For how long a server has said nothing; none for one that has never spoken."""
        heard_at = self._servers[server].heard_at
        return None if heard_at is None else self._turned_at - heard_at

    @property
    def has_been_heard(self) -> bool:
        """Whether every server knows of the failure that it was told of, or has stopped by itself; one that never spoke may be late."""
        told = (server.news for server in self._servers)
        return all(news is not None and (news.failure is not None or news.state != "serving") for news in told)

    @property
    def failure(self) -> Failure | None:
        """What ended the job, as the servers say."""
        return next((server.news.failure for server in self._servers if server.news is not None and server.news.failure is not None), None)

    @property
    def left(self) -> set[int]:
        """Trainers that have left in order, as any server says: the word may have missed another that had ended."""
        return {rank for server in self._servers if server.news is not None for rank in server.news.left}

    @property
    def lost(self) -> dict[int, Lost]:
        """Trainers that are gone without having left."""
        lost = {one.rank: one for server in reversed(self._servers) if server.news is not None for one in server.news.lost}
        return {rank: lost[rank] for rank in sorted(lost.keys() - self.left)}

    @property
    def silence_s(self) -> float:
        """For so long nobody may be silent, as the servers say; 0 before any has spoken."""
        return max((server.news.silence_s for server in self._servers if server.news is not None), default=0.0)

    def _ask_at_once(self) -> None:
        for server in self._servers:
            if server.news is None or server.news.state != "ended":
                server.asked_at = None

    def _ask(self, server: _Server, *, knows_end: bool) -> None:
        notice = Notice(lost=self._lost, failure=self._failure, knows_end=knows_end)
        with contextlib.suppress(zmq.Again):
            server.socket.send_multipart(encode(Head("watch", session=server.session), (notice.to_bytes(),)), zmq.NOBLOCK)

    def _hear(self, server: _Server) -> None:
        while True:
            try:
                head, tensors = decode(server.socket.recv_multipart(zmq.NOBLOCK, copy=False))
                news = News.from_bytes(tensors) if head.kind == "news" and head.session == server.session else None
            except zmq.Again:
                return
            except WireError:
                continue
            if news is None:
                continue
            if news.state == "ended" and (server.news is None or server.news.state != "ended"):
                server.asked_at = None  # to say that it is known
            server.news, server.heard_at = news, self._turned_at
