"""Actor: a role of a job on the simulated clock, which does one thing after the other; and the job of all roles."""

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from fleetbench.plan.events import Event, Message
from fleetbench.plan.layers import LayerTable
from fleetbench.plan.operations import Operation
from fleetbench.plan.replay import RoleDecider
from fleetbench.plan.servers.rules import ServerRules
from fleetbench.plan.servers.states import Role
from fleetbench.timeline import Span
from sim.clock import Clock
from sim.servers.ports import Hosts
from sim.servers.traffic import Part, Traffic


class Costs(Protocol):
    """Times of operations, requested once per operation, in the order in which operations begin."""

    def took_ns(self, role: Role, rank: int, operation: Operation, nbytes: int) -> int:
        """Return the time in ns that an operation takes.

        ``nbytes``: bytes of the push or answer that a server's operation handles, or of a header; 0 for other
        roles.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """Times of a server's work per message and per byte, and of trainers' and senders' own work."""

    push_ns: int = 0
    """Time in ns of a server's work on each push, whatever its size."""
    push_ns_per_byte: float = 0.0
    answer_ns: int = 0
    """Time in ns of a server's work on each answer to a pull or look-up, whatever its size."""
    answer_ns_per_byte: float = 0.0
    update_ns: int = 0
    """Time in ns of a trainer's own update, in GeoSGD."""
    merge_ns: int = 0
    """Time in ns of a sender's work on a push."""
    install_ns: int = 0
    """Time in ns of a sender's work on pulled parameters."""

    def took_ns(self, role: Role, rank: int, operation: Operation, nbytes: int) -> int:  # noqa: ARG002  # all ranks alike
        """See ``Costs``."""
        kind = operation.kind
        if role == "server":
            if kind in ("update", "accumulate"):
                return self.push_ns + round(nbytes * self.push_ns_per_byte)
            if kind == "send" and operation.payload in ("parameters", "rows"):
                return self.answer_ns + round(nbytes * self.answer_ns_per_byte)
            return 0
        if role == "trainer":
            return self.update_ns if kind == "update" else 0
        return {"merge": self.merge_ns, "install": self.install_ns}.get(kind, 0)


