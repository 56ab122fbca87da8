"""Security: which processes a server hears. A job has a token; a process without it is refused at the handshake, and never read.

CURVE encrypts everything, which costs CPU. The server's keys are derived from the token, so there are no key files, and a process
without the token cannot begin a handshake. PLAIN encrypts nothing, and shows the token to all who can read the network: it is for
connections that do not leave the machine. There libzmq asks for each connection whether the password is right (ZAP, RFC 27), and is
answered from the server's own loop, which never logs one.
"""

import contextlib
import hashlib
import hmac
import os
import secrets
from collections.abc import Callable, Mapping, Sequence

import zmq
from zmq.utils import z85

from fleetbench.errors import ConfigError, EnvironmentLacks
from real.processes.joining import is_loopback
from real.servers.hosts import resolve
from real.servers.wire import Head, Tensor, encode

TOKEN = "FLEETBENCH_TOKEN"  # noqa: S105  # the variable's name
"""Environment variable with the job's token."""
ENCRYPT = "FLEETBENCH_SERVER_ENCRYPTION"
"""Environment variable: 1 encrypts everything between trainers and servers, 0 nothing; without it, see ``encrypts``."""

_HEARTBEAT_MS = 5_000
_SILENCE_MS = 20_000
"""libzmq breaks a connection on which it hears nothing for so long, not before the job itself takes that for silence. ..."""
_LONGEST_SILENCE_MS = 6_553_500
"""... and no later than its protocol can say: tenths of a second, in 16 bits."""
_HANDSHAKE_MS = 10_000


def new_token() -> str:
    """A token for one job."""
    return secrets.token_urlsafe(32)


def token_of(environment: Mapping[str, str]) -> str:
    """The job's token. Raises ``ConfigError`` where there is none."""
    token = environment.get(TOKEN, "")
    if len(token) < 16:
        draw = "python3 -c 'import secrets; print(secrets.token_urlsafe(32))'"
        hint = f"on one machine fleetbench launch sets it; else draw one with {draw}, and export it on every host, not on a command line"
        raise ConfigError("a job with parameter servers has a token of at least 16 characters, the same on all hosts", TOKEN, hint=hint)
    return token


def encrypts(environment: Mapping[str, str], endpoints: Sequence[str]) -> bool:
    """Whether a job's connections are encrypted: as ``ENCRYPT`` says, and unsaid where an endpoint is not the loopback.

    ``endpoints``: of all servers, as every process of the job has them; none, where all processes are of one machine. Raises
    ``ConfigError`` for a value that is neither yes nor no, ``EnvironmentLacks`` where ZeroMQ was built without encryption.
    """
    value = environment.get(ENCRYPT, "")
    if value not in ("", "0", "1"):
        hint = "1 encrypts them, 0 does not; without it, what leaves a machine is"
        raise ConfigError("says whether connections are encrypted", ENCRYPT, repr(value), hint)
    leaves = any(not is_loopback(endpoint.rpartition(":")[0]) for endpoint in endpoints)
    if not (leaves if value == "" else value == "1"):
        return False
    if not zmq.has("curve"):
        hint = f"install a pyzmq that has libsodium; {ENCRYPT}=0 on all hosts sends the token in clear"
        raise EnvironmentLacks("ZeroMQ was built without CURVE, its encryption", "parameter servers", hint=hint)
    return True


class ServerSocket:
    """Life cycle: made; ``bind``; ``poll``, ``receive`` and ``send``; ``close``. Used by one thread.

    ``say`` hears of the first process without the token.
    """

    def __init__(self, endpoint: str, token: str, *, encrypted: bool, say: Callable[[str], None], timeout_s: float = 0.0) -> None:
        self.has_refused = False
        """Whether a connection came with another password."""
        self.poller = zmq.Poller()
        self._endpoint, self._say, self._password = endpoint, say, token.encode()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        _prepare(self._socket, timeout_s)
        self._socket.router_mandatory = True
        self._questions = self._context.socket(zmq.REP)
        if encrypted:
            self._socket.curve_server = True
            self._socket.curve_secretkey = _server_key(token)
        else:
            self._socket.plain_server = True
            self._socket.zap_domain = b"fleetbench"
            self._questions.bind("inproc://zeromq.zap.01")
        for listened in (self._socket, self._questions):
            self.poller.register(listened, zmq.POLLIN)

    def bind(self) -> None:
        """Take the address. Raises ``ConfigError`` for one that is none, ``EnvironmentLacks`` where it cannot be had."""
        address = resolve(self._endpoint)
        try:
            self._socket.bind(f"tcp://{address}")
        except zmq.ZMQError as error:
            what = f"the server's address cannot be taken: {error}"
            hint = "an address of this machine, and a port on which no other job's server listens"
            raise EnvironmentLacks(what, "server", self._endpoint, hint) from error

    def poll(self, timeout_s: float) -> bool:
        """Answer new connections, and wait for at most so long; whether a message is there."""
        ready = dict(self.poller.poll(int(timeout_s * 1000)))
        if self._questions in ready:
            self._answer_question()
        return self._socket in ready

    def receive(self) -> tuple[bytes, list[zmq.Frame]] | None:
        """Whom the next message comes from, and its frames; none where there is none."""
        try:
            identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        return identity.bytes, frames

    def send(self, identity: bytes, head: Head, tensors: Sequence[Tensor] = ()) -> None:
        """Send a message. One to a process that is gone, or reads nothing, is dropped: if it comes back, it asks again."""
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send_multipart([identity, *encode(head, tensors)], zmq.NOBLOCK, copy=False)

    def close(self) -> None:
        """Release the address."""
        self._questions.close(linger=0)
        self._socket.close()
        self._context.term()

    def _answer_question(self) -> None:
        version, request, _, address, _, _, *credentials = self._questions.recv_multipart()
        is_known = len(credentials) == 2 and hmac.compare_digest(credentials[1], self._password)
        status = (b"200", b"OK", b"fleetbench") if is_known else (b"400", b"not of this job", b"")
        self._questions.send_multipart([version, request, *status, b""])
        if not is_known and not self.has_refused:  # logged once: it may try again and again
            self.has_refused = True
            self._say(f"a process at {address.decode('ascii', 'replace')} was refused: it does not have the job's token")


def guard_client(client: zmq.Socket[bytes], token: str, *, encrypted: bool, timeout_s: float = 0.0) -> None:
    """Prepare a trainer's socket, before it connects. One frame may be on its way for ``timeout_s``."""
    _prepare(client, timeout_s)
    if encrypted:
        client.curve_publickey, client.curve_secretkey = zmq.curve_keypair()
        client.curve_serverkey = zmq.curve_public(_server_key(token))
    else:
        client.plain_username = b"fleetbench"
        client.plain_password = token.encode()


def _prepare(either: zmq.Socket[bytes], timeout_s: float) -> None:
    """Bound how long a connection may be silent. Its queues need no bound: a trainer has few requests without an answer."""
    either.sndhwm = either.rcvhwm = 0
    either.heartbeat_ivl = _HEARTBEAT_MS
    silence_ms = int(min(max(timeout_s * 1000, _SILENCE_MS), _LONGEST_SILENCE_MS))
    either.heartbeat_timeout = either.heartbeat_ttl = silence_ms  # of this end, and what it asks of the other
    either.handshake_ivl = _HANDSHAKE_MS
    either.linger = 1_000


def _server_key(token: str) -> bytes:
    return z85.encode(hashlib.sha256(f"fleetbench server {token}".encode()).digest())


def new_session() -> int:
    """A number that no other connection has."""
    return int.from_bytes(os.urandom(8), "little") | 1
