"""Handshake: what becomes of the connections that a trainer's socket makes, of which libzmq tells nothing but in its socket's events.

Behind a refusal libzmq does not try again, so that waiting would be in vain. Who hangs up in the midst, or says
nothing, may be the server still to come, or a proxy before it: that is tried again, and is worth a remark alone.
"""

from __future__ import annotations

import time
from typing import Literal

import zmq
from zmq.utils.monitor import recv_monitor_message

_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
IN_VAIN_S = 5.0
"""For so long somebody may take connections before a handshake succeeds; a server that begins or ends is faster."""

Refusal = Literal["token", "protocol"]


class Handshake:
    """Life cycle: made before the socket connects; ``hear`` where ``events`` has something; ``close`` before the socket does."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self.events = socket.get_monitor_socket(_EVENTS)
        """To be polled."""
        self._is_under_way = False
        self._since: float | None = None

    def hear(self) -> Refusal | None:
        """Why the other end is no server of this job; none as long as it may be.

        ``token``: it is a server of another job. ``protocol``: it encrypts and we do not, or the other way round, or it is
        another program.
        """
        while self.events.poll(0):
            event = recv_monitor_message(self.events)["event"]
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                return "token"
            if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                return "protocol"
            if event == zmq.EVENT_DISCONNECTED and self._is_under_way:  # greeted by what is no ZeroMQ: of this there is no other event
                return "protocol"
            self._is_under_way = event == zmq.EVENT_CONNECTED
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._since = None
            elif event == zmq.EVENT_CONNECTED and self._since is None:
                self._since = time.monotonic()
        return None

    @property
    def is_in_vain(self) -> bool:
        """Whether somebody listens, and handshakes have come to nothing for a while all the same."""
        return self._since is not None and time.monotonic() - self._since > IN_VAIN_S

    def close(self) -> None:
        """Hear no more."""
        if not self._socket.closed:
            self._socket.disable_monitor()
        self.events.close(linger=0)
