"""States of the three roles, as plain tuples that are recorded, replayed and saved as JSON; and ``Issue``."""

from typing import Any, Literal, NamedTuple

from fleetbench.plan.operations import Operation, Operations, tupled

Role = Literal["trainer", "sender", "server"]
Awaited = Literal["room", "fresh", "rows", "drained"]


class TrainerState(NamedTuple):
    """State of a trainer: the gradients handed to its sender, and the reason for waiting.

    A trainer is in a step from ``StepBegin`` to the step's ``update`` or ``skip``, else between two steps.
    While ``waits`` is not None, the executor starts nothing new for this trainer.
    """

    step: int | None = None
    in_step: bool = False
    next_id: int = 0
    queued: int = 0
    """Number of gradients or recorded steps that the sender has not taken yet."""
    waits: Awaited | None = None
    """What the trainer waits for: ``room`` in the sender's queue, ``fresh`` parameters after a synchronous
    update, looked-up ``rows``, or the end of a flush (``drained``). None if it does not wait."""
    answers: int = 0
    """Number of servers that have answered the current look-up."""
    ends: bool = False
    """Whether training has ended."""


class SenderState(NamedTuple):
    """State of a background sender: its queue, its pushes in flight, and its pulls."""

    next_id: int = 0
    queued: int = 0
    pushed: int = 0
    """Number of pushes begun."""
    acknowledged: tuple[int, ...] = ()
    """Number of pushes that each server has applied, by server."""
    unseen: int = 0
    """Number of gradients pushed since the last pull began."""
    pulling: bool = False
    answers: int = 0
    """Number of servers that have answered the current pull, or the synchronous push."""
    idle: bool = False
    """Whether the trainer has ended no step for ``idle_ns`` while gradients are queued."""
    flushes: bool = False
    owes_pull: bool = False
    """Whether a flush still has to pull what other trainers changed."""

    @property
    def in_flight(self) -> int:
        """Number of pushes that not all servers have acknowledged."""
        return self.pushed - min(self.acknowledged)


class ServerState(NamedTuple):
    """State of a server: its number of updates, and the trainers in each situation.

    Trainers are named by rank, in ascending order.
    """

    next_id: int = 0
    version: int = 0
    """Number of updates so far."""
    initialised: bool = False
    joining: tuple[int, ...] = ()
    """Trainers that wait until the parameters are initialised."""
    arrived: tuple[int, ...] = ()
    """Trainers whose gradients of this synchronous round have arrived."""
    met: tuple[int, ...] = ()
    """Trainers that wait at a barrier."""
    left: tuple[int, ...] = ()
    """Trainers that have ended."""
    stopped: bool = False


RoleState = TrainerState | SenderState | ServerState
_TYPES: dict[str, type[RoleState]] = {"trainer": TrainerState, "sender": SenderState, "server": ServerState}


def state_of(role: Role, data: dict[str, Any]) -> RoleState:
    """Return a role's state from its ``_asdict()``, which may have been stored as JSON."""
    return _TYPES[role](**tupled(data))


class Issue:
    """Collects the numbered operations that one event starts. Each waits for the one before it."""

    def __init__(self, next_id: int) -> None:
        self.next_id = next_id
        self._operations: list[Operation] = []

    def add(self, kind: Any, **fields: Any) -> None:
        """Add an operation that waits for the one added before it, if any."""
        after = (self._operations[-1].id,) if self._operations else ()
        self._operations.append(Operation(id=self.next_id, kind=kind, after=after, **fields))
        self.next_id += 1

    def send(self, group: str, message: str, **fields: Any) -> None:
        """Add a ``send`` of ``message`` to ``group``."""
        self.add("send", group=group, message=message, **fields)

    @property
    def operations(self) -> Operations:
        """Operations in the order in which they start."""
        return tuple(self._operations)
