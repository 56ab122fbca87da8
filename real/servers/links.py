"""Links: one thread's connections to all servers, with numbered requests that are repeated until they are answered.

A request is done exactly once, whatever becomes of connections: a server does requests in the order of
their numbers and knows the last one. TCP loses nothing while a connection lives, so requests are repeated when it
breaks: the trainer greets the server over the next connection, and its welcome is followed by all requests that have
no answer yet. A server that began again from a checkpoint does not know the trainer's session. It is greeted with what
the trainer had joined with, says which requests its checkpoint holds, and gets the others, numbered again from there on
without a gap, because some between them may have been answered.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import zmq
from zmq.utils.monitor import recv_monitor_message

from fleetbench.errors import ConfigError, WorkerFailed
from real.servers.silence import Silence
from real.servers.wire import Head, Tensor, WireError, decode, encode, new_session

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
    """A server that is silent for so long has failed."""
    startup_timeout_s: float = 300.0
    record: bool = False
    first_step: int = 1
    keep_times: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of ``server``."""

    server: int
    kind: str
    request: str
    """Kind of what it answers."""
    count: int
    version: int
    tensors: Sequence[memoryview]


@dataclass(slots=True)
class _Link:
    """The connection to one server. Greeting, until it is welcome; then ready; greeting again after a broken connection or a restart."""

    server: int
    endpoint: str
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    """Of broken connections."""
    session: int
    last: int = 0
    """The last request's number."""
    outstanding: dict[int, tuple[Head, Sequence[Tensor]]] = field(default_factory=dict)
    """Requests without an answer by number, in order."""
    ready: bool = False
    life: int = 0
    """Which life of the server it is; 0 before it is known."""
    beat_at: float = 0.0
    joined_with: Sequence[Tensor] = ()
    """What the server has taken this trainer's join with; its next life may not know it."""
    meetings: int = 0
    """Barriers that this trainer has passed, counted as the server counts them."""
    has_left: bool = False
    """The server knows that this trainer has ended, and may be gone."""


