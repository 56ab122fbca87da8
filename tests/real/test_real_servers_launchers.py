"""What launchers and servers tell each other."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from server_desk import Clock, Desk, desk
from server_job import PATIENCE_S, SYNCHRONOUS, TOKEN, free_port, job, served
from test_real_servers_training import add, counting

from fleetbench.errors import WorkerFailed
from real.processes.diagnosis import how_it_ended
from real.servers.checkpoints import load_shard
from real.servers.launcher_link import LauncherLink
from real.servers.launchers import Launchers
from real.servers.news import Failure, Lost, News, Notice
from real.servers.wire import WireError

FAILURE = Failure(where="host b", what="the launch was ended there")


@contextmanager
def watching(*endpoints: str, token: str = TOKEN) -> Iterator[LauncherLink]:
    """A launcher's link."""
    link = LauncherLink(endpoints, token, encrypted=False)
    try:
        yield link
    finally:
        link.close()


def until(link: LauncherLink, what: Callable[[], object]) -> None:
    """Turn until ``what`` is true."""
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline, "it never came about"
        link.turn()
        time.sleep(0.01)


def of(message: Notice | News) -> list[memoryview]:
    """As it comes."""
    return [memoryview(message.to_bytes())]


# What is said


def test_news_and_notices_come_as_they_went() -> None:
    """All that they hold."""
    notice = Notice(lost={1: -9, 0: 7}, failure=FAILURE, knows_end=True)
    assert Notice.from_bytes(of(notice), 2) == notice
    lost = (Lost(rank=1, why="was killed by SIGKILL", code=-9), Lost(rank=2, why="has fallen silent"))
    news = News(state="stopping", left=(0, 3), lost=lost, failure=FAILURE, silence_s=7.5)
    assert News.from_bytes(of(news)) == news
    assert News.from_bytes(of(News(state="serving", silence_s=1.0))).failure is None


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"lost": [1], "failure": null, "knows_end": false}'],
    ids=["nothing", "a list", "no field", "no text", "too deep", "no mapping"],
)
def test_what_is_no_notice_or_news_is_senseless(text: bytes) -> None:
    """It is passed over, whoever sends it."""
    for read in (lambda: Notice.from_bytes([memoryview(text)], 2), lambda: News.from_bytes([memoryview(text)])):
        with pytest.raises(WireError):
            read()
    with pytest.raises(WireError):
        Notice.from_bytes([], 2)


def test_an_exit_code_that_is_no_number_is_senseless() -> None:
    """Whoever judges by it compares it with numbers."""
    news = {"state": "serving", "left": [], "lost": [{"rank": 1, "why": "ended", "code": "seven"}], "failure": None, "silence_s": 1.0}
    with pytest.raises(WireError, match="no news"):
        News.from_bytes([memoryview(json.dumps(news).encode())])


@pytest.mark.parametrize(("rank", "code"), [(7, -9), (-1, 0)])
def test_a_loss_that_cannot_be_is_senseless(rank: int, code: int) -> None:
    """Of a trainer that there is not."""
    with pytest.raises(WireError, match="trainer"):
        Notice.from_bytes([memoryview(json.dumps({"lost": {rank: code}, "failure": None, "knows_end": False}).encode())], 2)


def test_a_signal_without_a_name_has_its_number() -> None:
    """Real-time signals are such, and a code that is none does no harm."""
    assert how_it_ended(-9) == "was killed by SIGKILL"
    assert how_it_ended(-40) == "was killed by signal 40"
    assert how_it_ended(-9999) == "was killed by signal 9999"


# The server's side


def test_a_launchers_question_is_no_sign_of_life() -> None:
    """The server answers it with what it knows, and expects its trainers as before."""
    with desk() as server:
        watch = server.server._watch
        before = dict(watch._heard)
        news = server.ask()
        assert news == News(state="serving", silence_s=30.0)
        assert watch._heard == before


def test_a_server_says_who_has_left_and_who_is_lost() -> None:
    """Before anybody has joined, too, when what it was told is noted."""
    with desk(trainers=3) as server:
        assert server.ask(lost={2: -9}).lost == (Lost(rank=2, why="was killed by SIGKILL", code=-9),)
        server.enter(0, 1)
        server.say("leave", 1, 2)
        assert server.ask() == News(
            state="serving", left=(1,), lost=(Lost(rank=2, why="was killed by SIGKILL", code=-9),), failure=None, silence_s=30.0
        )
        server.say("leave", 0, 3)
        assert (server.ask().state, server.ask().left) == ("stopping", (0, 1))


