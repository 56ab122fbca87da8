"""What a server answers to repeats and after its restart; without a network."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from server_desk import Clock, desk, save_shard

from fleetbench.errors import ConfigError, WorkerFailed
from fleetbench.plan.servers.rules import Mode, ServerRules
from real.servers.links import Answer, TrainerOptions
from real.servers.parameters import Parameters, join
from real.servers.silence import Silence


def test_meetings_that_were_never_held_are_not_believed() -> None:
    """After a greeting that claims meetings no trainer passes a barrier: this server has not begun again, and counts them itself."""
    with desk() as server:
        server.enter(0, 1)
        server.say("barrier", 0, 3, count=1)
        assert [head.kind for head in server.say("hello", 1, session=5, count=2**32 - 1)] == ["welcome"]
        assert server.waiting(0) == [3]
        assert [head.rank for head in server.say("barrier", 1, 2, count=1)] == [0, 1]


def test_an_error_of_an_update_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """No trainer may go on with half an update."""
    with desk() as server:
        server.enter(0, 1)

        def fail(*_arguments: object) -> None:
            raise ValueError("a bug")

        monkeypatch.setattr(server.server.shard, "update", fail)
        with pytest.raises(ValueError, match="a bug"):
            server.say("gradient", 0, 3, server.push([1, 1], []), rate=1.0)


def test_warm_up_is_in_no_servers_load() -> None:
    """Counting begins where the first trainer says that its steps count, and no other, and no repeat of it, begins it again.

    All updates are in the report, and of those after the first word, which missed 2, 3 and 4 updates, the staleness.
    """
    with desk() as server:
        server.enter(0, 1)

        def pushes(rank: int, sequence: int) -> None:
            server.say("gradient", rank, sequence, server.push([1, 1], []), rate=1.0, count=1)

        pushes(0, 3)
        pushes(1, 2)
        assert [head.kind for head in server.say("counts", 1, 3)] == ["counts"]
        report = server.server.report
        assert not report.staleness
        pushes(1, 4)
        pushes(0, 4)
        assert [head.kind for head in server.say("counts", 0, 5)] == ["counts"]
        assert [head.kind for head in server.say("counts", 1, 3)] == ["counts"]
        pushes(0, 6)
        assert report.staleness == {2: 1, 3: 1, 4: 1}
        assert report.updates == 5


# Joining


class Joining:
    """Links to two servers, of which the second has nothing and the first has made so many updates."""

    def __init__(self, updates: int) -> None:
        self.options = TrainerOptions(rank=0, endpoints=("a:1", "b:1"))
        self.updates = updates
        self.is_idle = True
        self.asked: list[tuple[int, str]] = []

    def greet(self) -> None:
        """Both bid welcome."""

    def ask(self, server: int, kind: str, _tensors: object = ()) -> None:
        """Note it."""
        self.asked.append((server, kind))

    def wait(self, kind: str, _within_s: float = 0.0) -> list[Answer]:
        """The answers to a joining; others are not there."""
        assert kind == "join"
        self.asked.clear()
        return [Answer(0, "ready", kind, 0, self.updates, ()), Answer(1, "blank", kind, 0, 0, ())]


@pytest.mark.parametrize("updates", [7, 0])
def test_a_job_does_not_mix_trained_parameters_and_those_of_the_beginning(updates: int) -> None:
    """Server 0 goes on from a checkpoint, server 1 has none: rank 0 brings it nothing, and names it. Without an update it does."""
    joining = Joining(updates)
    parameters = Parameters(torch.nn.Linear(2, 1))
    with desk() as other:
        rules = ServerRules(mode="asynchronous", trainers=1, servers=2)
        spec = dataclasses.replace(other.spec, rules=rules, dense=3, sizes=(3,), tables=())
    if updates:
        with pytest.raises(ConfigError, match=r"server 1: has no checkpoint to begin from, where server 0 goes on after 7 updates"):
            join(joining, spec, parameters)  # type: ignore[arg-type]  # so much of it
        assert joining.asked == []
    else:
        with pytest.raises(AssertionError):
            join(joining, spec, parameters)  # type: ignore[arg-type]  # so much of it
        assert joining.asked == [(1, "initial"), (0, "fetch"), (1, "fetch")]


def test_whoever_joins_is_told_how_often_a_server_has_updated() -> None:
    """The answer ``ready`` holds the number."""
    with desk() as server:
        server.enter(0)
        server.say("gradient", 0, 3, server.push([1, 1], []), rate=1.0)
        server.hello(1)
        assert [(head.kind, head.version) for head in server.say("join", 1, 1, [server.spec.to_json()])] == [("ready", 1)]


# Barriers


def test_a_barrier_that_is_repeated_counts_once() -> None:
    """While it waits its repeat is passed over, after the meeting it is answered, and the next meeting still needs both."""
    with desk() as server:
        server.enter(0, 1)
        assert server.say("barrier", 0, 3, count=1) == []
        assert server.say("barrier", 0, 3, count=1) == []
        assert server.waiting(0) == [3]
        assert [(head.kind, head.rank) for head in server.say("barrier", 1, 2, count=1)] == [("barrier", 0), ("barrier", 1)]
        assert [(head.kind, head.rank) for head in server.say("barrier", 0, 3, count=1)] == [("barrier", 0)]
        assert server.say("barrier", 1, 3, count=2) == []
        assert [(head.kind, head.rank) for head in server.say("barrier", 0, 4, count=2)] == [("barrier", 0), ("barrier", 1)]


def test_a_trainer_that_was_lost_at_a_barrier_comes_back_to_it() -> None:
    """The others go on without it; when it is back, its barrier is theirs if they have passed it, and the next one is met by both."""
    with desk() as server:
        server.enter(0, 1)
        server.say("barrier", 1, 2, count=1)
        server.server._lose(1, "has fallen silent")
        assert server.state.lost == (1,)
        assert [head.kind for head in server.say("beat", 1)] == ["unknown", "alive"]  # so that it greets, and asks again
        assert server.waiting(1) == []
        assert server.state.lost == ()
        assert server.say("barrier", 1, 2, count=1) == []
        assert [head.rank for head in server.say("barrier", 0, 3, count=1)] == [0, 1]
        server.say("barrier", 1, 3, count=2)
        server.server._lose(1, "has fallen silent")
        assert [head.rank for head in server.say("barrier", 0, 4, count=2)] == [0]
        assert [head.rank for head in server.say("barrier", 1, 3, count=2)] == [1]
        assert server.say("barrier", 1, 4, count=3) == []


# A server that begins again


def test_a_barrier_that_was_met_in_a_servers_life_before_is_not_met_again(tmp_path: Path) -> None:
    """One trainer's answer was lost with the server: as soon as the other says that it has been there, it is answered."""
    with desk() as before:
        before.enter(0, 1)
        save_shard(tmp_path, before.server._moment())
    with desk(restore=tmp_path) as server:
        server.hello(1, has_joined=True, mark=1)
        assert server.say("barrier", 1, 2, count=1) == []
        answers = server.say("hello", 0, mark=3, count=1)
        assert [(head.kind, head.rank) for head in answers] == [("barrier", 1), ("welcome", 0)]
        assert server.say("barrier", 0, 4, count=2) == []
        assert [head.rank for head in server.say("barrier", 1, 3, count=2)] == [0, 1]


