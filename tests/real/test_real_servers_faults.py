"""Faults of servers, trainers and networks. Nothing hangs past its timeout, and every error names who failed."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
import zmq
from safetensors import safe_open
from server_desk import save_shard
from server_job import SYNCHRONOUS, Job, ServerThread, SlowProxy, dice, job, served, together
from test_real_servers_training import add, counting

from fleetbench.errors import EnvironmentLacks, WorkerFailed
from real.servers.checkpoints import shard_path
from real.servers.links import Answer, Links, TrainerOptions
from real.servers.served_training import ServedTraining
from real.servers.server_options import ServerOptions
from real.servers.wire import Head, decode, encode

pytestmark = pytest.mark.slow


def wait_for(what: object, patience_s: float = 10.0) -> None:
    """Until ``what`` is true."""
    deadline = time.monotonic() + patience_s
    while not what():  # type: ignore[operator]  # a condition
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.02)


def keep_on(model: torch.nn.Module, optimizer: torch.optim.Optimizer, training: ServedTraining, steps: int) -> None:
    """Train and exchange."""
    for _ in range(steps):
        add(model, optimizer, 0, 1.0, 1.0)
        training.flush()


def still_serves(running: Job) -> None:
    """A trainer joins, trains and leaves."""
    model, optimizer, training = counting(running, 0, served())
    add(model, optimizer, 1, 2.0, 1.0)
    training.finish()
    running.reports()
    assert torch.equal(running.table()[1], torch.full((2,), -2.0))


def test_garbage_on_the_port_does_not_stop_the_service() -> None:
    """Random bytes, half a handshake and a page request end with their connections."""
    with job() as running:
        host, _, port = running.endpoints[0].partition(":")
        for text in (dice(1).randbytes(4096), b"\xff\x00\x00\x00", b"GET / HTTP/1.1\r\n\r\n", b""):
            with socket.create_connection((host, int(port)), timeout=5) as stranger:
                stranger.sendall(text)
        still_serves(running)


def test_messages_of_another_version_and_of_no_trainer_are_passed_over(capfd: pytest.CaptureFixture[str]) -> None:
    """No head, another protocol, no such rank: logged, and no more."""
    with job() as running:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        mad = context.socket(zmq.DEALER)
        try:
            mad.linger = 0
            mad.connect(f"tcp://{running.endpoints[0]}")
            mad.send_multipart(encode(Head("hello", 0, 77)))
            assert mad.poll(5000)
            mad.recv_multipart()
            head = encode(Head("pull", 0, 77, 1))[0]
            for message in (
                [b"x"],
                [b""],
                [b"WHAT" + bytes(head)[4:]],
                encode(Head("pull", 9, 77, 1)),
            ):
                mad.send_multipart(message)
        finally:
            context.destroy(linger=0)
        still_serves(running)
    text = capfd.readouterr().err
    assert text.count("was ignored") == 4


@pytest.mark.parametrize("k_steps", [0, 1], ids=["asynchronous", "geo_sgd"])
def test_training_goes_on_without_a_lost_trainer(k_steps: int, capfd: pytest.CaptureFixture[str]) -> None:
    """A trainer that falls silent is named in the log, the other trains on, and the servers end with it.

    In GeoSGD it has its own 30 steps, and the half of the lost one's that had gone out.
    """
    with job(2, 2, timeout_s=3.0) as running:
        first = counting(running, 0, served(k_steps, send_wait_times=10**6))
        second = counting(running, 1, served(k_steps, send_wait_times=10**6))
        add(second[0], second[1], 0, 1.0, 1.0)
        second[2].flush()
        second[2].close()  # its process is gone, without a word
        for _ in range(15):
            add(first[0], first[1], 1, 1.0, 1.0)
        wait_for(lambda: all(thread.server.report.lost for thread in running.threads))
        for _ in range(15):
            add(first[0], first[1], 1, 1.0, 1.0)
        first[2].finish()
        assert [report.lost for report in running.reports()] == [[1], [1]]
        if k_steps:
            assert -30.5 < float(running.dense()[0]) < -25.0  # but for what the last exchanges left
            assert torch.allclose(first[0].bias.detach(), torch.tensor(-30.5), rtol=0, atol=1e-4)  # type: ignore[operator]  # its parameter
        else:
            assert torch.equal(running.dense(), torch.full((3,), -31.0))
    assert capfd.readouterr().err.count("trainer 1 is lost") == 2


def test_synchronous_training_stops_and_names_the_lost_trainer() -> None:
    """The trainer that waits for a round, and the server, end with the silent one's rank."""
    with job(1, 2, timeout_s=3.0) as running:

        def lonely() -> None:
            model, optimizer, training = counting(running, 0, SYNCHRONOUS)
            with pytest.raises(WorkerFailed, match="rank 1: this trainer has fallen silent"):
                keep_on(model, optimizer, training, 3)

        def dying() -> None:
            model, optimizer, training = counting(running, 1, SYNCHRONOUS)
            add(model, optimizer, 0, 1.0, 1.0)
            training.close()

        together(lonely, dying)
        running.reports()
        assert isinstance(running.threads[0].error, WorkerFailed)
        assert running.threads[0].error.where == "rank 1"


