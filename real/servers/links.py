"""Links: one thread's connections to all servers. Requests go out in order, and each gets one answer.

While a connection lives, TCP delivers every message once and in order. A connection that breaks is not replaced: the trainer
raises, and the job ends. So does a trainer whose server is silent.
"""

import math
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from fleetbench.errors import ConfigError, WorkerFailed
from real.servers.silence import Silence
from real.servers.wire import Head, Tensor, decode, encode, text_of

BEAT_S = 0.5
_HINT = "all trainers of a job have one model, optimizer and strategy; a checkpoint is of the same model and optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerOptions:
    """What a trainer is told of its job, and where its servers are."""

    rank: int
    endpoints: tuple[str, ...]
    """``host:port`` of every server, in order."""
    trainers: int = 1
    timeout_s: float = 30.0
    """Seconds of silence after which a server has failed."""
    startup_timeout_s: float = 300.0
    record: bool = False
    first_step: int = 1
    keep_times: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of ``server``; other fields as in its ``Head``."""

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
    """Hears that the connection has broken."""
    unanswered: int = 0
    """Number of requests without an answer."""
    is_up: bool = False
    """The server has said something."""
    beat_at: float = -math.inf
    has_left: bool = False
    """The server knows that this trainer has ended, and may be gone."""

    @property
    def place(self) -> tuple[str, str]:
        """Where an error is, and with what."""
        return f"server {self.server}", self.endpoint


class Links:
    """Used by one thread.

    Raises ``WorkerFailed`` naming a server that is silent for too long or whose connection breaks, or the process because of which all
    stop, and ``ConfigError`` if a server refuses this trainer.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], options: TrainerOptions, *, are_up: bool = False) -> None:
        """``are_up``: the servers are known to be there; else each has until its first word to come."""
        self.options = options
        self.bytes_sent = 0
        self._silence = Silence(range(len(options.endpoints)), options.timeout_s, options.timeout_s)
        self._poller = zmq.Poller()
        self._links = []
        for server, endpoint in enumerate(options.endpoints):
            dealer = context.socket(zmq.DEALER)
            dealer.sndhwm = dealer.rcvhwm = 0  # a trainer has few requests without an answer
            monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            dealer.connect(f"tcp://{endpoint}")
            for listened in (dealer, monitor):
                self._poller.register(listened, zmq.POLLIN)
            self._links.append(_Link(server, endpoint, dealer, monitor, is_up=are_up))

    @property
    def is_idle(self) -> bool:
        """Whether everything that was asked has been answered."""
        return not any(link.unanswered for link in self._links)

    def ask(self, server: int, kind: str, tensors: Sequence[Tensor] = (), *, rate: float = 0.0, count: int = 0) -> None:
        """Send a request; its answer comes from ``poll``. The tensors must stay as they are until then."""
        link = self._links[server]
        if not link.unanswered:
            self._silence.hear(server)  # while nothing was asked, this process did not listen
        link.unanswered += 1
        self._send(link, Head(kind, self.options.rank, rate=rate, count=count), tensors)

    def poll(self, timeout_s: float, wake: socket.socket | None = None) -> list[Answer]:
        """Wait for answers, for at most ``timeout_s`` and the time to the next beat, or until there is something to read from ``wake``."""
        self._beat()
        if wake is not None and wake not in self._poller:
            self._poller.register(wake, zmq.POLLIN)
        ready = dict(self._poller.poll(max(0, int(min(timeout_s, BEAT_S) * 1000 + 0.999))))
        answers: list[Answer] = []
        for link in self._links:
            if link.socket in ready or link.monitor in ready:  # a last word comes before its connection breaks
                self._receive(link, answers)
            if link.monitor in ready:
                recv_monitor_message(link.monitor)
                if link.is_up and not link.has_left:
                    hint = "its log says why; start the job again, from its checkpoint if there is one"
                    raise WorkerFailed("its connection has broken", *link.place, hint)
        return answers

    def wait(self, within_s: float) -> list[Answer]:
        """The answers of all servers to a ``join``. Raises ``WorkerFailed`` if they do not come ``within_s`` seconds."""
        deadline = time.monotonic() + within_s
        answers: dict[int, Answer] = {}
        while len(answers) < len(self._links):
            if time.monotonic() > deadline:
                late = next((link for link in self._links if not link.is_up), None)
                if late is not None:
                    hint = "is it started, and does the address lead to it?"
                    raise WorkerFailed(f"has not answered within {within_s:g} s", *late.place, hint)
                raise WorkerFailed(f"has not brought the parameters within {within_s:g} s", "rank 0", hint="has it been started?")
            answers |= {answer.server: answer for answer in self.poll(BEAT_S)}
        return [answers[server] for server in range(len(self._links))]

    def settle(self) -> None:
        """Wait until everything that was asked has been answered."""
        while not self.is_idle:
            self.poll(BEAT_S)

    def close(self) -> None:
        """Close the connections; what was sent to a server that is there still goes out, for a second."""
        for link in self._links:
            if not link.socket.closed:
                link.socket.disable_monitor()
            link.monitor.close(linger=0)
            link.socket.close(linger=1_000 if link.is_up and not link.has_left else 0)

    def _beat(self) -> None:
        self._silence.pass_time()
        now, late = time.monotonic(), self._silence.late
        for link in self._links:
            if not link.is_up:
                self._silence.hear(link.server)
            if link.has_left or now - link.beat_at < BEAT_S or (not link.is_up and link.beat_at > 0):
                continue
            if link.is_up and link.server in late:
                what = f"has been silent for {self.options.timeout_s:g} s"
                hint = "its log says why, or that the job has ended; begin again from its checkpoint, or raise timeout_s on a slow network"
                raise WorkerFailed(what, *link.place, hint)
            link.beat_at = now
            self._send(link, Head("beat", self.options.rank), ())

    def _receive(self, link: _Link, answers: list[Answer]) -> None:
        while True:
            try:
                frames = link.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            link.is_up = True
            self._silence.hear(link.server)
            head, tensors = decode(frames)
            if head.kind == "stopped":
                raise WorkerFailed(text_of(tensors[0]), text_of(tensors[1]), hint="its own output says why; start the job again")
            if head.kind == "refused":
                raise ConfigError(f"refuses this trainer: {text_of(tensors[0])}", *link.place, hint=_HINT)
            if head.kind != "alive":
                link.unanswered -= 1
                link.has_left = link.has_left or head.kind == "leave"
                answers.append(Answer(link.server, head.kind, head.count, head.version, tensors))

    def _send(self, link: _Link, head: Head, tensors: Sequence[Tensor]) -> None:
        frames = encode(head, tensors)
        try:
            link.socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:  # libzmq has given the connection up, and the monitor is about to say so
            return
        self.bytes_sent += sum(len(frame) if isinstance(frame, bytes) else frame.nbytes for frame in frames)
