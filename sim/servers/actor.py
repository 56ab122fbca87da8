"""Actor: a role of a job on the simulated clock, which does one thing after the other; and the job that all of them execute."""

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
    """Nanoseconds that an operation takes, asked once per operation, in the order in which they begin."""

    def took_ns(self, role: Role, rank: int, operation: Operation, nbytes: int) -> int:
        """``nbytes``: of the push, or of the answer, that a server's operation is about; 0 where it is about none."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A time for every message that a server hears about, and one for every byte; trainers' and senders' own work."""

    push_ns: int = 0
    """A server's work on a push, however small."""
    push_ns_per_byte: float = 0.0
    answer_ns: int = 0
    """Time of a server's work on each answer to a pull or look-up, whatever its size."""
    answer_ns_per_byte: float = 0.0
    update_ns: int = 0
    """A trainer's own update, in GeoSGD."""
    merge_ns: int = 0
    """A sender's work on a push."""
    install_ns: int = 0
    """A sender's work on what it pulled."""

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
    """Costs from a layer table: an update over all parameters takes ``table.update``, one over a part its share by bytes.

    ``gradient_bytes``: of one step's gradient over all servers together. ``host_ns_per_byte``: a server's own work on what it
    receives and sends.
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
    """Times of reading a batch, forward and backward. Those of updates are in ``costs``."""
    traffic: Traffic
    costs: Costs
    hosts: Hosts
    steps: range
    """Warm-up and counted steps; the counted ones start at 1."""
    draws: tuple[tuple[int, ...], ...]
    """X in units of 2^-24, by rank and step."""
    fetch_every: int = 1
    """Steps between two moments at which results are read back from the device."""
    waits_each_step: bool = False
    """A trainer waits after every step for its own push, and the pull after it: the closed loop."""


class Act(NamedTuple):
    """A role's operation on parameters, gradients or deltas that has ended; or ``forward``, as a trainer's begins."""

    role: Role
    rank: int
    kind: str
    payload: str | None = None
    of: int | None = None
    """The trainer that a server has done it for; none: all whose gradients have come."""
    num: int = 0
    """Gradients that it is about."""
    divisor: int = 1


_ACTS = frozenset(
    (role, kind)
    for role, kinds in {"trainer": "update skip", "sender": "merge install", "server": "update accumulate parameters rows"}.items()
    for kind in kinds.split()
)


def act_of(role: Role, rank: int, operation: Operation) -> Act | None:
    """The act that an operation is; none where it changes and tells nothing that is trained."""
    kind = str(operation.payload) if operation.kind == "send" else operation.kind
    if (role, kind) not in _ACTS:
        return None
    return Act(role, rank, kind, operation.payload, operation.rank, operation.count, operation.divisor)


class Order:
    """A job's acts, in the order in which they happened: with the data, all that its training depends on.

    Messages between two roles arrive as they were sent, so that the acts say what each of them carried.
    """

    def __init__(self) -> None:
        self.acts: list[Act] = []
        self._known: dict[Act, Act] = {}
        """There are few different ones, each of which is one object."""

    def add(self, act: Act) -> None:
        """One more."""
        self.acts.append(self._known.setdefault(act, act))

    def digest(self) -> str:
        """Hexadecimal. Equal where every server, and every trainer with its sender, has done the same acts one by one.

        With look-ups, where all acts are in one order: an evaluation reads tables from the servers.
        """
        whole = any(act.kind == "rows" for act in self._known)
        digests: dict[tuple[bool, int], Any] = {}
        told = {act: repr(act).encode() for act in self._known}
        for act in self.acts:
            digests.setdefault((False, 0) if whole else (act.role == "server", act.rank), hashlib.sha256()).update(told[act])
        return hashlib.sha256("".join(f"{name}{own.hexdigest()}" for name, own in sorted(digests.items())).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Carried:
    """Sizes and versions that come with a message."""

    nbytes: int = 0
    versions: tuple[int, ...] = ()
    """For each gradient of a push, updates that the server had made in what it was computed from."""
    part: Part = (0, 0, 0)
    """Steps whose gradients a push holds."""
    answer_nbytes: int = 0
    """Bytes of a look-up's answer."""


NOTHING = Carried()
Post = Callable[[int, Message, Carried], None]
"""Carries a message, and what comes with it, to a server of this number."""
Answer = Callable[[str, int, Message, Carried], None]
"""Carries a message, and what comes with it, to a trainer or sender, named by role and rank."""


class Actor:
    """Hears events in the order in which they come, and does what is decided.

    Idle, until ``hear``; then busy: while an operation takes its time, what comes in waits. An event
    is decided on when the work on all before it has ended.
    """

    def __init__(self, clock: Clock, decider: RoleDecider, job: Job) -> None:
        self.decider = decider
        self.spans: list[Span] = []
        self.order: Order | None = None
        """Where acts are noted."""
        self._clock = clock
        self._job = job
        self._inbox: deque[tuple[Event, Carried]] = deque()
        self._to_do: deque[Operation] = deque()
        self._busy = False
        self._took_ns = 0
        """By the operation that has just ended."""

    def hear(self, event: Event, carried: Carried = NOTHING) -> None:
        """An event, with what comes with it."""
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
        """The event is decided on next."""

    def _idle(self) -> None:
        """There is nothing left to do."""

    def _nbytes(self, operation: Operation) -> int:  # noqa: ARG002  # a server overrides it
        """See ``Costs``."""
        return 0

    def _do(self, operation: Operation) -> None:
        """Carry out an operation whose time has passed."""
        raise NotImplementedError
