"""Who may speak to a server, and how much of what is said is kept: one of each kind, others are among the slow tests of faults."""

from __future__ import annotations

import contextlib
import socket as sockets
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import zmq
from server_job import TOKEN, Job, Proxy, job, served
from test_real_servers_training import add, counting

from fleetbench.errors import ConfigError, EnvironmentLacks, WorkerFailed
from fleetbench.strategy import DistributedStrategy
from real.job.served_launcher import launch_placed
from real.processes.roles import Role
from real.servers.hosts import Placement, local_endpoints
from real.servers.leg_servers import LegServers
from real.servers.links import Links, TrainerOptions
from real.servers.security import ENCRYPT, ServerSocket, encrypts, guard_client
from real.servers.served import Served
from real.servers.wire import Head, decode, encode

SERVED = DistributedStrategy(mode="ps")

HERE = ("127.0.0.1:7164", "127.8.0.1:7164", "[::1]:7164", "localhost:7164")
BEYOND = ("10.0.0.1:7164", "[fd00::1]:7164", "node1:7164", "0.0.0.0:7164")


@pytest.mark.parametrize("value", [None, ""])
def test_what_leaves_the_machine_is_encrypted_unless_somebody_says_otherwise(value: str | None) -> None:
    """One server that other hosts reach, by address or name, is enough; the loopback alone is not encrypted, nor are a leg's processes."""
    environment = {} if value is None else {ENCRYPT: value}
    assert not encrypts(environment, HERE)
    assert not encrypts(environment, ())
    for endpoint in BEYOND:
        assert encrypts(environment, (endpoint,))
        assert encrypts(environment, (*HERE, endpoint))


def test_who_says_whether_to_encrypt_is_heard() -> None:
    """One encrypts on the loopback, too, and zero nowhere."""
    assert encrypts({ENCRYPT: "1"}, HERE)
    assert not encrypts({ENCRYPT: "0"}, BEYOND)


def test_servers_trainers_and_launchers_of_several_hosts_encrypt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From nothing but the list of servers and the token, all three come to the same."""
    monkeypatch.delenv(ENCRYPT, raising=False)
    monkeypatch.setenv("FLEETBENCH_TOKEN", TOKEN)
    for servers, means in ((("10.0.0.1:7164",), True), (("127.0.0.1:7164",), False)):
        server = Served(Role(launcher="Paddle", kind="server", servers=servers), SERVED, 80.0)
        assert server._server_options().encrypted is means
        trainer = Served(Role(launcher="Paddle", servers=servers), SERVED, 80.0)
        trainer.distributed_model(torch.nn.Linear(1, 1))
        assert trainer.training is not None
        assert trainer.training._options.encrypted is means
        asked: list[bool] = []

        def messenger(*_arguments: object, encrypted: bool, asked: list[bool] = asked) -> None:
            asked.append(encrypted)
            raise InterruptedError

        monkeypatch.setattr("real.job.served_launcher.Messenger", messenger)
        placement = Placement(endpoints=servers, workers=("10.0.0.2",), own=frozenset(["10.0.0.2"]))
        with pytest.raises(InterruptedError):
            launch_placed(placement, [__file__], log_dir=tmp_path / "log")
        assert asked == [means]


class Recorder(Proxy):
    """Keeps what passes."""

    def __init__(self, target: str) -> None:
        self.heard = bytearray()
        super().__init__(target)

    def passes(self, near: sockets.socket, far: sockets.socket, data: bytes) -> bool:
        """Note it."""
        self.heard += data
        return super().passes(near, far, data)


@pytest.mark.parametrize("encrypted", [True, False])
def test_an_encrypted_connection_does_not_show_the_token(encrypted: bool) -> None:
    """Nor what is said: neither is among the bytes on the network, where both are without encryption. Keys come of the token alone."""
    with job(encrypted=encrypted) as running:
        recorder = Recorder(running.endpoints[0])
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        options = TrainerOptions(rank=0, endpoints=(recorder.endpoint,), token=TOKEN, encrypted=encrypted)
        links = Links(context, options)
        try:
            links.greet()
        finally:
            links.close()
            context.term()
            recorder.close()
    assert len(recorder.heard) > 200
    for secret in (TOKEN.encode(), b"FBPS"):
        assert (secret in recorder.heard) is not encrypted


def test_a_zeromq_without_encryption_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody falls back to sending the token in clear."""
    monkeypatch.setattr("real.servers.security.zmq.has", lambda _capability: False)
    with pytest.raises(EnvironmentLacks, match="CURVE"):
        encrypts({}, BEYOND)
    assert not encrypts({}, HERE)


@pytest.mark.parametrize("value", ["true", "yes", "on", "2", " 1"])
def test_another_word_for_yes_is_not_taken_for_no(value: str, tmp_path: Path) -> None:
    """It is an error that names the variable, before any server of an experiment is started."""
    with pytest.raises(ConfigError, match=ENCRYPT):
        encrypts({ENCRYPT: value}, HERE)
    with pytest.raises(ConfigError, match=ENCRYPT):
        LegServers(tmp_path / "leg", tmp_path, local_endpoints(1), trainers=1, environment={ENCRYPT: value})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("timeout_s", "silence_ms"), [(1.0, 20_000), (600.0, 600_000), (1e9, 6_553_500)])
