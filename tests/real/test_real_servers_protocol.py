"""What a server does with what trainers tell it, and with those that do not come; without a network."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from server_desk import Clock, desk

from fleetbench.errors import ConfigError, EnvironmentLacks, WorkerFailed
from fleetbench.plan.servers.rules import Mode, ServerRules
from real.servers.links import Answer, TrainerOptions
from real.servers.parameters import Parameters, join


def test_an_error_of_an_update_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """No trainer may go on with half an update."""
    with desk() as server:
        server.enter(0, 1)

        def fail(*_arguments: object) -> None:
            raise ValueError("a bug")

        monkeypatch.setattr(server.server.shard, "update", fail)
        with pytest.raises(ValueError, match="a bug"):
            server.say("gradient", 0, server.push([1, 1], []), rate=1.0)


def test_warm_up_is_in_no_servers_load() -> None:
    """Counting begins where the first trainer says that its steps count, and no other begins it again.

    All updates are in the report, and of those after the first word, which missed 2, 3 and 4 updates, the staleness.
    """
    with desk() as server:
        server.enter(0, 1)

        def pushes(rank: int) -> None:
            server.say("gradient", rank, server.push([1, 1], []), rate=1.0, count=1)

        pushes(0)
        pushes(1)
        assert server.say("counts", 1) == [("counts", 1)]
        report = server.server.report
        assert not report.staleness
        pushes(1)
        pushes(0)
        assert server.say("counts", 0) == [("counts", 0)]
        pushes(0)
        assert report.staleness == {2: 1, 3: 1, 4: 1}
        assert report.updates == 5


# Joining


class Joining:
    """Links to two servers, of which the second has nothing and the first has made so many updates."""

    def __init__(self, updates: int) -> None:
        self.options = TrainerOptions(rank=0, endpoints=("a:1", "b:1"))
        self.updates = updates
        self.asked: list[tuple[int, str]] = []

    def ask(self, server: int, kind: str, _tensors: object = ()) -> None:
        """Note it."""
        self.asked.append((server, kind))

    def settle(self) -> None:
        """All is answered."""

    def wait(self, _within_s: float) -> list[Answer]:
        """The answers to a joining: server 0 holds 7, the first of the model's three numbers."""
        self.asked.clear()
        held = memoryview(np.array([7], np.float32)).cast("B")
        return [Answer(0, "ready", 0, self.updates, [held]), Answer(1, "blank", 0, 0, ())]


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
        own = parameters.flat[1:].clone()
        assert join(joining, spec, parameters) == (0, 0)  # type: ignore[arg-type]  # so much of it
        assert joining.asked == [(1, "initial")]
        assert parameters.flat.tolist() == [7, *own.tolist()]


def test_whoever_joins_is_told_how_often_a_server_has_updated() -> None:
    """The answer ``ready`` holds the number."""
    with desk() as server:
        server.enter(0)
        server.say("gradient", 0, server.push([1, 1], []), rate=1.0)
        server.join(1)
        assert [(head.kind, head.version) for head, _ in server._sent] == [("ready", 1)]


def test_a_second_process_of_a_rank_is_refused() -> None:
    """A job that is started twice trains with the first of each rank; a rank that has left may join again."""
    with desk() as server:
        server.enter(0, 1)
        assert server.say("join", 1, [server.spec.to_json()], connection=b"another") == [("refused", 1)]
        assert server.said("refused") == [b"another process has joined as rank 1: is the job started twice?"]
        server.say("leave", 1)
        assert server.say("join", 1, [server.spec.to_json()], connection=b"another") == [("ready", 1)]


def test_a_barrier_is_met_by_all() -> None:
    """Nobody is answered before the last has come, and the next one needs all of them again."""
    with desk() as server:
        server.enter(0, 1)
        for _ in range(2):
            assert server.say("barrier", 0) == []
            assert server.say("barrier", 1) == [("barrier", 0), ("barrier", 1)]


# Trainers that end


