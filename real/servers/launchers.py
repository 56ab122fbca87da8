"""Launchers: who has started the processes of a server's job, one on every host, and asks the server how the job goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from real.servers.news import News, Notice
from real.servers.wire import Head, Tensor

_PRESENT_S = 2.5
"""One that has asked nothing for so long is not waited for; it asks twice a second."""


@dataclass(slots=True)
class _Launcher:
    identity: bytes
    heard_at: float
    knows_end: bool = False


class Launchers:
    """Used by the server's thread. ``send`` is its door's."""

    def __init__(self, send: Callable[[bytes, Head, Sequence[Tensor]], None]) -> None:
        self._send = send
        self._by_session: dict[int, _Launcher] = {}

    def hear(self, identity: bytes, session: int, notice: Notice) -> None:
        """One has spoken."""
        self._by_session[session] = _Launcher(identity, time.monotonic(), notice.knows_end)

    def tell(self, news: News, session: int | None = None) -> None:
        """Tell one, or all."""
        for own, launcher in self._by_session.items():
            if session in (None, own) and not launcher.knows_end:
                self._send(launcher.identity, Head("news", session=own), (news.to_bytes(),))

    @property
    def know_the_end(self) -> bool:
        """Whether nobody is left who still asks."""
        now = time.monotonic()
        return all(launcher.knows_end or now - launcher.heard_at > _PRESENT_S for launcher in self._by_session.values())
