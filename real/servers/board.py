"""Board: what the launchers and servers of a job tell each other: one list of entries, which all of them read in the same order.

The launcher on server 0's host holds the board, at the port after server 0's. The others repeat their entries until these are
acknowledged, and get those that they have not read, over connections that are guarded as those to a server.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import zmq

from real.servers.security import ServerSocket, guard_client, new_session
from real.servers.silence import Silence
from real.servers.wire import Head, WireError, decode, encode, read_json, reading

ADDRESS = "FLEETBENCH_BOARD"
"""Environment variable of a server: ``host:port`` of its job's board."""
_ASK_S = 0.2
_GONE_S = 10.0
"""A process that has asked nothing for so many seconds is gone, and so is a holder that has answered nothing."""
_CLOSE_S = 3.0
"""For entries to be acknowledged, and read by the others, before a process ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What one process tells all others.

    ``ended``: the launcher of ``name``, ``rank 1`` or ``server 0``, saw it end with ``code``. ``lost``: servers go on without trainer
    ``name``, which raises by itself within ``seconds`` if it lives. ``failed``: the job ends because of ``name``. ``gone``: the launcher of
    host ``name`` has not been heard for too long.
    """

    kind: Literal["ended", "lost", "failed", "gone"]
    name: str
    why: str = ""
    code: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and isinstance(self.why, str) and type(self.code) is int and abs(self.code) < 2**31):
            raise TypeError("no name, reason or exit code")


class Board:
    """Everyone's side. Life cycle: made; ``write`` and ``turn``, often; ``close``, which alone may wait.

    ``holder``: the list itself, in the process that holds it; it is turned and closed with this.
    """

    def __init__(
        self, endpoint: str, token: str, name: str, *, encrypted: bool, startup_timeout_s: float = 300.0, holder: Holder | None = None
    ) -> None:
        self.holder = holder
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        """To be polled."""
        guard_client(self.socket, token, encrypted=encrypted)
        self.socket.connect(f"tcp://{endpoint}")
        self._head = Head("watch", session=new_session())
        self._name, self._startup_timeout_s = name, startup_timeout_s
        self._own: list[dict[str, Any]] = []
        self._taken = self._read = self._unanswered = 0
        self._has_met = False
        self._asked_at = -math.inf

    def write(self, entry: Entry) -> None:
        """Tell all."""
        self._own.append(asdict(entry))
        self._asked_at = -math.inf

    @property
    def is_silent(self) -> bool:
        """Whether the holder has answered nothing for long, counted in questions: time in which this process is stopped does not count."""
        return self._unanswered * _ASK_S > (_GONE_S if self._has_met else self._startup_timeout_s)

    def turn(self) -> list[Entry]:
        """Entries that are new here, in their order."""
        if self.holder is not None:
            self.holder.turn()
        new: list[Entry] = []
        with contextlib.suppress(zmq.Again):
            while True:
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
                with contextlib.suppress(WireError):
                    new += self._hear(decode(frames)[1])
        if time.monotonic() - self._asked_at > _ASK_S:
            self._unanswered += 1
            self._ask()
        return new

    def _ask(self, *, parts: bool = False) -> None:
        """``parts``: and never again."""
        self._asked_at = time.monotonic()
        entries = self._own[self._taken :]
        question = {"name": self._name, "parts": parts, "read": self._read, "first": self._taken, "entries": entries}
        with contextlib.suppress(zmq.Again):
            self.socket.send_multipart(encode(self._head, (json.dumps(question).encode(),)), zmq.NOBLOCK)

    def _hear(self, tensors: Sequence[memoryview]) -> list[Entry]:
        with reading("no answer of a board"):
            answer = read_json(tensors[0])
            entries = [Entry(**entry) for entry in answer["entries"][self._read - answer["first"] :]]
            self._taken = max(self._taken, answer["taken"])
        self._unanswered, self._has_met = 0, True
        self._read += len(entries)
        return entries

    def close(self) -> None:
        """Wait, for a moment, until what was written here is acknowledged and, where the list is here, read by the others."""
        deadline = time.monotonic() + _CLOSE_S
        while time.monotonic() < deadline and not self.is_silent:
            if self._taken == len(self._own) and (self.holder is None or self.holder.is_known):
                break
            self.turn()
            time.sleep(0.01)
        self._ask(parts=True)
        self.socket.close(linger=500 if self._has_met else 0)
        self._context.term()
        if self.holder is not None:
            self.holder.close()


@dataclass(slots=True)
class _Reader:
    name: str
    identity: bytes
    taken: int = 0
    read: int = 0


class Holder:
    """The list itself. Life cycle: made, which takes the address; ``turn``, often; ``close``.

    ``hosts``: those of other launchers. One that has not come within ``startup_timeout_s`` is gone. Raises ``EnvironmentLacks`` for an
    address that cannot be had.
    """

    def __init__(self, endpoint: str, token: str, hosts: Sequence[str], *, encrypted: bool, startup_timeout_s: float) -> None:
        self._listener = ServerSocket(endpoint, token, encrypted=encrypted, say=lambda _text: None)
        self._entries: list[dict[str, Any]] = []
        self._readers: dict[int, _Reader] = {}
        self._hosts = frozenset(hosts)
        self._silence = Silence(hosts, _GONE_S, startup_timeout_s)
        try:
            self._listener.bind()
        except BaseException:
            self._listener.close()
            raise

    def turn(self) -> None:
        """Answer questions, and note whose launcher is gone."""
        num = len(self._entries)
        self._listener.poll(0)
        while (message := self._listener.receive()) is not None:
            with contextlib.suppress(WireError):
                self._answer(*message)
        self._silence.pass_time()
        for host in self._silence.late:
            del self._silence.silent_s[host]
            self._entries.append(asdict(Entry(kind="gone", name=host)))
        for session, reader in self._readers.items() if len(self._entries) > num else ():
            self._send(session, reader)

    @property
    def is_known(self) -> bool:
        """Whether the launchers of other hosts, but those that have parted, are gone or have not come, have read everything."""
        return all(reader.read == len(self._entries) for reader in self._readers.values() if reader.name in self._silence.silent_s)

    def close(self) -> None:
        """Release the address."""
        self._listener.close()

    def _answer(self, identity: bytes, frames: list[zmq.Frame]) -> None:
        head, tensors = decode(frames)
        with reading("no question to a board"):
            question = read_json(tensors[0])
            is_new = head.session not in self._readers
            reader = self._readers.setdefault(head.session, _Reader(str(question["name"]), identity))
            parts = bool(question["parts"])
            entries = [asdict(Entry(**entry)) for entry in question["entries"][reader.taken - question["first"] :]]
            reader.identity, reader.read = identity, int(question["read"])
        self._entries += entries
        reader.taken += len(entries)
        if parts:
            self._silence.silent_s.pop(reader.name, None)
        elif reader.name in self._silence.silent_s or (is_new and reader.name in self._hosts):  # one that is started again counts again
            self._silence.hear(reader.name)
        self._send(head.session, reader)

    def _send(self, session: int, reader: _Reader) -> None:
        answer = {"taken": reader.taken, "first": reader.read, "entries": self._entries[reader.read :]}
        self._listener.send(reader.identity, Head("watch", session=session), (json.dumps(answer).encode(),))
