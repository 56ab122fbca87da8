"""The address that a server listens on: names, what is none, and what is taken."""

from __future__ import annotations

import socket

import pytest
import zmq
from server_job import TOKEN, ServerThread, free_port

from fleetbench.errors import ConfigError, EnvironmentLacks
from real.servers.addresses import resolve
from real.servers.door import Door
from real.servers.links import LinkOptions, Links
from real.servers.server_options import ServerOptions


def test_a_server_listens_on_a_name() -> None:
    """What is bound by libzmq are addresses alone; ``localhost`` becomes one, and who connects to it gets through."""
    port = free_port()
    said: list[str] = []
    door = Door(f"localhost:{port}", TOKEN, encrypted=False, say=said.append)
    try:
        door.bind()
        family = socket.AF_INET if "127.0.0.1" in said[0] else socket.AF_INET6
        with socket.socket(family) as caller:
            caller.settimeout(5)
            caller.connect(("localhost", port))
    finally:
        door.close()


@pytest.mark.parametrize(
    ("endpoint", "listens"),
    [
        ("127.0.0.1:6000", (socket.AF_INET, "127.0.0.1:6000")),
        ("0.0.0.0:6000", (socket.AF_INET, "0.0.0.0:6000")),
        ("[::1]:6000", (socket.AF_INET6, "[::1]:6000")),
    ],
)
def test_an_address_stays_what_it_is(endpoint: str, listens: tuple[socket.AddressFamily, str]) -> None:
    """Of both families, and also the one that means every network, where somebody writes it."""
    assert resolve(endpoint) == listens


def test_a_name_leads_to_its_address_of_the_older_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a host has both, trainers may be without the newer."""
    found = [(socket.AF_INET6, 1, 6, "", ("fd00::7", 6000, 0, 0)), (socket.AF_INET, 1, 6, "", ("10.0.0.7", 6000))]
    monkeypatch.setattr("socket.getaddrinfo", lambda *_arguments, **_named: found)
    assert resolve("node7:6000") == (socket.AF_INET, "10.0.0.7:6000")
    found.pop()
    assert resolve("node7:6000") == (socket.AF_INET6, "[fd00::7]:6000")


@pytest.mark.parametrize("endpoint", [":6000", "*:6000", "[]:6000", "node1", "node1:", "node1:http", ""])
def test_an_endpoint_without_a_host_or_a_port_is_refused(endpoint: str) -> None:
    """No host would be all of the machine's networks, which nobody asked for."""
    with pytest.raises(ConfigError, match="is no address to listen on"):
        resolve(endpoint)


def test_a_trainer_connects_by_the_family_that_its_server_listens_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses and names of both; a name that nobody knows yet may come to be known, and is no error."""
    names = {"old": [(socket.AF_INET, 1, 6, "", ("10.0.0.7", 6000))], "new": [(socket.AF_INET6, 1, 6, "", ("fd00::7", 6000, 0, 0))]}
    names["both"] = [*names["new"], *names["old"]]
    look_up = socket.getaddrinfo

    def found(host: str, *arguments: object, **named: object) -> object:
        if host == "nobody":
            raise socket.gaierror(-2, "Name or service not known")
        return names[host] if host in names else look_up(host, *arguments, **named)  # type: ignore[call-overload]  # as given

    monkeypatch.setattr("socket.getaddrinfo", found)
    families = {"127.0.0.1": False, "[::1]": True, "old": False, "new": True, "both": False, "nobody": False}
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    links = Links(context, LinkOptions(rank=0, endpoints=tuple(f"{host}:6000" for host in families), token=TOKEN))
    try:
        assert [bool(link.socket.ipv6) for link in links._links] == list(families.values())
    finally:
        links.close()
        context.destroy(linger=0)


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_trainer_finds_its_server_by_the_newer_family(encrypted: bool) -> None:
    """Over the loopback address of IPv6, where the machine has it."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
            endpoint = f"[::1]:{probe.getsockname()[1]}"
    except OSError:
        pytest.skip("this machine has no IPv6")
    server = ServerThread(ServerOptions(server=0, servers=1, trainers=1, endpoint=endpoint, token=TOKEN, encrypted=encrypted))
    server.start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    links = Links(context, LinkOptions(rank=0, endpoints=(endpoint,), token=TOKEN, encrypted=encrypted, startup_timeout_s=10.0))
    try:
        assert links.greet() == [False]
    finally:
        links.close()
        context.destroy(linger=0)
        server.abandon()


def test_a_name_that_leads_nowhere_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the endpoint, and what was wrong."""

    def fail(*_arguments: object, **_named: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", fail)
    with pytest.raises(EnvironmentLacks, match=r"(?s)Name or service not known.*node9:6000"):
        resolve("node9:6000")
