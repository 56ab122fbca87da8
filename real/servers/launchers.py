"""Launchers: who has started the processes of a server's job, one on every host, and asks the server how the job goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from real.servers.news import News, Notice
from real.servers.wire import Head, Tensor

_PARTING_S = 5.0
"""For all to hear how a server ended."""
_PRESENT_S = 2.5
"""One that has asked nothing for so long is not waited for; it asks twice a second."""


@dataclass(slots=True)
class _Launcher:
    identity: bytes
    heard_at: float
    knows_end: bool = False
    ended: dict[int, frozenset[int]] = field(default_factory=dict)
    """Trainers of its own that it has seen end, with the sessions that each had had by then."""
    replaced: set[int] = field(default_factory=set)
    """Those of them in whose place a new process has joined, of which it knows nothing."""


class Launchers:
    """Used by the server's thread. ``send`` is its door's."""

    def __init__(self, send: Callable[[bytes, Head, Sequence[Tensor]], None]) -> None:
        self._send = send
        self._by_session: dict[int, _Launcher] = {}

    def hear(self, identity: bytes, session: int, notice: Notice) -> None:
        """One has spoken."""
        launcher = self._by_session.setdefault(session, _Launcher(identity, 0.0))
        launcher.identity, launcher.heard_at, launcher.knows_end = identity, time.monotonic(), notice.knows_end

    def losses(self, session: int, lost: Mapping[int, int], sessions_of: Callable[[int], frozenset[int]]) -> dict[int, int]:
        """What still holds of exit codes by rank that one tells: it does so again and again, also behind a new process's joining."""
        launcher = self._by_session[session]
        for rank in lost:
            launcher.ended.setdefault(rank, sessions_of(rank))
        return {rank: code for rank, code in lost.items() if rank not in launcher.replaced}

    def join(self, rank: int, session: int) -> None:
        """A trainer has joined; a word of the process that has ended may only come late."""
        for launcher in self._by_session.values():
            if rank in launcher.ended and session not in launcher.ended[rank]:
                launcher.replaced.add(rank)

    def tell(self, news: News, session: int | None = None) -> None:
        """Tell one, or all."""
        for own, launcher in self._by_session.items():
            if session in (None, own) and not launcher.knows_end:
                self._send(launcher.identity, Head("news", session=own), (news.to_bytes(),))

    def part(self, news: News, attend: Callable[[], None]) -> None:
        """Let all know how the server ended, before it is gone. ``attend`` hears for a moment what comes."""
        self.tell(news)
        deadline = time.monotonic() + _PARTING_S
        while not self.know_the_end and time.monotonic() < deadline:
            attend()

    @property
    def know_the_end(self) -> bool:
        """Whether nobody is left who still asks."""
        now = time.monotonic()
        return all(launcher.knows_end or now - launcher.heard_at > _PRESENT_S for launcher in self._by_session.values())
