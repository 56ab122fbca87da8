"""Sharing: transfers that are under way together divide the ports that they have in common.

Max-min fair, as long flows are: all speeds rise together, and those on the first port that is full
stay where they are while the others rise on. So n transfers over one port have 1 / n of it each,
and transfers without a port in common know nothing of each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import TypeVar

from simpy import Event

from sim.algorithms import Port
from sim.clock import Clock, half_up

T = TypeVar("T")


def fair_speeds(ports_of: Mapping[T, Sequence[Port]]) -> dict[T, Fraction]:
    """The max-min fair speed of every transfer, as a share of its speed alone; a port carries 1 in all."""
    users: dict[Port, list[T]] = {}
    for transfer, ports in ports_of.items():
        for port in ports:
            users.setdefault(port, []).append(transfer)
    crowds = list(dict.fromkeys(tuple(crowd) for crowd in users.values()))  # ports with the same users are as one
    speeds: dict[T, Fraction] = {}
    while crowds:
        shares = [_share(crowd, speeds) for crowd in crowds]
        share = min(shares)
        for transfer in crowds[shares.index(share)]:
            speeds.setdefault(transfer, share)
        crowds = [crowd for crowd in crowds if any(transfer not in speeds for transfer in crowd)]
    return speeds


def _share(crowd: Sequence[T], speeds: Mapping[T, Fraction]) -> Fraction:
    taken = sum((speeds[transfer] for transfer in crowd if transfer in speeds), Fraction(0))
    return (1 - taken) / sum(transfer not in speeds for transfer in crowd)


@dataclass(slots=True, eq=False)
class _Transfer:
    """A transfer under way."""

    ports: tuple[Port, ...]
    remaining_ns: Fraction
    """At the speed alone."""
    end: Event
    since_ns: int
    speed: Fraction = Fraction(0)
    timer: Event | None = None


class SharedPorts:
    """Transfers over ports that each carry 1 in all.

    A transfer is under way from ``transfer`` until its event triggers. Whenever one starts or ends,
    the progress of those that it shares with, directly or not, is integrated exactly; the time of
    each end is rounded once.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._users: dict[Port, dict[_Transfer, None]] = {}

    def transfer(self, ports: tuple[Port, ...], alone_ns: Fraction) -> Event:
        """Start a transfer that would take ``alone_ns`` with its ports for itself; the event is its end."""
        started = _Transfer(ports, alone_ns, self._clock.event(), self._clock.now)
        for port in ports:
            self._users.setdefault(port, {})[started] = None
        self._share_among(self._connected(started))
        return started.end

    def _connected(self, transfer: _Transfer) -> dict[_Transfer, None]:
        """All that share a port with it, or with one that does; itself among them."""
        found: dict[_Transfer, None] = {transfer: None}
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

    def _share_among(self, transfers: Mapping[_Transfer, None]) -> None:
        now_ns = self._clock.now
        for transfer, speed in fair_speeds({transfer: transfer.ports for transfer in transfers}).items():
            transfer.remaining_ns -= (now_ns - transfer.since_ns) * transfer.speed
            transfer.since_ns, transfer.speed = now_ns, speed
            delay_ns = half_up(transfer.remaining_ns / speed)
            transfer.timer = self._clock.timeout(max(delay_ns, 0))  # below 0 where the end before this one was rounded up past it
            transfer.timer.callbacks.append(partial(self._end, transfer))

    def _end(self, transfer: _Transfer, timer: Event) -> None:
        if timer is not transfer.timer:  # a transfer that started or ended since moved this end
            return
        others = self._connected(transfer)
        del others[transfer]
        for port in transfer.ports:
            del self._users[port][transfer]
        transfer.end.succeed()
        self._share_among(others)
