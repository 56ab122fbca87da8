"""Launchers' messages to servers about trainers, and the note that a process leaves for its launcher when another one ends it."""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import zmq

from fleetbench.errors import WorkerFailed
from real.servers.wire import Head, encode

NOTE = "FLEETBENCH_FAILURE_NOTE"
"""Environment variable of a server or trainer: the file in which its launcher finds the first failure that a process of its host names."""
_LINGER_MS = 3_000


class Messenger:
    """A launcher's connections to all servers. A message to a server that is not up yet waits for it, until ``close``."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets = [self._context.socket(zmq.DEALER) for _ in endpoints]
        for socket, endpoint in zip(self._sockets, endpoints, strict=True):
            socket.connect(f"tcp://{endpoint}")

    def trainer_ended(self, rank: int) -> None:
        """A trainer has ended with exit code 0."""
        self._tell(Head("ended", rank))

    def job_failed(self, where: str, what: str) -> None:
        """The job ends because of ``where``, such as ``rank 1``; servers tell all trainers."""
        self._tell(Head("failed"), what, where)

    def close(self, linger: bool) -> None:
        """Release the connections; with ``linger`` once all messages are out, or after three seconds."""
        for socket in self._sockets:
            socket.close(linger=_LINGER_MS if linger else 0)
        self._context.term()

    def _tell(self, head: Head, *texts: str) -> None:
        for socket in self._sockets:
            with suppress(zmq.Again):
                socket.send_multipart(encode(head, [text.encode() for text in texts]), zmq.NOBLOCK)


def note_failure(error: BaseException | None) -> None:
    """Name, for this host's launcher, the process because of which this one ends. The first note counts."""
    path = Path(os.environ.get(NOTE, ""))
    if not path.name or path.exists() or not isinstance(error, WorkerFailed) or error.where is None:
        return
    own = path.with_name(f"{path.name}.{os.getpid()}")
    if error.where.startswith(("rank ", "server ", "host ")):
        with suppress(FileNotFoundError):  # the launcher is gone, and its folder with it
            own.write_text(json.dumps([error.where, error.what]), encoding="utf-8")
            own.replace(path)
