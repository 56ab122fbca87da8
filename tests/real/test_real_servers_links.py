"""What a trainer's links make of what servers answer, and of their silence; without a network."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import zmq
from server_desk import Clock

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
    """The server's word becomes the error, with the rank."""
    with pytest.raises(WorkerFailed, match="rank 1: this trainer has let the others wait") as raised:
        hears(links, "stopped", b"this trainer has let the others wait for its gradient for 60 s", b"rank 1")
    assert raised.value.where == "rank 1"


def test_a_trainer_that_stood_still_does_not_blame_its_server(links: Links, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was stopped for an hour and goes on; a server that stays silent while it listens is blamed all the same."""
    clock = Clock()
    clock.now = time.monotonic()
    monkeypatch.setattr("real.servers.links.time", clock)
    monkeypatch.setattr("real.servers.silence.time", clock)
    links._beat()
    clock.now += 3600.0
    links._beat()

    def listen(seconds: int) -> None:
        for _ in range(seconds):
            clock.now += 1.0
            links._beat()

    listen(25)
    with pytest.raises(WorkerFailed, match="server 0: has been silent for 30 s") as raised:
        listen(10)
    assert "the job has ended" in str(raised.value.hint)


def test_a_look_up_behind_a_long_pause_of_look_ups_does_not_excuse_its_server_for_long(
    links: Links, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection was not listened to for ten minutes; a server that then says nothing is blamed after the usual time."""
    clock = Clock()
    clock.now = time.monotonic()
    monkeypatch.setattr("real.servers.links.time", clock)
    monkeypatch.setattr("real.servers.silence.time", clock)
    links._beat()
    clock.now += 600.0
    links.ask(0, "look_up")
    links._beat()
    for _ in range(30):
        clock.now += 1.0
        links._beat()
    clock.now += 1.0
    with pytest.raises(WorkerFailed, match="server 0: has been silent for 30 s"):
        links._beat()
