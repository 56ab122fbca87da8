"""What a trainer's links make of what servers answer; without a network."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import zmq

from fleetbench.errors import ConfigError, WorkerFailed
from real.servers.links import Answer, Links, TrainerOptions
from real.servers.wire import Head, encode


class Wire:
    """Stands for a socket: what is sent is kept, and what is put in comes out."""

    def __init__(self) -> None:
        self.sent: list[list[bytes]] = []
        self.coming: list[list[zmq.Frame]] = []
        self.closed = True

    def send_multipart(self, frames: list[bytes], *_flags: object, **_named: object) -> None:
        """Keep it."""
        self.sent.append(frames)

    def recv_multipart(self, *_flags: object, **_named: object) -> list[zmq.Frame]:
        """The next; ``zmq.Again`` where there is none."""
        if not self.coming:
            raise zmq.Again
        return self.coming.pop(0)

    def close(self, linger: int) -> None:
        """Nothing is held."""


@pytest.fixture
def links() -> Iterator[Links]:
    """Of a trainer whose one server has said something."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = Links(context, TrainerOptions(rank=0, endpoints=("127.0.0.1:9",)))
    link = made._links[0]
    link.socket.disable_monitor()
    link.socket.close(linger=0)
    link.socket = Wire()  # type: ignore[assignment]  # so much of it
    hears(made, "alive")
    yield made
    made.close()
    context.destroy(linger=0)


def hears(links: Links, kind: str, *tensors: bytes) -> list[Answer]:
    """The server sends this."""
    answers: list[Answer] = []
    links._links[0].socket.coming.append([zmq.Frame(bytes(part)) for part in encode(Head(kind), tensors)])  # type: ignore[attr-defined]  # the fixture's
    links._receive(links._links[0], answers)
    return answers


def test_every_request_has_one_answer(links: Links) -> None:
    """Signs of life are none; links are idle once all have come."""
    links.ask(0, "gradient")
    links.ask(0, "pull")
    assert [answer.kind for answer in hears(links, "applied")] == ["applied"]
    assert hears(links, "alive") == []
    assert not links.is_idle
    assert [answer.kind for answer in hears(links, "parameters")] == ["parameters"]
    assert links.is_idle


def test_a_trainer_raises_what_a_server_refuses(links: Links) -> None:
    """The error says who refused it and why."""
    links.ask(0, "join")
    with pytest.raises(ConfigError, match="server 0: refuses this trainer: it differs in dtype"):
        hears(links, "refused", b"it differs in dtype")


def test_a_trainer_hears_because_of_whom_all_stop(links: Links) -> None:
    """The server's word becomes the error, with the rank, and all servers hear it before they miss this trainer."""
    why = b"this trainer has let the others wait for its gradient for 60 s"
    with pytest.raises(WorkerFailed, match="rank 1: this trainer has let the others wait") as raised:
        hears(links, "stopped", why, b"rank 1")
    assert raised.value.where == "rank 1"
    assert links._links[0].socket.sent == [encode(Head("failed"), [why, b"rank 1"])]  # type: ignore[attr-defined]  # the fixture's


def test_a_server_that_lives_and_says_nothing_is_named() -> None:
    """Its process answers libzmq's heartbeats while its own loop hangs; a server that says something is waited for."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = context.socket(zmq.ROUTER)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    options = TrainerOptions(rank=0, endpoints=(f"127.0.0.1:{port}",), timeout_s=0.4, startup_timeout_s=1.0)
    made = Links(context, options, are_up=True)
    try:
        made.ask(0, "pull")
        identity, *_ = server.recv_multipart()
        begin = time.monotonic()
        while time.monotonic() < begin + 2.0:
            server.send_multipart([identity, *(bytes(part) for part in encode(Head("alive"), []))])
            assert made.poll(0.1) == []
        with pytest.raises(WorkerFailed, match=r"server 0: has said nothing for 1\.4 s, though its process lives"):
            made.settle()
    finally:
        made.close()
        server.close(linger=0)
        context.destroy(linger=0)
