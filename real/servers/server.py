"""Server: one process's event loop. It reads messages, tells the server's role, and does what that decides.

Life cycle: ``bind``; ``run``, which returns when all trainers have left; ``close``. Each request of a
trainer's connection is numbered. The next one is done; one that was done before is answered again
and not done again; one that waits for others is answered when they have come; one that comes too early is ignored,
and its trainer sends what is missing. A message of another version is logged and ignored; whatever else raises is an error of this
program, of a server or of a trainer, and ends the server.

The answer to a repeated request depends on its connection's ``Peer``, the shard and, for barriers, how many
meetings there have been: a trainer's k-th barrier is its part in the k-th meeting, so one that comes again after that meeting is
answered, and takes no part in another.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import zmq

from fleetbench.errors import EnvironmentLacks, FleetbenchError, WorkerFailed
from fleetbench.plan.events import Message
from fleetbench.plan.operations import Operation
from fleetbench.plan.replay import RoleDecider
from fleetbench.plan.servers.states import ServerState
from fleetbench.plan.servers.training import ServerTraining
from fleetbench.workloads.server_updates import ROW, Change
from real.processes.diagnosis import how_it_ended
from real.processes.joining import is_loopback
from real.servers.board import Board, Entry
from real.servers.checkpoints import Saved, Writer, load_shard
from real.servers.hosts import resolve
from real.servers.parameters import Shard, Spec, differences
from real.servers.server_options import ServerOptions, ServerReport
from real.servers.silence import Silence
from real.servers.wire import Head, Tensor, WireError, decode, encode, new_session, numbers

_LOOK_S = 0.5  # between two looks at who is silent
_ENDING_LOOK_S = 0.02  # between two looks at whether all trainers had their time
_FAREWELL_S, _NEAR_FAREWELL_S = 1.0, 0.1
"""After the last trainer's leave, for trainers whose answer was lost; less on the loopback, where all have left in order."""
_NEVER_CAME = "has never come"


@dataclass(slots=True)
class Peer:
    """One connection of a trainer."""

    identity: bytes
    rank: int
    session: int
    received: int
    """The last request that was taken."""
    applied: int
    """The last request whose effect is in the shard, or that has none there."""
    waiting: set[int] = field(default_factory=set)
    """Of those that were taken, the ones that wait for other trainers."""
    refusal: str | None = None
    """Why a request was refused; all that come after it are refused with it, because they may build on it."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is being done, or waits for others."""

    peer: Peer
    head: Head
    tensors: Sequence[memoryview] = ()
    again: bool = False
    push: Change = field(default_factory=lambda: Change(None, []))
    rows: Sequence[np.ndarray] = ()
    """Of each table, what a look-up asks for."""


class Lost(NamedTuple):
    """Why a trainer is gone that has not left, as it stands after its name, and its exit code, where its launcher saw it end."""

    why: str
    code: int | None = None


