"""Server: one process's event loop. It reads messages, tells the server's role, and does what that decides.

Life cycle: ``bind``; ``run``, which returns when all trainers have left; ``close``. Each request of a
trainer's connection is numbered. The next one is done; one that was done before is answered again
and not done again; one that waits for others is answered when they have come; one that comes too early is ignored,
and its trainer sends what is missing. A request that makes no sense is refused, which ends its trainer;
a message that is no request of any trainer is logged and ignored.

A message is read, and found to fit, before anything is done because of it: what is raised there is a ``WireError``, and its sender's
fault. Any other error is this program's own and ends the server.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fleetbench.errors import EnvironmentLacks, FleetbenchError, WorkerFailed
from fleetbench.plan.events import Message
from fleetbench.plan.operations import Operation
from fleetbench.plan.servers.recording import RoleDecider
from fleetbench.plan.servers.states import ServerState
from real.processes.diagnosis import how_it_ended
from real.servers.board import Board, Entry
from real.servers.checkpoints import Saved, load_shard
from real.servers.door import LOGGED, Door
from real.servers.peers import Peer, Peers, Request
from real.servers.security import TOKEN, new_session
from real.servers.server_options import ServerOptions
from real.servers.server_report import ServerReport
from real.servers.shard import Shard
from real.servers.spec import Spec, differences
from real.servers.watch import FELL_SILENT, LOOK_S, NEVER_CAME, Lost, Watch
from real.servers.wire import Head, Tensor, WireError, decode
from real.servers.writer import Writer, Written, folder_of

_ANSWERS = {"join": ("ready", "blank"), "pull": ("parameters",), "look_up": ("rows",), "barrier": ("barrier",)}
_WRITING_LOOK_S = 0.02  # between two looks at whether a checkpoint has been written
_FAREWELL_S = 1.0
"""After the last trainer's leave, for those whose answer went astray."""


