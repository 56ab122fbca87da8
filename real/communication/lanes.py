"""Lanes: where collectives run beside compute.

A lane runs what is submitted to it in order. ``submit`` returns a ``Ticket``; an operation
starts once the tickets it comes ``after`` are done, on whatever lane those are. On a CPU a lane
is one thread; on a CUDA device it is a side stream, where waiting orders streams and blocks
nobody. An operation ends with ``work.wait()`` on what torch.distributed returned: on NCCL that
orders the side stream behind the collective, on gloo it blocks the lane's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Protocol

from real.communication.streams import StreamEvent, Streams


class Ticket(Protocol):
    """An operation under way."""

    def wait(self) -> None:
        """Order what the caller does next behind the operation; raises what the operation raised."""
        ...


class Lane(Protocol):
    """An ordered place for collectives."""

    def submit(self, operation: Callable[[], None], after: Sequence[Ticket]) -> Ticket:
        """Start ``operation`` behind what the caller did before, everything submitted before, and ``after``."""
        ...

    def close(self) -> None:
        """Release the lane; everything submitted has been waited for."""
        ...


class Flight:
    """An operation that may also be begun without waiting for its end.

    ``start`` begins it and returns what waits for its end; it returns none, and does nothing, where
    the operation can only be run.
    """

    def __init__(self, run: Callable[[], None], start: Callable[[], Callable[[], None] | None]) -> None:
        self._run = run
        self.start = start

    def __call__(self) -> None:
        """Run it to its end."""
        self._run()


class _ThreadTicket:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()

    def is_done(self) -> bool:
        return self._future.done()


class _StartedTicket:
    """A collective that runs on the backend's own threads; the first who waits for it finishes it."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish
        self._lock = Lock()
        self._done = False

    def wait(self) -> None:
        with self._lock:
            if not self._done:
                self._finish()
                self._done = True

    def is_done(self) -> bool:
        return self._done


class ThreadLane:
    """A lane on the CPU: one thread that runs blocking collectives.

    What need not wait for anything is started at once, by the submitter, where it can be: the
    backend has threads of its own, and a change of threads costs more than a small collective.
    """

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._last: _ThreadTicket | _StartedTicket | None = None

    def submit(self, operation: Callable[[], None], after: Sequence[Ticket]) -> Ticket:
        """See ``Lane``."""
        before = self._last
        if isinstance(operation, Flight) and (before is None or before.is_done()) and not after:
            finish = operation.start()
            if finish is not None:
                self._last = _StartedTicket(finish)
                return self._last

        def run() -> None:
            if isinstance(before, _StartedTicket):  # what this thread has run lies behind it anyway
                before.wait()
            for ticket in after:
                ticket.wait()
            operation()

        self._last = _ThreadTicket(self._pool.submit(run))
        return self._last

    def close(self) -> None:
        """See ``Lane``."""
        self._pool.shutdown(wait=True)


class StreamTicket:
    """A place in a side stream, behind an operation."""

    def __init__(self, streams: Streams, event: StreamEvent) -> None:
        self._streams = streams
        self._event = event

    def wait(self) -> None:
        """Order the current stream behind the operation; returns at once."""
        self._streams.current().wait_event(self._event)


class StreamLane:
    """A lane on a device: a side stream, on which operations are enqueued at once.

    What an operation allocates belongs to the side stream, so it may be dropped when the
    operation returns; what it is given must live until its ticket was waited for.
    """

    def __init__(self, streams: Streams, priority: int = 0) -> None:
        self.streams = streams
        self.stream = streams.create(priority)

    def submit(self, operation: Callable[[], None], after: Sequence[Ticket]) -> Ticket:
        """See ``Lane``; ``operation`` runs before this returns, and what it raises is raised here."""
        self.follow_submitter()
        with self.streams.use(self.stream):
            self.follow(after)
            operation()
            event = self.stream.record_event()
        return self.ticket(event)

    def follow_submitter(self) -> None:
        """Order the side stream behind the caller's: what the operation reads must have been written."""
        self.stream.wait_stream(self.streams.current())

    def follow(self, tickets: Sequence[Ticket]) -> None:
        """Order the side stream, which is the current one here, behind other operations."""
        for ticket in tickets:
            ticket.wait()

    def ticket(self, event: StreamEvent) -> Ticket:
        """What ``submit`` returns for an operation that ends at ``event``."""
        return StreamTicket(self.streams, event)

    def close(self) -> None:
        """See ``Lane``; a stream goes with its last reference."""


class _DoneTicket:
    def wait(self) -> None:
        pass


class InlineLane:
    """No overlap: an operation has ended, in the order of the caller's stream, when ``submit`` returns.

    For ``enable_sequential_execution``. On a device the operation is enqueued on the caller's own
    stream, whose order is the program's; the host does not block there either.
    """

    def submit(self, operation: Callable[[], None], after: Sequence[Ticket]) -> Ticket:
        """See ``Lane``."""
        for ticket in after:
            ticket.wait()
        operation()
        return _DoneTicket()

    def close(self) -> None:
        """See ``Lane``."""
