"""Node: trainers that reduce their gradients among themselves before one of them pushes the sum, and broadcasts what it pulled.

The node has one communicator, on which a reduce or a broadcast waits for the one before it. To the servers the node is one trainer.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence

from fleetbench.plan.events import Message
from sim.clock import Clock
from sim.servers.actor import Carried, NodeCosts
from sim.servers.worker import Sender, Trainer


class Node:
    """Stands between the trainers of a node and the one sender that they share."""

    def __init__(self, clock: Clock, costs: NodeCosts, trainers: Sequence[Trainer], sender: Sender) -> None:
        self._clock = clock
        self._costs = costs
        self._trainers = trainers
        self._sender = sender
        self._come = Counter[tuple[str, int]]()
        """Trainers whose word about a piece is here, until all are."""
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        """Collectives: what each takes, and what follows it. The first is under way."""
        for trainer in trainers:
            trainer.tell_sender = self._hear_trainer
        sender.tell_trainer = self._hear_sender

    def _hear_trainer(self, message: Message, piece: int) -> None:
        key = message.kind, piece
        self._come[key] += 1
        if self._come[key] < len(self._trainers):
            return
        del self._come[key]
        self._collective(self._costs.reduce_ns, message, piece, lambda: self._sender.hear(message, Carried(piece=piece)))

    def _hear_sender(self, message: Message, piece: int) -> None:
        self._collective(self._costs.broadcast_ns, message, piece, lambda: self._tell_trainers(message, piece))

    def _tell_trainers(self, message: Message, piece: int) -> None:
        for trainer in self._trainers:
            trainer.hear(message, Carried(piece=piece))

    def _collective(self, costs_ns: Sequence[int], message: Message, piece: int, then: Callable[[], None]) -> None:
        """A gradient and fresh parameters pass through the trainers; other messages carry nothing."""
        if message.kind not in ("gradient", "fresh"):
            self._clock.timeout(0).callbacks.append(lambda _: then())
            return
        for trainer in self._trainers:
            trainer.sent(self._costs.nbytes[piece])
        self._waiting.append((costs_ns[piece], then))
        if len(self._waiting) == 1:
            self._start()

    def _start(self) -> None:
        self._clock.timeout(self._waiting[0][0]).callbacks.append(lambda _: self._end())

    def _end(self) -> None:
        _, then = self._waiting.popleft()
        if self._waiting:
            self._start()
        then()
