"""What a trainer's links make of what servers answer, and of their silence; without a network."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import zmq
from server_desk import Clock

from fleetbench.errors import ConfigError, WorkerFailed
from real.servers.links import Links, TrainerOptions
from real.servers.wire import Head


@pytest.fixture
def links() -> Iterator[Links]:
    """Of a trainer whose one server has bidden it welcome in life 11; what it sends is kept in ``links.sent``."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = Links(context, TrainerOptions(rank=0, endpoints=("127.0.0.1:9",)))
    made.sent = []  # type: ignore[attr-defined]  # for the test
    made._send = lambda _link, head, _tensors: made.sent.append(head)  # type: ignore[method-assign, attr-defined]  # the wire
    made._hear(made._links[0], Head("welcome", version=11, count=1), [], [])
    yield made
    made.close()
    context.destroy(linger=0)


def hears(links: Links, kind: str, sequence: int, *tensors: bytes, **fields: int) -> None:
    """The server sends this."""
    head = Head(kind, 0, links._links[0].session, sequence, **fields)
    links._hear(links._links[0], head, [memoryview(tensor) for tensor in tensors], [])


def test_a_trainer_raises_what_a_server_refuses(links: Links) -> None:
    """The error says what was refused and why, and nothing is outstanding any more."""
    links.ask(0, "gradient")
    with pytest.raises(ConfigError, match="server 0: refuses this trainer's gradient: a learning rate of nan"):
        hears(links, "refused", 1, b"a learning rate of nan")
    assert links.is_idle


def test_what_has_no_answer_when_a_connection_breaks_is_sent_again(links: Links) -> None:
    """After the greeting that follows the break, under the same numbers; what was answered is not sent again."""
    for kind in ("gradient", "barrier", "pull"):
        links.ask(0, kind)
    hears(links, "applied", 1)
    links.sent.clear()  # type: ignore[attr-defined]  # the fixture's
    links._break(links._links[0])
    links.ask(0, "gradient")  # while it is not welcome
    assert [head.kind for head in links.sent] == ["hello"]  # type: ignore[attr-defined]  # the fixture's
    hears(links, "welcome", 3, version=11)
    sent = [(head.kind, head.sequence) for head in links.sent]  # type: ignore[attr-defined]  # the fixture's
    assert sent == [("hello", 0), ("barrier", 2), ("pull", 3), ("gradient", 4)]
    assert links.restarts == []


def test_a_trainer_counts_its_meetings_from_those_that_there_were(links: Links) -> None:
    """It learns at its joining how many there have been, asks for the next, and says how far it is when it greets again."""
    links.ask(0, "join")
    hears(links, "ready", 1, count=4)
    links.ask(0, "barrier")
    assert links.sent[-1].count == 5  # type: ignore[attr-defined]  # the fixture's
    links._greet(links._links[0])
    assert links.sent[-1].count == 4  # type: ignore[attr-defined]  # the fixture's
    hears(links, "barrier", 2, count=5)
    links._greet(links._links[0])
    assert (links.sent[-1].kind, links.sent[-1].count) == ("hello", 5)  # type: ignore[attr-defined]  # the fixture's


def test_a_trainer_greets_a_next_life_with_what_it_has_joined_with(links: Links) -> None:
    """Before it has joined it says nothing; after that, its own description each time, for the file may be another job's."""
    sent: list[tuple[str, tuple[bytes, ...]]] = []
    links._send = lambda _link, head, tensors: sent.append((head.kind, tuple(tensors)))  # type: ignore[method-assign, assign, misc, arg-type, return-value]  # the wire
    links._greet(links._links[0])
    links.ask(0, "join", [b"own"])
    links._greet(links._links[0])
    hears(links, "ready", 1)
    hears(links, "unknown", 0)
    assert [tensors for kind, tensors in sent if kind == "hello"] == [(), (), (b"own",)]


def test_requests_are_numbered_without_a_gap_for_a_server_that_began_again(links: Links) -> None:
    """A barrier is outstanding, a push after it was answered and is lost: what follows is numbered on from what the checkpoint holds."""
    link = links._links[0]
    for kind in ("pull", "barrier", "gradient", "pull", "gradient"):
        links.ask(0, kind)
    hears(links, "parameters", 1)
    hears(links, "applied", 3)
    hears(links, "unknown", 0)
    links.ask(0, "delta")  # while it is not welcome
    assert (links.sent[-1].kind, links.sent[-1].mark) == ("hello", 1)  # type: ignore[attr-defined]  # the fixture's
    links.sent.clear()  # type: ignore[attr-defined]  # the fixture's
    hears(links, "welcome", 1, mark=1, version=12, count=1)
    sent = [(head.kind, head.sequence, head.version) for head in links.sent]  # type: ignore[attr-defined]  # the fixture's
    assert sent == [("barrier", 2, 12), ("pull", 3, 12), ("gradient", 4, 12), ("delta", 5, 12)]
    assert links.restarts == [(0, 1)]  # the answered push
    links.ask(0, "pull")
    assert link.last == 6
    for number in (2, 3, 4, 5, 6):
        hears(links, "applied", number)
    assert links.is_idle


def test_what_a_checkpoint_holds_keeps_its_number(links: Links) -> None:
    """Requests up to the last that the checkpoint holds are repeated as they were, for their answers alone; nothing of them is lost."""
    for kind in ("gradient", "gradient", "gradient", "gradient"):
        links.ask(0, kind)
    hears(links, "applied", 2)
    hears(links, "unknown", 0)
    links.sent.clear()  # type: ignore[attr-defined]  # the fixture's
    hears(links, "welcome", 3, mark=3, version=12, count=1)
    assert [head.sequence for head in links.sent] == [1, 3, 4]  # type: ignore[attr-defined]  # the fixture's
    assert links.restarts == [(0, 0)]


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


def test_a_trainer_hears_because_of_whom_all_stop(links: Links) -> None:
    """The server's word becomes the error, with the rank."""
    with pytest.raises(WorkerFailed, match="rank 1: this trainer has let the others wait") as raised:
        hears(links, "stopped", 0, b"this trainer has let the others wait for its gradient for 60 s", b"rank 1")
    assert raised.value.where == "rank 1"