def test_a_push_computed_from_updates_that_a_restart_has_lost_is_not_stale(tmp_path: Path) -> None:
    """The checkpoint has no update, the gradient is of parameters after three: its staleness is 0, and none is below."""
    with desk() as before:
        before.enter(0, 1)
        save_shard(tmp_path, before.server._moment())
    with desk(restore=tmp_path) as server:
        server.hello(0, has_joined=True, mark=2)
        version, *rest = server.push([1, 1], [])
        assert isinstance(version, np.ndarray)
        assert [head.kind for head in server.say("gradient", 0, 3, [version + 3, *rest], rate=1.0)] == ["applied"]
        assert server.server.report.staleness == {0: 1}


def test_a_request_that_was_numbered_for_a_life_before_is_no_request(tmp_path: Path) -> None:
    """A copy that was long on its way comes after the new greeting, with the very number that is next: it is not done."""
    with desk() as before:
        before.enter(0, 1)
        save_shard(tmp_path, before.server._moment())
        life = before.life
    with desk(restore=tmp_path) as server:
        welcome = server.hello(0, has_joined=True, mark=2)
        assert (welcome.sequence, welcome.mark) == (2, 2)
        server.life, now = life, server.life
        assert server.say("gradient", 0, 3, server.push([1, 1], []), rate=1.0) == []
        assert server.dense() == [0, 0]
        server.life = now
        assert [head.kind for head in server.say("gradient", 0, 3, server.push([1, 1], []), rate=1.0)] == ["applied"]


