"""Senseless messages of somebody who has the token: a server drops or refuses them, and its state is what the good messages alone give."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import zmq
from server_desk import ROWS, Desk, desk
from server_job import dice

from fleetbench.plan.servers.rules import Mode, ServerRules
from fleetbench.workloads.served import ROW
from real.servers.parameters import VERSION
from real.servers.wire import Head, Tensor, encode

MODES: tuple[Mode, ...] = ("asynchronous", "synchronous", "geo_sgd")
PROTOCOL = b"FBPS 6 "
"""What a head begins with; JSON follows."""
Frames = list[bytes]


def bring(server: Desk, frames: Sequence[bytes]) -> list[str]:
    """Let frames come off the network as one message; kinds of what is answered."""
    inbox = [(b"x", [zmq.Frame(frame) for frame in frames])]
    server.server._listener.receive = lambda: inbox.pop() if inbox else None  # type: ignore[method-assign]  # the network
    server._sent.clear()
    server.server._receive()
    return [head.kind for head, _ in server._sent]


def frames_of(head: Head, tensors: Sequence[Tensor] = ()) -> Frames:
    """A message as it comes off the network."""
    return [bytes(frame) for frame in encode(head, tensors)]


def requests(server: Desk, mode: Mode) -> dict[str, list[Tensor]]:
    """What a good trainer sends with each kind of request."""
    push = server.push([1, 1], [2])
    return {
        "join": [server.spec.to_json()],
        "initial": server.everything,
        "delta" if mode == "geo_sgd" else "gradient": push,
        "pull": [],
        "look_up": [np.array([1], ROW)],
        "fetch": [],
        "barrier": [],
        "save": [b"saved"],
        "leave": [],
        "counts": [],
    }


def patched(frames: Frames, field: str, value: object) -> Frames:
    """A message with another value in its head."""
    head = json.loads(frames[0].removeprefix(PROTOCOL)) | {field: value}
    return [PROTOCOL + json.dumps(head).encode(), *frames[1:]]


def broken_frames(frames: Frames) -> Iterator[Frames]:
    """What no ``encode`` makes of any message, or claims to be of a trainer that is not the speaker."""
    head, bodies = frames[0], frames[1:]
    yield []
    yield [b""]
    yield [head[:20], *bodies]
    yield [head + b"\0", *bodies]
    yield [b"WHAT" + head[4:], *bodies]
    yield [head.replace(b"FBPS 6", b"FBPS 5"), *bodies]
    yield patched(frames, "unknown", 1)
    for kind in ("dance", "welcome", "applied", "refused", "stopped", "watch", "", None, 1):
        yield patched(frames, "kind", kind)
    for rank in (0, 2, 2**31, 2**64, -1, 1.0, "1", None, True):
        yield patched(frames, "rank", rank)
    for number in (0, 2**63, 2**64, -1, 1.0):
        yield patched(frames, "sequence", number)
    for rate in (1, "1", None):
        yield patched(frames, "rate", rate)
    if any(bodies):
        yield frames[:-1]
        yield [*frames, b"more"]
        yield [head, *bodies[:-1], bodies[-1] + b"\0"]


def is_readable(frames: Frames, kind: str) -> bool:
    """Whether a message has the head of a first request of this kind, so that its sender can be answered."""
    if not frames or not frames[0].startswith(PROTOCOL):
        return False
    try:
        head = json.loads(frames[0].removeprefix(PROTOCOL))
    except ValueError:
        return False
    return head == dataclasses.asdict(Head(kind, 1, head["session"], 1, 0, head["version"], head["rate"], head["count"])) and (
        type(head["rank"]) is int and type(head["sequence"]) is int and type(head["rate"]) is float
    )


def broken_pushes(server: Desk) -> Iterator[tuple[list[Tensor], float]]:
    """Tensors and rate of a push that do not fit the shard."""
    version, dense, rows, values = server.push([1, 1], [2])
    yield [], 1.0
    for left_out in range(4):
        yield [part for place, part in enumerate((version, dense, rows, values)) if place != left_out], 1.0
    yield [version, dense, rows, values, values], 1.0
    yield [version, np.ones(2, np.float64), rows, values], 1.0
    for length in (1, 3, 1000):
        yield [version, np.ones(length, np.float32), rows, values], 1.0
    yield [version, b"abc", rows, values], 1.0
    for row in (-1, ROWS, 2**31 - 1, -(2**31)):
        yield [version, dense, np.array([row], ROW), values], 1.0
    yield [version, dense, np.array([2], np.int64), values], 1.0
    yield [version, dense, np.array([1, 1], ROW), np.ones(2, np.float32)], 1.0
    for length in (0, 2, 100):
        yield [version, dense, rows, np.ones(length, np.float32)], 1.0
    for number in (-1, -(2**63)):
        yield [np.array([number], VERSION), dense, rows, values], 1.0
    yield [b"odd", dense, rows, values], 1.0
    for rate in (math.nan, math.inf, -math.inf):
        yield [version, dense, rows, values], rate


WRONG: tuple[Any, ...] = (None, "x", "\ud800", -1, 2**63, 10**400, 0.5, math.nan, math.inf, True, [], {}, [[]], {"a": 1})


def paths_of(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the parts of plain data are."""
    yield here
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        yield from paths_of(part, (*here, key))


