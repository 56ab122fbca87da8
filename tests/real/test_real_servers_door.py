"""The address that a server listens on: names, what is none, and what is taken."""

from __future__ import annotations

import socket

import pytest
from server_job import TOKEN, free_port

from fleetbench.errors import ConfigError, EnvironmentLacks
from real.servers.door import Door, resolve


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


def test_a_name_that_leads_nowhere_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the endpoint, and what was wrong."""

    def fail(*_arguments: object, **_named: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", fail)
    with pytest.raises(EnvironmentLacks, match=r"(?s)Name or service not known.*node9:6000"):
        resolve("node9:6000")