@pytest.mark.parametrize("mode", ["asynchronous", "synchronous", "geo_sgd"])
def test_a_trainer_that_ended_well_without_a_word_has_left(mode: Any) -> None:
    """Before it had joined, as scripts that return early do, or unheard, while a server was away: nobody waits for it, nor ends by it."""
    with desk(mode, trainers=3) as server:
        assert server.ask(lost={2: 0}).state == "serving"
        server.enter(0, 1)
        assert (server.ask().left, server.ask().lost, server.ask().failure) == ((2,), (), None)
        assert server.ask(lost={1: 0, 2: 0}).left == (1, 2)
        assert [head.kind for head in server.say("barrier", 0, 3, count=1)] == ["barrier"]
        server.say("leave", 0, 4)
        assert (server.ask().state, server.ask().failure) == ("stopping", None)


def test_a_first_trainer_that_ended_without_bringing_the_parameters_ends_the_job() -> None:
    """However well it ended: nobody else has them."""
    with desk() as server:
        server.ask(lost={0: 0})
        server.hello(1)
        server.say("join", 1, 1, [server.spec.to_json()])
        failure = server.ask().failure
        assert failure is not None
        assert (failure.where, failure.what) == ("rank 0", "this trainer ended with exit code 0, and nobody else brings the parameters")


def test_a_trainer_that_comes_back_is_not_lost() -> None:
    """As when it had only been silent."""
    with desk() as server:
        server.enter(0, 1)
        server.server._lose(Lost(rank=1, why="has fallen silent"))
        assert [one.rank for one in server.ask().lost] == [1]
        server.say("beat", 1, 1)
        assert server.ask().lost == ()


@pytest.mark.parametrize("code", [-9, 0])
def test_a_trainer_that_is_started_again_by_hand_is_lost_once(code: int) -> None:
    """Its launcher says for ever that the process before it has ended: no word of that one brings it back, the new one's joining does."""
    with desk() as server:
        server.enter(0)
        server.hello(1)
        server.ask(lost={1: code})
        server.say("join", 1, 1, [server.spec.to_json()])  # that lay on its way
        server.ask(lost={1: code})
        assert 1 in server.state.left + server.state.lost
        num_lost = len(server.server.report.lost)
        server.hello(1, session=555)
        server.say("join", 1, 1, [server.spec.to_json()], session=555)
        for _ in range(3):
            news = server.ask(lost={1: code})
            server.say("beat", 1, 1, session=555)
            assert (news.left, news.lost) == ((), ())
        assert len(server.server.report.lost) == num_lost
        server.say("leave", 0, 3)
        assert not server.state.stopped
        server.say("watch", 0, tensors=[Notice(lost={1: -9}).to_bytes()], session=8)  # another launcher, which started the new one
        assert server.state.stopped


@pytest.mark.parametrize("mode", ["asynchronous", "synchronous"])
def test_a_launchers_failure_ends_the_job_and_everybody_hears_why(mode: Any) -> None:
    """Trainers and launchers, in the launcher's words; what comes later changes nothing."""
    with desk(mode) as server:
        server.enter(0, 1)
        news = server.ask(failure=FAILURE)
        assert (news.state, news.failure) == ("stopping", FAILURE)
        server.say("beat", 1, 1)
        assert server.said("stopped") == [b"the launch was ended there"]
        assert server.ask(failure=Failure(where="rank 0", what="another")).failure == FAILURE
        assert server.ask(lost={0: 1}).failure == FAILURE  # trainers that heard of it end with an error
        assert str(server.server._failure).startswith("host b: the launch was ended there")


def test_a_failure_behind_a_good_end_is_none() -> None:
    """All have left: the last checkpoint is still written."""
    with desk(trainers=1) as server:
        server.enter(0)
        server.say("leave", 0, 3)
        assert server.ask(failure=FAILURE).failure is None
        assert server.server._failure is None


def test_synchronous_training_tells_launchers_because_of_whom_it_ends() -> None:
    """The rank and what its launcher saw."""
    with desk("synchronous") as server:
        server.enter(0, 1)
        failure = server.ask(lost={1: 3}).failure
        assert failure is not None
        assert failure.where == "rank 1"
        assert failure.what == "this trainer ended with exit code 3, and synchronous training cannot go on without it"


def test_a_checkpoint_that_was_not_written_is_the_servers_failure(tmp_path: Path) -> None:
    """Launchers of other hosts hear of it, too."""
    (tmp_path / "file").touch()
    with desk(trainers=1) as server:
        server.enter(0)
        server.server._writer.every(None, tmp_path / "file")
        server.say("leave", 0, 3)
        server.server._stopped_at = -1e9
        server.ask(knows_end=True)
        with pytest.raises(Exception, match="does not hold the last checkpoint"):
            server.server.run(tmp_path / "file")
        news = server.server._news()
        assert news.state == "ended"
        assert news.failure is not None
        assert news.failure.where == "server 0"
        assert "does not hold the last checkpoint" in news.failure.what


