"""Sharing: messages of trainers and parameter servers that are under way together divide the ports that they have in common.

Max-min fair, as long flows are: the rates of all rise together, and those on the first port that is
full stay where they are while the others rise on (Bertsekas and Gallager, Data Networks, section 6.5.2).
So n transfers have 1 / n of a port each, one that has less elsewhere leaves what it does not need, and
transfers without a port in common know nothing of each other.
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
    """The max-min fair speed of every transfer, as a share of its speed alone, at which it fills each of its ports."""
    users: dict[Port, list[T]] = {}
    for transfer, ports in ports_of.items():
        for port in ports:
            users.setdefault(port, []).append(transfer)
    crowds = list(dict.fromkeys(map(tuple, users.values())))  # ports alike are as one
    speeds = {transfer: Fraction(1) for transfer, ports in ports_of.items() if not ports}
    while crowds:
        level, crowd = min(((_level(crowd, speeds), crowd) for crowd in crowds), key=itemgetter(0))
        for transfer in crowd:
            speeds.setdefault(transfer, level)
        crowds = [crowd for crowd in crowds if any(transfer not in speeds for transfer in crowd)]
    return speeds


def _level(crowd: Sequence[T], speeds: Mapping[T, Fraction]) -> Fraction:
    """The speed of each transfer that still rises, where the port on which this crowd meets becomes full."""
    known = [speeds[transfer] for transfer in crowd if transfer in speeds]
    return (1 - sum(known, Fraction(0))) / (len(crowd) - len(known))


@dataclass(slots=True, eq=False)
class Transfer:
    """A transfer under way; ``end`` triggers when it is over."""

    ports: tuple[Port, ...]
    remaining_ns: Fraction
    """Time that is left at the speed that it has alone."""
    end: Event
    since_ns: int
    speed: Fraction = Fraction(0)
    timer: Event | None = None
    due_ns: int | None = None
    """Time at which the timer goes off; none while no timer is set."""


class SharedPorts:
    """Transfers over ports that each carry 1 in all.

    A transfer is under way from ``transfer`` until its event triggers. Whenever one starts or ends,
    the progress of those that it shares with, directly or not, is integrated exactly; the time of
    each end is rounded once.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._users: dict[Port, dict[Transfer, None]] = {}

    def transfer(self, ports: tuple[Port, ...], alone_ns: Fraction) -> Event:
        """Start a transfer that would take ``alone_ns`` with its ports for itself; the event is its end."""
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
        """All that share a port with it, or with one that does; itself among them."""
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
            if transfer.due_ns == self._clock.now:  # it ends now, whatever else begins now: no order among these is a meaning
                continue
            self._integrate(transfer)
            transfer.speed = speed
            remaining_ns = half_up(transfer.remaining_ns / transfer.speed)
            delay_ns = max(remaining_ns, 0)  # below 0 where the end before this one was rounded up past it
            transfer.due_ns = self._clock.now + delay_ns
            transfer.timer = self._clock.timeout(delay_ns)
            transfer.timer.callbacks.append(partial(self._end, transfer))

    def _end(self, transfer: Transfer, timer: Event) -> None:
        if timer is not transfer.timer:  # a transfer that started or ended since moved this end
            return
        others = self._connected(transfer)
        del others[transfer]
        for port in transfer.ports:
            del self._users[port][transfer]
        transfer.end.succeed()
        self._share_among(others)
