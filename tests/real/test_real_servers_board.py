"""What launchers and servers of a job tell each other: on the board of a host, and from host to host."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from server_desk import Desk, desk
from server_job import PATIENCE_S, SYNCHRONOUS, job
from test_real_servers_training import add, counting

from fleetbench.errors import EnvironmentLacks, WorkerFailed
from real.processes.diagnosis import how_it_ended
from real.servers.board import Board, Entry, Messenger
from real.servers.checkpoints import load_shard

FAILED = ("host b", "the launch was ended there")


def test_a_signal_without_a_name_has_its_number() -> None:
    """Real-time signals are such, and a code that is none does no harm."""
    assert how_it_ended(-9) == "was killed by SIGKILL"
    assert how_it_ended(-40) == "was killed by signal 40"
    assert how_it_ended(-9999) == "was killed by signal 9999"


# The server's side


@pytest.mark.parametrize("mode", ["asynchronous", "geo_sgd"])
def test_a_trainer_that_ended_well_without_a_word_has_left(mode: Any) -> None:
    """Before it had joined, as scripts that return early do, or unheard, while a server was away: nobody waits for it, nor ends by it."""
    with desk(mode, trainers=3) as server:
        server.board(ended={2: 0})
        assert not server.is_stopping
        server.enter(0, 1)
        assert (server.state.left, server.lost, server.failure) == ((2,), {}, None)
        server.board(ended={1: 0})
        assert server.state.left == (1, 2)
        assert [head.kind for head in server.say("barrier", 0, 3, count=1)] == ["barrier"]
        server.say("leave", 0, 4)
        assert (server.is_stopping, server.failure) == (True, None)


def test_synchronous_training_ends_with_a_trainer_that_had_joined_and_ended_without_a_word() -> None:
    """However well it ended: it may have been in the middle. One that had not joined has left."""
    with desk("synchronous", trainers=3) as server:
        server.board(ended={2: 0})
        server.enter(0, 1)
        assert (server.state.left, server.failure) == ((2,), None)
        server.board(ended={1: 0})
        why = "this trainer ended with exit code 0, without fleet.stop_worker(), and synchronous training cannot continue without it"
        assert server.failure == ("rank 1", why)


def test_a_first_trainer_that_ended_without_bringing_the_parameters_ends_the_job() -> None:
    """However well it ended: nobody else has them."""
    with desk() as server:
        server.board(ended={0: 0})
        server.hello(1)
        server.say("join", 1, 1, [server.spec.to_json()])
        assert server.failure == ("rank 0", "this trainer ended with exit code 0, and no other trainer brings the parameters")


def test_a_trainer_that_comes_back_is_not_lost() -> None:
    """As when it had only been silent."""
    with desk() as server:
        server.enter(0, 1)
        server.server._lose(1, "has fallen silent")
        assert list(server.lost) == [1]
        assert server.told == [Entry(kind="lost", name="rank 1", why="has fallen silent", seconds=30.0)]
        server.say("beat", 1, 1)
        assert server.lost == {}


@pytest.mark.parametrize("code", [-9, 0])
def test_a_trainer_that_is_started_again_by_hand_is_lost_once(code: int) -> None:
    """The new process's joining brings it back, and the job ends with it."""
    with desk() as server:
        server.enter(0)
        server.hello(1)
        server.board(ended={1: code})
        assert 1 in server.state.left + server.state.lost
        num_lost = len(server.server.report.lost)
        server.hello(1, session=555)
        server.say("join", 1, 1, [server.spec.to_json()], session=555)
        server.say("beat", 1, 1, session=555)
        assert (server.state.left, server.lost) == ((), {})
        assert len(server.server.report.lost) == num_lost
        server.say("leave", 0, 3)
        assert not server.state.stopped
        server.board(ended={1: -9})  # by another launcher, which started the new one
        assert server.state.stopped


@pytest.mark.parametrize("mode", ["asynchronous", "synchronous"])
def test_a_launchers_failure_ends_the_job_and_everybody_hears_why(mode: Any) -> None:
    """Trainers and launchers, in the launcher's words; what comes later changes nothing."""
    with desk(mode) as server:
        server.enter(0, 1)
        server.board(failed=FAILED)
        assert (server.is_stopping, server.failure) == (True, FAILED)
        server.say("beat", 1, 1)
        assert server.said("stopped") == [b"the launch was ended there"]
        server.board(failed=("rank 0", "another"))
        server.board(ended={0: 1})  # trainers that heard of it end with an error
        assert server.failure == FAILED
        assert server.told[0] == Entry(kind="failed", name="host b", why="the launch was ended there")


def test_a_failure_behind_a_good_end_is_none() -> None:
    """All have left: the last checkpoint is still written."""
    with desk(trainers=1) as server:
        server.enter(0)
        server.say("leave", 0, 3)
        server.board(failed=FAILED)
        assert server.failure is None


def test_synchronous_training_tells_launchers_because_of_whom_it_ends() -> None:
    """The rank and what its launcher saw."""
    with desk("synchronous") as server:
        server.enter(0, 1)
        server.board(ended={1: 3})
        why = "this trainer ended with exit code 3, and synchronous training cannot continue without it"
        assert server.told == [Entry(kind="failed", name="rank 1", why=why)]


