"""Traffic over plain TCP between namespaces: rates of links, and a fixed probe of links and machine.

A socket belongs to the namespace in which it was created, so one process holds both ends.
"""

import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack

Inside = Callable[[str], AbstractContextManager[None]]
Flow = tuple[str, str, str]
"""Source, target, and the target's address."""
_CHUNK = 1 << 16
_RECEIVE_BYTES = 1 << 18
_SEND_BUFFER = 1 << 18
"""Size in bytes of a send buffer. It limits the data in the shaper's queue, so that a transfer ends with its sender."""
_PATIENCE_S = 10.0


def _connect(stack: ExitStack, inside: Inside, flow: Flow, *, bounded: bool = True) -> tuple[socket.socket, socket.socket]:
    """Return both ends of a connection; ``stack`` closes them.

    ``bounded``: whether to limit the send buffer. If not, the kernel may have as much data in flight as a long link
    needs.
    """
    source, target, address = flow
    with inside(target):
        listener = socket.create_server((address, 0))
    with listener:
        with inside(source):
            sender = stack.enter_context(socket.socket())
        if bounded:
            sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sender.settimeout(_PATIENCE_S)
        sender.connect(listener.getsockname())
        listener.settimeout(_PATIENCE_S)
        receiver = stack.enter_context(listener.accept()[0])
    receiver.settimeout(_PATIENCE_S)
    return sender, receiver


def rates(inside: Inside, flows: Sequence[Flow], *, skip_s: float, seconds: float, bounded: bool = True) -> list[float]:
    """Return the payload rate of each flow in bit/s while all run at once, for ``seconds`` after ``skip_s``."""
    with ExitStack() as stack, ThreadPoolExecutor(2 * len(flows)) as pool:
        ends = [_connect(stack, inside, flow, bounded=bounded) for flow in flows]
        begin = time.monotonic() + skip_s
        for sender, _ in ends:
            pool.submit(_send, sender, begin + seconds)
        found = [pool.submit(_receive, receiver, begin) for _, receiver in ends]
        return [rate.result() for rate in found]


def _send(sender: socket.socket, end: float) -> None:
    data = memoryview(bytes(_CHUNK))
    try:
        while time.monotonic() < end:
            sender.sendall(data)
        sender.shutdown(socket.SHUT_WR)
    except OSError:  # a link that carries nothing has a rate of 0
        return


def _receive(receiver: socket.socket, begin: float) -> float:
    """Return the rate in bit/s between the first arrival after ``begin`` and the last arrival."""
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


def round_trips(inside: Inside, flow: Flow, times: int) -> list[float]:
    """Return the seconds of each of ``times`` round trips of a byte, one after the other."""
    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        here, there = _connect(stack, inside, flow)
        there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        returned = pool.submit(lambda: [there.send(there.recv(1)) for _ in range(times)])
        found = []
        for _ in range(times):
            begin = time.perf_counter()
            here.sendall(b"?")
            here.recv(1)
            found.append(time.perf_counter() - begin)
        returned.result()
        return found


def ring(inside: Inside, hosts: Sequence[tuple[str, str]], *, nbytes: int, rounds: int) -> list[float]:
    """Return the seconds of each round over hosts (name, address), in which every host sends ``nbytes`` to the next one."""
    data = bytes(nbytes)

    def receive(receiver: socket.socket) -> None:
        missing = nbytes
        while missing:
            count = len(receiver.recv(min(missing, _RECEIVE_BYTES)))
            if count == 0:
                raise ConnectionResetError("a host of the ring has left")
            missing -= count

    with ExitStack() as stack, ThreadPoolExecutor(2 * len(hosts)) as pool:
        links = [_connect(stack, inside, (source, *hosts[(number + 1) % len(hosts)])) for number, (source, _) in enumerate(hosts)]
        times = []
        for _ in range(rounds):
            begin = time.monotonic()
            parts = [*(pool.submit(sender.sendall, data) for sender, _ in links), *(pool.submit(receive, end) for _, end in links)]
            for part in parts:
                part.result()
            times.append(time.monotonic() - begin)
        return times