class ParameterServer:
    """See the module. Raises ``EnvironmentLacks`` for an address that is taken, ``WorkerFailed`` where a trainer's loss ends the job."""

    def __init__(self, options: ServerOptions, board: Board | None = None) -> None:
        self.options = options
        self.report = ServerReport()
        self.shard: Shard | None = None
        self.role: RoleDecider | None = None
        self._life = new_session() >> 1  # what fits into a signed number
        self._peers = Peers()
        self._restored = ServerState()
        self._waiting: dict[tuple[int, str], Request] = {}
        self._arrived: dict[int, Request] = {}
        self._request: Request  # the last that the role was told of
        self._meetings = 0
        self._gone: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
        self._watch = Watch(options.trainers, options.timeout_s, options.startup_timeout_s)
        self._noted: dict[int, Lost] = {}
        self._lost: dict[int, Lost] = {}
        self._failure: FleetbenchError | None = None
        self._has_diverged = self._is_known = False
        self._stopped_at: float | None = None
        self._writer = Writer(self._moment, options.folder)
        self._door = Door(options.endpoint, options.token, encrypted=options.encrypted, say=self._say, timeout_s=options.timeout_s)
        self._board = board
        if board is not None:
            self._door.poller.register(board.socket)

    def restore(self, folder: Path) -> bool:
        """Begin from a checkpoint; whether there is one. Raises ``ConfigError`` for one that does not fit."""
        self._writer.allow(folder)
        saved = load_shard(folder, self.options.server, self.options.servers)
        if saved is None:
            return False
        self.shard, self._peers.restored, self._restored = saved.shard, saved.applied, saved.state
        self._gone = (saved.left, saved.lost)
        self._say(f"begins from {folder}, after {saved.state.version} updates")
        return True

    def _begin(self, spec: Spec) -> None:
        """Serve under the rules of ``spec``; those of a checkpoint may be another job's."""
        if self.shard is None:
            self.shard = Shard(spec, self.options.server)
        elif self.shard.spec != spec:
            self.shard.adopt(spec)
        self.role = RoleDecider.start(spec.rules, "server", self.options.server, record=self.options.record, state=self._restored)

    def bind(self) -> None:
        """Take the address. Raises ``ConfigError`` for one that is none, ``EnvironmentLacks`` where it cannot be had."""
        self._door.bind()

    def run(self, save_to: Path | None = None, save_every_s: float | None = None) -> ServerReport:
        """Serve until all trainers have left.

        ``save_to``: folder of checkpoints, one every ``save_every_s`` seconds and one at the end. Raises ``WorkerFailed`` naming the
        trainer without which the job cannot go on, ``EnvironmentLacks`` where the last checkpoint cannot be written.
        """
        self._writer.every(save_every_s, save_to)
        while self._stopped_at is None or time.monotonic() - self._stopped_at < _FAREWELL_S:
            self._attend(_WRITING_LOOK_S if self._writer.is_busy else LOOK_S)
            for entry in () if self._board is None else self._board.turn():
                self._hear_board(entry)
            for written in self._writer.attend():
                self._tell_of(written)
            if self._watch.is_due:
                self._look()
            if self._writer.is_due and self._state.initialised and self.role is not None:
                self._writer.want_own()
            self.report.strangers, self.report.bytes_sent = self._door.strangers, self._door.bytes_sent
        self._remark_not_finite()
        self._say(str(self.report))
        try:
            self._save_last()
        except EnvironmentLacks as error:
            self._failure = error
            self._write(Entry(kind="failed", name=f"server {self.options.server}", why=f"{error.where} {error.what}"))
        if self._failure is None and (nobody := self._nobody_left()) is not None:
            self._failure = nobody
            self._write(Entry(kind="failed", name=str(nobody.where), why=nobody.what))
        if self._failure is not None:
            raise self._failure
        return self.report

    def close(self) -> None:
        """Let the address go."""
        self._writer.close()
        self._door.close()
        if self._board is not None:
            self._board.close()

    # What comes in

    def _receive(self) -> None:
        for _ in range(64):  # between two looks at the other sockets
            message = self._door.receive()
            if message is None:
                return
            identity, frames = message
            try:
                head, tensors = decode(frames)
            except WireError as error:
                self._reject(error.head, error)
            else:
                self.report.bytes_received += sum(len(frame) for frame in frames)
                self._hear(identity, head, tensors)

    def _hear(self, identity: bytes, head: Head, tensors: Sequence[memoryview]) -> None:
        try:
            self._sort(identity, head, tensors)
        except WireError as error:
            self._reject(head, error)

    def _reject(self, head: Head | None, error: WireError) -> None:
        """What makes no sense, and is a trainer's next request, is answered with why, and so is all that comes after it."""
        peer = None if head is None else self._peers.of(head.session)
        if head is not None and peer is not None and self._is_in_turn(peer, head):
            self._remark(f"a request of trainer {peer.rank} was refused: {error}")
            self._refuse(Request(peer, head), str(error))
            peer.received = max(peer.received, head.sequence)
        else:
            self._remark(f"a message was passed over: {error}")

    def _sort(self, identity: bytes, head: Head, tensors: Sequence[memoryview]) -> None:
        """By what a message is, and whose."""
        peer = self._peers.of(head.session)
        if not 0 <= head.rank < self.options.trainers or (peer is not None and peer.rank != head.rank):
            raise WireError(f"a trainer {head.rank} of {self.options.trainers}{f', which is trainer {peer.rank}' if peer else ''}")
        if head.kind == "hello":  # which is no sign of life: who lives sends beats as well
            self._greet(identity, head, tensors)
            return
        self._watch.hear(head.rank)
        if peer is None:
            self._door.send(identity, Head("unknown", head.rank, head.session))
            return
        peer.identity = identity
        if self._failure is not None or self._is_late(head):
            self._send_stopped(peer)
            return
        if head.kind in ("beat", "barrier") and head.rank in self._state.lost:
            self._say(f"trainer {head.rank} is back")
            self._tell(Message("sender", head.rank, "join"))
        if head.kind == "beat":
            self._door.send(identity, *peer.echo(head.sequence))
        elif self._is_in_turn(peer, head):
            self._do(Request(peer, head, tensors, again=head.sequence <= peer.received))
            peer.received = max(peer.received, head.sequence)

    def _is_in_turn(self, peer: Peer, head: Head) -> bool:
        """Whether a request is to be taken. One that is numbered for a server that is no more, or after one that was lost, comes again."""
        return head.version == self._life and head.sequence <= peer.received + 1

    def _is_late(self, head: Head) -> bool:
        """Whether who speaks was lost, or comes anew, and the others have ended the job meanwhile."""
        return self._stopped_at is not None and (head.kind == "join" or head.rank not in self._state.left)

    def _hear_board(self, entry: Entry) -> None:
        """What launchers, and the job's other servers, tell."""
        kind, _, number = entry.name.partition(" ")
        if entry.kind == "failed" and self._stopped_at is None:
            self._fail(entry.name, entry.why, "its own output says why; start the job again")
        elif entry.kind == "ended" and kind == "rank" and number.isdecimal() and int(number) < self.options.trainers:
            self._lose(Lost(rank=int(number), why=how_it_ended(entry.code), code=entry.code))

    def _greet(self, identity: bytes, head: Head, joined_with: Sequence[memoryview]) -> None:
        """``joined_with``: of a trainer that had joined a life of this server before, its description; the file may be another job's."""
        spec = Spec.from_json(joined_with[0]) if joined_with else None
        peer, comes_back = self._peers.greet(identity, head)
        if spec is not None and (why := self._agree(head.rank, spec)):
            peer.refusal = why.encode()
        self._is_known = self._is_known or comes_back  # so that this is the job of which the checkpoint is
        self._lose_noted(head.rank)
        if self._restored.initialised:  # else this server has been at all of them itself
            self._learn_of_meetings(head.count)
        # What it took, and what of that the shard holds: they differ in what another life of this server acknowledged.
        welcome = Head("welcome", head.rank, head.session, peer.received, peer.applied, self._life, count=int(self._state.initialised))
        self._door.send(identity, welcome)

    def _learn_of_meetings(self, num: int) -> None:
        """A trainer has been at ``num`` meetings: who still waits in one of them, after a restart of this server, need not."""
        self._meetings = max(self._meetings, num)
        waiting = [request for (_, answer), request in self._waiting.items() if answer == "barrier"]
        for request in waiting:
            if request.head.count <= self._meetings:
                del self._waiting[request.head.rank, "barrier"]
                self._answer(request, "barrier")
                self._tell(Message("sender", request.head.rank, "join"))  # who joins waits at no barrier

    def _do(self, request: Request) -> None:
        """Do a request, or answer one that was done before."""
        peer, head = request.peer, request.head
        if peer.refusal is not None:
            self._refuse(request, peer.refusal.decode())
        elif head.sequence in peer.waiting:
            return
        elif head.sequence == 0:
            raise WireError("a request without a number")
        elif head.kind == "join":
            self._join(request)
        elif self.shard is None or self.role is None:
            raise WireError(f"{head.kind} before anybody has joined")
        elif head.kind in ("gradient", "delta", "piece", "initial"):
            self._do_push(request)
        else:
            self._serve(request)
            peer.applied = max(peer.applied, head.sequence)

    def _serve(self, request: Request) -> None:
        """Do what changes no parameters."""
        head = request.head
        assert self.shard is not None
        self._request = request
        if head.kind == "fetch":
            self._answer(request, "fetched", self.shard.everything(head.rank))
        elif head.kind == "save":
            self._save(request)
        elif head.kind == "leave":
            self._answer(request, "applied")
            if not request.again:
                self._writer.hurry()  # a next life of this server must know it
                self._tell(Message("trainer", head.rank, "leave"))
        elif head.kind == "counts":
            self._answer(request, "counts")
            self.report.restart()  # the first trainer's first step is everybody's
        elif head.kind == "barrier" and not 0 < head.count <= self._meetings + 1:
            raise WireError(f"a meeting {head.count} after {self._meetings}")
        elif head.kind == "barrier" and head.count <= self._meetings:
            self._answer(request, "barrier")
        elif head.kind == "look_up":
            self._wait(replace(request, rows=self.shard.read_rows(request.tensors)))
            self._tell(Message("trainer", head.rank, head.kind))
        elif head.kind in ("pull", "barrier"):
            self._wait(request)
            self._tell(Message("sender", head.rank, head.kind))
        else:
            raise WireError(f"{head.kind} is no request")

    def _save(self, request: Request) -> None:
        peer, sequence = request.peer, request.head.sequence
        if peer.saved[0] == sequence:
            self._answer(request, "saved", (peer.saved[1],))
            return
        folder = folder_of(request.tensors)
        peer.waiting.add(sequence)
        if why := self._writer.refusal(folder) if self._state.initialised else "there are no parameters yet":
            self._tell_of(Written(folder, request, why))
        else:
            self._writer.want(folder, request)

    def _do_push(self, request: Request) -> None:
        peer, head = request.peer, request.head
        assert self.shard is not None
        mode = self.shard.spec.rules.mode
        if head.kind == ("gradient" if mode == "geo_sgd" else "delta") or (head.kind in ("piece", "initial") and head.rank != 0):
            raise WireError(f"{head.kind} of trainer {head.rank} in {mode} training")
        in_rounds = head.kind == "gradient" and mode == "synchronous"
        if request.again:
            self._answer(request, *(("parameters", self.shard.parameters(head.rank)) if in_rounds else ("applied",)))
            return
        push = self.shard.read_push(head, request.tensors)
        request = replace(request, push=push, tensors=())
        if head.kind in ("piece", "initial"):
            if head.kind == "piece" and not self._state.initialised:
                self.shard.install(push)
            peer.applied = head.sequence
            self._answer(request, "applied")
            if head.kind == "initial":
                self._tell(Message("sender", head.rank, "initial"))
            return
        if in_rounds:
            self._arrived[head.rank] = request
        self._wait(request, "parameters" if in_rounds else "applied")
        self._request = request
        for version in push.versions:
            self.report.gradient(self._state.version - int(version))
        self._tell(Message("sender", head.rank, head.kind, count=head.count, version=int(push.versions.min(initial=2**62))))
        if not in_rounds:
            peer.applied = head.sequence

    def _join(self, request: Request) -> None:
        peer, head = request.peer, request.head
        if not request.tensors:
            raise WireError("it joins without a word")
        spec = Spec.from_json(request.tensors[0])
        if why := self._agree(head.rank, spec):
            self._refuse(request, why)
            return
        peer.applied = max(peer.applied, head.sequence)
        if request.again and self._state.initialised:
            self._answer(request, "ready")
            return
        self._noted.pop(head.rank, None)
        self._wait(request)
        self._tell(Message("sender", head.rank, "join"))
        self._lose_noted(head.rank)

    def _agree(self, rank: int, spec: Spec) -> str:
        """Serve under a trainer's description of the job; why not, where it does not fit."""
        held, own = None if self.shard is None else self.shard.spec, self.options
        if why := differences(held, spec, own.trainers, own.servers, model_only=self.role is None):
            self._say(f"trainer {rank} is refused: it differs in {why}")
            return f"it differs in {why}"
        if self.role is None:
            self._begin(spec)
        return ""

    def _wait(self, request: Request, *answers: str) -> None:
        """The request is answered when the role has one of these sent; a kind of request has its own."""
        request.peer.waiting.add(request.head.sequence)
        for answer in answers or _ANSWERS[request.head.kind]:
            self._waiting[request.head.rank, answer] = request

    def _refuse(self, request: Request, why: str) -> None:
        request.peer.refusal = why.encode("utf-8", "backslashreplace")
        self._answer(request, "refused", (request.peer.refusal,))

    # What the role decides

    @property
    def _state(self) -> ServerState:
        """The role's; before there is a role, because no trainer has said yet by which rules this job goes, what it will begin from."""
        state = self._restored if self.role is None else self.role.state
        assert isinstance(state, ServerState)
        return state

    def _tell(self, message: Message) -> None:
        """Tell the role, and do what it decides."""
        if self.role is None:
            return
        for operation in self.role.on(time.monotonic_ns(), message):
            self._execute(operation, message)

    def _lose(self, lost: Lost) -> None:
        """A trainer does not count any longer, unless it comes back. Before anybody has joined it is noted for then."""
        if self.role is None:
            self._noted[lost.rank] = lost
        elif lost.rank not in (*self._state.left, *self._state.lost):
            has_left = lost.code == 0 and (lost.rank != 0 or self._state.initialised)  # it ended well, before it had joined or unheard
            self._lost[lost.rank] = lost
            self._tell(Message("executor", lost.rank, "leave" if has_left else "lost"))
            if not self._state.left:
                self._watch.expect_soon(self._state.lost)

    def _lose_noted(self, present: int) -> None:
        """Once it is known which job this is, lose those who were gone before; trainer ``present`` is not."""
        if self.role is None:
            return
        if self._is_known:
            (left, lost), self._gone = self._gone, ((), ())
            for rank in left:
                self._tell(Message("trainer", rank, "leave"))
            for rank in lost:
                if rank != present:
                    self._lose(Lost(rank=rank, why="was lost before this server began again"))
        noted, self._noted = self._noted, {}
        for one in noted.values():
            self._lose(one)

    def _execute(self, operation: Operation, message: Message) -> None:
        assert self.shard is not None
        if operation.kind == "send":
            self._fulfil(operation)
        elif operation.kind == "update":
            arrived = [self._arrived.pop(rank) for rank in sorted(self._arrived)] if operation.rank is None else [self._request]
            self.shard.update([one.pushed for one in arrived], operation.divisor)
            for one in arrived:
                one.peer.applied = max(one.peer.applied, one.head.sequence)
            self.report.updates += 1
        elif operation.kind == "accumulate":
            self.shard.accumulate(self._request.pushed)
            self.report.updates += 1
        elif operation.kind == "mark":
            self.shard.mark(message.rank, self._request.pushed)
        elif operation.kind == "drop":
            assert operation.rank is not None
            self.report.lost.append(operation.rank)
            why = self._lost[operation.rank].why
            self._say(f"trainer {operation.rank} is lost: it {why}; training goes on without it")
            self._write(Entry(kind="lost", name=f"rank {operation.rank}", why=why, seconds=self.options.timeout_s))
            self._peers.forget_waiting(operation.rank)
            self._waiting = {key: request for key, request in self._waiting.items() if key[0] != operation.rank}
        elif operation.kind == "stop":
            self._stop(operation.rank)
        else:
            assert operation.kind == "install", operation

    def _fulfil(self, operation: Operation) -> None:
        """Answer the request that has been waiting for this; none where its answer was given before."""
        assert operation.rank is not None
        assert operation.message is not None
        assert self.shard is not None
        request = self._waiting.get((operation.rank, operation.message))
        if request is None:
            return
        for answer in (operation.message, *_ANSWERS.get(request.head.kind, ())):
            self._waiting.pop((operation.rank, answer), None)
        if operation.message == "parameters":
            self._answer(request, "parameters", self.shard.parameters(operation.rank, again=request.again))
        elif operation.message == "rows":
            self._answer(request, "rows", self.shard.look_up(request.rows))
        else:
            if operation.message == "barrier":
                self._meetings = max(self._meetings, request.head.count)
            self._answer(request, operation.message)

    def _stop(self, because: int | None) -> None:
        """The job is over, where ``because`` names nobody because all have left or are lost."""
        if because is None:
            self._close_down()
            return
        has_begun = because != 0 or self._state.initialised
        why = "and synchronous training cannot continue without it" if has_begun else "and nobody else brings the parameters"
        hint = "its own output says why, or the network is so slow that timeout_s must be raised; start the job again"
        self._fail(f"rank {because}", f"this trainer {self._lost[because].why}, {why}", hint)

    def _fail(self, where: str, what: str, hint: str) -> None:
        """The job cannot go on, because of ``where``; everybody hears it, and what was said first counts."""
        if self._failure is not None:
            return
        self._close_down()
        self._failure = WorkerFailed(what, where, hint=hint)
        self._say(f"the job ends: {where}: {what}")
        self._write(Entry(kind="failed", name=where, why=what))
        for peer in self._peers:
            self._send_stopped(peer)

    def _nobody_left(self) -> WorkerFailed | None:
        """Why a job is over that no trainer has left in order; none where one has. What was trained is in the last checkpoint.

        Names the first to blame: a trainer that was killed, then one that ended by itself, then one that fell silent.
        """
        lost = list(self._noted.values()) if self.role is None else [self._lost[rank] for rank in self._state.lost]
        if self._state.left or not lost:
            return None
        first = min(lost, key=lambda one: one.order)
        hint = "its own output says why; start the job again, from the last checkpoint if there is one"
        if first.why == NEVER_CAME:
            hint = "is it started, and does its address of this server lead here?"
            if self._door.strangers:
                hint += f" Connections were refused, {self._door.strangers} in all: has it this server's {TOKEN}?"
        return WorkerFailed(f"this trainer {first.why}, and no other is left", f"rank {first.rank}", hint=hint)

    def _close_down(self) -> None:
        self._stopped_at = time.monotonic()
        self._writer.every(None, self._writer.own)  # none but the last is still to come

    def _send_stopped(self, peer: Peer) -> None:
        failure = self._failure or WorkerFailed("the job has ended without this trainer", f"rank {peer.rank}")
        head = Head("stopped", peer.rank, peer.session)
        self._door.send(peer.identity, head, (failure.what.encode(), str(failure.where).encode()))

    def _attend(self, timeout_s: float = _WRITING_LOOK_S) -> None:
        if self._door.poll(timeout_s):
            begin = time.monotonic()
            self._receive()
            self.report.worked(begin)

    # What goes out

    def _answer(self, request: Request, kind: str, tensors: Sequence[Tensor] = ()) -> None:
        peer, head = request.peer, request.head
        peer.waiting.discard(head.sequence)
        count = self._meetings if head.kind == "join" else head.count
        answer = Head(kind, head.rank, head.session, head.sequence, version=self._state.version, count=count)
        self._door.send(peer.identity, answer, tensors)

    # Beside the messages

    def _look(self) -> None:
        """Find out who has fallen silent, and who keeps others waiting."""
        is_synchronous = self.shard is not None and self.shard.spec.rules.mode == "synchronous"
        waiting = (request for (_, answer), request in self._waiting.items() if answer in ("parameters", "barrier"))
        longest = next(waiting, None) if is_synchronous and not self._writer.is_asked else None
        silent, waited_s = self._watch.look(longest)
        if self._stopped_at is not None:
            return
        if self.role is None:
            gone = {rank: Lost(rank=rank, why=NEVER_CAME) for rank in silent} | self._noted
            if len(gone) == self.options.trainers:
                self._say("no trainer has come")
                self._noted, self._stopped_at = gone, time.monotonic()
            return
        for rank in silent:
            self._lose(Lost(rank=rank, why=FELL_SILENT if self._watch.has_spoken(rank) else NEVER_CAME))
        if longest is None:
            return
        limit_s = self.options.round_timeout_s
        if longest.head.kind == "barrier" or not self.report.updates:  # another server may be writing what all wait for, or a trainer start
            limit_s = max(limit_s, self.options.meeting_timeout_s)
        if waited_s > limit_s:
            self._lose_late(longest.head.kind, limit_s)

    def _lose_late(self, kind: str, limit_s: float) -> None:
        """End with the first trainer that lives, but has not come where the others wait for it."""
        state, where = self._state, "at a barrier" if kind == "barrier" else "for its gradient"
        late = [rank for rank in range(self.options.trainers) if rank not in (*state.met, *state.arrived, *state.left, *state.lost)]
        for rank in late[:1]:
            self._lose(Lost(rank=rank, why=f"has let the others wait {where} for {limit_s:g} s"))

    def _moment(self) -> Saved:
        """What a checkpoint holds just now."""
        assert self.shard is not None
        self._remark_not_finite()
        return Saved(self.shard, self._state, self._peers.applied())

    def _tell_of(self, written: Written) -> None:
        """A checkpoint has been written, or not: training goes on all the same."""
        if written.error:
            self._say(f"no checkpoint in {written.folder}: {written.error}")
        if written.request is not None:
            peer, head = written.request.peer, written.request.head
            peer.saved = (head.sequence, written.error.encode())
            self._answer(written.request, "saved", (peer.saved[1],))

    def _save_last(self) -> None:
        folder = self._writer.own
        is_wanted = folder is not None and self._failure is None and self._state.initialised
        if is_wanted:
            self._writer.want_own()
        done = self._writer.attend(wait=True)
        for written in done:
            self._tell_of(written)
        if is_wanted and done[-1].error:
            hint = "what was trained last is lost; begin again from the checkpoint before, once there is room and the right to write"
            raise EnvironmentLacks(f"does not hold the last checkpoint: {done[-1].error}", str(folder), hint=hint)

    def _remark_not_finite(self) -> None:
        """Say it once of a model that cannot be mended any more; looked for at checkpoints and at the end."""
        if self.shard is not None and not self._has_diverged and (names := self.shard.not_finite):
            self._has_diverged = True
            held = f"after {self._state.version} updates {', '.join(names)} hold NaN or infinite numbers"
            self._say(f"{held}: is the learning rate too high? Checkpoints from now on are of no use")

    def _write(self, entry: Entry) -> None:
        """Tell launchers, and the other servers."""
        if self._board is not None:
            self._board.write(entry)

    def _remark(self, text: str) -> None:
        """Of what makes no sense; it may come very often."""
        self.report.senseless += 1
        if self.report.senseless <= LOGGED:
            self._say(text)

    def _say(self, text: str) -> None:
        print(f"server {self.options.server}: {text}", file=sys.stderr, flush=True)  # noqa: T201  # the server's log
