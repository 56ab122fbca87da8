"""Lanes: queues of collectives that run during compute.

A lane starts operations in the order of their submission. ``submit`` returns a ``Ticket``; an operation starts when the
tickets in its ``after``, of any lane, are done. On gloo, a lane is a thread that hands operations which may overlap to
the backend. On NCCL, it is a side stream, where waiting orders streams and blocks no thread. An operation ends with
``work.wait()`` on the result of torch.distributed: NCCL orders the side stream after the collective, and gloo blocks
the waiting thread.

A device runs the work of one stream in order, and that of two streams in any order unless an event orders them. The
host never waits for the device, except where ``host_reads`` marks it. The interface is torch's own: ``Stream``,
``current_stream`` and ``stream`` of ``torch.get_device_module(device)``, which ``torch.cpu`` has too. Tests substitute
another one, which finds missing ordering.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol

import torch

_CPU = torch.device("cpu")
Streams = Any
"""``torch.cuda``, ``torch.cpu``, or a substitute with their ``Stream``, ``current_stream`` and ``stream``."""
MAY_WAIT: ContextVar[bool] = ContextVar("fleetbench_host_may_wait", default=False)


@contextmanager
def host_reads() -> Iterator[None]:
    """Mark a place where the host may wait for a device value; streams of tests refuse all other reads in a step."""
    token = MAY_WAIT.set(True)
    try:
        yield
    finally:
        MAY_WAIT.reset(token)


class Ticket(Protocol):
    """Handle of a submitted operation."""

    def wait(self) -> None:
        """Order the caller's next work after the operation, and raise what the operation raised."""
        ...


class Lane(Protocol):
    """An ordered queue of collectives."""

    def submit(self, operation: Callable[[], None], after: Sequence[Ticket]) -> Ticket:
        """Start ``operation`` after the caller's earlier work, all earlier operations of the lane, and ``after``.

        A ``Flight`` may overlap with earlier flights.
        """
        ...

    def close(self) -> None:
        """Release the lane, after the caller has waited for all operations."""
        ...


class Started(Ticket, Protocol):
    """A collective that the backend runs on its own threads."""

    def is_done(self) -> bool:
        """Whether ``wait`` would return, or raise, at once."""
        ...


@dataclass(frozen=True, slots=True)
class Flight:
    """An operation that can be run to its end, or only be started."""

    run: Callable[[], None]
    start: Callable[[], Started | None]
    """Hands the operation to the backend. Returns None, and does nothing, if it can only be run."""

    def __call__(self) -> None:
        """Run the operation to its end."""
        self.run()


class _ThreadTicket:
    """An operation on the lane's thread, which runs it or hands it over to the backend."""

    def __init__(self, future: Future[Started | None]) -> None:
        self._future = future

    @property
    def has_left(self) -> bool:
        """Whether the thread has run the operation, or handed it over to the backend."""
        return self._future.done()

    def wait(self) -> None:
        started = self._future.result()
        if started is not None:
            started.wait()

    def is_done(self) -> bool:
        if not self._future.done() or self._future.exception() is not None:
            return self._future.done()
        started = self._future.result()
        return started is None or started.is_done()


class ThreadLane:
    """A lane with one thread of its own, in addition to the backend's.

    A flight goes to the backend as soon as all of ``after`` have ended, without waiting for earlier flights: the
    backend keeps their order, and carries as many at once as it can. If the thread is idle, the submitter hands the
    flight over itself, because a switch of threads costs more than a small collective. All other operations run on the
    thread, after everything submitted before.
    """

    def __init__(self, name: str, device: torch.device = _CPU) -> None:
        """``device``: the rank's device, set on the thread, which would otherwise use device 0."""
        self._streams: Streams = torch.get_device_module(device)
        self._pool = ThreadPoolExecutor(1, name, self._streams.set_device, (device,))
        self._last: _ThreadTicket | None = None
        """The last operation given to the thread."""
        self._lock = Lock()
        self._handed: list[Started] = []
        """Collectives that the backend may still be running."""

    def submit(self, operation: Callable[[], None], after: Sequence[Ticket]) -> Ticket:
        """See ``Lane``."""
        if isinstance(operation, Flight) and (self._last is None or self._last.has_left) and all(map(_has_ended, after)):
            started = self._hand_over(operation)
            if started is not None:
                return started

        stream = self._streams.current_stream()

        def run() -> Started | None:
            with self._streams.stream(stream):  # gloo orders its copies after the stream of the thread that calls it
                for ticket in after:
                    ticket.wait()
                started = self._hand_over(operation) if isinstance(operation, Flight) else None
                if started is None:
                    with self._lock:
                        before, self._handed = self._handed, []
                    for ticket in before:
                        ticket.wait()
                    operation()
                return started

        self._last = _ThreadTicket(self._pool.submit(run))
        return self._last

    def close(self) -> None:
        """See ``Lane``."""
        self._pool.shutdown(wait=True)

    def _hand_over(self, flight: Flight) -> Started | None:
        started = flight.start()
        if started is not None:
            with self._lock:
                self._handed = [*(other for other in self._handed if not other.is_done()), started]
        return started


def _has_ended(ticket: Ticket) -> bool:
    is_done: Callable[[], bool] | None = getattr(ticket, "is_done", None)
    return is_done is not None and is_done()


@dataclass(frozen=True, slots=True)
class StreamTicket:
    """Ticket of an operation on a side stream: an event recorded after it."""

    streams: Streams
    event: Any

    def wait(self) -> None:
        """Order the current stream after the operation; returns at once."""
        self.streams.current_stream().wait_event(self.event)


class StreamLane:
    """A lane on a device: a side stream, on which operations are enqueued at once.

    Memory that an operation allocates belongs to the side stream, so it may be freed when the operation returns. Its
    inputs must live until its ticket has been waited for.
    """

    def __init__(self, streams: Streams, priority: int = 0) -> None:
        self.streams = streams
        self.stream = streams.Stream(priority=priority)

    def submit(self, operation: Callable[[], None], after: Sequence[Ticket]) -> Ticket:
        """See ``Lane``; ``operation`` is called before this returns, and its exceptions are raised here."""
        self.follow_submitter()
        with self.streams.stream(self.stream):
            self.follow(after)
            operation()
            event = self.stream.record_event()
        return self.ticket(event)

    def follow_submitter(self) -> None:
        """Order the side stream after the caller's stream, which has written the operation's inputs."""
        self.stream.wait_stream(self.streams.current_stream())

    def follow(self, tickets: Sequence[Ticket]) -> None:
        """Order the side stream, which is the current one here, after other operations."""
        for ticket in tickets:
            ticket.wait()

    def ticket(self, event: Any) -> Ticket:
        """Return the ticket of an operation that ends at ``event``."""
        return StreamTicket(self.streams, event)

    def close(self) -> None:
        """See ``Lane``; a stream is released with its last reference."""


class Joined:
    """A ticket that is done when all tickets in ``after`` are done."""

    def __init__(self, after: Sequence[Ticket]) -> None:
        self._after = tuple(after)

    def wait(self) -> None:
        """See ``Ticket``."""
        for ticket in self._after:
            ticket.wait()


class InlineLane:
    """A lane without overlap: an operation has ended, in the order of the caller's stream, when ``submit`` returns.

    It is for ``enable_sequential_execution``. On a device, operations are enqueued on the caller's own stream, in
    program order; the host does not block there either.
    """

    def submit(self, operation: Callable[[], None], after: Sequence[Ticket]) -> Ticket:
        """See ``Lane``."""
        Joined(after).wait()
        operation()
        return Joined(())

    def close(self) -> None:
        """See ``Lane``."""
