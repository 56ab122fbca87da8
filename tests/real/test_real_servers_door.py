"""The address that a server listens on: names, what is none, and what is taken."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest
import torch
import zmq
from server_job import ServerThread, free_port, served

from fleetbench.errors import ConfigError, EnvironmentLacks, WorkerFailed
from real.servers.hosts import resolve
from real.servers.links import Links, TrainerOptions
from real.servers.served_training import ServedTraining
from real.servers.server_options import ServerOptions


def test_a_server_listens_on_a_name() -> None:
    """What is bound by libzmq are addresses alone; ``localhost`` becomes one, and who connects to it gets through."""
    port = free_port()
    server = ServerThread(ServerOptions(server=0, servers=1, trainers=1, endpoint=f"localhost:{port}"))
    server.start()
    model = torch.nn.Linear(1, 1)
    options = TrainerOptions(rank=0, endpoints=(f"127.0.0.1:{port}",), startup_timeout_s=20.0)
    training = ServedTraining(model, served(), options)
    training.attach_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    training.begin()
    training.finish()
    server.join(20)
    assert server.error is None


@pytest.mark.parametrize("endpoint", ["127.0.0.1:6000", "0.0.0.0:6000"])
def test_an_address_stays_what_it_is(endpoint: str) -> None:
    """Also the one that means every network, where somebody writes it."""
    assert resolve(endpoint) == endpoint


@pytest.mark.parametrize("endpoint", [":6000", "*:6000", "node1", "node1:", "node1:http", ""])
def test_an_endpoint_without_a_host_or_a_port_is_refused(endpoint: str) -> None:
    """No host would be all of the machine's networks, which nobody asked for."""
    with pytest.raises(ConfigError, match="is no address to listen on"):
        resolve(endpoint)


def test_a_name_that_leads_nowhere_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the endpoint, and what was wrong."""

    def fail(*_arguments: object, **_named: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr("socket.gethostbyname", fail)
    with pytest.raises(EnvironmentLacks, match=r"(?s)Name or service not known.*node9:6000"):
        resolve("node9:6000")


class Listener(threading.Thread):
    """Takes connections, says something that no server says, and hangs up. ``close`` ends it."""

    def __init__(self, greeting: bytes) -> None:
        super().__init__(daemon=True)
        self._greeting, self._closing = greeting, False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.05)
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.start()

    def run(self) -> None:
        """Listen until ``close``."""
        while not self._closing:
            with contextlib.suppress(TimeoutError), self._listener.accept()[0] as taken:
                taken.sendall(self._greeting)
        self._listener.close()

    def close(self) -> None:
        """Hang up for good."""
        self._closing = True
        self.join(10)


@pytest.mark.parametrize("greeting", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_who_hangs_up_may_be_a_server_still_to_come(greeting: bytes) -> None:
    """It is tried again until the time for starting is over; the hint says what may be wrong."""
    listener = Listener(greeting)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    links = Links(context, TrainerOptions(rank=0, endpoints=(listener.endpoint,)))
    try:
        links.ask(0, "join", [b"{}"])
        with pytest.raises(WorkerFailed, match=r"(?s)within 1.2 s.*does the address lead to it"):
            links.wait(1.2)
    finally:
        links.close()
        context.destroy(linger=0)
        listener.close()
