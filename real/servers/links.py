"""Links: one thread's connections to all servers. Requests go out in order, and each gets one answer.

While a connection lives, TCP delivers every message once and in order. libzmq's heartbeats also break the connection
if the other machine is gone or the other process is stopped. A broken connection is not replaced: the trainer tells
all servers which process has failed, and raises.
"""

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from fleetbench.errors import ConfigError, WorkerFailed
from real.servers.wire import Head, Tensor, decode, encode, text_of

BEAT_S = 0.5
"""Seconds between two heartbeats of a connection, and between two checks whether the sender has failed."""
_BROKEN = "its connection has broken, or it was silent for {:g} s"
_HINT = "all trainers of a job have one model, optimizer and strategy; a checkpoint is of the same model and optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerOptions:
    """Options of one trainer: its job, and the addresses of its servers."""

    rank: int
    endpoints: tuple[str, ...]
    """``host:port`` of every server, in order."""
    trainers: int = 1
    timeout_s: float = 30.0
    """Seconds without an answer to a heartbeat after which a server counts as failed."""
    startup_timeout_s: float = 300.0
    record: bool = False
    first_step: int = 1
    keep_times: bool = False


def keep_alive(wire: zmq.Socket[bytes], timeout_s: float) -> None:
    """Let libzmq break a socket's connection if the other process answers no heartbeat for ``timeout_s`` seconds."""
    wire.heartbeat_ivl = int(1000 * BEAT_S)
    wire.heartbeat_timeout = min(int(1000 * timeout_s), 2**31 - 1)


def broken(where: str, timeout_s: float, value: str | None = None) -> WorkerFailed:
    """Return the error that names the process at the other end of a broken connection."""
    hint = "its output says why; start the job again, from its checkpoint if there is one, or raise timeout_s on a slow network"
    return WorkerFailed(_BROKEN.format(timeout_s), where, value, hint)


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of ``server``: fields of its ``Head``, and its tensors."""

    server: int
    kind: str
    count: int
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

    @property
    def place(self) -> tuple[str, str]:
        """Name and address of the server, which are ``where`` and ``value`` of an error."""
        return f"server {self.server}", self.endpoint


class Links:
    """Connections of one thread; see the module.

    Raises ``WorkerFailed`` naming a server whose connection breaks, or another process whose failure ends the job.
    Raises ``ConfigError`` if a server refuses this trainer.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], options: TrainerOptions, *, are_up: bool = False) -> None:
        """``are_up``: whether the servers are known to run; if not, one may disconnect before its first message."""
        self.options = options
        self._patience_s = options.timeout_s + options.startup_timeout_s  # long enough for a checkpoint; ``wait`` has a shorter limit
        self.bytes_sent = 0
        self._poller = zmq.Poller()
        self._links = []
        for server, endpoint in enumerate(options.endpoints):
            dealer = context.socket(zmq.DEALER)
            dealer.sndhwm = dealer.rcvhwm = 0  # a trainer has few requests without an answer
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

    def ask(self, server: int, kind: str, tensors: Sequence[Tensor] = (), *, rate: float = 0.0, count: int = 0) -> None:
        """Send a request, whose answer ``poll`` will return.

        The tensors must not change until then.
        """
        link = self._links[server]
        if not link.unanswered:
            link.heard_s = time.monotonic()
        link.unanswered += 1
        self._send(link, Head(kind, self.options.rank, rate=rate, count=count), tensors)

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
                    where, endpoint = link.place
                    raise self._told(broken(where, self.options.timeout_s, endpoint))
            if link.unanswered and time.monotonic() > link.heard_s + self._patience_s:
                hint = "its output says what it does; a server that writes a checkpoint says nothing: is its disk slow?"
                raise self._told(WorkerFailed(f"has said nothing for {self._patience_s:g} s, though its process lives", *link.place, hint))
        return answers

    def wait(self, within_s: float) -> list[Answer]:
        """Return the answers of all servers to a ``join``.

        Raises ``WorkerFailed`` if they do not arrive within ``within_s`` seconds.
        """
        deadline = time.monotonic() + within_s
        answers: dict[int, Answer] = {}
        while len(answers) < len(self._links):
            if time.monotonic() > deadline:
                late = next((link for link in self._links if not link.is_up), None)
                if late is not None:
                    hint = "is it started, and does the address lead to it?"
                    raise self._told(WorkerFailed(f"has not answered within {within_s:g} s", *late.place, hint))
                what = f"has not brought the parameters within {within_s:g} s"
                raise self._told(WorkerFailed(what, "rank 0", hint="has it been started?"))
            answers |= {answer.server: answer for answer in self.poll(BEAT_S)}
        return [answers[server] for server in range(len(self._links))]

    def settle(self) -> None:
        """Wait until every request has been answered."""
        while not self.is_idle:
            self.poll(BEAT_S)

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
                hint = "its own output says why; start the job again"
                raise self._told(WorkerFailed(text_of(tensors[0]), text_of(tensors[1]), hint=hint))
            if head.kind == "refused":
                raise ConfigError(f"refuses this trainer: {text_of(tensors[0])}", *link.place, hint=_HINT)
            if head.kind != "alive":
                link.unanswered -= 1
                link.has_left = link.has_left or head.kind == "leave"
                answers.append(Answer(link.server, head.kind, head.count, head.version, tensors))

    def _told(self, failure: WorkerFailed) -> WorkerFailed:
        """Tell all servers which process failed, before they notice that this trainer is gone; return ``failure``."""
        for link in self._links:
            self._send(link, Head("failed", self.options.rank), [failure.what.encode(), str(failure.where).encode()])
        return failure

    def _send(self, link: _Link, head: Head, tensors: Sequence[Tensor]) -> None:
        frames = encode(head, tensors)
        try:
            link.socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:  # libzmq has given the connection up, and the monitor is about to say so
            return
        self.bytes_sent += sum(len(frame) if isinstance(frame, bytes) else frame.nbytes for frame in frames)
