"""Longest chain: the exact time of a collective's longest chain of messages, for every size.

Around a ring, a message leaves its sender's port once its bytes are sent and arrives a latency later. The
sender's next message starts when the port is free, and the message that forwards the data starts when the
data have arrived. In rounds of exchanges and on trees, both ends continue when a message has arrived. A
collective ends with its longest chain of messages. Each chain takes ``latency_ns + nbytes * ns_per_byte``, so
the longest, over all sizes, is the upper envelope of a few lines.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Pace:
    """Time of one chain of messages: a latency, and nanoseconds per byte of the collective."""

    latency_ns: int
    ns_per_byte: Fraction

    def at(self, latency: int, nbytes: int) -> Fraction:
        """Return the chain's weighted cost: ``latency * latency_ns + nbytes * ns_per_byte``.

        With a ``latency`` of 1, this is the chain's time in ns for ``nbytes`` bytes.
        """
        return latency * self.latency_ns + nbytes * self.ns_per_byte


Longest = Callable[[int, int], Pace]
"""Function that returns the longest chain for given weights of latency and bytes; see ``Pace.at``."""
Message = tuple[int, int, Pace]
"""A message: rank of the sender, rank of the receiver, and pace."""


def envelope(longest: Longest) -> tuple[Pace, ...]:
    """Return the chains that are longest at some size, in order of that size, from zero bytes on."""
    return tuple(dict.fromkeys(_between(longest, longest(1, 0), longest(0, 1))))


def _between(longest: Longest, small: Pace, large: Pace) -> list[Pace]:
    rises, falls = large.ns_per_byte - small.ns_per_byte, small.latency_ns - large.latency_ns
    if rises <= 0 or falls <= 0:
        return [small, large]
    meets = falls / rises
    latency, nbytes = meets.denominator, meets.numerator
    highest = longest(latency, nbytes)
    if highest.at(latency, nbytes) <= small.at(latency, nbytes):
        return [small, large]
    return [*_between(longest, small, highest), *_between(longest, highest, large)]


def around_ring(num_messages: int, hops: Sequence[Pace]) -> Longest:
    """Return a function for the longest chain of ``num_messages`` messages around a ring, whose ranks forward data.

    In a chain, a message is followed by the next one on the same hop, which waits for the port, or by the one
    that carries its data over the next hop, which waits for the arrival. So a chain covers a window of
    consecutive hops that a chunk passes in turn, and all remaining messages are on the hop in the window
    whose port takes longest. The latencies in a window add up, and each faster hop subtracts the time that
    its port saves.
    """
    unit = math.lcm(*(hop.ns_per_byte.denominator for hop in hops))
    around = [hop for _ in range(3) for hop in hops]
    slopes = [int(hop.ns_per_byte * unit) for hop in around]
    latencies_ns = 2 * sum(hop.latency_ns for hop in hops)  # upper bound for any window

    def longest(latency: int, nbytes: int) -> Pace:
        best = Pace(0, Fraction(0))
        for level in sorted(set(slopes), reverse=True):
            remaining = Fraction(level, unit)
            if best.at(latency, nbytes) > latency * latencies_ns + nbytes * num_messages * remaining:
                break  # no chain whose slowest hop has this level or a lower one is longer
            gains = [latency * unit * hop.latency_ns + nbytes * (slope - level) for hop, slope in zip(around, slopes, strict=True)]
            begin, end = _best_window(gains, [slope == level for slope in slopes], num_messages)
            window_ns = Fraction(sum(slopes[begin:end]), unit)
            chain = Pace(sum(hop.latency_ns for hop in around[begin:end]), window_ns + (num_messages - (end - begin)) * remaining)
            best = max(best, chain, key=lambda chain: (chain.at(latency, nbytes), chain.latency_ns, chain.ns_per_byte))
        return best

    return longest


def _best_window(gains: Sequence[int], is_level: Sequence[bool], longest: int) -> tuple[int, int]:
    """Return start and end of the window of at most ``longest`` hops, one of them level, with the largest gains."""
    until = [0, *accumulate(gains)]
    best, chosen = None, (0, 0)
    starts: deque[int] = deque()
    """Possible starts of the best window, in ascending order of the sums of gains before them."""
    entered = 0
    for end, has_level in enumerate(is_level):
        if has_level:  # a window that ends here or later may begin anywhere up to here
            for start in range(entered, end + 1):
                while starts and until[starts[-1]] >= until[start]:
                    starts.pop()
                starts.append(start)
            entered = end + 1
        while starts and starts[0] <= end - longest:
            starts.popleft()
        if starts and (best is None or until[end + 1] - until[starts[0]] > best):
            best, chosen = until[end + 1] - until[starts[0]], (starts[0], end + 1)
    return chosen


def through_rounds(rounds: Sequence[Sequence[Message]]) -> Longest:
    """Return a function for the longest chain through rounds of messages.

    Both ends of a message continue when it has arrived.
    """
    paces = list(dict.fromkeys(pace for messages in rounds for _, _, pace in messages))
    unit = math.lcm(*(pace.ns_per_byte.denominator for pace in paces))
    slopes = [int(pace.ns_per_byte * unit) for pace in paces]
    places = {pace: place for place, pace in enumerate(paces)}
    placed = [[(sender, receiver, places[pace]) for sender, receiver, pace in messages] for messages in rounds]

    def longest(latency: int, nbytes: int) -> Pace:
        weighted = [
            (latency * unit * pace.latency_ns + nbytes * slope, pace.latency_ns, slope) for pace, slope in zip(paces, slopes, strict=True)
        ]
        nothing = (0, 0, 0)  # weighted time, sum of latencies in ns, and time on ports in 1 / unit ns per byte
        ready: dict[int, tuple[int, int, int]] = {}
        for messages in placed:
            before = dict(ready)
            for sender, receiver, place in messages:
                begun, takes = max(before.get(sender, nothing), before.get(receiver, nothing)), weighted[place]
                arrived = (begun[0] + takes[0], begun[1] + takes[1], begun[2] + takes[2])
                for end in (sender, receiver):
                    ready[end] = max(arrived, ready.get(end, nothing))
        _, latency_ns, slope = max(ready.values(), default=nothing)
        return Pace(latency_ns, Fraction(slope, unit))

    return longest
