"""Turns: how collectives in flight together take the ports that they have in common.

A collective's messages follow each other, each a latency after the previous one. A turn is one message, on
every port that its collective passes. A port carries turns in the order of their arrival, so that one
collective's bytes travel during another's latency. Alone, a collective of n messages, each with x ns on the
ports and a latency of a ns, takes n (x + a) ns; k such collectives take max(n (x + a) + (k - 1) x, k n x +
a). If a collective has many messages, a turn stands for several, and the latencies between these keep no port
busy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import TypeVar

MOST = 30
"""Largest number of messages of a collective that have a turn each: an all-reduce on a ring of 16 ranks has as many."""
FEW = 8
"""Number of turns of a collective that has more messages than ``MOST``, or whose bytes follow each other
without a pause."""


Time = TypeVar("Time", int, Fraction)
"""Type of a time in ns: a fraction for a collective that compute slows down."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One or more messages that take their ports together. Times are in ns."""

    own_ns: int
    """Time from the arrival of the messages at idle ports until they have left."""
    busy_ns: int
    """Part of ``own_ns`` for which the busiest port is busy."""
    then_ns: int
    """Time from when the messages have left until the next turn arrives, or the collective ends."""


@dataclass(frozen=True, slots=True)
class Window:
    """Limit of two messages in flight.

    A message leaves once its receiver has announced that it has processed the message before the previous
    one. In a device, the announcement queues behind up to ``queue_ns`` of the receiver's own data; see
    ``sim.network.gloo``.
    """

    latency_ns: int
    host_ns: int
    """Time in ns that the receiver takes to process a message that has arrived."""
    queue_ns: int

    def next(self, arrived: Time, left: Time, done: Time) -> tuple[Time, Time]:
        """Return when the next message may arrive at the ports, and when the receiver has processed this one.

        This message arrives there at ``arrived`` and has left at ``left``; the previous one is processed at
        ``done``.
        """
        behind = min(max(done, left), done + self.queue_ns) if arrived <= done else done
        return behind + self.latency_ns, max(done, left + self.latency_ns) + self.host_ns


def taken_in_turns(latency_ns: int, busy_ns: int, messages: int) -> tuple[Turn, ...]:
    """Return the turns of this many ``messages``, each followed by its part of the latency.

    Without messages, all latency follows the last byte.
    """
    if not messages:
        *others, last = taken_in_turns(0, busy_ns, FEW)
        return (*others, replace(last, then_ns=last.then_ns + latency_ns))
    messages = max(1, min(messages, busy_ns))
    number = messages if messages <= MOST else FEW
    counts = [(messages - 1) * index // max(number - 1, 1) for index in range(number)]  # the last message has its own turn

    def of(whole_ns: int, first: int, last: int) -> int:
        return whole_ns * last // messages - whole_ns * first // messages

    return tuple(
        Turn(
            of(busy_ns, first, last) + of(latency_ns, first, last - 1),
            of(busy_ns, first, last),
            of(latency_ns, last - 1, last),
        )
        for first, last in pairwise((*counts, messages))
    )


def busy_on(turn: Turn, load: Fraction) -> int:
    """Return the time in ns for which ``turn`` keeps a port with this ``load`` busy, rounded half up."""
    return turn.busy_ns if load == 1 else (2 * turn.busy_ns * load.numerator + load.denominator) // (2 * load.denominator)


def scaled(duration_ns: int, by: float) -> int:
    """Return ``duration_ns`` times ``by``: exactly if ``by`` is 1, because a float cannot hold a very long duration."""
    return duration_ns if by == 1.0 else math.floor(duration_ns * by + 0.5)