def test_servers_that_nobody_came_to_say_who_did_not() -> None:
    """One was said to have ended, the other never came."""
    with desk(startup_timeout_s=0.0) as server:
        server.ask(lost={1: 1})
        server.server._look()
        news = server.ask()
        assert news.state == "stopping"
        assert [(one.rank, one.why) for one in news.lost] == [(0, "has never come"), (1, "ended with exit code 1")]


def ending(server: Desk, save_to: Path | None = None) -> None:
    """Run a server whose job is over, without the second in which answers may go astray."""
    assert server.server._stopped_at is not None
    server.server._stopped_at = -1e9
    server.ask(knows_end=True)
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
        server.ask(lost=codes)
        for rank in (0, 1):
            server.server._lose(Lost(rank=rank, why="has fallen silent"))
        with pytest.raises(WorkerFailed, match=blamed):
            ending(server, tmp_path)
        failure = server.server._news().failure
        assert failure is not None
        assert f"{failure.where}: {failure.what}" == blamed
    saved = load_shard(tmp_path, 0, 1)
    assert saved is not None
    assert saved.shard.dense.tolist() == [-1, -2]


def test_a_server_that_one_trainer_has_left_in_order_ends_well() -> None:
    """Whatever became of the other."""
    with desk() as server:
        server.enter(0, 1)
        server.say("leave", 0, 3)
        server.server._lose(Lost(rank=1, why="has fallen silent"))
        ending(server)


@pytest.mark.parametrize(("num_strangers", "hint"), [(0, "is it started"), (2, "(?s)is it started.*refused, 2 in all.*FLEETBENCH_TOKEN")])
def test_a_server_that_nobody_came_to_ends_with_an_error(num_strangers: int, hint: str) -> None:
    """It names the first that did not come, and says of connections that were refused what that may mean."""
    with desk(startup_timeout_s=0.0) as server:
        for _ in range(num_strangers):
            server.server._door._refuse("10.0.0.9")
        server.server._look()
        with pytest.raises(WorkerFailed, match="rank 0: this trainer has never come, and no other is left") as raised:
            ending(server)
        assert re.search(hint, str(raised.value.hint))
        assert ("FLEETBENCH_TOKEN" in str(raised.value.hint)) == bool(num_strangers)