@pytest.mark.parametrize("mode", ["asynchronous", "synchronous"])
def test_a_failure_that_one_trainer_tells_ends_the_job_and_everybody_hears_why(mode: Any) -> None:
    """Rank 0 has found that rank 1 is gone: all trainers hear it in its words; what comes later changes nothing."""
    with desk(mode) as server:
        server.enter(0, 1)
        assert server.say("failed", 0, [b"was killed by SIGKILL", b"rank 1"]) == [("stopped", 0), ("stopped", 1)]
        assert server.said("stopped") == [b"was killed by SIGKILL"] * 2
        server.say("failed", 0, [b"another", b"rank 0"])
        assert (server.is_stopping, server.failure) == (True, ("rank 1", "was killed by SIGKILL"))
        with pytest.raises(WorkerFailed, match="rank 1: was killed by SIGKILL"):
            server.server.run()


def test_a_failure_behind_a_good_end_is_none() -> None:
    """All have left: the last checkpoint is still written."""
    with desk(trainers=1) as server:
        server.enter(0)
        server.say("leave", 0)
        server.say("failed", 0, [b"the launch was ended there", b"host b"])
        assert server.failure is None


def test_a_last_checkpoint_that_was_not_written_is_the_servers_failure(tmp_path: Path) -> None:
    """By its name, once all have left."""
    (tmp_path / "file").touch()
    with desk(trainers=1) as server:
        server.enter(0)
        server.say("leave", 0)
        with pytest.raises(EnvironmentLacks, match=r"server 0: .*does not hold the last checkpoint"):
            server.server.run(tmp_path / "file")


# Time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What a server's limits go by."""
    made = Clock()
    monkeypatch.setattr("real.servers.server.time", made)
    return made


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_a_trainer_that_never_comes_ends_the_job_by_name(mode: Mode, clock: Clock) -> None:
    """After the startup timeout, and before anybody has joined, too."""
    for joined in ((0,), ()):
        with desk(mode, startup_timeout_s=60.0) as server:
            server.enter(*joined)
            for _ in range(13):
                assert not server.is_stopping
                clock.now += 5.0
                server.server._look()
            assert server.failure == (f"rank {len(joined)}", "this trainer has never come")


@pytest.mark.parametrize(("kind", "limit"), [("gradient", 60), ("barrier", 100)])
def test_a_trainer_that_lives_but_does_not_come_ends_synchronous_training(kind: str, limit: int, clock: Clock) -> None:
    """Rank 0 waits for rank 1, which lives, and for longer than the round may take: all are told that it is because of rank 1."""
    with desk("synchronous", round_timeout_s=60.0, startup_timeout_s=100.0) as server:
        server.enter(0, 1)

        def passes(seconds: int) -> None:
            for _ in range(seconds // 5):
                clock.now += 5.0
                server.server._look()

        passes(500)  # nobody waits
        server.say("gradient", 0, server.push([1, 1], []), rate=1.0)
        passes(80)  # before the first update, a trainer has as long as for its start
        server.say("gradient", 1, server.push([1, 1], []), rate=1.0)
        server.say(kind, 0, server.push([1, 1], []) if kind == "gradient" else [], rate=1.0)
        passes(limit - 10)
        assert not server.is_stopping
        passes(20)
        assert server.failure is not None
        assert server.failure[0] == "rank 1"
        assert "let the others wait" in server.failure[1]


def test_who_waits_for_the_late_one_is_not_the_late_one(clock: Clock) -> None:
    """Rank 0 stands at a barrier, rank 1 waits with its gradient for rank 2, which lives and does nothing: it is rank 2."""
    with desk("synchronous", trainers=3, round_timeout_s=60.0, startup_timeout_s=60.0) as server:
        server.enter(0, 1, 2)
        server.say("barrier", 0)
        server.say("gradient", 1, server.push([1, 1], []), rate=1.0)
        for _ in range(14):
            clock.now += 5.0
            server.server._look()
        assert server.failure is not None
        assert server.failure[0] == "rank 2"


def test_asynchronous_trainers_may_wait_at_a_barrier_for_as_long_as_all_live(clock: Clock) -> None:
    """Nobody has failed whose connection holds."""
    with desk(round_timeout_s=60.0) as server:
        server.enter(0, 1)
        server.say("barrier", 0)
        for _ in range(100):
            clock.now += 5.0
            server.server._look()
        assert not server.is_stopping
