"""Board: what the launcher, the servers and the trainers of one host tell each other: lines of a file, which all append to and read.

A launcher tells servers of other hosts by ``Messenger``.
"""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Self

import zmq

from real.servers.wire import Head, encode

BOARD = "FLEETBENCH_BOARD"
"""Environment variable of a server or trainer: the file of its host."""
_LINGER_MS = 3_000
"""For what a launcher has told servers to reach them, before it ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What one process tells the others.

    ``ended``: the launcher of ``name``, ``rank 1`` or ``server 0``, saw it end with ``code``. ``lost``: servers go on without trainer
    ``name``, which raises by itself within ``seconds`` if it lives. ``failed``: the job ends because of ``name``. ``blamed``: a trainer of
    this host ends because of ``name``.
    """

    kind: Literal["ended", "lost", "failed", "blamed"]
    name: str
    why: str = ""
    code: int = 0
    seconds: float = 0.0


class Board:
    """One process's view of the file, which comes with the first entry."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self | None:
        """The host's; none where no launcher of ours has started this process."""
        return cls(Path(environment[BOARD])) if BOARD in environment else None

    def write(self, entry: Entry) -> None:
        """Tell all of this host; where the launcher is gone, its folder is gone too, and no process is told."""
        with suppress(OSError), self._path.open("ab") as file:
            file.write(json.dumps(asdict(entry)).encode() + b"\n")

    def turn(self) -> list[Entry]:
        """Entries that are new here, in their order, this process's own among them."""
        with suppress(OSError):
            if os.path.getsize(self._path) > self._read:  # noqa: PTH202  # asked for between two messages
                with self._path.open("rb") as file:
                    file.seek(self._read)
                    text = file.read()
                whole = text[: text.rfind(b"\n") + 1]
                self._read += len(whole)
                return [Entry(**json.loads(line)) for line in whole.splitlines()]
        return []


class Messenger:
    """A launcher's connections to servers of other hosts. What it tells one that is not up yet waits for it, until ``close``."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets = [self._context.socket(zmq.DEALER) for _ in endpoints]
        for socket, endpoint in zip(self._sockets, endpoints, strict=True):
            socket.sndhwm = 0
            socket.connect(f"tcp://{endpoint}")

    def tell(self, entry: Entry) -> None:
        """Tell all of them."""
        for socket in self._sockets:
            with suppress(zmq.Again):
                socket.send_multipart(encode(Head("told"), (json.dumps(asdict(entry)).encode(),)), zmq.NOBLOCK)

    def close(self) -> None:
        """Release the connections, once what was told has gone out, or after a moment."""
        for socket in self._sockets:
            socket.close(linger=_LINGER_MS)
        self._context.term()
