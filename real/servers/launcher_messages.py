"""What a launcher tells servers when its part of a job fails, and the note by which a process names to its launcher who ended the job."""

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


def tell_servers(endpoints: Sequence[str], where: str, what: str) -> None:
    """Tell all servers that the job ends because of ``where``, such as ``rank 1``; they tell all trainers.

    Returns once the messages are out, or after three seconds.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    for endpoint in endpoints:
        socket = context.socket(zmq.DEALER)
        socket.linger = _LINGER_MS
        socket.connect(f"tcp://{endpoint}")
        socket.send_multipart(encode(Head("failed"), [what.encode(), where.encode()]))
        socket.close()
    context.term()


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
