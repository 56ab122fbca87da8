"""Peers: what a server knows of each connection of its trainers: which requests it took, which of them wait, and what is in the shard.

Each request is numbered. What a repeat of one is answered with depends on nothing but what is known here, on
the shard and, for barriers, on how many meetings there have been: a trainer's k-th barrier is its part in
the k-th meeting, so one that comes again behind that meeting is answered, and takes no part in another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from real.servers.shard import Push
from real.servers.wire import NUMBER, Head, Tensor


@dataclass(slots=True)
class Peer:
    """One connection of a trainer."""

    identity: bytes
    rank: int
    session: int
    received: int
    """The last request that was taken."""
    applied: int
    """The last request whose effect is in the shard, or that has none there."""
    waiting: set[int] = field(default_factory=set)
    """Of those that were taken, the ones that wait for other trainers, or for a file to be written."""
    refusal: bytes | None = None
    """Why a request was refused; all that come behind it are refused with it, because they may build on it."""
    saved: tuple[int, bytes] = (0, b"")
    """The last request for a checkpoint that was done, and what became of it."""

    def echo(self, beat: int) -> tuple[Head, list[Tensor]]:
        """The answer to a beat: what has come, and what waits. All else has been answered, or was lost."""
        head = Head("alive", self.rank, self.session, beat, version=self.received)
        return head, [np.array(sorted(self.waiting), NUMBER)]


@dataclass(frozen=True, slots=True)
class Request:
    """What is being done, or waits for others."""

    peer: Peer
    head: Head
    tensors: Sequence[memoryview] = ()
    again: bool = False
    push: Push | None = None
    rows: Sequence[np.ndarray] = ()
    """Of each table, what a look-up asks for."""

    @property
    def pushed(self) -> Push:
        """What a push holds, once it has been read."""
        assert self.push is not None
        return self.push


class Peers:
    """All connections, by session. ``restored``: sessions that a checkpoint knows, with the last request of each that it holds."""

    def __init__(self) -> None:
        self.restored: Mapping[int, int] = {}
        self._by_session: dict[int, Peer] = {}

    def of(self, session: int) -> Peer | None:
        """Who speaks; none before he has greeted."""
        return self._by_session.get(session)

    def greet(self, identity: bytes, head: Head) -> tuple[Peer, bool]:
        """Who says hello, and whether he is known from the server's life before and heard for the first time in this one."""
        peer = self._by_session.get(head.session)
        comes_back = peer is None and head.session in self.restored
        if peer is None:
            held = self.restored.get(head.session, 0)
            peer = self._by_session[head.session] = Peer(identity, head.rank, head.session, max(held, head.mark), held)
        peer.identity = identity
        return peer, comes_back

    def applied(self) -> dict[int, int]:
        """For a checkpoint: the last request of each session that it holds."""
        return {**self.restored, **{session: peer.applied for session, peer in self._by_session.items()}}

    def forget_waiting(self, rank: int) -> None:
        """Nobody answers ``rank`` any more; should it come back, it finds that out, and asks again."""
        for peer in self._by_session.values():
            if peer.rank == rank:
                peer.waiting.clear()

    def __len__(self) -> int:
        return len(self._by_session)

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._by_session.values()))
