"""Which host of a job has what, as ``--servers`` and ``--workers`` say it, and what of that is this machine's."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from fleetbench.errors import ConfigError, EnvironmentLacks
from real.servers import hosts
from real.servers.hosts import Placement, place, require_addresses


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make this machine the one of these names or addresses."""

    def be(*own: str) -> None:
        monkeypatch.setattr(hosts, "own_among", lambda names: [number for number, name in enumerate(names) if name in own])

    return be


def test_every_host_finds_its_part_in_one_line(machine: Callable[..., None]) -> None:
    """Servers by their place in the list, trainers numbered host by host; together the hosts have each process once."""
    line = ("10.0.0.1:7164, 10.0.0.2:7164,10.0.0.1:7165", "10.0.0.2:2,10.0.0.3:3,10.0.0.4")
    found = {}
    for host in ("10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"):
        machine(host)
        placement = place(*line)
        assert placement.endpoints == ("10.0.0.1:7164", "10.0.0.2:7164", "10.0.0.1:7165")
        assert (len(placement.workers), placement.is_spread) == (6, True)
        found[host] = (placement.own_servers, placement.own_trainers)
    assert found == {"10.0.0.1": ((0, 2), ()), "10.0.0.2": ((1,), (0, 1)), "10.0.0.3": ((), (2, 3, 4)), "10.0.0.4": ((), (5,))}


def test_two_counts_are_all_on_this_machine() -> None:
    """Nothing is spread, and every server has a port of its own on the loopback."""
    placement = place("2", "3")
    assert (placement.own_servers, placement.own_trainers, placement.is_spread) == ((0, 1), (0, 1, 2), False)
    assert {endpoint.partition(":")[0] for endpoint in placement.endpoints} == {"127.0.0.1"}
    assert len(set(placement.endpoints)) == 2


@pytest.mark.parametrize(
    ("servers", "workers", "named"),
    [
        ("0", "2", "--servers: must be at least 1"),
        ("1", "0", "--workers: must be at least 1"),
        ("2", "a:1", "--servers: is no host:port"),
        ("a:65536", "a:2", "--servers: is no host:port"),
        ("a:7164", "a:6171", "--workers: is no host:count"),
        ("127.0.0.1:7164", "a:2", "--servers: is every machine itself"),
        ("a:7164", "a:1,localhost:2", "--workers: is every machine itself"),
        ("0.0.0.0:7164", "a:1", "--servers: is every machine itself"),
        ("b:7164", "c:1,d:1", "this machine is none of these hosts"),
    ],
)
def test_lists_that_make_no_sense_are_refused(servers: str, workers: str, named: str, machine: Callable[..., None]) -> None:
    """The message names the option and what is wrong with it, and there is a hint what to write."""
    machine("a", "127.0.0.1", "localhost", "0.0.0.0")  # noqa: S104  # a name in a list
    with pytest.raises(ConfigError) as raised:
        place(servers, workers)
    assert named in str(raised.value)
    assert raised.value.hint


def test_an_address_that_is_taken_is_found_before_anything_starts() -> None:
    """Free ones are left free."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EnvironmentLacks, match="the port cannot be taken") as raised:
            require_addresses(place(f"127.0.0.1:{port}", "127.0.0.1:1"))
        assert (raised.value.value, bool(raised.value.hint)) == (f"127.0.0.1:{port}", True)
    free = place(f"127.0.0.1:{port}", "127.0.0.1:1")
    for _ in range(2):
        require_addresses(free)


def test_a_name_that_is_the_loopback_here_serves_no_other_host() -> None:
    """As the own name of a host is that lists itself under 127.0.1.1; alone it would do."""
    spread = Placement(endpoints=("localhost:7164",), workers=("a",), own=frozenset(["localhost"]))
    with pytest.raises(EnvironmentLacks, match="loopback") as raised:
        require_addresses(spread)
    assert "address instead of its name" in str(raised.value.hint)


def test_names_are_said_with_their_hosts_where_there_are_several(machine: Callable[..., None]) -> None:
    """A rank and a server of a spread job; anything else, and one machine's, as they are."""
    machine("a")
    placement = place("a:1,b:2", "b:1,c:2")
    names = ("server 1", "rank 0", "rank 2", "rank 7", "host c")
    assert [placement.located(name) for name in names] == ["server 1 on b", "rank 0 on b", "rank 2 on c", "rank 7", "host c"]
    assert place("1", "1").located("rank 0") == "rank 0"