def test_a_checkpoint_that_was_not_written_is_the_servers_failure(tmp_path: Path) -> None:
    """Launchers of other hosts hear of it, too."""
    (tmp_path / "file").touch()
    with desk(trainers=1) as server:
        server.enter(0)
        server.server._writer.every(None, tmp_path / "file")
        server.say("leave", 0, 3)
        server.server._stopped_at = -1e9
        with pytest.raises(EnvironmentLacks, match="does not hold the last checkpoint"):
            server.server.run(tmp_path / "file")
        (told,) = server.told
        assert (told.kind, told.name) == ("failed", "server 0")
        assert "does not hold the last checkpoint" in told.why


def test_servers_that_nobody_came_to_say_who_did_not() -> None:
    """One was said to have ended, the other never came."""
    with desk(startup_timeout_s=0.0) as server:
        server.board(ended={1: 1})
        server.server._look()
        assert server.is_stopping
        assert sorted((rank, lost.why) for rank, lost in server.lost.items()) == [(0, "has never come"), (1, "ended with exit code 1")]


def ending(server: Desk, save_to: Path | None = None) -> None:
    """Run a server whose job is over, without the second in which answers may go astray."""
    assert server.server._stopped_at is not None
    server.server._stopped_at = -1e9
    server.server.run(save_to)


@pytest.mark.parametrize(
    ("codes", "blamed"),
    [
        ({0: 3, 1: -9}, "rank 1: this trainer was killed by SIGKILL, and no other is left"),
        ({1: 3}, "rank 1: this trainer ended with exit code 3, and no other is left"),
        ({}, "rank 0: this trainer has fallen silent, and no other is left"),
    ],
)
def test_a_server_whose_trainers_are_all_lost_ends_with_an_error_and_keeps_what_they_made(
    codes: dict[int, int], blamed: str, tmp_path: Path
) -> None:
    """It names the first to blame, launchers are told, and the last checkpoint holds the one update."""
    with desk() as server:
        server.enter(0, 1)
        server.say("gradient", 1, 2, server.push([1, 2], []), rate=1.0)
        server.board(ended=codes)
        for rank in (0, 1):
            server.server._lose(rank, "has fallen silent")
        with pytest.raises(WorkerFailed, match=blamed):
            ending(server, tmp_path)
        assert f"{server.told[-1].name}: {server.told[-1].why}" == blamed
    saved = load_shard(tmp_path, 0, 1)
    assert saved is not None
    assert saved.shard.dense.tolist() == [-1, -2]


def test_a_server_that_one_trainer_has_left_in_order_ends_well() -> None:
    """Whatever became of the other."""
    with desk() as server:
        server.enter(0, 1)
        server.say("leave", 0, 3)
        server.server._lose(1, "has fallen silent")
        ending(server)


def test_a_server_that_nobody_came_to_ends_with_an_error() -> None:
    """It names the first that did not come, and what may be the reason."""
    with desk(startup_timeout_s=0.0) as server:
        server.server._look()
        with pytest.raises(WorkerFailed, match="rank 0: this trainer has never come, and no other is left") as raised:
            ending(server)
        assert re.search("is it started", str(raised.value.hint))


def test_a_trainer_that_comes_back_behind_the_end_is_told_of_it() -> None:
    """One that was lost, by its beat, and a new process, when it joins; who has left is not told so."""
    with desk() as server:
        server.enter(0, 1)
        server.server._lose(1, "has fallen silent")
        server.say("leave", 0, 3)
        assert [head.kind for head in server.say("beat", 0, 8)] == ["alive"]
        assert [head.kind for head in server.say("beat", 1, 8)] == ["stopped"]
        assert server._sent[-1][1] == [b"the job has ended without this trainer", b"rank 1"]
        server.hello(0, session=9)
        assert [head.kind for head in server.say("join", 0, 1, [server.spec.to_json()], session=9)] == ["stopped"]
        assert server.state.lost == (1,)


# The file, and what comes over a network


def ended(name: str, code: int = 0) -> Entry:
    """Of a process."""
    return Entry(kind="ended", name=name, code=code)


def test_all_read_all_entries_in_one_order(tmp_path: Path) -> None:
    """All processes' lines are read, also by one that comes late; a line that is not whole yet is read when it is."""
    path = tmp_path / "board"
    boards = [Board(path), Board(path)]
    assert boards[0].turn() == []
    read: list[list[Entry]] = [[], []]
    for number in range(20):
        boards[number % 2].write(ended(f"rank {number}", number))
        read[number % 2] += boards[number % 2].turn()
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:10])
    expected = [ended(f"rank {number}", number) for number in range(20)]
    assert [own + board.turn() for own, board in zip(read, boards, strict=True)] == [expected, expected]
    path.write_bytes(whole + whole[: whole.index(b"\n") + 1])
    assert boards[0].turn() == [ended("rank 0")]
    assert len(Board(path).turn()) == 21


def test_a_board_whose_launcher_is_gone_is_no_error(tmp_path: Path) -> None:
    """Its folder went with it."""
    board = Board(tmp_path / "gone" / "board")
    board.write(ended("rank 0"))
    assert board.turn() == []


def test_what_a_launcher_of_another_host_tells_reaches_all() -> None:
    """Two servers: a trainer raises with the host's name, and so does each server."""
    with job(2, 1) as own:
        model, optimizer, _ = counting(own, 0, SYNCHRONOUS)
        messenger = Messenger(own.endpoints)
        messenger.tell(Entry(kind="failed", name=FAILED[0], why=FAILED[1]))
        for thread in own.threads:
            thread.join(PATIENCE_S)
            assert str(thread.error).startswith("host b: the launch was ended there")
        with pytest.raises(WorkerFailed, match="host b: the launch was ended there"):
            add(model, optimizer, 0, 1.0, 1.0)
        messenger.close()