def test_a_server_that_begins_again_knows_who_has_left_its_job(tmp_path: Path) -> None:
    """A trainer of the job proves by its greeting which job it is: the one that had ended is not waited for."""
    with desk() as before:
        before.enter(0, 1)
        before.server._writer.every(1000.0, tmp_path)
        assert not before.server._writer.is_due
        before.say("leave", 1, 2)
        assert before.server._writer.is_due  # or a kill soon after would make it forget
        save_shard(tmp_path, before.server._moment())
    with desk(restore=tmp_path) as server:
        server.hello(0, has_joined=True, mark=2)
        assert server.state.left == (1,)
        assert [head.kind for head in server.say("barrier", 0, 3, count=1)] == ["barrier"]
        server.say("leave", 0, 4)
        assert server.state.stopped
    with desk(restore=tmp_path) as other:
        other.hello(0, session=5)
        assert other.state.left == ()
        other.say("join", 0, 1, [other.spec.to_json()], session=5)
        assert other.say("barrier", 0, 2, count=1, session=5) == []


def test_a_synchronous_job_goes_on_without_a_trainer_that_had_left_before_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainer 1 had left and works on: after the startup timeout the job of trainer 0 still lives, and makes its updates alone."""
    clock = Clock()
    monkeypatch.setattr("real.servers.silence.time", clock)
    with desk("synchronous") as before:
        before.enter(0, 1)
        before.say("leave", 1, 2)
        save_shard(tmp_path, before.server._moment())
    with desk("synchronous", restore=tmp_path, startup_timeout_s=30.0) as server:
        server.hello(0, has_joined=True, mark=2)
        for _ in range(7):
            clock.now += 5.0
            server.say("beat", 0, 1)
            server.server._look()
        assert [head.kind for head in server.say("gradient", 0, 3, server.push([1, 1], []), rate=1.0)] == ["parameters"]
        assert server.dense() == [-1, -1]


def test_a_trainer_whose_leave_was_not_answered_ends_with_the_servers_next_life(tmp_path: Path) -> None:
    """All had left when the checkpoint was written: the repeated leave is answered, and the server ends."""
    with desk(trainers=1) as before:
        before.enter(0)
        before.say("leave", 0, 3)
        save_shard(tmp_path, before.server._moment())
    with desk(trainers=1, restore=tmp_path) as server:
        assert server.hello(0, has_joined=True, mark=2).sequence == 3  # which the file holds: the repeat is done all the same
        assert [head.kind for head in server.say("leave", 0, 3)] == ["applied"]
        assert server.state.stopped


# Trainers that are gone before it begins


@pytest.mark.parametrize("mode", ["asynchronous", "synchronous", "geo_sgd"])
@pytest.mark.parametrize("is_early", [True, False])
def test_nobody_waits_for_parameters_that_nobody_brings(mode: Mode, is_early: bool) -> None:
    """Rank 0's process ends before it has brought them, before or after the first one's joining: all are told that it is because of it."""
    with desk(mode) as server:
        if is_early:
            server.board(ended={0: -9})
        server.hello(1)
        server.say("join", 1, 1, [server.spec.to_json()])
        if not is_early:
            server.hello(0)
            server.say("join", 0, 1, [server.spec.to_json()])
            server.board(ended={0: -9})
        assert server.state.stopped
        (why,) = {bytes(reason) for reason in server.said("stopped")}
        assert why == b"this trainer was killed by SIGKILL, and no other trainer brings the parameters"
        assert isinstance(server.server._failure, WorkerFailed)
        assert server.server._failure.where == "rank 0"


def test_a_trainer_that_was_said_to_have_ended_may_join_again() -> None:
    """Rank 0 is started again before anybody has joined, and rank 1 is known to have ended as soon as there is something to know."""
    with desk(trainers=3) as server:
        server.board(ended={0: -9})
        server.board(ended={1: -9})
        server.enter(0, 2)
        assert not server.state.stopped
        assert server.state.lost == (1,)
        assert server.server.report.lost == [1]


def test_a_server_ends_whose_trainers_have_all_ended_before_they_came(capfd: pytest.CaptureFixture[str]) -> None:
    """It does not wait for the five minutes in which they might still come."""
    with desk() as server:
        server.board(ended={0: -9})
        server.server._look()
        assert server.server._stopped_at is None
        server.board(ended={1: -9})
        server.server._look()
        assert server.server._stopped_at is not None
    assert "no trainer has come" in capfd.readouterr().err


def test_a_greeting_is_no_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have lain on its way until its trainer was gone; who lives sends beats."""
    clock = Clock()
    monkeypatch.setattr("real.servers.silence.time", clock)
    with desk() as server:
        server.enter(0, 1)
        for _ in range(8):
            clock.now += 5.0
            server.say("hello", 1, session=9)
            server.say("beat", 0, 1)
            server.server._look()
        assert server.state.lost == (1,)


