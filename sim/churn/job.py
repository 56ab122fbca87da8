"""Job: one training on nodes that leave and come back, in integer nanoseconds.

A job waits until enough nodes are there, starts with all of them, and then does rounds and checkpoints in
turn. Local steps have rounds of K steps, other strategies of one update. At time 0 it starts at once.

- ``synchronous``: the loss of a node ends the job. What was done since the last checkpoint is lost. The job
  restarts with the nodes that are there. A node that comes during training is taken in by a restart.
- ``elastic``: the round continues without a lost node, whose own steps of the round are lost. A new node joins
  after ``join_time`` at the end of a round. Only the loss of all trainers ends the job, as above: no peer then
  has the state. With fewer than ``least_nodes`` trainers the others wait, and keep theirs.

What ends at the instant of a loss is complete. The time of every node that is there, which is what is paid for,
goes to one of ``CAUSES``.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from fleetbench.churn import Churn
from sim.churn.availability import Availability

Kind = Literal["synchronous", "elastic"]
CAUSES = ("useful", "lost_steps", "checkpoints", "restarts", "waiting", "joining")
"""Uses of a node's time: rounds whose result survives, and rounds whose result is lost; checkpoints; restarts,
with regrouping; waiting for ``least_nodes``; and being there before the job takes the node in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Reaction of a job to the loss and the return of nodes."""

    kind: Kind
    interval_ns: int
    """Time of rounds between two checkpoints, rounded up to whole rounds."""
    rejoin: Literal["checkpoint", "restart"] = "checkpoint"
    """As in ``Churn``."""


@dataclass(slots=True)
class Job:
    """State of a job. ``run`` takes it to the end; ``spent_ns`` and ``useful_rounds`` are its results."""

    churn: Churn
    available: Availability
    round_ns: Callable[[int], int]
    """Time of a round in ns by number of nodes."""
    policy: Policy
    spent_ns: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0))
    """Time of all nodes together by cause, in ns."""
    useful_rounds: int = 0
    """Rounds whose result survives, summed over nodes."""
    clock: int = 0
    there: dict[int, int] = field(default_factory=dict)
    """Nodes that are there, with the time at which they came."""
    members: set[int] = field(default_factory=set)
    """Nodes that train."""
    _next: int = 0
    _next_at: int = 0
    """Index and time of the next change; the time of a missing one is the end."""
    _since: int = 0
    """Number of rounds since the last checkpoint."""
    _fresh: int = 0
    """Rounds since the last checkpoint, summed over nodes; ``_fresh_ns`` is their time."""
    _fresh_ns: int = 0
    _regroups: bool = False

    def run(self) -> None:
        """Simulate to the end of the availability. Work since the last checkpoint then counts as useful."""
        while self.clock < self.available.end_ns:
            while self._next_at <= self.clock:  # the end is later, so a node leaves or comes
                self._lose(self._change())
            if not self.members:
                self._start()
            elif self._is_elastic and (self._admit() or self._regroups):
                self._regroups = False
                self._spend(self.churn.regroup_time, "restarts")
            elif len(self.members) < self.churn.least_nodes:
                self._spend(min(self._next_at, self._next_ready) - self.clock, "waiting")
            else:
                self._train()
        self._commit()

    @property
    def _is_elastic(self) -> bool:
        return self.policy.kind == "elastic"

    @property
    def _next_ready(self) -> int:
        """Time at which the next new node can join."""
        came = (at for node, at in self.there.items() if node not in self.members)
        return min(came, default=self.available.end_ns) + self.churn.join_ns

    def _change(self) -> set[int]:
        """Apply the next change, and return the members that it takes."""
        changes, end_ns = self.available.changes, self.available.end_ns
        change = changes[self._next]
        self._next += 1
        self._next_at = min(end_ns, changes[self._next].at_ns) if self._next < len(changes) else end_ns
        for node in change.lost:
            del self.there[node]
        self.there.update(dict.fromkeys(change.came, change.at_ns))
        lost = self.members.intersection(change.lost)
        self.members -= lost
        return lost

    def _lose(self, lost: set[int]) -> bool:
        """React to the loss of members; return whether it ends the job."""
        if not lost or (self._is_elastic and self.members):
            self._regroups |= bool(lost)
            return False
        self.spent_ns["lost_steps"] += self._fresh_ns
        self._fresh = self._fresh_ns = 0
        self.members.clear()
        return True

    def _commit(self) -> None:
        self.useful_rounds += self._fresh
        self.spent_ns["useful"] += self._fresh_ns
        self._fresh = self._fresh_ns = self._since = 0

    def _charge(self, took: int, cause: str) -> None:
        """Let time pass in which no node leaves or comes."""
        self.clock += took
        self.spent_ns["joining"] += took * (len(self.there) - len(self.members))
        if cause == "round":
            self._fresh_ns += took * len(self.members)
        else:
            self.spent_ns[cause] += took * len(self.members)

    def _spend(self, took: int, cause: str) -> bool:
        """Let time pass, with its changes; return whether the job is still there afterwards, before the end."""
        begin = self.clock
        until = min(begin + took, self.available.end_ns)
        while self._next_at < until:
            self._charge(self._next_at - self.clock, cause)
            lost = self._change()
            if cause == "round" and self._is_elastic:
                self._fresh_ns -= len(lost) * (self.clock - begin)
                self.spent_ns["lost_steps"] += len(lost) * (self.clock - begin)
            if self._lose(lost):
                return False
        self._charge(until - self.clock, cause)
        return until == begin + took

    def _start(self) -> None:
        self.members = set(self.there)
        if len(self.members) < self.churn.least_nodes:
            self._charge(self._next_at - self.clock, "waiting")
            self.members.clear()
        elif self.clock:
            self._spend(self.churn.restart_time, "restarts")
        self._since, self._regroups = 0, False

    def _admit(self) -> bool:
        """Take in the nodes that are ready, and return whether there are any."""
        if len(self.there) == len(self.members):
            return False
        ready = {node for node, came in self.there.items() if came + self.churn.join_ns <= self.clock} - self.members
        self.members |= ready
        return bool(ready)

    def _train(self) -> None:
        """Train until a node leaves or can be taken in, or do the round or checkpoint in which this happens."""
        round_ns = self.round_ns(len(self.members))
        every = max(1, -(-self.policy.interval_ns // round_ns))
        until = min(self._next_at, self._next_ready) if self._is_elastic else self._next_at
        self._skip(round_ns, every, until)
        if self.clock == until:
            return
        if self._since < every:
            if self._spend(round_ns, "round"):
                self._fresh += len(self.members)
                self._since += 1
        elif self._spend(self.churn.checkpoint_time, "checkpoints"):
            self._commit()
            if self._takes_in:
                self.members.clear()

    @property
    def _takes_in(self) -> bool:
        """Whether the job restarts after the next checkpoint, to take in new nodes."""
        return not self._is_elastic and self.policy.rejoin == "checkpoint" and len(self.there) > len(self.members)

    def _skip(self, round_ns: int, every: int, until: int) -> None:
        """Do all rounds and checkpoints that end by ``until``, in one step; to the next checkpoint if it takes in nodes."""
        span, left, checkpoint_ns = until - self.clock, max(0, every - self._since), self.churn.checkpoint_time
        if not self._takes_in and span >= (first := left * round_ns + checkpoint_ns):
            cycles, span = divmod(span - first, every * round_ns + checkpoint_ns)
            self._rounds(left + cycles * every, round_ns)
            self._charge((cycles + 1) * checkpoint_ns, "checkpoints")
            self._commit()
            left = every
        self._rounds(min(left, span // round_ns), round_ns)

    def _rounds(self, num: int, round_ns: int) -> None:
        self._charge(num * round_ns, "round")
        self._fresh += num * len(self.members)
        self._since += num