class ParameterServer:
    """See the module. Raises ``EnvironmentLacks`` for an address that is taken, ``WorkerFailed`` where a trainer's loss ends the job."""

    def __init__(self, options: ServerOptions, board: Board | None = None) -> None:
        self.options = options
        self.report = ServerReport()
        self.shard: Shard | None = None
        self.role: RoleDecider | None = None
        self._life = new_session() >> 1  # what fits into a signed number
        self._peers: dict[int, Peer] = {}  # by session
        self._saved: Saved | None = None  # what it begins from
        self._waiting: dict[tuple[int, str], Request] = {}  # by the rank, and the kind of the answer
        self._arrived: dict[int, Request] = {}
        self._request: Request  # the last that the role was told of
        self._meetings = 0
        self._looked_at = time.monotonic()
        self._silence = Silence(range(options.trainers), options.timeout_s, options.startup_timeout_s)
        self._longest: tuple[Request | None, float] = (None, 0.0)  # what has waited longest for another trainer, and for how many seconds
        self._lost: dict[int, Lost] = {}  # the role knows of them, once there is one
        self._failure: FleetbenchError | None = None
        self._stopped_at: float | None = None
        self._writer = Writer(self._moment, self._say, options.folder)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.sndhwm = self._socket.rcvhwm = 0  # a trainer has few requests without an answer
        self._socket.linger = 1_000
        self._board = board

    def restore(self, folder: Path) -> bool:
        """Begin from a checkpoint; whether there is one. Raises ``ConfigError`` for one that does not fit."""
        self._writer.allow(folder)
        self._saved = load_shard(folder, self.options.server, self.options.servers)
        if self._saved is None:
            return False
        self.shard = self._saved.shard
        self._say(f"begins from {folder}, after {self._state.version} updates")
        return True

    def bind(self) -> None:
        """Take the address. Raises ``ConfigError`` for one that is none, ``EnvironmentLacks`` where it cannot be had."""
        address = resolve(self.options.endpoint)
        try:
            self._socket.bind(f"tcp://{address}")
        except zmq.ZMQError as error:
            what = f"the server's address cannot be taken: {error}"
            hint = "an address of this machine, and a port on which no other job's server listens"
            raise EnvironmentLacks(what, "server", self.options.endpoint, hint) from error

    def run(self, save_to: Path | None = None, save_every_s: float | None = None) -> ServerReport:
        """Serve until all trainers have left.

        ``save_to``: folder of checkpoints, one every ``save_every_s`` seconds and one at the end. Raises ``WorkerFailed`` naming the
        trainer without which the job cannot continue, ``EnvironmentLacks`` where the last checkpoint cannot be written.
        """
        self._writer.every(save_every_s, save_to)
        while self._stopped_at is None or time.monotonic() - self._stopped_at < self._farewell_s:
            if self._socket.poll(int(1000 * (_LOOK_S if self._stopped_at is None else _ENDING_LOOK_S))):
                begin = time.monotonic()
                self._receive()
                self.report.worked(begin)
            for entry in () if self._board is None else self._board.turn():
                self._hear_board(entry)
            if time.monotonic() - self._looked_at > _LOOK_S:
                self._looked_at = time.monotonic()
                self._look()
            if self._writer.is_due and self._state.initialised and self.role is not None:
                self._writer.write()
        self._say(str(self.report))
        if (failure := self._save_last() or self._no_trainer_left()) is not None:
            self._fail(failure)
        if self._failure is not None:
            raise self._failure
        return self.report

    def close(self) -> None:
        """Release the address."""
        self._socket.close()
        self._context.term()

    def _receive(self) -> None:
        for _ in range(64):  # between two looks at the other sockets
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                head, tensors = decode(frames)
            except WireError as error:
                self._say(f"a message was ignored: {error}")
            else:
                self._hear(identity.bytes, head, tensors)

    def _send(self, identity: bytes, head: Head, tensors: Sequence[Tensor] = ()) -> None:
        """Send a message; one to a process that is gone is dropped: if it comes back, it asks again."""
        self._socket.send_multipart([identity, *encode(head, tensors)], zmq.NOBLOCK, copy=False)

    def _hear(self, identity: bytes, head: Head, tensors: Sequence[memoryview]) -> None:
        if head.kind == "told":  # by the launcher of another host
            self._hear_board(Entry(**json.loads(bytes(tensors[0]))))
            return
        peer = self._peers.get(head.session)
        if not 0 <= head.rank < self.options.trainers or (peer is not None and peer.rank != head.rank):
            known_as = f", which is trainer {peer.rank}" if peer else ""
            self._say(f"a message was ignored: a trainer {head.rank} of {self.options.trainers}{known_as}")
            return
        if head.kind == "hello":  # which is no sign of life: a trainer that lives sends beats as well
            self._greet(identity, head, tensors)
            return
        self._silence.hear(head.rank)
        if peer is None:
            self._send(identity, Head("unknown", head.rank, head.session))
            return
        peer.identity = identity
        is_late = self._stopped_at is not None and (head.kind == "join" or head.rank not in self._state.left)
        if self._failure is not None or is_late:  # it was lost, or comes again, and the others have ended the job in the meantime
            self._send_stopped(peer)
            return
        if head.kind in ("beat", "barrier") and head.rank in self._state.lost:
            self._say(f"trainer {head.rank} is back")
            self._tell(Message("sender", head.rank, "join"))
            if head.kind == "beat":
                self._send(identity, Head("unknown", head.rank, head.session))  # it greets, and repeats what was dropped
        if head.kind == "beat":
            self._send(identity, Head("alive", head.rank, head.session))
        elif head.version == self._life and head.sequence <= peer.received + 1:  # else one before it, or of an earlier life, comes again
            self._do(Request(peer, head, tensors, again=head.sequence <= peer.received))
            peer.received = max(peer.received, head.sequence)

    def _hear_board(self, entry: Entry) -> None:
        """What launchers, and the host's other servers, tell."""
        kind, _, number = entry.name.partition(" ")
        if entry.kind == "failed" and self._stopped_at is None:
            self._fail(WorkerFailed(entry.why, entry.name, hint="its own output says why; start the job again"))
        elif entry.kind == "ended" and kind == "rank" and number.isdecimal() and int(number) < self.options.trainers:
            self._lose(int(number), how_it_ended(entry.code), entry.code)

    def _greet(self, identity: bytes, head: Head, joined_with: Sequence[memoryview]) -> None:
        """``joined_with``: of a trainer that had joined a life of this server before, its description; the file may be another job's."""
        spec = Spec.from_json(joined_with[0]) if joined_with else None
        peer = self._peers.get(head.session)
        if peer is None:
            applied = 0 if self._saved is None else self._saved.applied.get(head.session, 0)
            peer = self._peers[head.session] = Peer(identity, head.rank, head.session, max(applied, head.mark), applied)
        peer.identity = identity
        if spec is not None and (why := self._agree(head.rank, spec)):
            peer.refusal = why
        if self._saved is not None:  # else this server has been at all of them itself
            self._learn_of_gone(self._saved, head)
            self._learn_of_meetings(head.count)
        # What it took, and what of that the shard holds: they differ in what another life of this server acknowledged.
        welcome = Head("welcome", head.rank, head.session, peer.received, peer.applied, self._life, count=int(self._state.initialised))
        self._send(identity, welcome)

    def _learn_of_gone(self, saved: Saved, head: Head) -> None:
        """A trainer whose session the checkpoint knows is of the same job: one that left it, or was lost to it, still counts as such."""
        if self.role is None or head.session not in saved.applied:
            return
        for rank in saved.left:
            self._tell(Message("trainer", rank, "leave"))
        for rank in saved.lost:
            if rank != head.rank:
                self._lose(rank, "was lost before this server began again")
        self._saved = replace(saved, left=(), lost=())

    def _learn_of_meetings(self, num: int) -> None:
        """A trainer has been at ``num`` meetings: who still waits in one of them, after a restart of this server, need not."""
        self._meetings = max(self._meetings, num)
        waiting = [request for (_, answer), request in self._waiting.items() if answer == "barrier"]
        for request in [one for one in waiting if one.head.count <= self._meetings]:
            del self._waiting[request.head.rank, "barrier"]
            self._answer(request, "barrier")
            self._tell(Message("sender", request.head.rank, "join"))  # a trainer that joins waits at no barrier

    def _do(self, request: Request) -> None:
        peer, head = request.peer, request.head
        self._request = request
        if peer.refusal is not None:
            self._refuse(request, peer.refusal)
            return
        if head.sequence in peer.waiting:
            return
        if head.kind == "join":
            self._join(request)
            return
        assert self.shard is not None, "a trainer asks for something before it has joined"
        if head.kind in ("gradient", "delta"):
            self._do_push(request, self.shard)
        else:
            self._serve(request, self.shard)
            peer.applied = max(peer.applied, head.sequence)

    def _serve(self, request: Request, shard: Shard) -> None:  # noqa: C901  # a branch a kind of request
        head = request.head
        match head.kind:
            case "initial":
                if not self._state.initialised:
                    arrays = zip(request.tensors, shard.arrays, strict=True)
                    shard.install([numbers(body, array.dtype, array.shape) for body, array in arrays])
                self._answer(request, "applied")
                self._tell(Message("sender", 0, "initial"))
            case "fetch":
                self._answer(request, "fetched", shard.everything(head.rank))
            case "save":  # a repeated request writes again, if the file was written before its answer was lost
                folder = Path(bytes(request.tensors[0]).decode())
                why = self._writer.refusal(folder) if self._state.initialised else "there are no parameters yet"
                self._answer(request, "saved", ((why or self._writer.write(folder)).encode(),))
            case "leave":
                self._answer(request, "applied")
                self._writer.due_at = time.monotonic()  # a next life of this server must know it
                self._tell(Message("trainer", head.rank, "leave"))  # a repeated one as well: it may predate a restart
            case "counts":
                self._answer(request, "counts")
                self.report.restart()  # at the first step of the first trainer
            case "look_up":
                self._wait(replace(request, rows=[numbers(body, ROW, (-1,)) for body in request.tensors]), "rows")
                self._tell(Message("trainer", head.rank, head.kind))
            case "pull":
                self._wait(request, "parameters")
                self._tell(Message("sender", head.rank, head.kind))
            case "barrier" if head.count <= self._meetings:
                self._answer(request, "barrier")
            case "barrier":
                self._wait(request, "barrier")
                self._tell(Message("sender", head.rank, head.kind))
            case kind:
                raise AssertionError(f"{kind} is no request")

    def _do_push(self, request: Request, shard: Shard) -> None:
        peer, head, mode = request.peer, request.head, shard.spec.rules.mode
        in_rounds = head.kind == "gradient" and mode == "synchronous"
        if request.again:
            self._answer(request, *(("parameters", shard.parameters(head.rank)) if in_rounds else ("applied",)))
            return
        push = shard.read_push(head, request.tensors)
        self._request = request = replace(request, push=push, tensors=())
        if in_rounds:
            self._arrived[head.rank] = request
        self._wait(request, "parameters" if in_rounds else "applied")
        versions = [version for (version,) in push.versions]
        for version in versions:  # which may be of updates that this server has lost by beginning again
            self.report.gradient(max(0, self._state.version - version))
        self._tell(Message("sender", head.rank, head.kind, count=head.count, version=min(versions, default=2**62)))
        if not in_rounds:
            peer.applied = head.sequence

    def _join(self, request: Request) -> None:
        peer, head = request.peer, request.head
        if why := self._agree(head.rank, Spec.from_json(request.tensors[0])):
            self._refuse(request, why)
            return
        peer.applied = max(peer.applied, head.sequence)
        if request.again and self._state.initialised:
            self._answer(request, "ready")
            return
        self._wait(request, "ready")
        self._tell(Message("sender", head.rank, "join"))

    def _agree(self, rank: int, spec: Spec) -> str:
        """Serve under a trainer's description of the job; why not, where it does not fit. A checkpoint's rules may be another job's."""
        own, told = (self.options.trainers, self.options.servers), (spec.rules.trainers, spec.rules.servers)
        why = ""
        if told != own:
            why = f"trainers and servers ({own[0]} and {own[1]} on the server, {told[0]} and {told[1]} on the trainer)"
        elif self.shard is not None:
            why = differences(self.shard.spec, spec, model_only=self.role is None)
        if why:
            self._say(f"trainer {rank} is refused: it differs in {why}")
            return f"it differs in {why}"
        if self.role is None:
            if self.shard is None:
                self.shard = Shard(spec, self.options.server)
            else:
                self.shard.adopt(spec)
            record, state = self.options.record, self._state
            self.role = RoleDecider.start(ServerTraining(spec.rules), self.options.server, "server", record=record, state=state)
            for other, lost in list(self._lost.items()):
                if other != rank:
                    self._lose(other, lost.why, lost.code)
        return ""

    def _wait(self, request: Request, answer: str) -> None:
        """The request is answered when the role has this sent."""
        request.peer.waiting.add(request.head.sequence)
        self._waiting[request.head.rank, answer] = request

    def _refuse(self, request: Request, why: str) -> None:
        request.peer.refusal = why
        self._answer(request, "refused", (why.encode("utf-8", "backslashreplace"),))

    @property
    def _state(self) -> ServerState:
        """The role's; before the first trainer has said by which rules this job goes, what the role will begin from."""
        if self.role is None:
            return ServerState() if self._saved is None else self._saved.state
        assert isinstance(self.role.state, ServerState)
        return self.role.state

    def _tell(self, message: Message) -> None:
        if self.role is None:
            return
        for operation in self.role.on(time.monotonic_ns(), message):
            self._execute(operation, message)

    def _lose(self, rank: int, why: str, code: int | None = None) -> None:
        """A trainer does not count any longer, unless it comes back. Before one has joined, it is noted for then."""
        if self.role is None:
            self._lost[rank] = Lost(why, code)
        elif rank not in (*self._state.left, *self._state.lost):
            has_left = code == 0 and (rank != 0 or self._state.initialised)  # it ended well, before it had joined or unheard
            in_rounds = self.shard is not None and self.shard.spec.rules.mode == "synchronous"
            if has_left and in_rounds and any(peer.rank == rank for peer in self._peers.values()):  # it may have ended by sys.exit
                has_left, why = False, f"{why}, without fleet.stop_worker()"
            self._lost[rank] = Lost(why, code)
            self._tell(Message("executor", rank, "leave" if has_left else "lost"))

    def _execute(self, operation: Operation, message: Message) -> None:
        shard, rank = self.shard, operation.rank
        assert shard is not None
        match operation.kind:
            case "send":
                self._fulfil(operation, shard)
            case "update":
                arrived = [self._request] if rank is not None else [self._arrived.pop(other) for other in sorted(self._arrived)]
                shard.update([one.push for one in arrived], operation.divisor)
                for one in arrived:
                    one.peer.applied = max(one.peer.applied, one.head.sequence)
                self.report.updates += 1
            case "accumulate":
                shard.accumulate(self._request.push)
                self.report.updates += 1
            case "mark":
                shard.mark(message.rank, self._request.push)
            case "drop":
                assert rank is not None
                self._drop(rank)
            case "stop":
                if rank is None:  # all trainers have left, or are lost
                    self._stop()
                    return
                has_begun = rank != 0 or self._state.initialised
                why = "and synchronous training cannot continue without it" if has_begun else "and no other trainer brings the parameters"
                hint = "its own output says why, or the network is so slow that timeout_s must be raised; start the job again"
                self._fail(WorkerFailed(f"this trainer {self._lost[rank].why}, {why}", f"rank {rank}", hint=hint))
            case kind:
                assert kind == "install", operation

    def _drop(self, rank: int) -> None:
        """Trainer ``rank`` gets no answers any more; should it come back, it finds that out, and asks again."""
        self.report.lost.append(rank)
        why = self._lost[rank].why
        self._say(f"trainer {rank} is lost: it {why}; training goes on without it")
        self._write(Entry(kind="lost", name=f"rank {rank}", why=why, seconds=self.options.timeout_s))
        for request in [self._waiting.pop(key) for key in list(self._waiting) if key[0] == rank]:
            request.peer.waiting.discard(request.head.sequence)

    def _fulfil(self, operation: Operation, shard: Shard) -> None:
        """Answer the request that has been waiting for this; none where its answer was given before."""
        rank, kind = operation.rank, operation.message
        assert rank is not None
        assert kind is not None
        request = self._waiting.pop((rank, "ready" if kind == "blank" else kind), None)
        if request is None:
            return
        tensors: Sequence[Tensor] = ()
        if kind == "parameters":
            tensors = shard.parameters(rank, again=request.again)
        elif kind == "rows":
            tensors = shard.look_up(request.rows)
        elif kind == "barrier":
            self._meetings = max(self._meetings, request.head.count)
        self._answer(request, kind, tensors)

    @property
    def _farewell_s(self) -> float:
        is_over = self._failure is None and not self._lost and is_loopback(self.options.endpoint.rpartition(":")[0])
        return _NEAR_FAREWELL_S if is_over else _FAREWELL_S

    def _stop(self) -> None:
        self._stopped_at = self._stopped_at or time.monotonic()
        self._writer.every(None, self._writer.own)  # none but the last is still to come

    def _fail(self, failure: FleetbenchError) -> None:
        """The job cannot go on, because of ``failure.where``; all others hear it. The first failure counts."""
        if self._failure is not None:
            return
        self._stop()
        self._failure = failure
        self._say(f"the job ends: {failure.where}: {failure.what}")
        self._write(Entry(kind="failed", name=str(failure.where), why=failure.what))
        for peer in list(self._peers.values()):
            self._send_stopped(peer)

    def _no_trainer_left(self) -> WorkerFailed | None:
        """Why a job is over that no trainer has left in order; none where one has. What was trained is in the last checkpoint.

        Names the first to blame: a trainer that was killed, then one that ended by itself, then one that fell silent.
        """
        lost = {rank: one for rank, one in self._lost.items() if self.role is None or rank in self._state.lost}
        if self._state.left or not lost:
            return None
        rank, first = min(lost.items(), key=lambda item: 256 if item[1].code is None else item[1].code)
        hint = "its own output says why; start the job again, from the last checkpoint if there is one"
        if first.why == _NEVER_CAME:
            hint = "is it started, and does its address of this server lead here?"
        return WorkerFailed(f"this trainer {first.why}, and no other is left", f"rank {rank}", hint=hint)

    def _send_stopped(self, peer: Peer) -> None:
        failure = self._failure or WorkerFailed("the job has ended without this trainer", f"rank {peer.rank}")
        head = Head("stopped", peer.rank, peer.session)
        self._send(peer.identity, head, (failure.what.encode(), str(failure.where).encode()))

    def _answer(self, request: Request, kind: str, tensors: Sequence[Tensor] = ()) -> None:
        peer, head = request.peer, request.head
        peer.waiting.discard(head.sequence)
        count = self._meetings if head.kind == "join" else head.count
        answer = Head(kind, head.rank, head.session, head.sequence, version=self._state.version, count=count)
        self._send(peer.identity, answer, tensors)

    def _write(self, entry: Entry) -> None:
        """Tell the launcher, and the host's other servers."""
        if self._board is not None:
            self._board.write(entry)

    def _say(self, text: str) -> None:
        print(f"server {self.options.server}: {text}", file=sys.stderr, flush=True)  # noqa: T201  # the server's log

    def _look(self) -> None:
        """Find out who has fallen silent, and who keeps others waiting."""
        passed_s = self._silence.pass_time()
        if self._stopped_at is not None:
            return
        came = {peer.rank for peer in self._peers.values()}
        silent = {rank: Lost("has fallen silent" if rank in came else _NEVER_CAME) for rank in self._silence.late}
        if self.role is None:
            if len(silent | self._lost) == self.options.trainers:
                self._say("no trainer has come")
                self._lost = silent | self._lost
                self._stop()
            return
        for rank, lost in silent.items():
            self._lose(rank, lost.why)
        is_synchronous = self.shard is not None and self.shard.spec.rules.mode == "synchronous"
        waiting = (request for (_, answer), request in self._waiting.items() if answer in ("parameters", "barrier"))
        longest = next(waiting, None) if is_synchronous else None
        waited_s = self._longest[1] + passed_s if longest is self._longest[0] else 0.0
        self._longest = longest, waited_s
        if longest is None:
            return
        limit_s = self.options.round_timeout_s
        if longest.head.kind == "barrier" or not self.report.updates:  # another server may be writing what all wait for, or a trainer start
            limit_s = max(limit_s, self.options.meeting_timeout_s)
        state, where = self._state, "at a barrier" if longest.head.kind == "barrier" else "for its gradient"
        late = set(range(self.options.trainers)) - {*state.met, *state.arrived, *state.left, *state.lost}
        if waited_s > limit_s and late:
            self._lose(min(late), f"has let the others wait {where} for {limit_s:g} s")

    def _moment(self) -> Saved:
        """What a checkpoint holds just now."""
        assert self.shard is not None
        held = {} if self._saved is None else self._saved.applied
        return Saved(self.shard, self._state, {**held, **{session: peer.applied for session, peer in self._peers.items()}})

    def _save_last(self) -> EnvironmentLacks | None:
        """Write the last checkpoint, where there is to be one; its error."""
        folder = self._writer.own
        if folder is None or self._failure is not None or not self._state.initialised or not (error := self._writer.write()):
            return None
        hint = "what was trained last is lost; begin again from the checkpoint before, once there is room and the right to write"
        return EnvironmentLacks(f"{folder} does not hold the last checkpoint: {error}", f"server {self.options.server}", hint=hint)
