"""Lines: the connections to a server's socket, and which of them broke off.

Who hangs up says so before. libzmq breaks a connection off by itself where a frame is longer than the limit, and
tells of that no more than that the connection has ended; so does one whose process or network has failed.
"""

from __future__ import annotations

import zmq


class Lines:
    """Told of libzmq's ``EVENTS`` and of whom each message comes from. Connections are known by their file descriptors."""

    EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED

    def __init__(self) -> None:
        self._speakers: dict[int, bytes] = {}
        """By connection, of those that have said something."""
        self._num_silent = 0
        """Connections that were let in and have said nothing; libzmq does not say which of those that end had been let in."""
        self._ended: list[bytes | int] = []
        """Speakers, and connections that had said nothing that was read by then."""
        self._parting: set[bytes] = set()

    def hear(self, event: int, connection: int) -> None:
        """One of the ``EVENTS``, and which connection's it is, where libzmq says so."""
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._num_silent += 1
            return
        self._ended.append(self._speakers.pop(connection, connection))

    def speaks(self, identity: zmq.Frame) -> None:
        """A message's first frame."""
        connection = int(identity.get(zmq.SRCFD))
        if self._speakers.get(connection) != identity.bytes and identity.bytes not in self._ended:
            self._speakers[connection] = identity.bytes
            self._num_silent -= 1

    def parts(self, identity: bytes) -> None:
        """Who says that he hangs up."""
        self._parting.add(identity)

    @property
    def have_ended(self) -> bool:
        """Whether any has, since ``broken`` was asked."""
        return bool(self._ended)

    def broken(self) -> list[bytes | None]:
        """Who has gone without a word since the last time; None is one who never spoke. To be asked when all messages are read."""
        ended, self._ended = self._ended, []
        broken: list[bytes | None] = []
        for who in ended:
            speaker = self._speakers.pop(who, None) if isinstance(who, int) else who
            if speaker is not None and speaker in self._parting:
                self._parting.remove(speaker)
            elif speaker is not None:
                broken.append(speaker)
            elif self._num_silent > 0:
                self._num_silent -= 1
                broken.append(None)
        return broken
