"""Availability: which nodes are there when, from a trace, or drawn from rates.

Draws are counter-based (``fleetbench.stragglers``): a function of seed, node or zone, and number, so that all
policies see the same nodes come and go.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, groupby
from operator import attrgetter, itemgetter

import numpy as np

from fleetbench.churn import LONGEST, Churn
from fleetbench.stragglers import Integers, uniform
from sim.limits import at_most

MOST_CHANGES = 5_000_000
"""Largest number of times at which nodes leave or come, in one simulation."""
_LOSSES = 250
"""Number of preempted nodes by which the default duration is chosen, if replacements come at once."""
_UP, _DOWN = 2, 3
"""Purposes of draws; stragglers have 0 and 1."""


@dataclass(frozen=True, slots=True)
class Change:
    """Nodes that leave, and nodes that come, at one time. A node that is replaced at once is in both."""

    at_ns: int
    lost: tuple[int, ...]
    came: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Availability:
    """Changes in order of time. The first is at 0, with the nodes that are there at the start."""

    changes: tuple[Change, ...]
    end_ns: int

    def failures(self, *, of_all: bool, join_ns: int, least_nodes: int) -> int:
        """Return the number of losses that end a job: of any node that trains or, with ``of_all``, of the last one.

        A job starts with all nodes that are there, once these are ``least_nodes``. A node that comes later trains
        after ``join_ns``.
        """
        there, members, found = dict[int, int](), set[int](), 0
        for change in self.changes:
            if members:
                members.update(node for node, came in there.items() if came + join_ns <= change.at_ns)
            lost = members.intersection(change.lost)
            members -= lost
            if lost and not (of_all and members):
                found += 1
                members.clear()
            for node in change.lost:
                del there[node]
            there.update(dict.fromkeys(change.came, change.at_ns))
            if not members and len(there) >= least_nodes:
                members.update(there)
        return found


def availability(churn: Churn, nodes: int, seed: int) -> Availability:
    """Return the changes of a cluster of at most ``nodes`` nodes; a trace does not depend on the seed.

    Raises ``ConfigError`` for too many changes.
    """
    return _recorded(churn) if churn.trace else _drawn(churn, nodes, seed)


def _recorded(churn: Churn) -> Availability:
    """Return the changes of a trace. Nodes of a zone leave in the order in which they came."""
    start, numbers, there, found = churn.trace[0].at, count(), dict[str, deque[int]](), list[Change]()
    for at, rows in groupby(churn.trace, attrgetter("at")):
        lost, came = list[int](), list[int]()
        for row in rows:
            own = there.setdefault(row.zone, deque())
            lost += [own.popleft() for _ in range(len(own) - row.nodes)]
            new = [next(numbers) for _ in range(row.nodes - len(own))]
            own.extend(new)
            came += new
        found.append(Change(at - start, tuple(lost), tuple(came)))
    return Availability(tuple(found), churn.trace[-1].at - start)


def _drawn(churn: Churn, nodes: int, seed: int) -> Availability:
    """Return drawn changes: a node is there while neither it nor its zone is preempted."""
    assert churn.mean_up is not None
    end_ns = churn.duration or min(LONGEST, _LOSSES * churn.mean_up // nodes)
    zones = [tuple(node for node in range(nodes) if node * churn.zones // nodes == zone) for zone in range(churn.zones)]
    events = list(_events(churn.mean_up, churn.mean_down, [(node,) for node in range(nodes)], (seed, 0), end_ns))
    if churn.zone_mean_up is not None:
        events += _events(churn.zone_mean_up, churn.mean_down, zones, (seed, 1), end_ns)
    reasons, found = [0] * nodes, [Change(0, (), tuple(range(nodes)))]
    for at, group in groupby(sorted(events), itemgetter(0)):
        lost, came = list[int](), list[int]()
        for _, is_back, members in group:  # losses first
            for node in members:
                reasons[node] += -1 if is_back else 1
                if reasons[node] == (0 if is_back else 1):
                    (came if is_back else lost).append(node)
        found.append(Change(at, tuple(lost), tuple(came)))
    return Availability(tuple(found), end_ns)


def _events(
    up_ns: int, down_ns: int, groups: list[tuple[int, ...]], key: tuple[int, int], end_ns: int
) -> Iterator[tuple[int, bool, tuple[int, ...]]]:
    """Yield when each group of nodes is preempted (False) and back (True), before ``end_ns``."""
    size = 16 + int(1.2 * end_ns / (up_ns + down_ns))
    at_most(size * len(groups), MOST_CHANGES, "changes", "cluster.churn.duration", "a shorter duration")
    while (times := _times(up_ns, down_ns, len(groups), key, size))[:, -1].min() < end_ns:
        size *= 2
    for group, row in zip(groups, times.tolist(), strict=True):
        yield from ((at, bool(number % 2), group) for number, at in enumerate(row) if at < end_ns)


def _times(up_ns: int, down_ns: int, num: int, key: tuple[int, int], size: int) -> Integers:
    """Return times at which ``num`` groups are preempted and back in turn, shape ``(num, 2 * size)``."""
    who, numbers = np.arange(num), np.arange(1, size + 1)
    ups, downs = (-mean * np.log1p(-uniform(*key, purpose, who, numbers)) for mean, purpose in ((up_ns, _UP), (down_ns, _DOWN)))
    spans = np.stack([np.maximum(ups, 1.0), downs], axis=2).reshape(num, 2 * size)
    return np.cumsum(np.rint(spans).astype(np.int64), axis=1)
