"""The three roles of parameter servers, against closed forms and references that are written out."""

from __future__ import annotations

import json
from collections import deque
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetbench.plan.events import Message
from fleetbench.plan.replay import Recording, RoleDecider
from fleetbench.plan.servers.rules import ServerRules
from fleetbench.plan.servers.states import state_of
from fleetbench.plan.servers.training import ServerTraining
from plan.server_bench import Bench, Rows, dice

DENSE = -1
"""A dense parameter of the bench."""


def zeros(*rows: int) -> Rows:
    """Parameters of nothing but zeros."""
    return dict.fromkeys(rows, Fraction(0))


def geo(trainers: int, k_steps: int = 1, servers: int = 1) -> ServerRules:
    """Rules of GeoSGD."""
    return ServerRules(mode="geo_sgd", trainers=trainers, servers=servers, k_steps=k_steps)


def changes(*steps: dict[int, int]) -> list[Rows]:
    """Steps that change rows by whole numbers."""
    return [{row: Fraction(value) for row, value in step.items()} for step in steps]


@pytest.mark.parametrize("trainers", [1, 2, 4, 7])
@pytest.mark.parametrize("row", [DENSE, 5])
def test_one_unit_update_reaches_the_server_geometrically(trainers: int, row: int) -> None:
    """One of N trainers changes a parameter by 1 and then only touches it: after j rounds the server has 1 - (1 - 1/N)^j of it."""
    bench = Bench(geo(trainers), zeros(DENSE, 5), [changes({row: 1}, *[{row: 0}] * 5), *[[]] * (trainers - 1)])
    for j in range(1, 7):
        bench.step(0)
        bench.settle()
        assert bench.held[row] == 1 - (1 - Fraction(1, trainers)) ** j


ANY_STEPS = st.lists(st.dictionaries(st.integers(0, 4), st.integers(-9, 9).map(Fraction), max_size=3), max_size=12)


@given(
    steps=st.lists(ANY_STEPS, min_size=1, max_size=3),
    servers=st.integers(1, 3),
    k_steps=st.integers(1, 4),
    seed=st.integers(0, 2**32),
)
def test_geo_loses_no_delta_and_applies_none_twice(steps: list[list[Rows]], servers: int, k_steps: int, seed: int) -> None:
    """Whatever the order of messages, steps and timers, the servers end with the initial parameters plus every delta, each once."""
    start = {row: Fraction(row) for row in (DENSE, 0, 1, 2, 3, 4)}
    bench = Bench(geo(len(steps), k_steps, servers), start, [[{DENSE: Fraction(1), **step} for step in own] for own in steps])
    bench.run(dice(seed))
    assert all(not trainer.steps and not trainer.touched for trainer in bench.trainers)
    assert bench.held == {
        row: value + sum((delta.get(row, Fraction(0)) for delta in bench.deltas), Fraction(0)) for row, value in start.items()
    }
    assert all(server.is_stopped and server.stopped is None for server in bench.servers)
    assert all(trainer.most_queued <= k_steps for trainer in bench.trainers)
    if len(steps) == 1:
        assert bench.held == bench.trainers[0].latest


@given(
    steps=st.lists(ANY_STEPS, min_size=1, max_size=3),
    servers=st.integers(1, 3),
    bounds=st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)),
    switches=st.tuples(st.booleans(), st.booleans()),
    seed=st.integers(0, 2**32),
)
def test_asynchronous_training_applies_every_gradient_once(
    steps: list[list[Rows]], servers: int, bounds: tuple[int, int, int, int], switches: tuple[bool, bool], seed: int
) -> None:
    """In any order the servers end with all gradients applied, no queue or merge exceeds its bound, and nobody waits for ever."""
    merge, queue, in_flight, before_receive = bounds
    independent, has_dense = switches
    rules = ServerRules(
        mode="asynchronous",
        trainers=len(steps),
        servers=servers,
        max_merge=merge,
        queue_size=queue,
        pushes_in_flight=in_flight,
        independent_receive=independent,
        sends_before_receive=before_receive,
        has_dense=has_dense,
    )
    dense = {DENSE: Fraction(1)} if has_dense else {}
    bench = Bench(rules, zeros(DENSE, 0, 1, 2, 3, 4), [[{**dense, **step} for step in own] for own in steps])
    bench.run(dice(seed))
    every = [gradient for own in steps for gradient in own]
    expected = {row: -sum((gradient.get(row, Fraction(0)) for gradient in every), Fraction(0)) for row in range(5)}
    assert bench.held == {**expected, DENSE: -Fraction(len(every) if has_dense else 0)}
    assert all(trainer.most_queued <= queue for trainer in bench.trainers)
    assert max(bench.merged, default=1) <= merge
    assert all(server.is_stopped for server in bench.servers)
    if has_dense and len(steps) == 1 and every:
        assert bench.trainers[0].latest[DENSE] == bench.held[DENSE]


