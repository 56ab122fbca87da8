"""Server: event loop of one server. It reads messages, passes them to the server's role, and executes its decisions.

Life cycle: ``bind``; ``run``, which returns when all trainers have left; ``close``. Requests of a connection are
handled in order, each once. The server ends if a trainer's connection breaks before the trainer has left, or if a
synchronous trainer keeps the others waiting for too long; it then names that trainer to all.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq

from fleetbench.errors import EnvironmentLacks, WorkerFailed
from fleetbench.plan.events import Message
from fleetbench.plan.operations import Operation
from fleetbench.plan.replay import RoleDecider
from fleetbench.plan.servers.states import ServerState
from fleetbench.plan.servers.training import ServerTraining
from fleetbench.staleness import ServerLoad
from fleetbench.workloads.server_updates import ROW, Change
from real.servers.checkpoints import load_shard, write_shard
from real.servers.hosts import resolve
from real.servers.links import BEAT_S, Head, Options, Tensor, broken, decode, encode, failure_told, keep_alive, numbers, text_of
from real.servers.parameters import Shard, Spec, differences

_ANSWERS = {"look_up": "rows", "pull": "parameters", "barrier": "barrier"}
"""Kinds of the requests that the role answers, and kinds of their answers."""


@dataclass(frozen=True, slots=True)
class Request:
    """A trainer's request that is being handled, or waits for other trainers."""

    identity: bytes
    """Identity of the trainer's connection."""
    head: Head
    tensors: Sequence[memoryview]
    came_s: float
    """Time in s, on the monotonic clock, at which it was read."""