# Time


@pytest.mark.parametrize(("kind", "limit"), [("gradient", 60), ("barrier", 100)])
def test_a_trainer_that_lives_but_does_not_come_ends_synchronous_training(kind: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both beat, rank 0 waits for rank 1 and for longer than the round may take: all are told that it is because of rank 1."""
    clock = Clock()
    monkeypatch.setattr("real.servers.silence.time", clock)
    with desk("synchronous", round_timeout_s=60.0, meeting_timeout_s=100.0) as server:
        server.enter(0, 1)

        def passes(seconds: int) -> None:
            for _ in range(seconds // 5):
                clock.now += 5.0
                for rank in (0, 1):
                    server.say("beat", rank, 1)
                server.server._look()

        passes(500)  # nobody waits
        server.say("gradient", 0, 3, server.push([1, 1], []), rate=1.0)
        passes(80)  # before the first update, a trainer has as long as for its start
        server.say("gradient", 1, 2, server.push([1, 1], []), rate=1.0)
        server.say(kind, 0, 4, server.push([1, 1], []) if kind == "gradient" else [], rate=1.0, count=1)
        passes(limit - 10)
        assert not server.state.stopped
        passes(20)
        assert server.state.stopped
        assert isinstance(server.server._failure, WorkerFailed)
        assert server.server._failure.where == "rank 1"
        (stopped,) = server.say("beat", 0, 2)  # who did not hear it at once
        assert stopped.kind == "stopped"
        assert server._sent[-1][1][1] == b"rank 1"
        assert b"let the others wait" in server.said("stopped")[0]


def test_who_waits_for_the_late_one_is_not_the_late_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 stands at a barrier, rank 1 waits with its gradient for rank 2, which beats and does nothing: it is rank 2."""
    clock = Clock()
    monkeypatch.setattr("real.servers.silence.time", clock)
    with desk("synchronous", trainers=3, round_timeout_s=60.0, meeting_timeout_s=60.0) as server:
        server.enter(0, 1, 2)
        server.say("barrier", 0, 3, count=1)
        server.say("gradient", 1, 2, server.push([1, 1], []), rate=1.0)
        for _ in range(14):
            clock.now += 5.0
            for rank in range(3):
                server.say("beat", rank, 1)
            server.server._look()
        assert isinstance(server.server._failure, WorkerFailed)
        assert server.server._failure.where == "rank 2"


def test_trainers_start_again_in_peace_with_a_server_that_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checkpoint has seen an update, and before the first of this life a trainer has as long as for its start all the same."""
    clock = Clock()
    with desk("synchronous") as before:
        before.enter(0, 1)
        for rank, sequence in ((0, 3), (1, 2)):
            before.say("gradient", rank, sequence, before.push([1, 1], []), rate=1.0)
        assert before.state.version == 1
        save_shard(tmp_path, before.server._moment())
    monkeypatch.setattr("real.servers.silence.time", clock)
    with desk("synchronous", restore=tmp_path, round_timeout_s=60.0, meeting_timeout_s=100.0) as server:
        for rank in (0, 1):
            server.hello(rank, session=rank + 1)
            server.say("join", rank, 1, [server.spec.to_json()], session=rank + 1)
        server.say("gradient", 0, 2, server.push([1, 1], []), rate=1.0, session=1)
        stopped = []
        for _ in range(24):
            clock.now += 5.0
            for rank in (0, 1):
                server.say("beat", rank, 1, session=rank + 1)
            server.server._look()
            stopped.append(server.state.stopped)
        assert stopped.index(True) == 21  # 105 s, of which the first look begins the count


def test_asynchronous_trainers_may_wait_at_a_barrier_for_as_long_as_all_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is lost who beats."""
    clock = Clock()
    monkeypatch.setattr("real.servers.silence.time", clock)
    with desk(round_timeout_s=60.0) as server:
        server.enter(0, 1)
        server.say("barrier", 0, 3, count=1)
        for _ in range(100):
            clock.now += 5.0
            for rank in (0, 1):
                server.say("beat", rank, 1)
            server.server._look()
        assert server.state.lost == ()


def test_a_server_that_stood_still_blames_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long time between two looks is the server's own; a silence that it has listened to is the trainer's."""
    clock = Clock()
    monkeypatch.setattr("real.servers.silence.time", clock)
    with desk("synchronous", round_timeout_s=60.0, startup_timeout_s=30.0) as server:
        server.enter(0, 1)
        server.say("gradient", 0, 3, server.push([1, 1], []), rate=1.0)
        server.server._look()
        clock.now += 1000.0
        server.server._look()
        assert not server.state.stopped
        for _ in range(7):
            clock.now += 5.0
            server.say("beat", 0, 1)
            server.server._look()
        assert server.state.lost == (1,)


def test_what_a_server_hears_first_behind_its_stop_is_not_heard_in_the_future(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was stopped, reads rank 0's beats that lay there, and looks: both are silent 30 s later, and who never came is not yet."""
    clock = Clock()
    monkeypatch.setattr("real.servers.silence.time", clock)
    silence = Silence(range(3), 30.0, 2000.0)
    silence.hear(0)
    silence.hear(1)
    silence.pass_time()
    clock.now += 1000.0
    silence.hear(0)
    assert silence.pass_time() == 0.0
    for _ in range(3):
        clock.now += 10.0
        assert silence.pass_time() == 10.0
        assert silence.late == []
    clock.now += 1.0
    silence.pass_time()
    assert silence.late == [0, 1]
    for _ in range(300):
        clock.now += 10.0
        silence.pass_time()
    assert silence.late == [0, 1, 2]


def test_a_silence_before_a_servers_stop_still_counts_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 was silent for 20 s when the server was stopped for long: it has 10 s left."""
    clock = Clock()
    monkeypatch.setattr("real.servers.silence.time", clock)
    silence = Silence(range(1), 30.0, 300.0)
    silence.hear(0)
    for seconds, late in ((10.0, []), (10.0, []), (1000.0, []), (9.0, []), (2.0, [0])):
        clock.now += seconds
        silence.pass_time()
        assert silence.late == late