@given(trainers=st.integers(1, 3), rounds=st.integers(1, 5), servers=st.integers(1, 3), seed=st.integers(0, 2**32))
def test_synchronous_training_is_one_update_a_round_by_the_mean(trainers: int, rounds: int, servers: int, seed: int) -> None:
    """In any order of messages the servers go through the very updates of the mean gradient, and every trainer ends with them."""
    chance = dice(seed)
    steps = [[{DENSE: Fraction(chance.randint(-9, 9)), 1: Fraction(chance.randint(-9, 9))} for _ in range(rounds)] for _ in range(trainers)]
    bench = Bench(ServerRules(mode="synchronous", trainers=trainers, servers=servers), zeros(DENSE, 1), steps)
    expected = zeros(DENSE, 1)
    for number in range(rounds):
        for row in expected:
            expected[row] -= sum((own[number][row] for own in steps), Fraction(0)) / trainers
        for rank in range(trainers):
            bench.step(rank)
        while choices := [choice for choice in bench.choices() if choice[0] == "deliver"]:
            bench.happen(chance.choice(choices))
        assert bench.held == expected
        assert all(trainer.latest[DENSE] == expected[DENSE] for trainer in bench.trainers)
    assert {server.updates for server in bench.servers} == {rounds}


def test_the_mean_of_those_who_are_left() -> None:
    """A trainer with fewer steps leaves, and the others' rounds close without it, by their own mean."""
    bench = Bench(
        ServerRules(mode="synchronous", trainers=2, servers=1), zeros(DENSE), [changes({DENSE: 2}), changes({DENSE: 4}, {DENSE: 10})]
    )
    bench.run(dice(3))
    assert bench.held == {DENSE: -13}


def test_a_full_queue_makes_the_trainer_wait() -> None:
    """Handing on a gradient that has no room waits until the sender takes one; in GeoSGD the step waits before its update."""
    for rules in (ServerRules(mode="asynchronous", trainers=1, servers=1, queue_size=2, max_merge=9), geo(1, 2)):
        bench = Bench(rules, zeros(0), [changes({0: 1}, {0: 1}, {0: 1})])
        for _ in range(3):
            bench.step(0)
        trainer = bench.roles["trainer", 0]
        assert trainer.state.waits == "room"  # type: ignore[union-attr]  # a trainer's
        assert bench.trainers[0].latest[0] == (2 if rules.mode == "geo_sgd" else 0)
        bench.settle()
        if rules.mode != "geo_sgd":  # two gradients are fewer than merge: they leave when the timer says that no more come
            bench.happen(("timer", 0))
            bench.settle()
        assert trainer.state.waits is None  # type: ignore[union-attr]  # a trainer's
        assert not trainer.state.in_step  # type: ignore[union-attr]  # a trainer's


def test_k_is_an_upper_bound() -> None:
    """A trainer that falls idle exchanges before it has made k steps, and a timer that a new step has set back does not count."""
    bench = Bench(geo(2, k_steps=100), zeros(0), [changes({0: 4}, {0: 4}), []])
    bench.step(0)
    bench.settle()
    assert bench.held[0] == 0
    assert bench.trainers[0].has_timer
    bench.happen(("timer", 0))
    bench.settle()
    assert bench.held[0] == 2
    assert not bench.trainers[0].has_timer


def test_an_independent_receiver_pulls_beside_pushes() -> None:
    """Without it a push waits for the pull before it; with it both are on their way at once."""
    for independent, under_way in ((False, ["pull"]), (True, ["pull", "gradient"])):
        rules = ServerRules(mode="asynchronous", trainers=1, servers=1, independent_receive=independent)
        bench = Bench(rules, zeros(DENSE), [changes({DENSE: 1}, {DENSE: 1})])
        channel = bench.channels.setdefault((("sender", 0), ("server", 0)), deque())
        bench.step(0)
        bench.deliver(("trainer", 0), ("sender", 0))
        bench.deliver(("sender", 0), ("server", 0))
        if independent:
            channel.clear()  # the pull that went beside the push; its answer is still awaited
        bench.deliver(("server", 0), ("sender", 0))
        bench.step(0)
        bench.deliver(("trainer", 0), ("sender", 0))
        kinds = [message.kind for message, _ in channel]
        assert kinds == (under_way[1:] if independent else under_way)


