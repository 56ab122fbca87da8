"""The address that a server listens on: names, what is none, and what is taken."""

from __future__ import annotations

import contextlib
import re
import socket
import threading

import pytest
import zmq
from server_job import TOKEN, ServerThread, free_port

from fleetbench.errors import ConfigError, EnvironmentLacks, WorkerFailed
from real.servers.hosts import resolve
from real.servers.links import Links, TrainerOptions
from real.servers.security import ServerSocket
from real.servers.server_options import ServerOptions


def test_a_server_listens_on_a_name() -> None:
    """What is bound by libzmq are addresses alone; ``localhost`` becomes one, and who connects to it gets through."""
    port = free_port()
    door = ServerSocket(f"localhost:{port}", TOKEN, encrypted=False, say=print)
    try:
        door.bind()
        with socket.socket() as caller:
            caller.settimeout(5)
            caller.connect(("localhost", port))
    finally:
        door.close()


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

    monkeypatch.setattr("socket.getaddrinfo", fail)
    with pytest.raises(EnvironmentLacks, match=r"(?s)Name or service not known.*node9:6000"):
        resolve("node9:6000")


class Listener(threading.Thread):
    """Takes connections and says the same to all; nothing: it hangs up. ``close`` ends it."""

    def __init__(self, greeting: bytes) -> None:
        super().__init__(daemon=True)
        self._greeting, self._closing = greeting, False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.05)
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.start()

    def run(self) -> None:
        """Listen until ``close``."""
        taken = []
        while not self._closing:
            with contextlib.suppress(TimeoutError):
                taken.append(self._listener.accept()[0])
                taken[-1].sendall(self._greeting)
                if not self._greeting:
                    taken.pop().close()
        for end in (*taken, self._listener):
            end.close()

    def close(self) -> None:
        """Hang up for good."""
        self._closing = True
        self.join(10)


def greet(endpoint: str, token: str = TOKEN, *, encrypted: bool = False, startup_timeout_s: float = 20.0) -> None:
    """As a trainer does."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    options = TrainerOptions(rank=0, endpoints=(endpoint,), token=token, encrypted=encrypted, startup_timeout_s=startup_timeout_s)
    links = Links(context, options)
    try:
        links.greet()
    finally:
        links.close()
        context.destroy(linger=0)


@pytest.mark.parametrize(
    ("token", "encrypted", "raised", "why"),
    [
        ("another job's own secret", False, ConfigError, "it has another token.*FLEETBENCH_TOKEN"),
        (TOKEN, True, EnvironmentLacks, "another protocol.*FLEETBENCH_SERVER_ENCRYPTION"),
    ],
    ids=["token", "encryption"],
)
def test_a_trainer_that_is_refused_knows_it_at_once(token: str, encrypted: bool, raised: type[Exception], why: str) -> None:
    """It does not wait for a server that has answered already, whose address it names: libzmq would not try again."""
    port = free_port()
    server = ServerThread(ServerOptions(server=0, servers=1, trainers=1, endpoint=f"127.0.0.1:{port}", token=TOKEN))
    server.start()
    try:
        with pytest.raises(raised, match=rf"(?s)server 0: .*got 127.0.0.1:{port}") as error:
            greet(f"127.0.0.1:{port}", token, encrypted=encrypted)
        assert re.search(why, str(error.value), re.DOTALL)
    finally:
        server.abandon()


@pytest.mark.parametrize("greeting", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-x\r\n"])
def test_another_program_on_the_port_is_known_at_once(greeting: bytes) -> None:
    """What it says is no greeting of ZeroMQ, and the trainer ends with the address."""
    listener = Listener(greeting)
    try:
        with pytest.raises(EnvironmentLacks, match=rf"server 0: is no server of this job.*got {listener.endpoint}"):
            greet(listener.endpoint)
    finally:
        listener.close()


def test_who_hangs_up_may_be_a_server_still_to_come() -> None:
    """It is tried again until the time for starting is over; the hint says what may differ."""
    listener = Listener(b"")
    try:
        with pytest.raises(WorkerFailed, match=r"(?s)within 1.2 s.*does the address lead to it.*FLEETBENCH_TOKEN"):
            greet(listener.endpoint, startup_timeout_s=1.2)
    finally:
        listener.close()
