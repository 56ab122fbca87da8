"""Hosts: which servers and trainers of a job run on which machine, and the IPv4 addresses of servers.

All hosts run the same command line: ``--servers 10.0.0.1:7164,10.0.0.2:7164 --workers 10.0.0.3:4,10.0.0.4:4``. A
machine finds itself in the lists by its addresses. Two counts instead of lists start a job on this machine alone.
"""

import re
import socket
from dataclasses import dataclass

from fleetbench.errors import ConfigError, EnvironmentLacks
from real.processes.joining import is_loopback, own_among
from real.processes.started import LOCAL, free_ports, require_free

_EXAMPLE = "--servers 10.0.0.1:7164,10.0.0.2:7164 --workers 10.0.0.3:4,10.0.0.4:4"
_MOST = 1023
"""Largest number of trainers per host: a larger one is taken for a port that was given by mistake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Hosts of a job's processes."""

    endpoints: tuple[str, ...]
    """``host:port`` of every server, in order."""
    workers: tuple[str, ...]
    """Host of every trainer, by rank."""
    own: frozenset[str]
    """Names and addresses that the lists use for this machine."""

    @property
    def own_servers(self) -> tuple[int, ...]:
        """Numbers of this machine's servers."""
        return tuple(number for number, endpoint in enumerate(self.endpoints) if host_of(endpoint) in self.own)

    @property
    def own_trainers(self) -> tuple[int, ...]:
        """Ranks of this machine's trainers."""
        return tuple(rank for rank, host in enumerate(self.workers) if host in self.own)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names and addresses in the lists, each once, those of servers first."""
        return tuple(dict.fromkeys((*map(host_of, self.endpoints), *self.workers)))

    @property
    def is_spread(self) -> bool:
        """Whether processes of the job run on other machines, too."""
        return not self.own.issuperset(self.hosts)

    def located(self, name: str) -> str:
        """Return ``name``, such as ``rank 1`` or ``server 0``, with its host if the job runs on several machines."""
        hosts = {f"server {number}": host_of(endpoint) for number, endpoint in enumerate(self.endpoints)}
        hosts |= {f"rank {rank}": host for rank, host in enumerate(self.workers)}
        return f"{name} on {hosts[name]}" if self.is_spread and name in hosts else name


def host_of(endpoint: str) -> str:
    """Return the host of ``host:port``."""
    return endpoint.rpartition(":")[0]


def place(servers: str, workers: str) -> Placement:
    """Return the placement that ``--servers`` and ``--workers`` define by two counts or two lists.

    Raises ``ConfigError`` for a text that is neither, for a loopback address
    among several hosts, and for lists without this machine.
    """
    given = {"--servers": servers, "--workers": workers}
    counts = {option: int(text) for option, text in given.items() if re.fullmatch(r"\s*[+-]?\d+\s*", text)}
    for option, count in counts.items():
        if count < 1:
            raise ConfigError("must be at least 1", option, str(count), f"for example {option} 2")
    if len(counts) == 2:
        return on_this_machine(*counts.values())
    endpoints = tuple(f"{host}:{port}" for host, port in _parts(servers, "--servers", "host:port", 65535))
    trainers = tuple(host for host, count in _parts(workers, "--workers", "host:count", _MOST) for _ in range(count))
    hosts = Placement(endpoints=endpoints, workers=trainers, own=frozenset()).hosts
    for host in hosts if len(hosts) > 1 else ():
        if is_loopback(host) or host == "0.0.0.0":  # noqa: S104  # such an address is refused
            hint = "an address of it by which the other hosts reach it"
            option = "--workers" if host in trainers else "--servers"
            raise ConfigError("is every machine itself, and there are several hosts", option, host, hint)
    own = frozenset(hosts[number] for number in own_among(hosts))
    if not own:
        hint = "start the same line on every host that it lists, and on no other; is each listed by an address of its own?"
        raise ConfigError("this machine is none of these hosts", "--servers, --workers", ", ".join(hosts), hint)
    return Placement(endpoints=endpoints, workers=trainers, own=own)


def on_this_machine(servers: int, workers: int) -> Placement:
    """Return the placement of ``servers`` and ``workers`` processes on this machine, servers on free ports."""
    return Placement(endpoints=local_endpoints(servers), workers=(LOCAL,) * workers, own=frozenset([LOCAL]))


def local_endpoints(servers: int) -> tuple[str, ...]:
    """Return ``host:port`` for ``servers`` servers on this machine, on free ports."""
    return tuple(f"{LOCAL}:{port}" for port in free_ports(servers))


def require_addresses(placement: Placement) -> None:
    """Raise ``EnvironmentLacks`` if an address of this machine's servers is taken, or other hosts cannot reach it."""
    for number in placement.own_servers:
        endpoint = placement.endpoints[number]
        host, _, port = resolve(endpoint).rpartition(":")
        if placement.is_spread and is_loopback(host):
            hint = "give its address instead of its name"
            raise EnvironmentLacks("here this name is the loopback, where no other host comes", "--servers", endpoint, hint)
        require_free(int(port), "--servers", host)


def _parts(text: str, option: str, form: str, most: int) -> list[tuple[str, int]]:
    """Return host and number of each part of a list.

    A host without a number has one trainer; for servers, the number is required. A bare number is not a host.
    """
    found: list[tuple[str, int]] = []
    for part in map(str.strip, text.split(",")):
        matched = re.fullmatch(r"(?!\d+(?::|$))([^\s:\[\]/*]+)(?::(\d+))?", part)
        if matched is None or not 1 <= (number := int(matched[2] or form == "host:count")) <= most:
            hint = f"two counts, --servers 2 --workers 4, or two lists of names or IPv4 addresses, {_EXAMPLE}; at most {_MOST} a host"
            raise ConfigError(f"is no {form}", option, repr(part), hint)
        host = matched[1]
        found.append((host, number))
    return found


def resolve(endpoint: str) -> str:
    """Return ``host:port`` with the host's IPv4 address, because libzmq does not resolve names to listen on.

    Raises ``ConfigError`` for an endpoint without a port, or without a host (which would mean all networks of the
    machine), and ``EnvironmentLacks`` for a name that does not resolve.
    """
    host, _, port = endpoint.rpartition(":")
    if not host or host == "*" or not port.isdecimal():
        hint = "host:port; 0.0.0.0 as host, should it be meant, is every network of this machine"
        raise ConfigError("is no address to listen on", "server", repr(endpoint), hint)
    try:
        return f"{socket.gethostbyname(host)}:{port}"
    except (OSError, UnicodeError) as error:
        hint = "a name or an IPv4 address of this machine"
        raise EnvironmentLacks(f"the server's host is not known: {error}", "server", endpoint, hint) from error