class Links:
    """Used by one thread.

    Raises ``WorkerFailed`` naming a server that is silent for too long, or the process because of which all stop,
    and ``ConfigError`` for a request that a server refuses.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], options: TrainerOptions, joined_with: Sequence[Tensor] = ()) -> None:
        """``joined_with``: the trainer's description, where other links of it have joined."""
        self.options = options
        self.restarts: list[tuple[int, int]] = []
        """Servers that began again, with how many acknowledged requests they lost; the reader removes them."""
        self.bytes_sent = 0
        self._silence = Silence(range(len(options.endpoints)), options.timeout_s, options.timeout_s)
        self._poller = zmq.Poller()
        self._links = []
        for server, endpoint in enumerate(options.endpoints):
            dealer = context.socket(zmq.DEALER)
            dealer.sndhwm = dealer.rcvhwm = 0  # a trainer has few requests without an answer
            dealer.linger = 1_000
            monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            dealer.connect(f"tcp://{endpoint}")
            for listened in (dealer, monitor):
                self._poller.register(listened, zmq.POLLIN)
            self._links.append(_Link(server, endpoint, dealer, monitor, new_session(), joined_with=joined_with))

    @property
    def is_idle(self) -> bool:
        """Whether everything that was asked has been answered."""
        return not any(link.outstanding for link in self._links)

    @property
    def meetings(self) -> list[int]:
        """Barriers that this trainer has passed, by server; known once it has joined."""
        return [link.meetings for link in self._links]

    def greet(self) -> None:
        """Wait until every server has answered. Raises ``WorkerFailed`` for one that does not come."""
        deadline = time.monotonic() + self.options.startup_timeout_s
        while (late := next((link for link in self._links if not link.ready), None)) is not None:
            if time.monotonic() > deadline:
                hint = "is it started, and does the address lead to it?"
                raise WorkerFailed(f"has not answered within {self.options.startup_timeout_s:g} s", *_place(late), hint)
            for link in self._links:
                self._silence.hear(link.server)
            self.poll(BEAT_S)

    def ask(self, server: int, kind: str, tensors: Sequence[Tensor] = (), *, rate: float = 0.0, count: int = 0) -> None:
        """Send a request; its answer comes from ``poll``. The tensors must stay as they are until then."""
        link = self._links[server]
        if not link.outstanding:
            self._silence.hear(server)  # while nothing was asked, this process did not listen
        link.last += 1
        if kind == "barrier":
            count = link.meetings + 1
        link.outstanding[link.last] = Head(kind, self.options.rank, link.session, link.last, rate=rate, count=count), tensors
        if link.ready:
            self._request(link, link.last)

    def poll(self, timeout_s: float, wake: zmq.Socket[bytes] | None = None) -> list[Answer]:
        """Wait for answers, or until ``wake`` has something; beats go out in the meantime."""
        self._beat()
        if wake is not None and wake not in self._poller:
            self._poller.register(wake, zmq.POLLIN)
        ready = dict(self._poller.poll(max(0, int(min(timeout_s, BEAT_S) * 1000 + 0.999))))
        answers: list[Answer] = []
        for link in self._links:
            if link.monitor in ready and _has_broken(link):
                self._break(link)
            if link.socket in ready:
                self._receive(link, answers)
        return answers

    def wait(self, kind: str, within_s: float = math.inf) -> list[Answer]:
        """The answers of all servers to what was just asked of each. ``within_s``: how long it may depend on trainer 0."""
        deadline = time.monotonic() + within_s
        answers: dict[int, Answer] = {}
        while len(answers) < len(self._links):
            if time.monotonic() > deadline:
                what = f"have not given an answer within {within_s:g} s"
                raise WorkerFailed(what, "servers", kind, "has trainer 0, which brings the parameters, been started?")
            for answer in self.poll(BEAT_S):
                if answer.request == kind:
                    answers[answer.server] = answer
        return [answers[server] for server in range(len(self._links))]

    def close(self) -> None:
        """Close the connections; what was sent to a server that is there still goes out, for a second."""
        for link in self._links:
            if not link.socket.closed:
                link.socket.disable_monitor()
            link.monitor.close(linger=0)
            link.socket.close(linger=None if link.ready and not link.has_left else 0)

    def _beat(self) -> None:
        self._silence.pass_time()
        now, late = time.monotonic(), self._silence.late
        for link in self._links:
            if now - link.beat_at < BEAT_S or link.has_left:
                continue
            link.beat_at = now
            if link.server in late:
                what = f"has been silent for {self.options.timeout_s:g} s"
                hint = "its log says why, or that the job has ended; begin again from its checkpoint, or raise timeout_s on a slow network"
                raise WorkerFailed(what, *_place(link), hint)
            if link.ready:
                self._send(link, Head("beat", self.options.rank, link.session), ())
            else:
                self._greet(link)

    def _greet(self, link: _Link) -> None:
        oldest = next(iter(link.outstanding), link.last + 1)
        self._send(link, Head("hello", self.options.rank, link.session, mark=oldest - 1, count=link.meetings), link.joined_with)

    def _break(self, link: _Link) -> None:
        """The connection has broken, or the server wants to be greeted: after its welcome all requests without an answer are repeated."""
        if link.ready:
            link.ready = False
            self._greet(link)

    def _receive(self, link: _Link, answers: list[Answer]) -> None:
        while True:
            try:
                frames = link.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._silence.hear(link.server)
            try:
                head, tensors = decode(frames)
                self._hear(link, head, tensors, answers)
            except WireError:
                continue

    def _hear(self, link: _Link, head: Head, tensors: Sequence[memoryview], answers: list[Answer]) -> None:
        if head.kind == "welcome":
            self._become_ready(link, head)
        elif head.kind == "unknown":
            self._break(link)
        elif head.kind == "stopped":
            what, where = (bytes(text).decode("utf-8", "replace") for text in tensors)
            raise WorkerFailed(what, where, hint="its own output says why; start the job again")
        elif (asked := link.outstanding.pop(head.sequence, None)) is not None:
            kind, sent = asked[0].kind, asked[1]
            if head.kind == "refused":
                why = bytes(tensors[0]).decode("utf-8", "replace") if tensors else "it does not say why"
                raise ConfigError(f"refuses this trainer's {kind}: {why}", *_place(link), hint=_HINT)
            if kind in ("join", "barrier"):
                link.meetings, link.joined_with = head.count, link.joined_with or sent  # a barrier has none
            link.has_left = link.has_left or kind == "leave"
            answers.append(Answer(link.server, head.kind, kind, head.count, head.version, tensors))

    def _become_ready(self, link: _Link, head: Head) -> None:
        if link.ready:
            return
        if link.life not in (0, head.version):
            if not head.count:
                hint = "fleet.init_server(FOLDER) and fleet.run_server(save_to=FOLDER) let it begin from a checkpoint"
                raise WorkerFailed("began again without its parameters", *_place(link), hint)
            answered = link.last - len(link.outstanding)
            held = head.mark - sum(number <= head.mark for number in link.outstanding)
            self.restarts.append((link.server, max(0, answered - held)))
            self._renumber(link, head.sequence)
        link.life, link.ready = head.version, True
        for number in link.outstanding:  # what the server did before it answers, and does not do again
            self._request(link, number)

    def _renumber(self, link: _Link, taken: int) -> None:
        """Close the gaps after request ``taken``: those in between were answered in a life of the server that has ended."""
        outstanding, link.outstanding, link.last = link.outstanding, {}, taken
        for number, (head, tensors) in outstanding.items():
            if number <= taken:
                link.outstanding[number] = (head, tensors)
            else:
                link.last += 1
                link.outstanding[link.last] = (replace(head, sequence=link.last), tensors)

    def _request(self, link: _Link, number: int) -> None:
        head, tensors = link.outstanding[number]
        self._send(link, replace(head, version=link.life), tensors)

    def _send(self, link: _Link, head: Head, tensors: Sequence[Tensor]) -> None:
        frames = encode(head, tensors)
        try:
            link.socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:  # libzmq has given the connection up, and the monitor is about to say why
            return
        self.bytes_sent += sum(len(frame) if isinstance(frame, bytes) else frame.nbytes for frame in frames)


def _has_broken(link: _Link) -> bool:
    """Whether the connection has broken."""
    has_broken = False
    while link.monitor.poll(0):
        recv_monitor_message(link.monitor)
        has_broken = True
    return has_broken


def _place(link: _Link) -> tuple[str, str]:
    """Where an error is, and with what."""
    return f"server {link.server}", link.endpoint
