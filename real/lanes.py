"""Lanes: where collectives run beside compute.

A lane runs what is submitted to it in order. ``submit`` returns a ``Ticket``; an operation
starts once the tickets it comes ``after`` are done, on whatever lane those are. On a CPU a lane
is one thread; a CUDA lane is a side stream, where waiting orders streams and blocks nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol


class Ticket(Protocol):
    """An operation under way."""

    def wait(self) -> None:
        """Order what the caller does next behind the operation; raises what the operation raised."""
        ...


class Lane(Protocol):
    """An ordered place for collectives."""

    def submit(self, operation: Callable[[], None], after: Sequence[Ticket]) -> Ticket:
        """Start ``operation`` behind everything submitted before and behind ``after``."""
        ...

    def close(self) -> None:
        """Release the lane; everything submitted has been waited for."""
        ...


class _ThreadTicket:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()


class ThreadLane:
    """A lane on the CPU: one thread that runs blocking collectives."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    def submit(self, operation: Callable[[], None], after: Sequence[Ticket]) -> Ticket:
        """See ``Lane``."""

        def run() -> None:
            for ticket in after:
                ticket.wait()
            operation()

        return _ThreadTicket(self._pool.submit(run))

    def close(self) -> None:
        """See ``Lane``."""
        self._pool.shutdown(wait=True)