class ParameterServer:
    """One parameter server; see the module.

    Raises ``EnvironmentLacks`` for an address that is taken, and ``WorkerFailed`` if a lost trainer ends the job.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.load = ServerLoad(since_ns=time.monotonic_ns())
        """Work since the first step of the first trainer whose steps count or, without one, since the beginning."""
        self._counts = False
        self.shard: Shard | None = None
        self.role: RoleDecider | None = None
        self.failure: WorkerFailed | None = None
        """Error that ends the job; ``None`` if there is none."""
        self._state_before = ServerState()  # until there is a role
        self._peers: dict[bytes, int] = {}  # ranks by connection
        self._joined: dict[int, bytes] = {}  # the connection by which a rank has joined
        self._waiting: dict[tuple[int, str], Request] = {}  # by the rank, and the kind of the answer
        self._arrived: dict[int, Change] = {}  # pushes that wait for their update, by rank
        self._has_ended = False
        self._began_at = self._looked_at = time.monotonic()
        self._gone: list[int] = []  # ranks whose connections have broken, in the order in which that was noticed
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 1_000
        self._socket.router_mandatory = True
        keep_alive(self._socket, options.timeout_s)
        self._poller = zmq.Poller()  # which costs less than the socket's own poll
        self._poller.register(self._socket, zmq.POLLIN)

    def restore(self, folder: Path) -> bool:
        """Begin from the checkpoint in ``folder``, and return whether there is one.

        Raises ``ConfigError`` for a checkpoint that cannot be used.
        """
        saved = load_shard(folder, self.options.number, len(self.options.endpoints))
        if saved is None:
            return False
        self.shard, version = saved
        self._state_before = ServerState(version=version, initialised=True)
        self._say(f"begins from {folder}, after {version} updates")
        return True

    def bind(self) -> None:
        """Listen on the server's address.

        Raises ``ConfigError`` if it is not valid, ``EnvironmentLacks`` if it cannot be taken.
        """
        endpoint = self.options.endpoints[self.options.number]
        address = resolve(endpoint)
        try:
            self._socket.bind(f"tcp://{address}")
        except zmq.ZMQError as error:
            what = f"the server's address cannot be taken: {error}"
            hint = "an address of this machine, and a port on which no other job's server listens"
            raise EnvironmentLacks(what, "server", endpoint, hint) from error

    def run(self) -> ServerLoad:
        """Serve until all trainers have left, and return the server's load.

        Raises ``WorkerFailed`` naming the process because of which the job ends.
        """
        while not self._has_ended:
            if self._poller.poll(int(1000 * BEAT_S)):
                begin_ns = time.monotonic_ns()
                self._receive()
                now_ns = time.monotonic_ns()
                self.load.worked(now_ns - begin_ns, now_ns)
            if time.monotonic() - self._looked_at > BEAT_S:
                self._looked_at = time.monotonic()
                self._look()
        self._say(f"ended after {self._state.version} updates")
        if self.failure is not None:
            raise self.failure
        return self.load

    def close(self) -> None:
        """Release the address; unsent messages have one more second to go out."""
        self._socket.close()
        self._context.term()

    def _receive(self) -> None:
        for _ in range(64):  # most messages between two checks of the time
            if self._has_ended:
                return
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                head, tensors = decode(frames)
            except ValueError as error:
                self._say(f"a message was ignored: {error}")
            else:
                self._hear(identity.bytes, head, tensors)

    def _send(self, identity: bytes, head: Head, tensors: Sequence[Tensor] = ()) -> None:
        """Send a message. If the receiver is gone, drop the message and note the receiver's rank."""
        try:
            self._socket.send_multipart([identity, *encode(head, tensors)], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._gone.append(head.rank)

    def _hear(self, identity: bytes, head: Head, tensors: Sequence[memoryview]) -> None:
        if head.kind == "failed":  # a trainer that ends names the process that failed
            self._fail(failure_told(tensors))
        else:
            self._peers[identity] = head.rank
            self._do(Request(identity, head, tensors, time.monotonic()))

    def _do(self, request: Request) -> None:
        head, shard = request.head, self.shard
        if head.kind == "join":
            self._join(request)
            return
        assert shard is not None, "a trainer asks for something before it has joined"
        match head.kind:
            case "gradient" | "delta":
                self._do_push(request, shard)
            case "look_up" | "pull" | "barrier" as kind:
                self._waiting[head.rank, _ANSWERS[kind]] = request
                self._tell(Message("trainer" if kind == "look_up" else "sender", head.rank, kind))
            case "initial":
                arrays = zip(request.tensors, shard.arrays, strict=True)
                shard.install([numbers(body, array.dtype, array.shape) for body, array in arrays])
                self._answer(request, "initial")
                self._tell(Message("sender", 0, "initial"))
            case "save":
                self._answer(request, "save", (self._save(Path(text_of(request.tensors[0]))).encode(),))
            case "leave":
                self._answer(request, "leave")
                self._joined.pop(head.rank, None)
                self._tell(Message("trainer", head.rank, "leave"))
            case "counts":
                self._answer(request, "counts")
                if not self._counts:
                    self._counts, self.load = True, ServerLoad(since_ns=time.monotonic_ns())
            case kind:
                raise AssertionError(f"{kind} is no request")

    def _do_push(self, request: Request, shard: Shard) -> None:
        head = request.head
        self._arrived[head.rank] = push = shard.read_push(head, request.tensors)
        self._waiting[head.rank, "parameters" if shard.spec.rules.mode == "synchronous" else "applied"] = request
        versions = push.versions.tolist()
        self.load.staleness.update(self._state.version - version for version in versions)
        self._tell(Message("sender", head.rank, head.kind, count=head.num, version=min(versions, default=2**62)))

    def _join(self, request: Request) -> None:
        rank, spec = request.head.rank, Spec.from_json(request.tensors[0])
        why = "" if self.shard is None else differences(self.shard.spec, spec, model_only=self.role is None)
        if (spec.rules.trainers, spec.rules.servers) != (self.options.trainers, len(self.options.endpoints)):
            why = "it differs in the number of trainers or servers"
        if not why and self._joined.setdefault(rank, request.identity) != request.identity:
            why = f"another process has joined as rank {rank}: is the job started twice?"
        if why:
            self._say(f"trainer {rank} is refused: {why}")
            self._answer(request, "refused", (why.encode("utf-8", "backslashreplace"),))
            return
        if self.role is None:
            self._begin(spec)
        self._waiting[rank, "ready"] = request
        self._tell(Message("sender", rank, "join"))

    def _begin(self, spec: Spec) -> None:
        """Create the role from the first trainer's description of the job."""
        if self.shard is None:
            self.shard = Shard(spec, self.options.number)
        else:
            self.shard.adopt(spec)
        training, record = ServerTraining(spec.rules), self.options.record
        self.role = RoleDecider.start(training, self.options.number, "server", record=record, state=self._state_before)

    @property
    def _state(self) -> ServerState:
        """State of the role; before the first trainer has joined, the state from which the role will begin."""
        if self.role is None:
            return self._state_before
        assert isinstance(self.role.state, ServerState)
        return self.role.state

    def _tell(self, message: Message) -> None:
        assert self.role is not None
        for operation in self.role.on(time.monotonic_ns(), message):
            self._execute(operation, message)

    def _execute(self, operation: Operation, message: Message) -> None:
        shard = self.shard
        assert shard is not None
        match operation.kind:
            case "send":
                self._fulfil(operation, shard)
            case "update":
                ranks = sorted(self._arrived) if operation.rank is None else [operation.rank]
                shard.update([self._arrived.pop(rank) for rank in ranks], operation.divisor)
            case "accumulate":
                shard.accumulate(self._arrived[message.rank])
            case "mark":
                shard.mark(message.rank, self._arrived.pop(message.rank))
            case "stop":
                self._has_ended = True
            case kind:
                assert kind == "install", operation

    def _fulfil(self, operation: Operation, shard: Shard) -> None:
        """Answer the request that has waited for this operation."""
        rank, kind = operation.rank, operation.message
        assert rank is not None
        assert kind is not None
        request = self._waiting.pop((rank, "ready" if kind == "blank" else kind), None)
        if request is None:
            return
        tensors: Sequence[Tensor] = ()
        if kind == "parameters":
            tensors = shard.parameters(rank)
        elif kind == "ready":
            tensors = [array.copy() for array in shard.arrays]
        elif kind == "rows":
            tensors = shard.look_up([numbers(body, ROW, (-1,)) for body in request.tensors])
        self._answer(request, kind, tensors)

    def _answer(self, request: Request, kind: str, tensors: Sequence[Tensor] = ()) -> None:
        head = request.head
        self._send(request.identity, Head(kind, head.rank, version=self._state.version, num=head.num), tensors)

    def _save(self, folder: Path) -> str:
        """Write a checkpoint if there are parameters; return the error, or an empty string."""
        if self.shard is None or not self._state.initialised:
            return ""
        error = write_shard(folder, self.shard, self._state.version)
        if error:
            self._say(f"no checkpoint in {folder}: {error}")
        return error

    def _fail_by(self, rank: int, why: str) -> None:
        hint = "its own output says why, or the network is so slow that timeout_s must be raised; start the job again"
        self._fail(WorkerFailed(f"this trainer {why}", f"rank {rank}", hint=hint))

    def _fail(self, failure: WorkerFailed) -> None:
        """End the job because of ``failure.where``, and tell all trainers. Only the first failure counts."""
        if self._has_ended:
            return
        self.failure, self._has_ended = failure, True
        self._say(f"the job ends: {failure.where}: {failure.what}")
        for identity, rank in self._peers.items():
            self._send(identity, Head("stopped", rank), (failure.what.encode(), str(failure.where).encode()))

    def _say(self, text: str) -> None:
        print(f"server {self.options.number}: {text}", file=sys.stderr, flush=True)  # noqa: T201  # the server's log

    def _look(self) -> None:
        """Send signs of life; end the job if a trainer is gone, never came, or keeps others waiting for too long."""
        now, options = time.monotonic(), self.options
        waiting_for = {request.identity: rank for (rank, _), request in self._waiting.items()}  # signs of life extend their patience
        for identity, rank in {**waiting_for, **{identity: rank for rank, identity in self._joined.items()}}.items():
            self._send(identity, Head("alive", rank))
        for rank in self._gone:
            if rank not in self._state.left:
                self._fail(broken(f"rank {rank}", options.timeout_s))
        missing = set(range(options.trainers)) - {*self._peers.values(), *self._state.left}
        if missing and now > self._began_at + options.startup_timeout_s:
            self._fail_by(min(missing), "has never come")
        if self.shard is None or self.shard.spec.rules.mode != "synchronous":
            return
        state, limit_s = self._state, options.round_timeout_s
        starts = state.version == self._state_before.version  # a trainer may be starting
        late = set(range(options.trainers)) - {*state.met, *state.arrived, *state.left}
        waiting = [request for (_, answer), request in self._waiting.items() if answer in ("parameters", "barrier")]
        for request in waiting:  # at a barrier, another server may be writing a checkpoint
            most_s = max(limit_s, options.startup_timeout_s) if starts or request.head.kind == "barrier" else limit_s
            if late and now > request.came_s + most_s:
                self._fail_by(min(late), f"has let the others wait for {most_s:g} s")