def costs_of(table: LayerTable, gradient_bytes: int, host_ns_per_byte: float = 0.0) -> Linear:
    """Return the costs from a layer table.

    An update of all parameters takes ``table.update``, and an update of a part its share by bytes.

    ``gradient_bytes``: bytes of one step's gradient over all servers. ``host_ns_per_byte``: a server's own
    time for each byte that it receives or sends.
    """
    return Linear(
        push_ns_per_byte=(table.update / gradient_bytes if gradient_bytes else 0.0) + host_ns_per_byte,
        answer_ns_per_byte=host_ns_per_byte,
        update_ns=table.update,
        merge_ns=table.merge + table.resume,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job with parameter servers, ready to be simulated."""

    rules: ServerRules
    table: LayerTable
    """Times of reading a batch, of the forward and of the backward. Times of updates are in ``costs``."""
    traffic: Traffic
    costs: Costs
    hosts: Hosts
    steps: range
    """Numbers of the warm-up and counted steps; the counted ones start at 1."""
    draws: tuple[tuple[int, ...], ...]
    """Straggler draws X in units of 2^-24, by rank and step."""
    fetch_every: int = 1
    """Number of steps between two reads of results from the device."""
    waits_each_step: bool = False
    """Whether a trainer waits after every step for its own push and the pull after it (a closed loop)."""


class Act(NamedTuple):
    """Ended operation of a role on parameters, gradients or deltas; or ``forward``, when a trainer's begins."""

    role: Role
    rank: int
    kind: str
    payload: str | None = None
    of: int | None = None
    """Rank of the trainer for which a server acted; ``None`` for all whose gradients have arrived."""
    num: int = 0
    """Number of gradients that the act handles."""
    divisor: int = 1


_ACTS = frozenset(
    (role, kind)
    for role, kinds in {"trainer": "update skip", "sender": "merge install", "server": "update accumulate parameters rows"}.items()
    for kind in kinds.split()
)


def act_of(role: Role, rank: int, operation: Operation) -> Act | None:
    """Return the act that an operation is; ``None`` if it neither changes nor sends anything that is trained."""
    kind = str(operation.payload) if operation.kind == "send" else operation.kind
    if (role, kind) not in _ACTS:
        return None
    return Act(role, rank, kind, operation.payload, operation.rank, operation.count, operation.divisor)


class Order:
    """Acts of a job, in the order in which they happened. With the data, they determine its training.

    Messages between two roles arrive in the order in which they were sent, so the acts determine what each
    message carried.
    """

    def __init__(self) -> None:
        self.acts: list[Act] = []
        self._known: dict[Act, Act] = {}
        """The distinct acts, each stored as one object; there are few."""

    def add(self, act: Act) -> None:
        """Add an act."""
        self.acts.append(self._known.setdefault(act, act))

    def digest(self) -> str:
        """Return a hexadecimal digest of the order of acts.

        Two orders have the same digest if each server, and each trainer with its sender, did the same acts in the same
        order. If rows are looked up, the order across roles counts too, because an evaluation reads tables from the
        servers.
        """
        whole = any(act.kind == "rows" for act in self._known)
        digests: dict[tuple[bool, int], Any] = {}
        told = {act: repr(act).encode() for act in self._known}
        for act in self.acts:
            digests.setdefault((False, 0) if whole else (act.role == "server", act.rank), hashlib.sha256()).update(told[act])
        return hashlib.sha256("".join(f"{name}{own.hexdigest()}" for name, own in sorted(digests.items())).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Carried:
    """Sizes and versions that accompany a message."""

    nbytes: int = 0
    versions: tuple[int, ...] = ()
    """For each gradient of a push, the number of the server's updates in the parameters that it was computed from."""
    part: Part = (0, 0, 0)
    """Steps whose gradients a push holds."""
    answer_nbytes: int = 0
    """Bytes of a look-up's answer."""


NOTHING = Carried()
Post = Callable[[int, Message, Carried], None]
"""Function that sends a message, with what it carries, to the server of this number."""
Answer = Callable[[str, int, Message, Carried], None]
"""Function that sends a message, with what it carries, to a trainer or sender, named by role and rank."""


class Actor:
    """A role that handles events in order of arrival, and executes the operations that its decider starts.

    It is idle until ``hear``, then busy until no work is left. The decider gets an event once the work on all
    earlier ones has ended.
    """

    def __init__(self, clock: Clock, decider: RoleDecider, job: Job) -> None:
        self.decider = decider
        self.spans: list[Span] = []
        self.order: Order | None = None
        """Order to which acts are added; ``None`` to record no acts."""
        self._clock = clock
        self._job = job
        self._inbox: deque[tuple[Event, Carried]] = deque()
        self._to_do: deque[Operation] = deque()
        self._busy = False
        self._took_ns = 0
        """Time in ns of the operation under way, or of the one that has just ended."""

    def hear(self, event: Event, carried: Carried = NOTHING) -> None:
        """Receive an event, with what its message carries."""
        self._inbox.append((event, carried))
        if not self._busy:
            self._busy = True
            self._work()

    def _work(self) -> None:
        while True:
            while self._to_do:
                operation = self._to_do[0]
                self._took_ns = self._job.costs.took_ns(self.decider.role, self.decider.rank, operation, self._nbytes(operation))
                if self._took_ns:
                    self._clock.timeout(self._took_ns).callbacks.append(lambda _: self._go_on())
                    return
                self._end(self._to_do.popleft())
            if not self._inbox:
                self._busy = False
                self._idle()
                return
            event, carried = self._inbox.popleft()
            self._begin(event, carried)
            self._to_do.extend(self.decider.on(self._clock.now, event))

    def _go_on(self) -> None:
        self._end(self._to_do.popleft())
        self._work()

    def _end(self, operation: Operation) -> None:
        if self.order is not None and (act := act_of(self.decider.role, self.decider.rank, operation)) is not None:
            self.order.add(act)
        self._do(operation)

    def _begin(self, event: Event, carried: Carried) -> None:
        """Prepare for an event that the decider gets next."""

    def _idle(self) -> None:
        """Called when no work is left."""

    def _nbytes(self, operation: Operation) -> int:  # noqa: ARG002  # a server overrides it
        """See ``Costs``."""
        return 0

    def _do(self, operation: Operation) -> None:
        """Carry out an operation whose time has passed."""
        raise NotImplementedError
