"""Links: one thread's connections to all servers, and the messages. Requests go out in order, and each gets one answer.

A message is a head as JSON, then each tensor as one frame; nothing is unpickled or evaluated. While a connection lives,
TCP delivers every message once and in order. libzmq's heartbeats also break the connection if the other machine is gone
or the other process is stopped. A broken connection is not replaced: the trainer tells all servers which process has
failed, and raises.
"""

import json
import math
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

from fleetbench.errors import ConfigError, WorkerFailed

BEAT_S = 0.5
"""Seconds between two heartbeats of a connection, and between two checks for failures."""
_PROTOCOL = b"FBPS 9 "
"""First bytes of every head: the protocol and its version."""
_HINT = "its output says why; start the job again, from its checkpoint if there is one, or raise timeout_s on a slow network"

Tensor = np.ndarray | bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of one server or trainer of a job."""

    number: int
    """Number of the server, or rank of the trainer."""
    endpoints: tuple[str, ...]
    """``host:port`` of every server, in order; the host is an address or a name that resolves to one."""
    trainers: int = 1
    timeout_s: float = 30.0
    """Seconds without an answer to a heartbeat after which the other process counts as failed."""
    startup_timeout_s: float = 300.0
    """Seconds in which the processes of the job must find each other, and the parameters all trainers."""
    round_timeout_s: float = math.inf
    """Seconds for which synchronous trainers wait for a live trainer that does not come to their update or barrier.
    Before the first update, the limit is at least ``startup_timeout_s``."""
    record: bool = False
    first_step: int = 1
    keep_times: bool = False


class Head(NamedTuple):
    """Head of a message; fields that its kind does not use are 0.

    An answer has the kind of its request, or a kind that only answers have. ``failed`` (from a trainer) and ``stopped``
    (from a server) have two texts as tensors: why the job ends, and the name of the process that failed.
    """

    kind: str
    rank: int = 0
    """Rank of the trainer that sends or receives the message."""
    version: int = 0
    """Number of updates that the server had made."""
    rate: float = 0.0
    """Learning rate of a gradient."""
    num: int = 0
    """Number of gradients in a push; the answer repeats it."""


def encode(head: Head, tensors: Sequence[Tensor] = ()) -> list[bytes | memoryview]:
    """Return the frames of a message.

    Tensors are not copied, so they must not change until the message has been sent.
    """
    return [_PROTOCOL + json.dumps(head).encode(), *map(_body, tensors)]


def decode(frames: Sequence[zmq.Frame]) -> tuple[Head, list[memoryview]]:
    """Return the head and the tensors of a message; the tensors are views of ``frames``.

    Raises ``ValueError`` for a message of another program, or of another version of this one.
    """
    text = frames[0].bytes
    if not text.startswith(_PROTOCOL):
        raise ValueError("no head of this version of fleetbench")
    return Head(*json.loads(text.removeprefix(_PROTOCOL))), [frame.buffer for frame in frames[1:]]


def numbers(body: memoryview, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> np.ndarray:
    """Return a tensor's numbers as a view of ``body``; -1 in ``shape`` as in numpy."""
    return np.frombuffer(body, dtype=dtype).reshape(shape)


def text_of(body: memoryview) -> str:
    """Return the text that a tensor contains."""
    return bytes(body).decode("utf-8", "replace")


def _body(tensor: Tensor) -> memoryview:
    if isinstance(tensor, bytes):
        return memoryview(tensor)
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data if tensor.size else memoryview(b"")


def keep_alive(wire: zmq.Socket[bytes], timeout_s: float) -> None:
    """Let libzmq break a socket's connection if the other process answers no heartbeat for ``timeout_s`` seconds.

    The socket holds any number of messages: a trainer has few requests without an answer.
    """
    wire.sndhwm = wire.rcvhwm = 0
    wire.heartbeat_ivl = int(1000 * BEAT_S)
    wire.heartbeat_timeout = min(int(1000 * timeout_s), 2**31 - 1)


def broken(where: str, timeout_s: float, value: str | None = None) -> WorkerFailed:
    """Return the error that names the process at the other end of a broken connection."""
    return WorkerFailed(f"its connection has broken, or it was silent for {timeout_s:g} s", where, value, _HINT)


def failure_told(tensors: Sequence[memoryview]) -> WorkerFailed:
    """Return the failure that another process has reported."""
    return WorkerFailed(text_of(tensors[0]), text_of(tensors[1]), hint="its own output says why; start the job again")


class Answer(NamedTuple):
    """An answer of ``server``: fields of its ``Head``, and its tensors."""

    server: int
    kind: str
    num: int
    version: int
    tensors: Sequence[memoryview]


@dataclass(slots=True)
class _Link:
    """The connection to one server."""

    server: int
    endpoint: str
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    """Socket that reports when the connection breaks."""
    unanswered: int = 0
    """Number of requests without an answer."""
    heard_s: float = 0.0
    """Time in s, on the monotonic clock, of the server's last message, or of the first unanswered request after it."""
    is_up: bool = False
    """Whether the server is known to run, for example because it has sent a message."""
    has_left: bool = False
    """Whether the server knows that this trainer has left, and may therefore be gone."""