def with_part(value: Any, path: tuple[Any, ...], part: Any) -> Any:
    """Plain data with another part there."""
    if not path:
        return part
    key, *rest = path
    if isinstance(value, dict):
        return {**value, key: with_part(value[key], tuple(rest), part)}
    return [*value[:key], with_part(value[key], tuple(rest), part), *value[key + 1 :]]


HAVE_DEFAULTS = {field.name for field in dataclasses.fields(ServerRules) if field.default is not dataclasses.MISSING}
"""Without one of them a description is the same."""


def broken_json(text: bytes) -> Iterator[bytes]:
    """JSON that is not this description: other types, huge numbers, missing and unknown fields, and no JSON."""
    good = json.loads(text)
    yield from (b"", b"{", b"\xff\xfe", b"[" * 100_000, b"1" * 5000, text + b"x", b'{"a":1}', b"nul")
    for path in paths_of(good):
        for wrong in WRONG:
            changed = with_part(good, path, wrong)
            if changed != good:
                yield json.dumps(changed).encode()
        if path:
            holder = good
            for key in path[:-1]:
                holder = holder[key]
            if isinstance(holder, dict):
                if path[-1] not in HAVE_DEFAULTS:
                    yield json.dumps(with_part(good, path[:-1], {key: part for key, part in holder.items() if key != path[-1]})).encode()
                yield json.dumps(with_part(good, path[:-1], {**holder, "unknown": 1})).encode()


def senseless(server: Desk, mode: Mode) -> Iterator[tuple[str, Callable[[int, int], Frames]]]:
    """Messages by kind, of a given session of rank 1 in a given life of the server, of which none says anything."""

    def message(
        kind: str, tensors: Sequence[Tensor], change: Callable[[Frames], Frames] = lambda frames: frames, **fields: Any
    ) -> tuple[str, Callable[[int, int], Frames]]:
        given = {"rate": 1.0, "count": 1, **fields}
        return kind, lambda session, life: change(frames_of(Head(kind, 1, session, 1, version=life, **given), tensors))

    own = requests(server, mode)
    for kind, tensors in own.items():
        for place in range(sum(1 for _ in broken_frames(frames_of(Head(kind), tensors)))):
            yield message(kind, tensors, lambda frames, place=place: list(broken_frames(frames))[place])  # type: ignore[misc]  # a change
    pushed = "delta" if mode == "geo_sgd" else "gradient"
    for tensors, rate in broken_pushes(server):
        yield from (message(kind, tensors, rate=rate) for kind in (pushed, "initial"))
    yield message("initial", own["initial"])  # which rank 0 brings, and nobody else
    yield message("gradient" if mode == "geo_sgd" else "delta", own[pushed])
    wanted = [np.array(rows, ROW) for rows in ([ROWS], [-1], [0, 2**31 - 1], [1])]
    for kind, all_tensors in {
        "look_up": [*([rows] for rows in wanted[:-1]), [], [b"abc"], [wanted[-1]] * 2],
        "save": [[], [b""], [b"\0"], [b"\xff\xfe"], [b"a\0b"]],
        "join": [[], *([text] for text in broken_json(server.spec.to_json()))],
    }.items():
        yield from (message(kind, tensors) for tensors in all_tensors)
    yield from (message("barrier", [], count=count) for count in (0, 1000, 2**32 - 1))


