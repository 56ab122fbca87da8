"""Sharing: transfers that are under way together divide the ports that they have in common.

Max-min fair, as long flows are: the rates of all rise together, and those on the first port that is
full stay where they are while the others rise on (Bertsekas and Gallager, Data Networks, section 6.5.2).
So n transfers that each fill a port alone have 1 / n of it each, one that a slower port elsewhere
holds back leaves what it does not need, and transfers without a port in common know nothing of each
other. Where several flows together were measured to carry more, or less, than one alone, a port
carries that much.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import TypeVar

from simpy import Event

from sim.clock import Clock, half_up
from sim.network.links import Port
from sim.network.work import Flow

T = TypeVar("T")
Capacity = Callable[[Port, int], Fraction]
"""What a port carries when so many transfers use it, as a multiple of what one alone gets."""
User = tuple[T, int | Fraction, int | Fraction]
"""Of a port: a transfer, what it takes of the port alone, and what more it takes for each bit/s more."""


def _one(_port: Port, _users: int) -> Fraction:
    return Fraction(1)


def fair_speeds(
    ports_of: Mapping[T, Sequence[Port]], capacity: Capacity = _one, flows: Mapping[T, Flow | None] | None = None
) -> dict[T, Fraction]:
    """The max-min fair speed of every transfer, as a share of its speed alone, which none exceeds.

    Without its flow, a transfer alone takes all of each of its ports, and all bring the same to them.
    """
    flow_of = {transfer: flow for transfer, flow in (flows or {}).items() if flow is not None}
    assert not flow_of or len(flow_of) == len(ports_of), "some transfers have a flow and others have none"
    are_alike = len({flow.bits_per_s for flow in flow_of.values()}) < 2  # whole numbers then do
    alone = {transfer: Fraction(1) if are_alike else flow_of[transfer].bits_per_s for transfer in ports_of}
    users: dict[Port, list[User[T]]] = {}
    for transfer, ports in ports_of.items():
        flow = flow_of.get(transfer)
        loads: Sequence[int | Fraction] = flow.loads if flow is not None and not flow.fills else [1] * len(ports)
        for port, load in zip(ports, loads, strict=True):
            users.setdefault(port, []).append((transfer, load, load if are_alike else load / alone[transfer]))
    crowds = list(dict.fromkeys((tuple(crowd), capacity(port, len(crowd))) for port, crowd in users.items()))  # ports alike are as one
    speeds = {transfer: Fraction(1) for transfer, ports in ports_of.items() if not ports}
    while crowds:
        levels = [_level(crowd, carries, speeds) for crowd, carries in crowds]
        level = min(levels)
        content = [transfer for transfer in ports_of if transfer not in speeds and alone[transfer] <= level]
        if content:
            speeds |= dict.fromkeys(content, Fraction(1))
        else:
            for transfer, _, _ in crowds[levels.index(level)][0]:
                speeds.setdefault(transfer, level / alone[transfer])
        crowds = [(crowd, carries) for crowd, carries in crowds if any(transfer not in speeds for transfer, _, _ in crowd)]
    return speeds


def _level(crowd: Sequence[User[T]], carries: Fraction, speeds: Mapping[T, Fraction]) -> Fraction:
    """How far the rates of those that still rise may rise, through the port that each fills most, until this one is full."""
    taken = sum((load * speeds[transfer] for transfer, load, _ in crowd if transfer in speeds), Fraction(0))
    return (carries - taken) / sum(rise for transfer, _, rise in crowd if transfer not in speeds)


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
    flow: Flow | None = None
    """What it takes of its ports alone; none: all of each."""
    speed: Fraction = Fraction(0)
    timer: Event | None = None
    due_ns: int | None = None
    """When the timer goes off."""


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

    def start(self, ports: tuple[Port, ...], alone_ns: Fraction, pace: Fraction = Fraction(1), flow: Flow | None = None) -> Transfer:
        """The same, at so much of the speed that its ports allow; all that share a port have a flow, or none has."""
        started = Transfer(ports, alone_ns, self._clock.event(), self._clock.now, pace, flow)
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
        ports_of, flows = {user: user.ports for user in transfers}, {user: user.flow for user in transfers}
        for transfer, speed in fair_speeds(ports_of, self._capacity, flows).items():
            if transfer.due_ns == self._clock.now:  # it ends now, whatever else begins now: no order among these is a meaning
                continue
            self._integrate(transfer)
            transfer.speed = speed * transfer.pace
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
