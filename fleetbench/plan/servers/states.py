"""States of the three roles: plain tuples of numbers and names, recorded, replayed, and saved as JSON; and what a role issues."""

from typing import Any, Literal, NamedTuple

from fleetbench.plan.operations import Operation, Operations, tupled

Role = Literal["trainer", "sender", "server"]
Awaited = Literal["room", "fresh", "rows", "drained"]


class TrainerState(NamedTuple):
    """A trainer: what it has handed to its sender, and what it waits for.

    Between two steps; then in a step, from ``StepBegin`` to its ``update`` or ``skip``. While ``waits``
    names something, the executor starts nothing new of this trainer.
    """

    step: int | None = None
    in_step: bool = False
    next_id: int = 0
    queued: int = 0
    """Gradients or noted steps handed on that the sender has not taken."""
    waits: Awaited | None = None
    """Room in the sender's queue, parameters after a synchronous update, looked-up rows, or the end of a flush."""
    answers: int = 0
    """Servers that have answered the look-up under way."""
    ends: bool = False
    """No step follows."""


class SenderState(NamedTuple):
    """A background sender: what it holds back, what is on its way, what it has to pull."""

    next_id: int = 0
    queued: int = 0
    pushed: int = 0
    """Pushes begun."""
    acknowledged: tuple[int, ...] = ()
    """Number of pushes that each server has applied, by server."""
    unseen: int = 0
    """Gradients pushed since the last pull began."""
    pulling: bool = False
    answers: int = 0
    """Servers that have answered the pull under way, or the synchronous push."""
    idle: bool = False
    """The trainer has been silent for a while, and something of before is still queued."""
    flushes: bool = False
    owes_pull: bool = False
    """A flush has still to see what others changed."""

    @property
    def in_flight(self) -> int:
        """Pushes that not all servers have acknowledged."""
        return self.pushed - min(self.acknowledged)


class ServerState(NamedTuple):
    """A server: whom it serves, and how often it has updated. Trainers are named by rank, in ascending order."""

    next_id: int = 0
    version: int = 0
    """Updates so far."""
    initialised: bool = False
    joining: tuple[int, ...] = ()
    """Trainers that wait for the parameters to be there."""
    arrived: tuple[int, ...] = ()
    """Synchronous: trainers whose gradients of this round are here."""
    met: tuple[int, ...] = ()
    """Trainers that wait at a barrier."""
    left: tuple[int, ...] = ()
    """Trainers that have ended."""
    stopped: bool = False


RoleState = TrainerState | SenderState | ServerState
_TYPES: dict[str, type[RoleState]] = {"trainer": TrainerState, "sender": SenderState, "server": ServerState}


def state_of(role: Role, data: dict[str, Any]) -> RoleState:
    """The state whose ``_asdict()`` went through JSON."""
    return _TYPES[role](**tupled(data))


class Issue:
    """Collects the numbered operations that one event starts. Each waits for the one before it."""

    def __init__(self, next_id: int) -> None:
        self.next_id = next_id
        self._operations: list[Operation] = []

    def add(self, kind: Any, **fields: Any) -> None:
        """One more operation, after the last."""
        after = (self._operations[-1].id,) if self._operations else ()
        self._operations.append(Operation(id=self.next_id, kind=kind, after=after, **fields))
        self.next_id += 1

    def send(self, group: str, message: str, **fields: Any) -> None:
        """One more ``send`` of a ``message``."""
        self.add("send", group=group, message=message, **fields)

    @property
    def operations(self) -> Operations:
        """In the order in which they start."""
        return tuple(self._operations)
