"""Server: one process's event loop. It reads messages, tells the server's role, and does what that decides.

Life cycle: ``bind``; ``run``, which returns when all trainers have left; ``close``. Each request of a
trainer's connection is numbered. The next one is done; one that was done before is answered again
and not done again; one that comes too early is passed over, and its trainer sends what is missing. A message
that makes no sense is counted, logged and passed over.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from fleetbench.errors import EnvironmentLacks, WorkerFailed
from fleetbench.plan.events import Message
from fleetbench.plan.operations import Operation
from fleetbench.plan.servers.recording import RoleDecider
from fleetbench.plan.servers.states import ServerState
from real.servers.checkpoints import Saved, load_shard, save_shard
from real.servers.security import Gatekeeper, guard_server, new_session
from real.servers.shard import Push, Shard
from real.servers.spec import Spec
from real.servers.wire import Head, Tensor, WireError, decode, encode

_ANSWERS = {"join": ("ready", "blank"), "pull": ("parameters",), "look_up": ("rows",), "barrier": ("barrier",)}
_LOOK_S = 0.5
"""Between two looks at who has fallen silent."""
_LOGGED = 20
"""Refusals and senseless messages that are logged one by one; the rest is counted."""
_FAREWELL_S = 1.0
"""Behind the last trainer's leave, for those whose answer went astray."""
_FAILED_HANDSHAKES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What one server is told by whoever starts it."""

    server: int
    servers: int
    trainers: int
    endpoint: str
    """``host:port`` to listen on."""
    token: str
    encrypted: bool = False
    timeout_s: float = 30.0
    """A trainer that is silent for so long is lost."""
    startup_timeout_s: float = 300.0
    """... and one that has never spoken, after so long."""
    record: bool = False


@dataclass(slots=True)
class _Peer:
    """One connection of a trainer."""

    identity: bytes
    rank: int
    session: int
    received: int
    """The last request that was taken."""
    answered: int
    applied: int
    """The last request whose effect is in the shard, or that has none."""


@dataclass(frozen=True, slots=True)
class _Request:
    """What is being done, or waits for others."""

    peer: _Peer
    head: Head
    push: Push | None = None
    tensors: Sequence[memoryview] = ()
    again: bool = False


@dataclass(slots=True)
class ServerReport:
    """What a server did in its life."""

    updates: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    """Gradients by the number of updates between what they were computed from and their own."""
    senseless: int = 0
    strangers: int = 0
    lost: list[int] = field(default_factory=list)
    bytes_received: int = 0
    bytes_sent: int = 0
    busy_s: float = 0.0
    """Reading, updating and answering, from the first gradient on."""
    served_s: float = 0.0
    """From the first gradient to the last."""


class ParameterServer:
    """See the module. Raises ``EnvironmentLacks`` for an address that is taken, ``WorkerFailed`` where a trainer's loss ends the job."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.report = ServerReport()
        self.shard: Shard | None = None
        self.role: RoleDecider | None = None
        self._life = new_session() >> 1  # what fits into a signed number
        self._peers: dict[int, _Peer] = {}
        self._restored: dict[int, int] = {}
        self._waiting: dict[tuple[int, str], _Request] = {}
        self._arrived: dict[int, _Request] = {}
        self._request: _Request | None = None
        self._heard = dict.fromkeys(range(options.trainers), time.monotonic() + options.startup_timeout_s - options.timeout_s)
        self._save_to: Path | None = None
        self._save_every_s: float | None = None
        self._because: int | None = None
        self._first_push: float | None = None
        self._stopped_at: float | None = None
        self._looked = self._saved_at = time.monotonic()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._gatekeeper = Gatekeeper(self._context, options.token, self._refuse)
        guard_server(self._socket, options.token, encrypted=options.encrypted)
        self._socket.router_mandatory = True
        self._monitor = self._socket.get_monitor_socket(_FAILED_HANDSHAKES)

    def restore(self, folder: Path) -> bool:
        """Begin from a checkpoint; whether there is one. Raises ``ConfigError`` for one that does not fit."""
        saved = load_shard(folder, self.options.server, self.options.servers)
        if saved is None:
            return False
        self.shard, self._restored = saved.shard, saved.applied
        rules, number, record = saved.shard.spec.rules, self.options.server, self.options.record
        self.role = RoleDecider.start(rules, "server", number, record=record, state=saved.state)
        self._say(f"begins from {folder}, after {saved.state.version} updates")
        return True

    def bind(self) -> None:
        """Take the address. Raises ``EnvironmentLacks`` where that fails."""
        host, _, port = self.options.endpoint.rpartition(":")
        try:
            self._socket.bind(f"tcp://{host or '*'}:{port}")
        except zmq.ZMQError as error:
            hint = "is another job's server there? choose another port"
            raise EnvironmentLacks(f"the server's address cannot be taken: {error}", "server", self.options.endpoint, hint) from error

    def run(self, save_to: Path | None = None, save_every_s: float | None = None) -> ServerReport:
        """Serve until all trainers have left. Raises ``WorkerFailed`` naming the trainer without which the job cannot go on.

        ``save_to``: folder of checkpoints, one every ``save_every_s`` seconds and one at the end.
        """
        self._save_to, self._save_every_s = save_to, save_every_s
        poller = zmq.Poller()
        for socket in (self._socket, self._gatekeeper.socket, self._monitor):
            poller.register(socket, zmq.POLLIN)
        while self._stopped_at is None or time.monotonic() - self._stopped_at < _FAREWELL_S:
            ready = dict(poller.poll(int(_LOOK_S * 1000)))
            if self._gatekeeper.socket in ready:
                self._gatekeeper.answer()
            if self._monitor in ready:
                self._hear_of_handshake()
            if self._socket in ready:
                begin = time.monotonic()
                self._receive()
                if self._first_push is not None:
                    self.report.busy_s += time.monotonic() - begin
            if time.monotonic() - self._looked > _LOOK_S:
                self._look()
        if save_to is not None and self.shard is not None and self._because is None:
            self._save(save_to)
        self._say(self._summary())
        if self._because is not None:
            what = "this trainer has fallen silent, and synchronous training cannot go on without it"
            raise WorkerFailed(what, f"rank {self._because}", hint="its own output says why; start the job again")
        return self.report

    def close(self) -> None:
        """Let the address go."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._gatekeeper.close()
        self._socket.close()
        self._context.term()

    # What comes in

    def _receive(self) -> None:
        for _ in range(64):  # between two looks at the other sockets
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                head, tensors = decode(frames)
                self.report.bytes_received += sum(len(frame) for frame in frames)
                self._hear(identity.bytes, head, tensors)
            except WireError as error:
                self._reject(str(error))

    def _hear(self, identity: bytes, head: Head, tensors: Sequence[memoryview]) -> None:
        if not 0 <= head.rank < self.options.trainers:
            raise WireError(f"a trainer {head.rank} of {self.options.trainers}")
        self._heard[head.rank] = time.monotonic()
        if head.kind == "lost":
            if head.count >= self.options.trainers:
                raise WireError(f"the loss of a trainer {head.count} of {self.options.trainers}")
            self._tell(Message("executor", head.count, "lost"))
            return
        if head.kind == "hello":
            self._greet(identity, head)
            return
        peer = self._peers.get(head.session)
        if peer is None:
            self._send(identity, Head("unknown", head.rank, head.session))
            return
        peer.identity = identity
        if head.kind == "beat":
            if self.role is not None and isinstance(self.role.state, ServerState) and head.rank in self.role.state.lost:
                self._say(f"trainer {head.rank} is back")
                self._tell(Message("sender", head.rank, "join"))
            alive = Head("alive", head.rank, head.session, head.sequence, mark=peer.answered, version=peer.received)
            self._send(identity, alive)
            return
        if head.sequence > peer.received + 1:
            return  # what came before it was lost on the way; its trainer finds out, and sends both
        again = head.sequence <= peer.received
        self._do(_Request(peer, head, tensors=tensors, again=again))
        peer.received = max(peer.received, head.sequence)

    def _greet(self, identity: bytes, head: Head) -> None:
        peer = self._peers.get(head.session)
        if peer is None:
            known = self._restored.get(head.session, 0)
            last = max(known, head.mark)
            if head.mark > known and head.session in self._restored:
                self._say(f"trainer {head.rank}: {head.mark - known} requests that the checkpoint does not hold are lost")
            peer = self._peers[head.session] = _Peer(identity, head.rank, head.session, last, last, known)
        peer.identity = identity
        initialised = self.role is not None and isinstance(self.role.state, ServerState) and self.role.state.initialised
        welcome = Head("welcome", head.rank, head.session, mark=peer.applied, version=self._life, count=int(initialised))
        self._send(identity, welcome)

    def _do(self, request: _Request) -> None:
        """Do a request, or answer one that was done before."""
        peer, head = request.peer, request.head
        kind = head.kind
        if kind == "join":
            self._join(request)
            return
        if self.shard is None or self.role is None:
            raise WireError(f"{kind} before anybody has joined")
        if kind in ("gradient", "delta", "piece", "initial"):
            self._do_push(request)
            return
        if request.again and kind == "barrier" and self._waiting.get((head.rank, "barrier")):
            return
        self._serve(request)
        peer.applied = max(peer.applied, head.sequence)

    def _serve(self, request: _Request) -> None:
        """Do what changes no parameters."""
        head, kind = request.head, request.head.kind
        assert self.shard is not None
        self._request = request
        if kind == "fetch":
            self._answer(request, "fetched", self.shard.everything(head.rank))
        elif kind == "save":
            self._answer(request, "saved", (self._save(_folder(request.tensors)),))
        elif kind == "leave":
            self._answer(request, "applied")
            if not request.again:
                self._tell(Message("trainer", head.rank, "leave"))
        elif kind in _ANSWERS:
            for answer in _ANSWERS[kind]:
                self._waiting[head.rank, answer] = request
            self._tell(Message("trainer" if kind == "look_up" else "sender", head.rank, kind))
        else:
            raise WireError(f"{kind} is no request")

    def _do_push(self, request: _Request) -> None:
        peer, head = request.peer, request.head
        assert self.shard is not None
        assert self.role is not None
        synchronous = self.shard.spec.rules.mode == "synchronous"
        if request.again:
            if not (head.kind == "gradient" and synchronous):
                self._answer(request, "applied")
            elif head.rank not in self._arrived:
                self._answer(request, "parameters", self.shard.parameters(head.rank))
            return
        push = self.shard.read_push(head, request.tensors)
        request = _Request(peer, head, push)
        if head.kind == "piece":
            if isinstance(self.role.state, ServerState) and not self.role.state.initialised:
                self.shard.install(push)
            self._answer(request, "applied")
        elif head.kind == "initial":
            peer.applied = head.sequence
            self._answer(request, "applied")
            self._tell(Message("sender", head.rank, "initial"))
            return
        else:
            if head.kind == "gradient" and synchronous:
                self._arrived[head.rank] = request
                self._waiting[head.rank, "parameters"] = request
            else:
                self._waiting[head.rank, "applied"] = request
            self._request = request
            for version in push.versions:
                self._count(int(version))
            self._tell(Message("sender", head.rank, head.kind, count=head.count, version=int(push.versions.min(initial=2**62))))
            if synchronous:
                return
        peer.applied = head.sequence

    def _count(self, version: int) -> None:
        now = time.monotonic()
        self._first_push = self._first_push or now
        self.report.served_s = now - self._first_push
        assert self.role is not None
        assert isinstance(self.role.state, ServerState)
        self.report.staleness[self.role.state.version - version] += 1

    def _join(self, request: _Request) -> None:
        if not request.tensors:
            raise WireError("it joins without a word")
        spec = Spec.from_json(request.tensors[0])
        is_ours = (spec.rules.trainers, spec.rules.servers) == (self.options.trainers, self.options.servers)
        if self.shard is None and is_ours:
            self.shard = Shard(spec, self.options.server)
            self.role = RoleDecider.start(spec.rules, "server", self.options.server, record=self.options.record)
        elif self.shard is None or self.shard.spec != spec:
            self._say(f"trainer {request.head.rank} has another model, optimizer or strategy, and is refused")
            self._answer(request, "refused")
            return
        for answer in _ANSWERS["join"]:
            self._waiting[request.head.rank, answer] = request
        self._tell(Message("sender", request.head.rank, "join"))
        request.peer.applied = max(request.peer.applied, request.head.sequence)

    # What the role decides

    def _tell(self, message: Message) -> None:
        """Tell the role, and do what it decides."""
        if self.role is None:
            return
        for operation in self.role.on(time.monotonic_ns(), message):
            self._execute(operation, message)

    def _execute(self, operation: Operation, message: Message) -> None:
        assert self.shard is not None
        request = self._request
        if operation.kind == "send":
            self._fulfil(operation)
        elif operation.kind == "update" and operation.rank is None:
            arrived = [self._arrived.pop(rank) for rank in sorted(self._arrived)]
            self.shard.update([_pushed(one) for one in arrived], operation.divisor)
            for one in arrived:
                one.peer.applied = one.head.sequence
            self.report.updates += 1
        elif operation.kind == "update":
            self.shard.update([_pushed(request)], operation.divisor)
            self.report.updates += 1
        elif operation.kind == "accumulate":
            self.shard.accumulate(_pushed(request))
            self.report.updates += 1
        elif operation.kind == "mark":
            self.shard.mark(message.rank, _pushed(request))
        elif operation.kind == "drop":
            assert operation.rank is not None
            self.report.lost.append(operation.rank)
            self._say(f"trainer {operation.rank} is lost: silent for {self.options.timeout_s:g} s, or ended; training goes on without it")
        elif operation.kind == "stop":
            self._stop(operation.rank)
        else:
            assert operation.kind == "install", operation

    def _fulfil(self, operation: Operation) -> None:
        """Answer the request that has been waiting for this; none where its answer was given before."""
        assert operation.rank is not None
        assert operation.message is not None
        assert self.shard is not None
        request = self._waiting.pop((operation.rank, operation.message), None)
        if request is None:
            return
        if operation.message == "parameters":
            self._answer(request, "parameters", self.shard.parameters(operation.rank, again=request.again))
        elif operation.message == "rows":
            self._answer(request, "rows", self.shard.look_up(self.shard.read_rows(request.tensors)))
        else:
            self._answer(request, operation.message)

    def _stop(self, because: int | None) -> None:
        self._because = because
        self._stopped_at = time.monotonic()
        if because is not None:
            self._say(f"trainer {because} has fallen silent: synchronous training ends")
            for peer in self._peers.values():
                self._send(peer.identity, Head("stopped", peer.rank, peer.session, count=1 + because))

    # What goes out

    def _answer(self, request: _Request, kind: str, tensors: Sequence[Tensor] = ()) -> None:
        peer, head = request.peer, request.head
        peer.answered = max(peer.answered, head.sequence)
        version = self.role.state.version if self.role is not None and isinstance(self.role.state, ServerState) else 0
        self._send(peer.identity, Head(kind, head.rank, head.session, head.sequence, version=version, count=head.count), tensors)

    def _send(self, identity: bytes, head: Head, tensors: Sequence[Tensor] = ()) -> None:
        frames = encode(head, tensors)
        try:
            self._socket.send_multipart([identity, *frames], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError:  # it has gone, or reads nothing; should it come back, it asks again
            return
        self.report.bytes_sent += sum(len(frame) if isinstance(frame, bytes) else frame.nbytes for frame in frames)

    # Beside the messages

    def _look(self) -> None:
        """Find out who has fallen silent; write a checkpoint that is due."""
        now = time.monotonic()
        if now - self._looked > self.options.timeout_s / 2:  # it was this process that stood still
            self._heard = {rank: heard + now - self._looked for rank, heard in self._heard.items()}
        self._looked = now
        if self._stopped_at is None:
            silent = [rank for rank, heard in self._heard.items() if now - heard > self.options.timeout_s]
            if self.role is None and len(silent) == self.options.trainers:
                self._say("no trainer has come")
                self._stopped_at = now
            for rank in silent:
                self._tell(Message("executor", rank, "lost"))
        every, folder = self._save_every_s, self._save_to
        if every is not None and folder is not None and self.shard is not None and now - self._saved_at > every:
            self._save(folder)

    def _save(self, folder: Path) -> bytes:
        """Write a checkpoint; the error's text where that fails, because training goes on all the same."""
        assert self.shard is not None
        assert self.role is not None
        assert isinstance(self.role.state, ServerState)
        self._saved_at = time.monotonic()
        if not self.role.state.initialised:
            return b"no parameters yet"
        applied = {session: peer.applied for session, peer in self._peers.items()}
        try:
            save_shard(folder, Saved(self.shard, self.role.state, {**self._restored, **applied}))
        except OSError as error:
            self._say(f"no checkpoint in {folder}: {error}")
            return str(error).encode()
        return b""

    def _reject(self, why: str) -> None:
        self.report.senseless += 1
        if self.report.senseless <= _LOGGED:
            self._say(f"a message was passed over: {why}")

    def _refuse(self, address: str) -> None:
        self.report.strangers += 1
        if self.report.strangers <= _LOGGED:
            self._say(f"a stranger at {address} was refused: it does not have the job's token")

    def _hear_of_handshake(self) -> None:
        event = recv_monitor_message(self._monitor)
        if event["event"] != zmq.EVENT_HANDSHAKE_FAILED_AUTH:  # of which the gatekeeper has told
            self.report.strangers += 1
            if self.report.strangers <= _LOGGED:
                self._say("a connection was refused: it does not speak this job's protocol, or hung up")

    def _summary(self) -> str:
        stale = self.report.staleness
        mean = f", mean staleness {sum(lag * num for lag, num in stale.items()) / stale.total():.2f}" if stale else ""
        refused = f", {self.report.strangers} strangers refused" if self.report.strangers else ""
        senseless = f", {self.report.senseless} senseless messages" if self.report.senseless else ""
        return f"ended after {self.report.updates} updates{mean}{refused}{senseless}"

    def _say(self, text: str) -> None:
        print(f"server {self.options.server}: {text}", file=sys.stderr, flush=True)  # noqa: T201  # the server's log


def _folder(tensors: Sequence[memoryview]) -> Path:
    try:
        text = bytes(tensors[0]).decode()
    except (IndexError, UnicodeDecodeError) as error:
        raise WireError("no name of a folder") from error
    if not text or "\0" in text:
        raise WireError("no name of a folder")
    return Path(text)


def _pushed(request: _Request | None) -> Push:
    assert request is not None
    assert request.push is not None
    return request.push
