"""Links of servers' hosts: the nanoseconds of ``SharedPorts``, which looks at all transfers whenever one starts or ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from random import Random

from sim.clock import Clock
from sim.network.links import Port
from sim.network.sharing import SharedPorts
from sim.servers.ports import ServerPorts

SERVERS = 1000
"""Number of the first server's host."""


@dataclass(frozen=True, slots=True)
class Message:
    """A transfer, so long after what caused it, and what its end causes."""

    ports: tuple[Port, ...]
    alone_ns: Fraction
    after_ns: int
    causes: tuple[Message, ...]


def messages(random: Random) -> list[Message]:
    """Pushes to several servers at once, and messages either way, some of which cause others; few sizes make many fall together."""
    trainers, servers = random.choice([1, 3, 10, 40]), random.choice([1, 1, 2, 3, 5])
    has_ties = random.random() < 0.6
    sizes = [Fraction(random.randint(0, 300), random.choice([1, 1, 3, 7])) for _ in range(3)]

    def message(trainer: int, server: int, is_push: bool, depth: int) -> Message:
        ends = (("inter", trainer), ("inter", SERVERS + server))
        (_, source), (_, target) = ends if is_push else reversed(ends)
        size = random.choice(sizes) if has_ties else Fraction(random.randint(0, 10_000), random.choice([1, 3, 7]))
        after = random.choice([0, 0, 100]) if has_ties else random.randint(0, 3000)
        causes = tuple(any_message(depth - 1) for _ in range(random.choice([0, 1, 2]))) if depth else ()
        return Message((("inter", source, "out"), ("inter", target, "in")), size, after, causes)

    def any_message(depth: int) -> Message:
        return message(random.randrange(trainers), random.randrange(servers), random.random() < 0.6, depth)

    found = []
    for _ in range(random.randint(1, 25)):
        trainer = random.randrange(trainers)
        found += [message(trainer, server, True, 0) for server in range(servers)] if random.random() < 0.3 else [any_message(3)]
    return found


def heard(first: list[Message], ports_of: Callable[[Clock], SharedPorts]) -> Counter[tuple[int, Message]]:
    """Ends of all transfers, each with its time."""
    clock = Clock()
    ports = ports_of(clock)
    ended = Counter[tuple[int, Message]]()

    def begin(message: Message) -> None:
        ports.transfer(message.ports, message.alone_ns).callbacks.append(lambda _: end(message))

    def end(message: Message) -> None:
        ended[clock.now, message] += 1
        for caused in message.causes:
            post(caused)

    def post(message: Message) -> None:
        clock.timeout(message.after_ns).callbacks.append(lambda _: begin(message))

    for message in first:
        post(message)
    clock.run()
    return ended


def test_every_transfer_ends_when_it_ends_among_shared_ports() -> None:
    """Random messages between up to 40 trainers and 5 servers, with and without ties."""
    for seed in range(40):
        first = messages(Random(seed))  # noqa: S311  # it has to be repeatable
        expected = heard(first, SharedPorts)
        assert heard(first, lambda clock: ServerPorts(clock, range(SERVERS, SERVERS + 5))) == expected, f"messages of seed {seed}"
