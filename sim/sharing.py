"""Sharing: transfers that are under way together divide the ports that they have in common.

Max-min fair, as long flows are: all speeds rise together, and those on the first port that is full
stay where they are while the others rise on. So n transfers over one port have 1 / n of it each,
and transfers without a port in common know nothing of each other. Where several flows together
were measured to carry more, or less, than one alone, a port carries that much.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import TypeVar

from simpy import Event

from sim.algorithms import Port
from sim.clock import Clock, half_up

T = TypeVar("T")
Capacity = Callable[[Port, int], Fraction]
"""What a port carries when so many transfers use it, as a multiple of what one alone gets."""


def _one(_port: Port, _users: int) -> Fraction:
    return Fraction(1)


def fair_speeds(ports_of: Mapping[T, Sequence[Port]], capacity: Capacity = _one) -> dict[T, Fraction]:
    """The max-min fair speed of every transfer, as a share of its speed alone, which none exceeds."""
    users: dict[Port, list[T]] = {}
    for transfer, ports in ports_of.items():
        for port in ports:
            users.setdefault(port, []).append(transfer)
    crowds = list(dict.fromkeys((tuple(crowd), capacity(port, len(crowd))) for port, crowd in users.items()))  # ports alike are as one
    speeds: dict[T, Fraction] = {}
    while crowds:
        shares = [min(Fraction(1), _share(crowd, carries, speeds)) for crowd, carries in crowds]
        share = min(shares)
        for transfer in crowds[shares.index(share)][0]:
            speeds.setdefault(transfer, share)
        crowds = [(crowd, carries) for crowd, carries in crowds if any(transfer not in speeds for transfer in crowd)]
    return speeds


def _share(crowd: Sequence[T], carries: Fraction, speeds: Mapping[T, Fraction]) -> Fraction:
    taken = sum((speeds[transfer] for transfer in crowd if transfer in speeds), Fraction(0))
    return (carries - taken) / sum(transfer not in speeds for transfer in crowd)


@dataclass(slots=True, eq=False)
class Transfer:
    """A transfer under way; ``end`` triggers when it is over."""

    ports: tuple[Port, ...]
    remaining_ns: Fraction
    """At the speed alone."""
    end: Event
    since_ns: int
    pace: Fraction = Fraction(1)
    """Of the speed that its ports allow, how much it uses."""
    speed: Fraction = Fraction(0)
    timer: Event | None = None


class SharedPorts:
    """Transfers over ports that each carry 1 in all, or what ``capacity`` says.

    A transfer is under way from ``transfer`` until its event triggers. Whenever one starts or ends,
    the progress of those that it shares with, directly or not, is integrated exactly; the time of
    each end is rounded once.
    """

    def __init__(self, clock: Clock, capacity: Capacity = _one) -> None:
        self._clock = clock
        self._capacity = capacity
        self._users: dict[Port, dict[Transfer, None]] = {}

    def transfer(self, ports: tuple[Port, ...], alone_ns: Fraction) -> Event:
        """Start a transfer that would take ``alone_ns`` with its ports for itself; the event is its end."""
        return self.start(ports, alone_ns).end

    def start(self, ports: tuple[Port, ...], alone_ns: Fraction, pace: Fraction = Fraction(1)) -> Transfer:
        """The same, at so much of the speed that its ports allow."""
        started = Transfer(ports, alone_ns, self._clock.event(), self._clock.now, pace)
        for port in ports:
            self._users.setdefault(port, {})[started] = None
        self._share_among(self._connected(started))
        return started

    def repace(self, transfer: Transfer, pace: Fraction) -> None:
        """From now on, a transfer under way uses so much of the speed that its ports allow; the rest is lost to all."""
        if not transfer.end.triggered:
            self._integrate(transfer)
            transfer.pace = pace
            self._share_among(self._connected(transfer))

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
        for transfer, speed in fair_speeds({transfer: transfer.ports for transfer in transfers}, self._capacity).items():
            self._integrate(transfer)
            transfer.speed = speed * transfer.pace
            delay_ns = half_up(transfer.remaining_ns / transfer.speed)
            transfer.timer = self._clock.timeout(max(delay_ns, 0))  # below 0 where the end before this one was rounded up past it
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