class Good:
    """Two trainers that do what they should; ``steps`` are whole: each pushes ones, and meets the other."""

    def __init__(self, server: Desk, mode: Mode) -> None:
        self.server, self.mode = server, mode
        self.steps = 0
        self._last = {0: 2, 1: 1}
        server.enter(0, 1)

    def ask(self, rank: int, kind: str, tensors: Sequence[Tensor] = (), **fields: float) -> list[str]:
        """The next request of a trainer."""
        self._last[rank] += 1
        return [head.kind for head in self.server.say(kind, rank, self._last[rank], tensors, **fields)]

    def step(self) -> None:
        """One push of each, and a meeting."""
        self.steps += 1
        kind = "delta" if self.mode == "geo_sgd" else "gradient"
        pushed = [self.ask(rank, kind, self.server.push([1, 1], [2]), rate=1.0, count=1) for rank in (0, 1)]
        assert pushed == ([[], ["parameters"] * 2] if self.mode == "synchronous" else [["applied"]] * 2)
        met = [self.ask(rank, "barrier", count=self.steps) for rank in (0, 1)]
        assert met == [[], ["barrier"] * 2]

    def check(self) -> None:
        """What these steps alone give, by hand: SGD of rate 1 on gradients of 1, the mean of two, or their sum; deltas add."""
        change = {"asynchronous": -2, "synchronous": -1, "geo_sgd": 2}[self.mode] * self.steps
        shard, state = self.server.server.shard, self.server.state
        assert shard is not None
        assert shard.dense.tolist() == [change] * 2
        assert shard.tables[0][:, 0].tolist() == [0, 0, change, 0]
        assert state.version == self.steps * (1 if self.mode == "synchronous" else 2)
        assert (state.left, state.lost, state.met, state.arrived, state.stopped) == ((), (), (), (), False)
        assert self.server.server._failure is None


@pytest.mark.parametrize("mode", MODES)
def test_senseless_messages_change_nothing(mode: Mode) -> None:
    """Each is dropped or refused, requests that can be read are answered, and two trainers train on beside them to the closed form."""
    kinds: Counter[str] = Counter()
    num_refused = 0
    with desk(mode) as server:
        good = Good(server, mode)
        for number, (kind, make) in enumerate(senseless(server, mode)):
            session = 10_000 + number
            assert bring(server, frames_of(Head("hello", 1, session))) == ["welcome"]
            frames = make(session, server.life)
            answers = bring(server, frames)
            assert answers in ([], ["refused"]), (kind, frames, answers)
            if is_readable(frames, kind):
                assert answers == ["refused"], (kind, frames)
                num_refused += 1
            kinds[kind] += 1
            if number % 100 == 0:
                good.step()
        for field, value in (("mark", 2**64), ("mark", -1), ("rank", 2), ("rank", 2**32 - 1), ("count", 0.5)):
            assert bring(server, patched(frames_of(Head("hello", 1, 5)), field, value)) == []
            assert bring(server, frames_of(Head("beat", 1, 5, 1))) == ["unknown"]
            kinds["hello"] += 1
        good.step()
        good.check()
    assert kinds.total() > 800
    assert num_refused > 500
    assert min(kinds[kind] for kind in ("join", "initial", "barrier", "hello")) >= 5