def test_a_frame_may_take_as_long_as_the_job_is_patient(timeout_s: float, silence_ms: int) -> None:
    """By itself libzmq would break a connection on which no frame ends for 20 s, again and again, however long the job's own timeout is."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    links = Links(context, TrainerOptions(rank=0, endpoints=("127.0.0.1:9",), token=TOKEN, timeout_s=timeout_s))
    door = ServerSocket("127.0.0.1:9", TOKEN, encrypted=False, say=print, timeout_s=timeout_s)
    try:
        for socket in (links._links[0].socket, door._socket):
            assert socket.heartbeat_timeout == silence_ms
            assert socket.heartbeat_ttl == silence_ms
    finally:
        door.close()
        links.close()
        context.destroy(linger=0)


def test_what_no_process_reads_is_not_kept_without_end(tmp_path: Path) -> None:
    """While its server is gone, a trainer's socket takes greetings and no push; the next server gets all pushes, each once."""
    many = 150
    configs = {"thread_pool_size": 2 * many, "send_queue_size": 2 * many, "min_send_grad_num_before_recv": 4 * many}
    with job() as running:
        model, optimizer, training = counting(running, 0, served(**configs, independent_recv_thread=True))
        links = training._sender_links
        assert links is not None
        add(model, optimizer, 0, 1.0, 1.0)
        training.save(tmp_path)
        (link,) = links._links
        running.threads[0].abandon()
        wait_for(lambda: not link.ready)
        sent: list[str] = []
        send = link.socket.send_multipart

        def note(frames: list[bytes | memoryview], *arguments: object, **named: object) -> object:
            taken = send(frames, *arguments, **named)  # type: ignore[call-overload]  # as given
            sent.append(decode([zmq.Frame(bytes(frame)) for frame in frames])[0].kind)
            return taken

        link.socket.send_multipart = note  # type: ignore[method-assign,assignment]  # which hears of what was taken
        for _ in range(many):
            add(model, optimizer, 1, 1.0, 1.0)
        wait_for(lambda: len(link.outstanding) == many)
        assert set(sent) <= {"hello", "beat"}
        del link.socket.send_multipart
        running.threads[0] = running.start(0, restore=tmp_path)
        training.finish()
        running.reports()
        assert torch.equal(running.table(), -torch.tensor([1.0, many, 0, 0, 0])[:, None].expand(5, 2))


def wait_for(what: Callable[[], object]) -> None:
    """Until ``what`` is true."""
    deadline = time.monotonic() + 10.0
    while not what():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.01)


@contextmanager
def caller(running: Job, token: str = TOKEN) -> Iterator[zmq.Socket[bytes]]:
    """A connection to the only server."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    try:
        guard_client(dealer, token, encrypted=False)
        dealer.linger = 0
        dealer.reconnect_ivl = -1
        dealer.connect(f"tcp://{running.endpoints[0]}")
        yield dealer
    finally:
        context.destroy(linger=0)


def greets(dealer: zmq.Socket[bytes], session: int) -> str:
    """The kind of the answer to a hello; nothing where there is none."""
    dealer.send_multipart(encode(Head("hello", 0, session)))
    return decode(dealer.recv_multipart(copy=False))[0].kind if dealer.poll(5000) else ""


def test_a_stranger_hears_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """One without the job's token is refused, which is said once, and the next, who has it, is welcome."""
    with job() as running:
        door = running.threads[0].server._listener
        with caller(running, "another job's token, of no use here") as stranger:
            stranger.send_multipart(encode(Head("hello", 0, 5)))
            wait_for(lambda: door.has_refused)
            assert not stranger.poll(50)
        assert not running.threads[0].server._peers
        with caller(running) as own:
            assert greets(own, 5) == "welcome"
    assert capfd.readouterr().err.count("a process at 127.0.0.1 was refused: it does not have the job's token") == 1


class HangsUpFirst(threading.Thread):
    """A server that greets as one with another mechanism does, and always hangs up before a whole greeting has come."""

    def __init__(self, mechanism: bytes) -> None:
        super().__init__(daemon=True)
        self._greeting = bytes.fromhex("ff00000000000000017f0301") + mechanism.ljust(20, b"\0") + bytes(32)  # RFC 37
        self._listener = sockets.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.start()

    def run(self) -> None:
        """Until ``close``."""
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                with near:
                    if len(near.recv(64)) == 12:  # signature and version alone
                        near.sendall(self._greeting)
                    else:
                        near.setsockopt(sockets.SOL_SOCKET, sockets.SO_LINGER, struct.pack("ii", 1, 0))  # a reset

    def close(self) -> None:
        """End it."""
        self._listener.shutdown(sockets.SHUT_RDWR)
        self._listener.close()
        self.join()


@pytest.mark.parametrize("encrypted", [True, False])
def test_a_server_that_encrypts_otherwise_is_refused_whoever_hangs_up_first(encrypted: bool) -> None:
    """At once: which end sees the other's greeting first is chance, and libzmq would try again until the timeout."""
    server, context = HangsUpFirst(b"PLAIN" if encrypted else b"CURVE"), zmq.Context()
    options = TrainerOptions(rank=0, endpoints=(server.endpoint,), token=TOKEN, encrypted=encrypted, startup_timeout_s=30)
    links, begin = Links(context, options), time.monotonic()
    try:
        with pytest.raises(EnvironmentLacks, match="or one that encrypts otherwise"):
            links.greet()
        links.close()
        context.term()
        assert time.monotonic() - begin < 5  # nothing is waited for that would go to this server
    finally:
        links.close()
        server.close()


def test_a_server_that_hangs_up_and_encrypts_alike_is_waited_for() -> None:
    """It may be at its start, or a proxy of one that is."""
    server, context = HangsUpFirst(b"PLAIN"), zmq.Context()
    links = Links(context, TrainerOptions(rank=0, endpoints=(server.endpoint,), token=TOKEN, startup_timeout_s=1))
    try:
        with pytest.raises(WorkerFailed, match="has not answered within 1 s"):
            links.greet()
    finally:
        links.close()
        context.destroy(linger=0)
        server.close()
