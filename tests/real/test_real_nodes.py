"""Who is to blame for the end of a launch; and which interface leads to the other nodes of a job."""

from __future__ import annotations

import os

import pytest

from fleetbench.errors import EnvironmentLacks
from real.processes import joining
from real.processes.joining import interface_towards, is_loopback, own_among


def test_the_interface_towards_an_address() -> None:
    """Towards the loopback it is the loopback; an unknown name is an error with a hint."""
    assert interface_towards("127.0.0.1", 1) == "lo"
    with pytest.raises(EnvironmentLacks) as caught:
        interface_towards("no-such-host.invalid", 1)
    assert "GLOO_SOCKET_IFNAME" in str(caught.value.hint)


def test_a_name_that_is_the_loopback_here_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a host's own name that its system lists under 127.0.1.1; not where it is meant, or somebody has chosen an interface."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.setattr(joining, "interface_towards", lambda *_, **__: "lo")
    with pytest.raises(EnvironmentLacks, match="no other machine comes"):
        joining.take_interface("node0", 1)
    joining.take_interface("localhost", 1)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    joining.take_interface("node0", 1)


@pytest.mark.parametrize(
    ("host", "is_it"),
    [("localhost", True), ("127.0.0.1", True), ("[::1]", True), ("127.0.1.1", True), ("10.0.0.1", False), ("node0", False)],
)
def test_addresses_that_mean_the_machine_itself(host: str, is_it: bool) -> None:
    """Names other than localhost may mean any machine."""
    assert is_loopback(host) == is_it


def test_this_machine_is_found_among_hosts() -> None:
    """Addresses of this machine's interfaces, and no others."""
    assert own_among(["192.0.2.1", "127.0.0.1", "no-such-host.invalid"]) == [1]
