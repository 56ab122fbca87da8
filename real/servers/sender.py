"""Sender: a trainer's background thread, which runs the sender's role: it merges, pushes and pulls during computation.

The trainer's messages reach the thread through a deque; a socket wakes the thread for an urgent one. Its messages to
the trainer go through a queue. An error ends the thread, and the trainer raises it at its next message.
``fleetbench.plan.servers.training`` decides what is sent and when, in GeoSGD too, and
``fleetbench.workloads.server_updates`` computes GeoSGD's deltas.
"""

import contextlib
import queue
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from fleetbench.errors import FleetbenchError, WorkerFailed
from fleetbench.plan.events import Message, TimerFired
from fleetbench.plan.operations import Operation
from fleetbench.plan.replay import RoleDecider
from fleetbench.plan.servers.rules import ServerRules
from fleetbench.plan.servers.training import ServerTraining
from fleetbench.workloads.server_updates import Change, GeoCopy, add_changes
from real.servers.links import BEAT_S, Answer, Links
from real.servers.parameters import VERSION, Parameters, Spec, read_pull, read_values, shard_change


class Sender(threading.Thread):
    """A trainer's background thread; see the module.

    Life cycle: ``start``; ``tell``, ``hand`` and ``hear``, called by the trainer's thread; ``close``.
    """

    def __init__(
        self,
        links: Links,
        spec: Spec,
        parameters: Parameters,
        geo: GeoCopy | None,
        *,
        rank: int,
        record: bool = False,
    ) -> None:
        super().__init__(name="fleetbench-sender", daemon=True)
        self.rules: ServerRules = spec.rules
        self.role = RoleDecider.start(ServerTraining(spec.rules), rank, "sender", record=record)
        self.versions: tuple[int, ...] = (0,) * spec.rules.servers
        """Number of each server's updates that the model's dense parameters contain, by server."""
        self.failure: FleetbenchError | None = None
        """The error that ended the thread."""
        self._links = links
        self._shards = spec.shards
        self._parameters = parameters
        self._geo = geo
        self._rank = rank
        self._queue: deque[Change] = deque()
        self._words: deque[str] = deque()
        self._staged = Change(None, [])
        self._pulled: list[Answer] = []
        self._timer: float | None = None
        self._to_trainer: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._closing = False
        self._do: dict[str, Callable[[Operation], None]] = {"merge": self._merge, "send": self._send, "install": self._install}

    # Called by the trainer's thread

    def hand(self, change: Change) -> None:
        """Queue a gradient, which ``tell("gradient")`` must then announce."""
        self._queue.append(change)

    def tell(self, word: str, *, urgent: bool = True) -> None:
        """Send the thread a message: ``gradient``, ``step`` or ``flush``.

        The thread reads a message that is not urgent together with the next urgent one, or at the latest after the
        time in which a trainer becomes idle.
        """
        self.raise_failure()
        self._words.append(word)
        if urgent:
            self._waker.send(b"!")

    def hear(self) -> Message | None:
        """Return the next message for the trainer, or ``None``. Raises the error that ended the thread."""
        if self._to_trainer.empty():  # which costs less than an exception, in every step
            self.raise_failure()
            return None
        return self._to_trainer.get()

    def await_word(self) -> Message:
        """Wait for the next message for the trainer and return it. Raises the error that ended the thread."""
        while True:
            with contextlib.suppress(queue.Empty):
                return self._to_trainer.get(timeout=BEAT_S)
            self.raise_failure()

    def close(self) -> None:
        """End the thread and close its sockets."""
        if self.is_alive():
            self._closing = True
            self._waker.send(b"!")
            self.join()
        self._waker.close()
        self._woken.close()

    def raise_failure(self) -> None:
        """Raise the error that ended the thread, if there is one."""
        if self.failure is not None:
            raise self.failure

    # Run by the thread itself

    def run(self) -> None:
        """Run the sender's role until ``close`` or an error."""
        try:
            longest = min(BEAT_S, self.rules.idle_ns * 1e-9) if self._geo is not None else BEAT_S
            while not self._closing:
                wait = longest if self._timer is None else min(longest, self._timer - time.monotonic())
                for answer in self._links.poll(wait, self._woken):
                    self._hear_answer(answer)
                self._hear_trainer()
                if self._timer is not None and time.monotonic() >= self._timer:
                    self._timer = None
                    self._decide(TimerFired())
        except FleetbenchError as error:
            self.failure = error
        except Exception as error:  # noqa: BLE001  # whatever it was, the trainer must learn of it
            hint = "the traceback above says where; begin again from the servers' checkpoint"
            self.failure = WorkerFailed(f"its background sender failed: {type(error).__name__}: {error}", f"rank {self._rank}", hint=hint)
            sys.excepthook(type(error), error, error.__traceback__)

    def _hear_trainer(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        while self._words:
            self._decide(Message("trainer", self._rank, self._words.popleft(), count=1))

    def _hear_answer(self, answer: Answer) -> None:
        if answer.kind == "parameters":
            self._pulled.append(answer)
        if answer.kind in ("applied", "parameters"):
            self._decide(Message("server", answer.server, answer.kind, count=answer.num, version=answer.version))

    def _decide(self, event: Message | TimerFired) -> None:
        for operation in self.role.on(time.monotonic_ns(), event):
            if operation.kind == "set_timer":
                self._timer = time.monotonic() + operation.delay_ns * 1e-9
            else:
                self._do[operation.kind](operation)

    def _merge(self, operation: Operation) -> None:
        if operation.payload == "gradient":
            self._staged = add_changes([self._queue.popleft() for _ in range(operation.count)])
        else:
            assert self._geo is not None
            self._staged = self._geo.take(operation.divisor)
            self._staged.versions = np.array([self.versions], VERSION)

    def _send(self, operation: Operation) -> None:
        assert operation.message is not None
        if operation.group == "trainer":
            self._to_trainer.put(Message("sender", self._rank, operation.message, count=operation.count))
            return
        for server in range(self.rules.servers):
            tensors = shard_change(self._staged, self._shards, server) if operation.payload is not None else ()
            self._links.ask(server, operation.message, tensors, rate=self._staged.rate, num=operation.count)

    def _install(self, operation: Operation) -> None:
        pulled, self._pulled = self._pulled, []
        versions = list(self.versions)
        for answer in pulled:
            versions[answer.server] = answer.version
            if operation.payload == "delta":
                assert self._geo is not None
                self._geo.merge(answer.server, *read_pull(answer, self._parameters))
            else:
                flat = self._parameters.flat[self._shards.dense_part(answer.server)]
                flat.copy_(read_values(answer.tensors[0], flat))
        self.versions = tuple(versions)
