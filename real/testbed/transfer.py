"""Transfers over plain TCP between namespaces: what a link carries.

A socket belongs to the namespace in which it was made, so one process holds both ends.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack

Inside = Callable[[str], AbstractContextManager[None]]
_CHUNK = 1 << 16
RECEIVE_BYTES = 1 << 18
_SEND_BUFFER = 1 << 18
"""Bounds what waits in the shaper's queue, so that a transfer is over when its sender is."""
PATIENCE_S = 10.0


def connect(inside: Inside, source: str, target: str, address: str) -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection from one namespace to the ``address`` of another."""
    with inside(target):
        listener = socket.create_server((address, 0))
    with listener:
        with inside(source):
            sender = socket.socket()
        try:
            sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
            sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sender.settimeout(PATIENCE_S)
            sender.connect(listener.getsockname())
            listener.settimeout(PATIENCE_S)
            receiver, _ = listener.accept()
        except BaseException:
            sender.close()
            raise
    receiver.settimeout(PATIENCE_S)
    return sender, receiver


def rates(inside: Inside, flows: Sequence[Sequence[str]], *, skip_s: float, seconds: float) -> list[float]:
    """Payload in bit/s of flows (source, target, address of target) that all run at once, after ``skip_s``."""
    with ExitStack() as stack:
        ends = []
        for source, target, address in flows:
            sender, receiver = connect(inside, source, target, address)
            stack.enter_context(sender)
            stack.enter_context(receiver)
            ends.append((sender, receiver))
        begin = time.monotonic() + skip_s
        found = [0.0] * len(ends)

        def receive(number: int, receiver: socket.socket) -> None:
            found[number] = _receive(receiver, begin)

        threads = [threading.Thread(target=_send, args=(sender, begin + seconds), daemon=True) for sender, _ in ends]
        threads += [threading.Thread(target=receive, args=(number, end[1]), daemon=True) for number, end in enumerate(ends)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(skip_s + seconds + 2 * PATIENCE_S)
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
    buffer = bytearray(RECEIVE_BYTES)
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
