"""Ring: the traffic of an all-reduce without its sums, as a fixed probe of links and machine."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from real.testbed.transfer import PATIENCE_S, RECEIVE_BYTES, Inside, connect


def ring(inside: Inside, hosts: Sequence[Sequence[str]], *, chunk_bytes: int, rounds: int) -> list[float]:
    """Seconds of each round of a ring over hosts (name, address): one round is one all-reduce's bytes.

    In each of 2(P - 1) steps every host sends a chunk to the next one, and begins a step when it
    has the chunk of the step before. One thread moves it all, so that nothing but the links and the
    machine's load decides how long it takes.
    """
    size = len(hosts)
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        links = []
        for number, (source, _) in enumerate(hosts):
            target, address = hosts[(number + 1) % size]
            sender, receiver = connect(inside, source, target, address)
            stack.enter_context(sender)
            stack.enter_context(receiver)
            links.append((sender, receiver))
        members = [_Member(links[number][0], links[number - 1][1], chunk_bytes, 2 * (size - 1)) for number in range(size)]
        times = []
        for _ in range(rounds):
            begin = time.monotonic()
            for member in members:
                member.begin(selector)
            while any(not member.done for member in members):
                ready = selector.select(PATIENCE_S)
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
        self._buffer = bytearray(RECEIVE_BYTES)
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