def test_a_mark_beyond_any_request_ends_no_server() -> None:
    """A hello that claims 2^64 requests, and the beat after it."""
    with desk() as server:
        server.enter(0, 1)
        bring(server, frames_of(Head("hello", 1, 5, mark=2**64)))
        bring(server, frames_of(Head("beat", 1, 5, 1)))
        assert server.senseless == 1
        assert [head.kind for head in server.say("gradient", 0, 3, server.push([1, 1], []), rate=1.0)] == ["applied"]


def test_meetings_that_were_never_held_are_not_believed() -> None:
    """A greeting that claims some lets nobody pass a barrier: this server has not begun again, and counts its meetings itself."""
    with desk() as server:
        server.enter(0, 1)
        server.say("barrier", 0, 3, count=1)
        assert [head.kind for head in server.say("hello", 1, session=5, count=2**32 - 1)] == ["welcome"]
        assert server.waiting(0) == [3]
        assert [head.rank for head in server.say("barrier", 1, 2, count=1)] == [0, 1]


def test_a_refused_request_is_answered_with_its_reason() -> None:
    """Its trainer hears why, and does not wait."""
    with desk() as server:
        server.enter(0, 1)
        frames = frames_of(Head("gradient", 1, 101, 2, version=server.life, rate=1.0), server.push([1, 1], [2]))
        assert bring(server, [*frames, b"more"]) == ["refused"]
        (why,) = server.said("refused")
        assert b"5 tensors instead of 4" in why
        assert bring(server, frames) == ["refused"]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # a flipped bit may make a signalling NaN, which is added
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(3))
def test_what_is_refused_leaves_no_trace(mode: Mode, seed: int) -> None:
    """Of messages with flipped bits, a server that hears all and one that hears only those that were not refused end alike."""
    chance, refused, heard = dice(seed), 0, 0
    for _ in range(12):
        with desk(mode) as server, desk(mode) as twin:
            both = (server, twin)
            twin.server._life = server.server._life
            for one in both:
                Good(one, mode).step()
            valid = {**requests(server, mode), "hello": [], "beat": []}
            del valid["save"]  # which would write
            for number in range(60):
                kind = chance.choice(sorted(valid))
                session, rank = 1000 + number, chance.randrange(2)
                hello = frames_of(Head("hello", rank, session))
                frames = frames_of(Head(kind, rank, session, 1, version=server.life, rate=0.5, count=2), valid[kind])
                for _ in range(chance.randrange(1, 4)):
                    place = chance.randrange(len(frames))
                    body = bytearray(frames[place])
                    if body:
                        body[chance.randrange(len(body))] ^= 1 << chance.randrange(8)
                    frames[place] = bytes(body)
                for one in both:
                    bring(one, hello)
                before = server.senseless
                answers = bring(server, frames)
                heard += 1
                if server.senseless > before or "refused" in answers:
                    refused += 1
                else:
                    bring(twin, frames)
            assert server.state == twin.state
            for ours, theirs in zip(server.server.shard.arrays, twin.server.shard.arrays, strict=True):  # type: ignore[union-attr]  # both have one
                assert np.array_equal(ours, theirs, equal_nan=True)
            assert server.server._meetings == twin.server._meetings
    assert 0 < refused < heard


def test_an_error_of_the_server_itself_is_not_taken_for_a_senseless_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """What applying a good message raises ends the server: nobody may go on with half an update."""
    with desk() as server:
        server.enter(0, 1)

        def fail(*_arguments: object) -> None:
            raise ValueError("a bug")

        monkeypatch.setattr(server.server.shard, "update", fail)
        with pytest.raises(ValueError, match="a bug"):
            server.say("gradient", 0, 3, server.push([1, 1], []), rate=1.0)
        assert server.senseless == 0
