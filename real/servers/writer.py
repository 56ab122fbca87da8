"""Writer: writes a server's checkpoints on a thread of its own, one at a time, so that trainers are answered meanwhile.

A server has checkpoints of its own, at intervals and at its end, and others that trainers ask for.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from real.servers.checkpoints import Frozen, Saved, freeze, write
from real.servers.peers import Request
from real.servers.wire import WireError, reading


@dataclass(frozen=True, slots=True)
class Written:
    """A checkpoint that was written, or was not."""

    folder: Path
    request: Request | None
    """Of the trainer who asked for it; none for the server's own."""
    error: str
    """Why it could not be written; empty where it was."""


class Writer:
    """Life cycle: made; ``every``; ``want`` and ``want_own`` at any time, and ``attend`` now and then; ``close``. Used by one thread.

    ``moment`` gives what is to be saved, as it is when writing begins: at most one copy of a shard is in memory.
    """

    def __init__(self, moment: Callable[[], Saved], folder: Path) -> None:
        self._moment = moment
        self._folders = {os.path.realpath(folder)}
        self._wanted: deque[tuple[Path, Request | None]] = deque()
        self._under_way: tuple[Path, Request | None, Future[str]] | None = None
        self._thread = ThreadPoolExecutor(1, "fleetbench-checkpoint")
        self.own: Path | None = None
        """Where the server's own go; none: it has none."""
        self._every_s: float | None = None
        self._due_at = 0.0

    def allow(self, folder: Path) -> None:
        """Trainers may ask for checkpoints below this folder, too."""
        self._folders.add(os.path.realpath(folder))

    def refusal(self, folder: Path) -> str:
        """Why a trainer's checkpoint is not written there, wherever links lead; empty where it is."""
        where = Path(os.path.realpath(folder))
        if any(where.is_relative_to(own) for own in self._folders):
            return ""
        own = " or ".join(sorted(self._folders))
        return f"{where} is not below {own}, where trainers may have this server write; fleet.run_server(save_to=...) names another folder"

    def every(self, seconds: float | None, folder: Path | None) -> None:
        """The server's own go to ``folder``, and are due every so many seconds; none: at its end alone."""
        self._every_s, self.own, self._due_at = seconds, folder, time.monotonic() + (seconds or 0.0)
        if folder is not None:
            self.allow(folder)

    def hurry(self) -> None:
        """The server's next own is due now, where it has any but the last."""
        self._due_at = time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether one of the server's own is; never while another is written."""
        return self._every_s is not None and self.own is not None and not self.is_busy and time.monotonic() >= self._due_at

    @property
    def is_busy(self) -> bool:
        """Whether something is being written, or waits for that."""
        return self._under_way is not None or bool(self._wanted)

    @property
    def is_asked(self) -> bool:
        """Whether a trainer waits for what is being written, or is to be."""
        under_way = [] if self._under_way is None else [self._under_way[1]]
        return any(request is not None for request in (*under_way, *(request for _, request in self._wanted)))

    def want(self, folder: Path, request: Request | None = None) -> None:
        """Write a checkpoint of a moment from now on."""
        self._wanted.append((folder, request))

    def want_own(self) -> None:
        """Write one of the server's own."""
        assert self.own is not None
        self._due_at = time.monotonic() + (self._every_s or 0.0)
        self.want(self.own)

    def attend(self, *, wait: bool = False) -> list[Written]:
        """What has been written since; begin what is wanted. ``wait``: until there is nothing left to write."""
        done = []
        while self._under_way is not None or self._wanted:
            if self._under_way is None:
                folder, request = self._wanted.popleft()
                try:
                    self._under_way = (folder, request, self._thread.submit(_write, folder, freeze(self._moment())))
                except MemoryError:
                    done.append(Written(folder, request, "there is no memory for a copy of what is to be written"))
                    continue
            folder, request, result = self._under_way
            if not (wait or result.done()):
                break
            done.append(Written(folder, request, result.result()))
            self._under_way = None
        return done

    def close(self) -> None:
        """Wait for what is under way, and end the thread."""
        self._thread.shutdown(cancel_futures=True)


def folder_of(tensors: Sequence[memoryview]) -> Path:
    """What a request for a checkpoint names. Raises ``WireError`` for what is no name."""
    with reading("no name of a folder"):
        (body,) = tensors
        text = bytes(body).decode()
    if not text or "\0" in text:
        raise WireError("no name of a folder")
    return Path(text)


def _write(folder: Path, frozen: Frozen) -> str:
    try:
        write(folder, frozen)
    except (OSError, ValueError, MemoryError) as error:  # ValueError: a name that no folder can have
        return str(error) or type(error).__name__
    return ""
