"""Security: who may speak to a server. A job has a token; whoever does not know it is refused at the handshake.

CURVE encrypts everything, which costs CPU; both sides derive their keys from the token, so there are no key files. PLAIN shows
the token to whoever can read the network, and encrypts nothing: it is for connections that do not leave the machine.
The gatekeeper answers libzmq's questions (ZAP, RFC 27) from the server's own loop, and never
logs a password, as pyzmq's authenticator does.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Callable, Mapping, Sequence

import zmq
from zmq.utils import z85

from fleetbench.errors import ConfigError, EnvironmentLacks
from real.processes.interfaces import is_loopback
from real.servers.wire import MAX_FRAME_BYTES

TOKEN = "FLEETBENCH_TOKEN"  # noqa: S105  # the variable's name
"""Environment variable with the job's token."""
ENCRYPT = "FLEETBENCH_SERVER_ENCRYPTION"
"""Environment variable: 1 encrypts everything between trainers and servers, 0 nothing; without it, see ``encrypts``."""

_USER = b"fleetbench"
_DOMAIN = b"fleetbench"
_HEARTBEAT_MS = 5_000
_SILENCE_MS = 20_000
"""libzmq breaks a connection on which it hears nothing for so long, not before the job itself takes that for silence. ..."""
_LONGEST_SILENCE_MS = 6_553_500
"""... and no later than its protocol can say: tenths of a second, in 16 bits."""
_HANDSHAKE_MS = 10_000
_QUEUED_MESSAGES = 64
"""High-water mark of a connection, each way."""


def new_token() -> str:
    """A token for one job."""
    return secrets.token_urlsafe(32)


def token_of(environment: Mapping[str, str]) -> str:
    """The job's token. Raises ``ConfigError`` where there is none."""
    token = environment.get(TOKEN, "")
    if len(token) < 16:
        hint = f"fleetbench launch sets it; else give all processes of the job the same secret, for example {TOKEN}=$(openssl rand -hex 32)"
        raise ConfigError("a job with parameter servers has a token of at least 16 characters", TOKEN, hint=hint)
    return token


def encrypts(environment: Mapping[str, str], endpoints: Sequence[str]) -> bool:
    """Whether a job's connections are encrypted: as ``ENCRYPT`` says, and unsaid where an endpoint is not the loopback.

    ``endpoints``: of all servers, as every process of the job has them; none, where all processes are of one machine. Raises
    ``ConfigError`` for a value that is neither yes nor no, ``EnvironmentLacks`` where ZeroMQ was built without encryption.
    """
    value = environment.get(ENCRYPT, "")
    if value not in ("", "0", "1"):
        raise ConfigError(
            "says whether connections are encrypted",
            ENCRYPT,
            repr(value),
            "1 encrypts them, 0 does not; without it, what leaves a machine is",
        )
    leaves = any(not is_loopback(endpoint.rpartition(":")[0]) for endpoint in endpoints)
    if not (leaves if value == "" else value == "1"):
        return False
    if not zmq.has("curve"):
        hint = f"install a pyzmq that has libsodium; {ENCRYPT}=0 on all hosts sends the token in clear"
        raise EnvironmentLacks("ZeroMQ was built without CURVE, its encryption", "parameter servers", hint=hint)
    return True


def guard_server(socket: zmq.Socket[bytes], token: str, *, encrypted: bool, timeout_s: float = 0.0) -> None:
    """Prepare a server's socket, before it is bound. One frame may be on its way for ``timeout_s``."""
    _prepare(socket, timeout_s)
    socket.zap_domain = _DOMAIN
    if encrypted:
        socket.curve_server = True
        socket.curve_secretkey = _key(token, "server")
    else:
        socket.plain_server = True


def guard_client(socket: zmq.Socket[bytes], token: str, *, encrypted: bool, timeout_s: float = 0.0) -> None:
    """Prepare a trainer's socket, before it connects. One frame may be on its way for ``timeout_s``."""
    _prepare(socket, timeout_s)
    if encrypted:
        secret = _key(token, "client")
        socket.curve_secretkey, socket.curve_publickey = secret, zmq.curve_public(secret)
        socket.curve_serverkey = zmq.curve_public(_key(token, "server"))
    else:
        socket.plain_username = _USER
        socket.plain_password = token.encode()


class Gatekeeper:
    """Answers whether a connection may be made; ``socket`` is to be polled, and ``answer`` called when it has something."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], token: str, refused: Callable[[str], None]) -> None:
        self._password = token.encode()
        self._key = z85.decode(zmq.curve_public(_key(token, "client")))
        self._refused = refused
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self) -> None:
        """Answer one question. ``refused`` hears of a stranger's address."""
        message = self.socket.recv_multipart()
        version, request, _, address, _, mechanism, *credentials = message
        known = (mechanism == b"PLAIN" and len(credentials) == 2 and hmac.compare_digest(credentials[1], self._password)) or (
            mechanism == b"CURVE" and len(credentials) == 1 and hmac.compare_digest(credentials[0], self._key)
        )
        status = (b"200", b"OK", _USER) if known else (b"400", b"not of this job", b"")
        self.socket.send_multipart([version, request, *status, b""])
        if not known:
            self._refused(address.decode("ascii", "replace"))

    def close(self) -> None:
        """Answer nobody any more."""
        self.socket.close()


def _prepare(socket: zmq.Socket[bytes], timeout_s: float) -> None:
    socket.maxmsgsize = MAX_FRAME_BYTES
    socket.sndhwm = socket.rcvhwm = _QUEUED_MESSAGES
    socket.heartbeat_ivl = _HEARTBEAT_MS
    silence_ms = int(min(max(timeout_s * 1000, _SILENCE_MS), _LONGEST_SILENCE_MS))
    socket.heartbeat_timeout = socket.heartbeat_ttl = silence_ms  # of this end, and what it asks of the other
    socket.handshake_ivl = _HANDSHAKE_MS
    socket.linger = 1_000


def _key(token: str, side: str) -> bytes:
    return z85.encode(hashlib.sha256(f"fleetbench {side} {token}".encode()).digest())


def new_session() -> int:
    """A number that no other connection has."""
    return int.from_bytes(os.urandom(8), "little") | 1