class Links:
    """Connections of one thread; see the module.

    Raises ``WorkerFailed`` naming a server whose connection breaks, or another process whose failure ends the job.
    Raises ``ConfigError`` if a server refuses this trainer.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], options: Options, *, are_up: bool = False) -> None:
        """``are_up``: whether the servers are known to run; if not, one may disconnect before its first message."""
        self.options = options
        self._patience_s = options.timeout_s + options.startup_timeout_s  # long enough for a checkpoint
        self.bytes_sent = 0
        self._poller = zmq.Poller()
        self._links = []
        for server, endpoint in enumerate(options.endpoints):
            dealer = context.socket(zmq.DEALER)
            keep_alive(dealer, options.timeout_s)
            monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            dealer.connect(f"tcp://{endpoint}")
            for listened in (dealer, monitor):
                self._poller.register(listened, zmq.POLLIN)
            self._links.append(_Link(server, endpoint, dealer, monitor, is_up=are_up))

    @property
    def is_idle(self) -> bool:
        """Whether every request has been answered."""
        return not any(link.unanswered for link in self._links)

    def ask(self, server: int, kind: str, tensors: Sequence[Tensor] = (), *, rate: float = 0.0, num: int = 0) -> None:
        """Send a request, whose answer ``poll`` will return.

        The tensors must not change until then.
        """
        link = self._links[server]
        if not link.unanswered:
            link.heard_s = time.monotonic()
        link.unanswered += 1
        self._send(link, Head(kind, self.options.number, rate=rate, num=num), tensors)

    def ask_all(self, kind: str, *tensors: Tensor) -> list[Answer]:
        """Send a request to all servers, and return their answers."""
        for link in self._links:
            self.ask(link.server, kind, tensors)
        return self.settle()

    def poll(self, timeout_s: float, wake: socket.socket | None = None) -> list[Answer]:
        """Wait for answers and return them, after at most ``timeout_s`` seconds, or once ``wake`` has data to read."""
        if wake is not None and wake not in self._poller:
            self._poller.register(wake, zmq.POLLIN)
        ready = dict(self._poller.poll(max(0, int(timeout_s * 1000 + 0.999))))
        answers: list[Answer] = []
        for link in self._links:
            if link.socket in ready or link.monitor in ready:  # a server's last message arrives before its connection breaks
                self._receive(link, answers)
            if link.monitor in ready:
                recv_monitor_message(link.monitor)
                if link.is_up and not link.has_left:
                    raise self._told(broken(f"server {link.server}", self.options.timeout_s, link.endpoint))
            if link.unanswered and time.monotonic() > link.heard_s + self._patience_s:
                what = f"has said nothing for {self._patience_s:g} s, though its process lives"
                raise self._told(WorkerFailed(what, f"server {link.server}", link.endpoint, "its output says what it does"))
        return answers

    def wait(self, within_s: float) -> list[Answer]:
        """Return the answers of all servers to a ``join``.

        Raises ``WorkerFailed`` if they do not arrive within ``within_s`` seconds.
        """
        deadline = time.monotonic() + within_s
        answers: list[Answer] = []
        while len(answers) < len(self._links):
            if time.monotonic() > deadline:
                late = next((f"server {link.server}" for link in self._links if not link.is_up), None)
                what = f"has not {'brought the parameters' if late is None else 'answered'} within {within_s:g} s"
                raise self._told(WorkerFailed(what, late or "rank 0", hint="is it started, and does the address lead to it?"))
            answers += self.poll(BEAT_S)
        return sorted(answers, key=lambda answer: answer.server)

    def settle(self) -> list[Answer]:
        """Wait until every request has been answered, and return the answers."""
        answers: list[Answer] = []
        while not self.is_idle:
            answers += self.poll(BEAT_S)
        return answers

    def close(self) -> None:
        """Close the connections. Messages to a server that still runs have one more second to go out."""
        for link in self._links:
            if not link.socket.closed:
                link.socket.disable_monitor()
            link.monitor.close(linger=0)
            link.socket.close(linger=1_000 if link.is_up and not link.has_left else 0)

    def _receive(self, link: _Link, answers: list[Answer]) -> None:
        while True:
            try:
                frames = link.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            link.is_up, link.heard_s = True, time.monotonic()
            head, tensors = decode(frames)
            if head.kind == "stopped":
                raise self._told(failure_told(tensors))
            if head.kind == "refused":
                hint = "all trainers of a job have one model, optimizer and strategy; a checkpoint is of the same model and optimizer"
                raise ConfigError(f"refuses this trainer: {text_of(tensors[0])}", f"server {link.server}", link.endpoint, hint)
            if head.kind != "alive":
                link.unanswered -= 1
                link.has_left = link.has_left or head.kind == "leave"
                answers.append(Answer(link.server, head.kind, head.num, head.version, tensors))

    def _told(self, failure: WorkerFailed) -> WorkerFailed:
        """Tell all servers which process failed, before they notice that this trainer is gone; return ``failure``."""
        for link in self._links:
            self._send(link, Head("failed", self.options.number), [failure.what.encode(), str(failure.where).encode()])
        return failure

    def _send(self, link: _Link, head: Head, tensors: Sequence[Tensor]) -> None:
        frames = encode(head, tensors)
        try:
            link.socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:  # libzmq has given the connection up, and the monitor is about to say so
            return
        self.bytes_sent += sum(len(frame) if isinstance(frame, bytes) else frame.nbytes for frame in frames)