@pytest.mark.parametrize("has_come", [False, True])
def test_who_never_came_is_not_waited_for_long_behind_those_who_are_lost(has_come: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 is lost, and of the other two nobody was heard: they have a silence's time, and not the five minutes of a start.

    Where one of them was heard, and lives, the last has its five minutes.
    """
    clock = Clock()
    monkeypatch.setattr("real.servers.watch.time", clock)
    with desk(trainers=3) as server:
        server.enter(0, *([1] if has_come else []))
        server.ask(lost={0: 1})

        def passes(seconds: int) -> None:
            for _ in range(seconds):
                clock.now += 1.0
                if has_come:
                    server.say("beat", 1, 1)
                server.server._look()

        passes(29)
        assert not server.state.stopped
        passes(2)
        assert server.state.stopped == (not has_come)
        assert {one.rank: one.why for one in server.ask().lost} == {
            0: "ended with exit code 1",
            **({} if has_come else {1: "has never come", 2: "has never come"}),
        }


def test_a_trainer_that_comes_back_behind_the_end_is_told_of_it() -> None:
    """One that was lost, by its beat, and a new process, when it joins; who has left is not told so."""
    with desk() as server:
        server.enter(0, 1)
        server.server._lose(Lost(rank=1, why="has fallen silent"))
        server.say("leave", 0, 3)
        assert [head.kind for head in server.say("beat", 0, 8)] == ["alive"]
        assert [head.kind for head in server.say("beat", 1, 8)] == ["stopped"]
        assert server._sent[-1][1] == [b"the job has ended without this trainer", b"rank 1"]
        server.hello(0, session=9)
        assert [head.kind for head in server.say("join", 0, 1, [server.spec.to_json()], session=9)] == ["stopped"]
        assert server.state.lost == (1,)


def test_launchers_that_still_ask_are_waited_for_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that knows how it ended, and one that has not been heard for long, ask no more; all that ask are told."""
    clock = Clock()
    monkeypatch.setattr("real.servers.launchers.time", clock)
    told: list[bytes] = []
    launchers = Launchers(lambda identity, _head, _tensors: told.append(identity))
    assert launchers.know_the_end
    launchers.hear(b"first", 1, Notice())
    launchers.hear(b"second", 2, Notice(knows_end=True))
    assert not launchers.know_the_end
    launchers.tell(News(state="ended", silence_s=1.0))
    assert told == [b"first"]
    clock.now += 2.0
    assert not launchers.know_the_end
    clock.now += 1.0
    assert launchers.know_the_end


# Both, over a network


def test_a_notice_reaches_a_server_however_late_it_comes_up() -> None:
    """Also one that comes up long after the launcher spoke first, and a second life of it."""
    with job(0, 2) as running, watching(endpoint := f"127.0.0.1:{free_port()}") as link:
        running.endpoints, running.num_servers = (endpoint,), 1
        link.lose(1, -9)
        for _ in range(5):
            link.turn()
        assert link.silent_s(0) is None
        assert not link.has_met(0)
        for _ in range(2):
            running.threads[:] = [running.start(0)]
            until(link, lambda: link.lost)
            assert link.lost == {1: Lost(rank=1, why="was killed by SIGKILL", code=-9)}
            assert link.silent_s(0) is not None
            assert link.has_met(0)
            running.threads[0].abandon()
            link.begins_again(0)
            assert not link.lost


def test_a_failure_reaches_a_server_that_is_just_coming_up() -> None:
    """Who has heard nothing yet does not know of it, and is waited for."""
    with job(0, 1) as running, watching(endpoint := f"127.0.0.1:{free_port()}") as link:
        running.endpoints, running.num_servers = (endpoint,), 1
        link.fail(FAILURE)
        link.turn()
        assert not link.has_been_heard
        running.threads[:] = [running.start(0)]
        until(link, lambda: link.has_been_heard)
        assert link.failure == FAILURE
        until(link, lambda: not running.threads[0].is_alive())
        assert str(running.threads[0].error).startswith("host b: the launch was ended there")


def test_a_server_waits_until_launchers_have_heard_how_it_ended() -> None:
    """A launcher that is slow to ask still hears it, with who left."""
    with job(1, 1) as running, watching(*running.endpoints) as link:
        until(link, lambda: link.news_of(0))
        model, optimizer, training = counting(running, 0, served())
        add(model, optimizer, 0, 1.0, 1.0)
        training.finish()
        time.sleep(1.6)  # the trainers' farewell is over
        until(link, lambda: (news := link.news_of(0)) and news.state == "ended")
        assert link.left == {0}
        assert link.failure is None
        link.turn()
        running.reports()


def test_a_server_does_not_wait_for_a_launcher_that_is_gone() -> None:
    """It had asked, and asks no more."""
    with job(1, 1) as running:
        with watching(*running.endpoints) as link:
            until(link, lambda: link.news_of(0))
        training = counting(running, 0, served())[2]
        training.finish()
        begin = time.monotonic()
        running.reports()
        assert running.threads[0].server._launchers.know_the_end
        assert time.monotonic() - begin < PATIENCE_S / 2


def test_one_hosts_interrupt_ends_trainers_of_all() -> None:
    """Two servers: a trainer raises with the host's name, and so does each server."""
    with job(2, 1) as running, watching(*running.endpoints) as link:
        model, optimizer, _ = counting(running, 0, SYNCHRONOUS)
        link.fail(FAILURE)
        until(link, lambda: link.failure and link.has_been_heard and all(link.news_of(server) for server in (0, 1)))
        with pytest.raises(WorkerFailed, match="host b: the launch was ended there"):
            add(model, optimizer, 0, 1.0, 1.0)
        for thread in running.threads:
            until(link, lambda thread=thread: not thread.is_alive())
            assert str(thread.error).startswith("host b: the launch was ended there")


def test_who_left_one_server_is_not_lost_to_another() -> None:
    """The other may have ended before the word reached it."""
    with watching("127.0.0.1:9", "127.0.0.1:9") as link:
        link._servers[0].news = News(state="ended", lost=(Lost(rank=1, why="has fallen silent"),), silence_s=3.0)
        assert list(link.lost) == [1]
        link._servers[1].news = News(state="ended", left=(1,), silence_s=4.0)
        assert (link.left, link.lost, link.silence_s) == ({1}, {}, 4.0)


def test_a_launcher_that_stood_still_takes_nobody_for_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time in which it did not run is not the servers'."""
    clock = Clock()
    with watching("127.0.0.1:9") as link:
        monkeypatch.setattr("real.servers.launcher_link.time", clock)
        link._turned_at = link._servers[0].heard_at = clock.now
        for _ in range(3):
            clock.now += 1.0
            link.turn()
        assert link.silent_s(0) == pytest.approx(3.0)
        clock.now += 1000.0
        link.turn()
        assert link.silent_s(0) == pytest.approx(3.0)


def test_a_launcher_of_another_job_hears_nothing() -> None:
    """It does not have the token."""
    with job(1, 1) as running, watching(*running.endpoints, token="another job's token, of no use") as link:  # noqa: S106  # of no use
        wait_until = time.monotonic() + PATIENCE_S
        while not running.threads[0].server.report.strangers and time.monotonic() < wait_until:
            link.turn()
            time.sleep(0.01)
        assert running.threads[0].server.report.strangers
        assert link.news_of(0) is None