def test_a_trainer_that_starts_again_goes_on() -> None:
    """It takes the servers' parameters, not its own, and both rounds of its steps count."""
    with job(1, 2, timeout_s=3.0) as running:
        other = counting(running, 0, served())
        for _ in range(2):
            model, optimizer, training = counting(running, 1, served())
            add(model, optimizer, 3, 1.0, 1.0)
            training.flush()
            training.close()
            wait_for(lambda: running.threads[0].server.report.lost)
            running.threads[0].server.report.lost.clear()
        model, optimizer, training = counting(running, 1, served())
        assert torch.equal(model.bias.detach(), torch.full((3,), -2.0))  # type: ignore[union-attr]  # its parameter
        training.finish()
        other[2].finish()
        running.reports()
        assert torch.equal(running.table()[3], torch.full((2,), -2.0))


def test_a_trainer_that_was_away_comes_back() -> None:
    """Its thread stood still until the server gave it up; it goes on, meets the other at a barrier, and every gradient counts."""
    with job(1, 2, timeout_s=3.0) as running:
        other = counting(running, 0, served())
        model, optimizer, training = counting(running, 1, served())
        add(model, optimizer, 3, 1.0, 1.0)
        training.flush()
        links = training._sender_links
        assert links is not None
        poll, may_go_on = links.poll, threading.Event()

        def stand_still(*arguments: object) -> object:
            assert may_go_on.wait(20)
            return poll(*arguments)  # type: ignore[arg-type]  # as given

        links.poll = stand_still  # type: ignore[assignment, method-assign]  # the thread's heartbeat
        wait_for(lambda: running.threads[0].server.report.lost == [1])
        add(model, optimizer, 3, 1.0, 1.0)
        may_go_on.set()
        together(training.barrier, other[2].barrier)
        add(model, optimizer, 3, 1.0, 1.0)
        training.finish()
        other[2].finish()
        running.reports()
        assert torch.equal(running.table()[3], torch.full((2,), -3.0))


def test_a_server_that_dies_is_named() -> None:
    """A trainer whose server is gone for good raises after its timeout, and says which it was and how long it was silent."""
    with job(2, 1, timeout_s=3.0) as running:
        model, optimizer, training = counting(running, 0, served())
        add(model, optimizer, 0, 1.0, 1.0)
        training.flush()
        running.threads[1].abandon()
        with pytest.raises(WorkerFailed, match="server 1: has been silent for 3 s") as raised:
            keep_on(model, optimizer, training, 10**6)
        assert running.endpoints[1] in str(raised.value)


def test_servers_that_never_come_are_named() -> None:
    """A trainer that finds nobody says whom it missed, after its startup timeout."""
    with job(1, 1, startup_timeout_s=1.0) as running, pytest.raises(WorkerFailed, match="server 1: has not answered within 1 s"):
        counting(running, 0, served(), endpoints=[running.endpoints[0], "127.0.0.1:9"])


def test_trainers_without_the_first_do_not_wait_for_ever() -> None:
    """Nobody brings the parameters: the second trainer says so after the startup timeout."""
    with job(1, 2, startup_timeout_s=1.0) as running, pytest.raises(WorkerFailed, match=r"(trainer|rank) 0"):
        counting(running, 1, served())