def tell(decider: RoleDecider, kind: str, rank: int) -> list[tuple[str, str | None, int | None]]:
    """What a server does when it hears ``kind`` from ``rank``."""
    return [(operation.kind, operation.message, operation.rank) for operation in decider.on(0, Message("sender", rank, kind, count=1))]


def test_nobody_waits_for_a_trainer_that_has_left() -> None:
    """Neither at a barrier nor for its gradient; after the last trainer the server ends, and hears nothing more."""
    server = RoleDecider.start(ServerTraining(ServerRules(mode="synchronous", trainers=3, servers=1)), 0, "server")
    assert tell(server, "barrier", 0) == []
    assert tell(server, "barrier", 1) == []
    assert tell(server, "leave", 2) == [("send", "barrier", 0), ("send", "barrier", 1)]
    assert tell(server, "gradient", 0) == []
    assert tell(server, "leave", 1) == [("update", None, None), ("send", "parameters", 0)]
    assert tell(server, "leave", 0) == [("stop", None, None)]
    assert tell(server, "gradient", 0) == []


def test_nobody_waits_for_the_gradient_of_a_trainer_at_a_barrier() -> None:
    """Of three, one has made its last step and one more than another: two gradients make an update by their mean, then all meet."""
    server = RoleDecider.start(ServerTraining(ServerRules(mode="synchronous", trainers=3, servers=1)), 0, "server")
    for rank in range(3):
        tell(server, "join", rank)
    tell(server, "initial", 0)
    assert tell(server, "barrier", 0) == []
    assert tell(server, "gradient", 1) == []
    (update, *answers) = server.on(0, Message("sender", 2, "gradient"))
    assert (update.kind, update.divisor) == ("update", 2)
    assert [(one.message, one.rank) for one in answers] == [("parameters", 1), ("parameters", 2)]
    tell(server, "gradient", 1)
    assert tell(server, "barrier", 2) == [("update", None, None), ("send", "parameters", 1)]  # its gradient waited for nobody else
    assert tell(server, "barrier", 1) == [("send", "barrier", 0), ("send", "barrier", 1), ("send", "barrier", 2)]


MODES = (
    ServerRules(mode="synchronous", trainers=2, servers=2),
    ServerRules(mode="asynchronous", trainers=2, servers=2, max_merge=2, sends_before_receive=2),
    ServerRules(mode="geo_sgd", trainers=2, servers=2, k_steps=3),
)


@pytest.mark.parametrize("rules", MODES, ids=[rules.mode for rules in MODES])
@pytest.mark.parametrize("role", ["trainer", "sender", "server"])
def test_a_recorded_role_replays_to_the_same_operations(rules: ServerRules, role: str) -> None:
    """The events of a run, from a file, give the same operations in a fresh state, and from a state saved in their midst."""
    bench = Bench(rules, zeros(DENSE, 0, 1), [changes(*[{DENSE: 1, 0: 1}] * 8), changes(*[{DENSE: 1, 1: 1}] * 8)])
    bench.run(dice(5))
    decider = bench.roles[role, 1]
    recording = decider.recording()
    again = Recording.from_dict(json.loads(json.dumps(recording.to_dict())))
    assert again == recording
    decided = [operations for _, _, operations in recording.log]
    assert again.replayed() == decided
    assert any(decided)
    ids = [operation.id for operations in decided for operation in operations]
    assert ids == list(range(len(ids)))
    for cut in range(0, len(recording.log), 5):
        half = RoleDecider.start(ServerTraining(rules), 1, role)
        for now, event, _ in recording.log[:cut]:
            half.on(now, event)
        saved = state_of(role, json.loads(json.dumps(half.state._asdict())))  # type: ignore[arg-type]  # a Role
        assert saved == half.state
        other = RoleDecider.start(ServerTraining(rules), 1, role, record=True, state=saved)
        assert [other.on(now, event) for now, event, _ in recording.log[cut:]] == decided[cut:]
        assert other.recording().initial == saved
        assert other.recording().replayed() == decided[cut:]
