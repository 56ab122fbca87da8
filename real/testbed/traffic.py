"""Traffic over plain TCP between namespaces: what links carry, and a fixed probe of links and machine.

A socket belongs to the namespace in which it was made, so one process holds both ends.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

Inside = Callable[[str], AbstractContextManager[None]]
_CHUNK = 1 << 16
_RECEIVE_BYTES = 1 << 18
_SEND_BUFFER = 1 << 18
"""Bounds what waits in the shaper's queue, so that a transfer is over when its sender is."""
_PATIENCE_S = 10.0


def _connect(stack: ExitStack, inside: Inside, source: str, target: str, address: str) -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection from one namespace to the ``address`` of another; ``stack`` closes them."""
    with inside(target):
        listener = socket.create_server((address, 0))
    with listener:
        with inside(source):
            sender = stack.enter_context(socket.socket())
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sender.settimeout(_PATIENCE_S)
        sender.connect(listener.getsockname())
        listener.settimeout(_PATIENCE_S)
        receiver = stack.enter_context(listener.accept()[0])
    receiver.settimeout(_PATIENCE_S)
    return sender, receiver


def rates(inside: Inside, flows: Sequence[Sequence[str]], *, skip_s: float, seconds: float) -> list[float]:
    """Payload in bit/s of flows (source, target, address of target) that all run at once, after ``skip_s``."""
    with ExitStack() as stack:
        ends = [_connect(stack, inside, *flow) for flow in flows]
        begin = time.monotonic() + skip_s
        found = [0.0] * len(ends)

        def receive(number: int, receiver: socket.socket) -> None:
            found[number] = _receive(receiver, begin)

        threads = [threading.Thread(target=_send, args=(sender, begin + seconds), daemon=True) for sender, _ in ends]
        threads += [threading.Thread(target=receive, args=(number, end[1]), daemon=True) for number, end in enumerate(ends)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(skip_s + seconds + 2 * _PATIENCE_S)
        return found


def _send(sender: socket.socket, end: float) -> None:
    data = memoryview(bytes(_CHUNK))
    try:
        while time.monotonic() < end:
            sender.sendall(data)
        sender.shutdown(socket.SHUT_WR)
    except OSError:  # a link that carries nothing is found by its rate
        return


def _receive(receiver: socket.socket, begin: float) -> float:
    """Rate between the first arrival after ``begin`` and the last of all."""
    buffer = bytearray(_RECEIVE_BYTES)
    first = last = 0.0
    total = 0
    try:
        while count := receiver.recv_into(buffer):
            last = time.monotonic()
            if first:
                total += count
            elif last >= begin:
                first = last
    except OSError:
        return 0.0
    return 8.0 * total / (last - first) if last > first else 0.0


def ring(inside: Inside, hosts: Sequence[Sequence[str]], *, chunk_bytes: int, rounds: int) -> list[float]:
    """Seconds of each round of a ring over hosts (name, address): one round is one all-reduce's bytes, without its sums.

    In each of 2(P - 1) steps every host sends a chunk to the next one, and begins a step when it
    has the chunk of the step before. One thread moves it all, so that nothing but the links and the
    machine's load decides how long it takes.
    """
    size = len(hosts)
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        links = [_connect(stack, inside, source, *hosts[(number + 1) % size]) for number, (source, _) in enumerate(hosts)]
        members = [_Member(links[number][0], links[number - 1][1], chunk_bytes, 2 * (size - 1)) for number in range(size)]
        times = []
        for _ in range(rounds):
            begin = time.monotonic()
            for member in members:
                member.begin(selector)
            while any(not member.done for member in members):
                ready = selector.select(_PATIENCE_S)
                if not ready:
                    raise TimeoutError("the ring stands still")
                for key, _ in ready:
                    key.data()
            times.append(time.monotonic() - begin)
        return times


class _Member:
    """A host of the ring. Sends step k's chunk once it has received step k - 1's."""

    def __init__(self, sender: socket.socket, receiver: socket.socket, chunk_bytes: int, steps: int) -> None:
        sender.setblocking(False)
        receiver.setblocking(False)
        self._sender, self._receiver = sender, receiver
        self._chunk, self._total = chunk_bytes, chunk_bytes * steps
        self._data = memoryview(bytes(chunk_bytes))
        self._buffer = bytearray(_RECEIVE_BYTES)
        self._sent = self._received = self._total
        self._selector: Any = None
        self._watches = False

    @property
    def done(self) -> bool:
        """Whether this round's chunks are all sent and received."""
        return self._sent == self._total and self._received == self._total

    def begin(self, selector: selectors.BaseSelector) -> None:
        """Start a round."""
        if self._selector is None:
            selector.register(self._receiver, selectors.EVENT_READ, self._receive)
        self._selector = selector
        self._sent = self._received = 0
        self._send()

    def _send(self) -> None:
        allowed = min(self._total, (self._received // self._chunk + 1) * self._chunk)
        try:
            while self._sent < allowed:
                place = self._sent % self._chunk
                self._sent += self._sender.send(self._data[place:])
        except BlockingIOError:
            self._watch(wanted=True)
            return
        self._watch(wanted=False)

    def _receive(self) -> None:
        # never into the next round: its first chunk may be here already
        count = self._receiver.recv_into(self._buffer, min(len(self._buffer), self._total - self._received) or 1)
        if count == 0:
            raise ConnectionResetError("a host of the ring has left")
        self._received += count
        if self._sent < self._total:
            self._send()

    def _watch(self, *, wanted: bool) -> None:
        if wanted and not self._watches:
            self._selector.register(self._sender, selectors.EVENT_WRITE, self._send)
        elif self._watches and not wanted:
            self._selector.unregister(self._sender)
        self._watches = wanted
