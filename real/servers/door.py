"""Door: the address that a server listens on, and who is let in through it.

Strangers are counted and logged; what they say is never read.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

from fleetbench.errors import EnvironmentLacks
from real.servers.addresses import resolve
from real.servers.remarks import Remarks
from real.servers.security import Gatekeeper, guard_server
from real.servers.wire import Head, Tensor, encode

_FAILED_HANDSHAKES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class Lines:
    """The connections to a server's socket, and which of them broke off.

    Told of libzmq's ``EVENTS`` and of whom each message comes from. Connections are known by their file descriptors. Who
    hangs up says so before. libzmq breaks a connection off by itself where a frame is longer than the limit, and tells of
    that no more than that the connection has ended; so does one whose process or network has failed.
    """

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


class Door:
    """Life cycle: made; ``bind``; ``poll``, ``receive`` and ``send``; ``close``. Used by one thread. ``say`` hears of strangers."""

    def __init__(self, endpoint: str, token: str, *, encrypted: bool, say: Callable[[str], None], timeout_s: float = 0.0) -> None:
        self.strangers = Remarks(say)
        self.lines = Lines()
        self.bytes_sent = 0
        self._endpoint, self._say = endpoint, say
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._gatekeeper = Gatekeeper(self._context, token, self._refuse)
        guard_server(self._socket, token, encrypted=encrypted, timeout_s=timeout_s)
        self._socket.router_mandatory = True
        self._monitor = self._socket.get_monitor_socket(_FAILED_HANDSHAKES | Lines.EVENTS)
        self._poller = zmq.Poller()
        for listened in (self._socket, self._gatekeeper.socket, self._monitor):
            self._poller.register(listened, zmq.POLLIN)

    def bind(self) -> None:
        """Take the address. Raises ``ConfigError`` for one that is none, ``EnvironmentLacks`` where it cannot be had."""
        family, address = resolve(self._endpoint)
        self._socket.ipv6 = family == socket.AF_INET6
        try:
            self._socket.bind(f"tcp://{address}")
        except zmq.ZMQError as error:
            what = f"the server's address cannot be taken: {error}"
            hint = "an address of this machine, and a port on which no other job's server listens"
            raise EnvironmentLacks(what, "server", self._endpoint, hint) from error
        if address != self._endpoint:
            self._say(f"listens on {address}, which is {self._endpoint}")

    def poll(self, timeout_s: float) -> bool:
        """Answer those who knock, for at most so long; whether a trainer has said something, or hung up."""
        ready = dict(self._poller.poll(int(timeout_s * 1000)))
        if self._gatekeeper.socket in ready:
            self._gatekeeper.answer()
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            if event["event"] & Lines.EVENTS:
                self.lines.hear(event["event"], event["value"])
            elif event["event"] != zmq.EVENT_HANDSHAKE_FAILED_AUTH:  # of which the gatekeeper has told
                self.strangers.add("a connection was refused: it does not speak this job's protocol, or hung up")
        return self._socket in ready or self.lines.have_ended

    def receive(self) -> tuple[bytes, list[zmq.Frame]] | None:
        """Whom the next message comes from, and its frames; none where there is none."""
        try:
            identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        self.lines.speaks(identity)
        return identity.bytes, frames

    def send(self, identity: bytes, head: Head, tensors: Sequence[Tensor] = ()) -> None:
        """Send a message; one to whom has gone, or reads nothing, is not sent: should he come back, he asks again."""
        frames = encode(head, tensors)
        try:
            self._socket.send_multipart([identity, *frames], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError:
            return
        self.bytes_sent += sum(len(frame) if isinstance(frame, bytes) else frame.nbytes for frame in frames)

    def close(self) -> None:
        """Let the address go."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._gatekeeper.close()
        self._socket.close()
        self._context.term()

    def _refuse(self, address: str) -> None:
        self.strangers.add(f"a stranger at {address} was refused: it does not have the job's token")
