"""Door: the address that a server listens on, and who is let in through it. What strangers say is never read."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

import zmq

from fleetbench.errors import EnvironmentLacks
from real.servers.addresses import resolve
from real.servers.security import Gatekeeper, guard_server
from real.servers.wire import Head, Tensor, encode

LOGGED = 20
"""Of what may happen very often."""


class Door:
    """Life cycle: made; ``bind``; ``poll``, ``receive`` and ``send``; ``close``. Used by one thread. ``say`` hears of strangers."""

    def __init__(self, endpoint: str, token: str, *, encrypted: bool, say: Callable[[str], None], timeout_s: float = 0.0) -> None:
        self.strangers = 0
        """Connections that were refused."""
        self.bytes_sent = 0
        self.poller = zmq.Poller()
        self._endpoint, self._say = endpoint, say
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._gatekeeper = Gatekeeper(self._context, token, self._refuse)
        guard_server(self._socket, token, encrypted=encrypted, timeout_s=timeout_s)
        self._socket.router_mandatory = True
        for listened in (self._socket, self._gatekeeper.socket):
            self.poller.register(listened, zmq.POLLIN)

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
        """Answer those who knock, for at most so long; whether a trainer has said something."""
        ready = dict(self.poller.poll(int(timeout_s * 1000)))
        if self._gatekeeper.socket in ready:
            self._gatekeeper.answer()
        return self._socket in ready

    def receive(self) -> tuple[bytes, list[zmq.Frame]] | None:
        """Whom the next message comes from, and its frames; none where there is none."""
        try:
            identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
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
        self._gatekeeper.close()
        self._socket.close()
        self._context.term()

    def _refuse(self, address: str) -> None:
        self.strangers += 1
        if self.strangers <= LOGGED:
            self._say(f"a stranger at {address} was refused: it does not have the job's token")