def test_two_servers_cannot_have_one_address() -> None:
    """The second says that the address is taken."""
    with job() as running:
        options = ServerOptions(server=0, servers=1, trainers=1, endpoint=running.endpoints[0])
        with pytest.raises(EnvironmentLacks, match="address cannot be taken"):
            ServerThread(options)


@pytest.mark.parametrize("k_steps", [0, 2], ids=["asynchronous", "geo_sgd"])
def test_a_server_begins_again_from_its_checkpoint(k_steps: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What was pushed after the checkpoint is lost; what was not acknowledged is pushed again; training goes on, exactly.

    The trainer says of how many requests the server had answered that the file does not know them.
    """
    with job(1, 1) as running:
        model, optimizer, training = counting(running, 0, served(k_steps))
        for _ in range(4):
            add(model, optimizer, 0, 1.0, 1.0)
        training.flush()
        training.save(tmp_path)
        for _ in range(6):
            add(model, optimizer, 1, 1.0, 1.0)
        training.flush()
        running.threads[0].abandon()
        (answered,) = (peer.received for peer in running.threads[0].server._peers.values() if peer.session == session_of(training))
        add(model, optimizer, 2, 1.0, 1.0)  # nobody is there to take it
        running.threads[0] = running.start(0, restore=tmp_path)
        training.flush()
        add(model, optimizer, 3, 1.0, 1.0)
        training.finish()
        running.reports()
        expected = -torch.tensor([4.0, 0, 1, 1, 0])[:, None].expand(5, 2)
        assert torch.equal(running.table(), expected)
        assert torch.equal(running.dense(), torch.full((3,), -6.0))
        if k_steps:
            assert torch.equal(model.table.weight.detach(), expected)  # type: ignore[union-attr]  # its table
    text = capfd.readouterr().err
    with safe_open(shard_path(tmp_path, 0, 1), "np") as file:
        held = json.loads(file.metadata()["applied"])[str(session_of(training))]
    assert answered - held >= (6 if k_steps == 0 else 3)  # the pushes alone
    assert f"server 0 has begun again from its checkpoint; {answered - held} of this trainer's requests are lost with it" in text


def session_of(training: ServedTraining) -> int:
    """Of its sender's connection."""
    assert training._sender_links is not None
    return training._sender_links._links[0].session


def test_a_server_begins_again_while_a_trainer_waits_at_a_barrier(tmp_path: Path) -> None:
    """The push that was acknowledged after the barrier is lost, and leaves no gap: the barrier is met, and training goes on, exactly."""
    with job(1, 2) as running:
        model, optimizer, training = counting(running, 0, served())
        other = counting(running, 1, served())
        add(model, optimizer, 0, 1.0, 1.0)
        training.flush()
        training.save(tmp_path)
        training._joined().tell("barrier")
        add(model, optimizer, 1, 1.0, 1.0)
        training.flush()
        running.threads[0].abandon()
        add(model, optimizer, 2, 1.0, 1.0)
        running.threads[0] = running.start(0, restore=tmp_path)
        together(training.flush)
        together(other[2].barrier)
        together(lambda: training._await("barrier"))
        training.finish()
        other[2].finish()
        running.reports()
        assert torch.equal(running.table(), -torch.tensor([1.0, 0, 1, 0, 0])[:, None].expand(5, 2))


def test_a_server_that_begins_again_does_not_wait_for_those_who_had_ended(tmp_path: Path) -> None:
    """Rank 1 has ended, the server is killed and begins again: rank 0 meets nobody at its barrier, and the server ends with it."""
    with job(1, 2, startup_timeout_s=60.0) as running:
        model, optimizer, training = counting(running, 0, served())
        other = counting(running, 1, served())
        training.flush()
        other[2].finish()
        training.save(tmp_path)
        running.threads[0].abandon()
        running.threads[0] = running.start(0, restore=tmp_path)
        add(model, optimizer, 0, 1.0, 1.0)
        training.barrier()
        training.finish()
        running.reports()
        assert torch.equal(running.table()[0], torch.full((2,), -1.0))


def test_what_a_checkpoint_holds_is_not_applied_again(tmp_path: Path) -> None:
    """A push whose acknowledgement was lost with the server is in the checkpoint, comes again, and counts once."""
    with job(1, 1) as running:
        model, optimizer, training = counting(running, 0, served())
        training.flush()
        links = training._sender_links
        assert links is not None
        receive = links._receive
        dropped: list[str] = []
        links._receive = lambda link, _answers: dropped.extend(drop(link.socket))  # type: ignore[method-assign]  # it hears nothing
        add(model, optimizer, 0, 1.0, 1.0)
        wait_for(lambda: "applied" in dropped)
        assert running.threads[0].server.report.updates == 1
        save_shard(tmp_path, running.threads[0].server._moment())
        running.threads[0].abandon()
        running.threads[0] = running.start(0, restore=tmp_path)
        links._receive = receive  # type: ignore[method-assign]  # and hears again
        training.finish()
        running.reports()
        assert torch.equal(running.dense(), torch.full((3,), -1.0))


def drop(heard: zmq.Socket[bytes]) -> list[str]:
    """Whatever a socket has received; of what kind it was."""
    kinds = []
    while heard.poll(0):
        kinds.append(decode(heard.recv_multipart(copy=False))[0].kind)
    return kinds


def test_a_server_without_its_checkpoint_is_an_error() -> None:
    """A server that begins again with nothing does not go on as if these were its parameters."""
    with job(1, 1) as running:
        model, optimizer, training = counting(running, 0, served())
        add(model, optimizer, 0, 1.0, 1.0)
        training.flush()
        running.threads[0].abandon()
        running.threads[0] = running.start(0)
        with pytest.raises(WorkerFailed, match="server 0: began again without its parameters"):
            keep_on(model, optimizer, training, 100)


def test_synchronous_training_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """The round that was open is closed by the server's next life, from the parameters of the checkpoint."""
    with job(1, 2) as running:

        def work(rank: int) -> None:
            model, optimizer, training = counting(running, rank, SYNCHRONOUS)
            add(model, optimizer, 0, 1.0, 1.0)
            training.barrier()
            if rank == 0:
                training.save(tmp_path)
                running.threads[0].abandon()
                running.threads[0] = running.start(0, restore=tmp_path)
            for _ in range(2):
                add(model, optimizer, 1, 1.0, 1.0)
            assert torch.equal(model.bias.detach(), torch.full((3,), -3.0))  # type: ignore[union-attr]  # its parameter
            training.finish()

        together(lambda: work(0), lambda: work(1))
        running.reports()
        assert torch.equal(running.table(), -torch.tensor([1.0, 2, 0, 0, 0])[:, None].expand(5, 2))


def test_a_slow_link_makes_nobody_fail() -> None:
    """A message that takes longer than the beats' rhythm on its way does not count as silence, nor is it sent again and again."""
    with job(1, 1, timeout_s=3.0) as running:
        slow = SlowProxy(running.endpoints[0], bytes_per_s=3_000_000)
        try:
            model = torch.nn.Linear(1500, 1000)  # 6 MB: two seconds each way
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            training = running.trainer(0, model, optimizer, served(), endpoints=[slow.endpoint])
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            start = running.dense().clone()
            before = training.bytes_sent
            optimizer.step()
            training.finish()
            assert training.bytes_sent - before < 6_100_000
        finally:
            slow.close()
        running.reports()
        assert torch.allclose(running.dense(), start - 1)


def test_a_model_that_is_long_on_its_way_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a join, which may wait for trainer 0, has a bound of its own; whatever else a server that is no more silent answers, comes."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    links = Links(context, TrainerOptions(rank=0, endpoints=("127.0.0.1:9",), startup_timeout_s=0.0))
    try:
        fetched = Answer(0, "fetched", "fetch", 0, 0, ())
        coming = iter([[], [], [fetched]])
        monkeypatch.setattr(links, "poll", lambda _timeout_s: next(coming))
        assert links.wait("fetch") == [fetched]
        with pytest.raises(WorkerFailed, match=r"(?s)join.*trainer 0, which brings the parameters"):
            links.wait("join", -1.0)
    finally:
        links.close()
        context.destroy(linger=0)
