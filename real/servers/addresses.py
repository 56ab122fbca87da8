"""Addresses: what a server's ``host:port`` leads to. Of a host that has both families it is the older, for servers and trainers alike."""

from __future__ import annotations

import socket

from fleetbench.errors import ConfigError, EnvironmentLacks

LOCAL = "127.0.0.1"
"""This machine, to itself."""


def resolve(endpoint: str) -> tuple[socket.AddressFamily, str]:
    """``host:port`` with the host's address instead of its name, which libzmq does not look up for those who listen.

    Raises ``ConfigError`` for an endpoint without a host, which would be all of the machine's networks, or without a port,
    ``EnvironmentLacks`` for a name that leads nowhere.
    """
    host, _, port = endpoint.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or host == "*" or not port.isdecimal():
        hint = "host:port; 0.0.0.0 as host, should it be meant, is every network of this machine"
        raise ConfigError("is no address to listen on", "server", repr(endpoint), hint)
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, OverflowError, UnicodeError) as error:
        hint = "a name or an address of this machine, and a port below 65536"
        raise EnvironmentLacks(f"the server's host is not known: {error}", "server", endpoint, hint) from error
    family, *_, address = min(found, key=lambda one: one[0] != socket.AF_INET)
    return family, f"[{address[0]}]:{port}" if family == socket.AF_INET6 else f"{address[0]}:{port}"


def family_of(endpoint: str) -> socket.AddressFamily:
    """The family by which a trainer connects to an endpoint; the older for a name that nobody knows yet, whose host may still come."""
    try:
        return resolve(endpoint)[0]
    except (ConfigError, EnvironmentLacks):
        return socket.AF_INET


def free_ports(num: int) -> list[int]:
    """Ports of this machine that nobody listens on just now."""
    probes = [socket.socket() for _ in range(num)]
    try:
        for probe in probes:
            probe.bind((LOCAL, 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()
