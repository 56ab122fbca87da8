"""Sharing: how concurrent messages between trainers and parameter servers divide the ports that they share.

Their speeds are max-min fair, like those of long flows. All speeds rise together until a port is full; those
on that port stay as they are, and the others rise further (Bertsekas and Gallager, Data Networks, section
6.5.2). So each of n transfers has 1 / n of a port, a transfer that is slower because of another port leaves
the rest to the others, and transfers without a common port do not affect each other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from operator import itemgetter
from typing import TypeVar

from simpy import Event

from sim.clock import Clock, half_up
from sim.network.links import Port

T = TypeVar("T")


def fair_speeds(ports_of: Mapping[T, Sequence[Port]]) -> dict[T, Fraction]:
    """Return the max-min fair speed of every transfer, as a share of its speed alone.

    A transfer alone fills each of its ports.
    """
    users: dict[Port, list[T]] = {}
    for transfer, ports in ports_of.items():
        for port in ports:
            users.setdefault(port, []).append(transfer)
    crowds = list(dict.fromkeys(map(tuple, users.values())))  # ports with the same users count once
    speeds = {transfer: Fraction(1) for transfer, ports in ports_of.items() if not ports}
    while crowds:
        level, crowd = min(((_level(crowd, speeds), crowd) for crowd in crowds), key=itemgetter(0))
        for transfer in crowd:
            speeds.setdefault(transfer, level)
        crowds = [crowd for crowd in crowds if any(transfer not in speeds for transfer in crowd)]
    return speeds


def _level(crowd: Sequence[T], speeds: Mapping[T, Fraction]) -> Fraction:
    """Return the speed at which those transfers of ``crowd`` that have none in ``speeds`` fill their common port."""
    known = [speeds[transfer] for transfer in crowd if transfer in speeds]
    return (1 - sum(known, Fraction(0))) / (len(crowd) - len(known))


@dataclass(slots=True, eq=False)
class Transfer:
    """A transfer under way; ``end`` triggers when it is over."""

    ports: tuple[Port, ...]
    remaining_ns: Fraction
    """Remaining time in ns at the speed that the transfer has alone."""
    end: Event
    since_ns: int
    speed: Fraction = Fraction(0)
    timer: Event | None = None
    due_ns: int | None = None
    """Time in ns at which the timer goes off; ``None`` while no timer is set."""


class SharedPorts:
    """Transfers over ports that each have a capacity of 1.

    A transfer is under way from ``transfer`` until its event triggers. Whenever one starts or ends, the
    progress of all that share ports with it, directly or not, is integrated exactly; the time of each end is
    rounded once.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._users: dict[Port, dict[Transfer, None]] = {}

    def transfer(self, ports: tuple[Port, ...], alone_ns: Fraction) -> Event:
        """Start a transfer that takes ``alone_ns`` with its ports to itself, and return the event of its end."""
        started = Transfer(ports, alone_ns, self._clock.event(), self._clock.now)
        for port in ports:
            self._users.setdefault(port, {})[started] = None
        self._share_among(self._connected(started))
        return started.end

    def _integrate(self, transfer: Transfer) -> None:
        now_ns = self._clock.now
        transfer.remaining_ns -= (now_ns - transfer.since_ns) * transfer.speed
        transfer.since_ns = now_ns

    def _connected(self, transfer: Transfer) -> dict[Transfer, None]:
        """Return ``transfer`` and all transfers that share a port with it, directly or through others."""
        found: dict[Transfer, None] = {transfer: None}
        seen: set[Port] = set()
        waiting = [transfer]
        while waiting:
            for port in waiting.pop().ports:
                if port in seen:
                    continue
                seen.add(port)
                for user in self._users[port]:
                    if user not in found:
                        found[user] = None
                        waiting.append(user)
        return found

    def _share_among(self, transfers: Mapping[Transfer, None]) -> None:
        for transfer, speed in fair_speeds({user: user.ports for user in transfers}).items():
            if transfer.due_ns == self._clock.now:  # it ends now: the order of events at one time must not matter
                continue
            self._integrate(transfer)
            transfer.speed = speed
            remaining_ns = half_up(transfer.remaining_ns / transfer.speed)
            delay_ns = max(remaining_ns, 0)  # below 0 if the previous end was rounded up past this one
            transfer.due_ns = self._clock.now + delay_ns
            transfer.timer = self._clock.timeout(delay_ns)
            transfer.timer.callbacks.append(partial(self._end, transfer))

    def _end(self, transfer: Transfer, timer: Event) -> None:
        if timer is not transfer.timer:  # another start or end has moved this end
            return
        others = self._connected(transfer)
        del others[transfer]
        for port in transfer.ports:
            del self._users[port][transfer]
        transfer.end.succeed()
        self._share_among(others)
