"""Turns: how collectives in flight together take the ports that they have in common.

A collective's messages follow each other, each a latency after the one before. A turn is one of them, on every port that its
collective passes. Ports carry turns in the order in which they arrive, so that one collective's bytes travel while another's latency
passes: n messages of x ns and a latency of a ns take n (x + a) ns alone, and k such collectives max(n (x + a) + (k - 1) x, k n x + a).
Where a collective has many messages, a turn stands for several; its latencies pass beside its bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import TypeVar

MOST = 30
"""Largest number of messages that have a turn each: those of a ring of 16 ranks."""
FEW = 8
"""Number of turns of a collective that has more messages, and of one whose bytes follow each other without a pause."""


Time = TypeVar("Time", int, Fraction)
"""Nanoseconds; a collective that compute slows is counted in parts of them."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Messages that take ports together; ns."""

    own_ns: int
    """Time from their arrival at the ports until they have left, where nothing is in the way."""
    busy_ns: int
    """Part of ``own_ns`` for which the busiest port is busy."""
    then_ns: int
    """Time from then until the next turn arrives, or the collective ends."""


@dataclass(frozen=True, slots=True)
class Window:
    """Two messages in flight, of which the next leaves when its receiver has told that it is done with the one before the last.

    What is told passes a device in which the sender's own data lies, up to ``queue_ns`` of it; see ``sim.network.gloo``.
    """

    latency_ns: int
    host_ns: int
    """Time that the receiver takes to be done with a message that has come."""
    queue_ns: int

    def next(self, arrived: Time, left: Time, done: Time) -> tuple[Time, Time]:
        """The earliest time at which the next turn may leave, and the time at which the receiver is done with this one.

        ``done``: the time at which it is done with the one before.
        """
        behind = min(max(done, left), done + self.queue_ns) if arrived <= done else done
        return behind + self.latency_ns, max(done, left + self.latency_ns) + self.host_ns


def taken_in_turns(latency_ns: int, busy_ns: int, messages: int) -> tuple[Turn, ...]:
    """The turns of so many messages, each followed by its part of the latency; without messages all latency follows the last byte."""
    if not messages:
        *others, last = taken_in_turns(0, busy_ns, FEW)
        return (*others, replace(last, then_ns=last.then_ns + latency_ns))
    messages = max(1, min(messages, busy_ns))
    number = messages if messages <= MOST else FEW
    counts = [(messages - 1) * index // max(number - 1, 1) for index in range(number)]  # the last message goes by itself

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
    """Time for which a port of this load is busy with a turn, rounded half up."""
    return turn.busy_ns if load == 1 else (2 * turn.busy_ns * load.numerator + load.denominator) // (2 * load.denominator)


def scaled(duration_ns: int, by: float) -> int:
    """``duration_ns`` times ``by``. Exact where ``by`` is 1, because no float holds a very long duration."""
    return duration_ns if by == 1.0 else math.floor(duration_ns * by + 0.5)
