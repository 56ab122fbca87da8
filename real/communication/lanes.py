"""Lanes: queues of collectives that run beside compute.

A lane starts what is submitted to it in order. ``submit`` returns a ``Ticket``; an operation
starts once the tickets it comes ``after`` are done, on any lane. On a CPU a lane
is one thread, which hands the backend what can go beside others; on a CUDA device it is a side
stream, where waiting orders streams and blocks no thread. An operation ends with ``work.wait()`` on
what torch.distributed returned: on NCCL that orders the side stream after the collective, on gloo
it blocks who waits.

A device runs what is enqueued on one stream in order, and what is enqueued on two in any order, unless an event orders them; the host is
not blocked, but in the few places that ``host_reads`` marks. The seam is torch's own: ``Stream``, ``current_stream`` and ``stream`` of
``torch.get_device_module(device)``, which ``torch.cpu`` has too; the tests bring another, which finds what was left unordered.
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
"""``torch.cuda``, ``torch.cpu``, or what has their ``Stream``, ``current_stream`` and ``stream``."""
MAY_WAIT: ContextVar[bool] = ContextVar("fleetbench_host_may_wait", default=False)


@contextmanager
def host_reads() -> Iterator[None]:
    """Marks a place where the host may read a device value, and so wait for the device; the tests' streams refuse any other in a step."""
    token = MAY_WAIT.set(True)
    try:
        yield
    finally:
        MAY_WAIT.reset(token)


class Ticket(Protocol):
    """An operation under way."""

    def wait(self) -> None:
        """Order what the caller does next after the operation; raises what the operation raised."""
        ...


class Lane(Protocol):
    """An ordered place for collectives."""

    def submit(self, operation: Callable[[], None], after: Sequence[Ticket]) -> Ticket:
        """Start ``operation`` after what the caller did before, everything submitted before, and ``after``.

        A ``Flight`` may start beside the flights before it.
        """
        ...

    def close(self) -> None:
        """Release the lane; everything submitted has been waited for."""
        ...


class Started(Ticket, Protocol):
    """A collective that the backend has, and carries on threads of its own."""

    def is_done(self) -> bool:
        """Whether ``wait`` would return, or raise, at once."""
        ...


@dataclass(frozen=True, slots=True)
class Flight:
    """An operation that may also be begun without waiting for its end."""

    run: Callable[[], None]
    start: Callable[[], Started | None]
    """Hands it to the backend; returns none, and does nothing, where the operation can only be run."""

    def __call__(self) -> None:
        """Run it to its end."""
        self.run()


class _ThreadTicket:
    """An operation on the lane's thread, which runs it or hands it over to the backend."""

    def __init__(self, future: Future[Started | None]) -> None:
        self._future = future

    @property
    def has_left(self) -> bool:
        """Whether the thread has finished with the operation."""
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
    """A lane on the CPU: one thread, and the backend's own beneath it.

    A flight goes to the backend as soon as what it comes after has ended, and does not wait for the
    flights before it: the backend keeps their order, and carries as many at once as it can. The
    submitter hands it over where the thread has nothing before it, because a change of threads costs
    more than a small collective. Everything else runs on the thread, after all that was submitted before.
    """

    def __init__(self, name: str, device: torch.device = _CPU) -> None:
        """``device``: the rank's; a thread would begin on device 0."""
        self._streams: Streams = torch.get_device_module(device)
        self._pool = ThreadPoolExecutor(1, name, self._streams.set_device, (device,))
        self._last: _ThreadTicket | None = None
        """The last operation given to the thread."""
        self._lock = Lock()
        self._handed: list[Started] = []
        """Collectives that the backend may still carry."""

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
    """A place in a side stream, after an operation."""

    streams: Streams
    event: Any

    def wait(self) -> None:
        """Order the current stream after the operation; returns at once."""
        self.streams.current_stream().wait_event(self.event)


class StreamLane:
    """A lane on a device: a side stream, on which operations are enqueued at once.

    What an operation allocates belongs to the side stream, so it may be dropped when the
    operation returns; what it is given must live until its ticket was waited for.
    """

    def __init__(self, streams: Streams, priority: int = 0) -> None:
        self.streams = streams
        self.stream = streams.Stream(priority=priority)

    def submit(self, operation: Callable[[], None], after: Sequence[Ticket]) -> Ticket:
        """See ``Lane``; ``operation`` runs before this returns, and what it raises is raised here."""
        self.follow_submitter()
        with self.streams.stream(self.stream):
            self.follow(after)
            operation()
            event = self.stream.record_event()
        return self.ticket(event)

    def follow_submitter(self) -> None:
        """Order the side stream after the caller's: what the operation reads must have been written."""
        self.stream.wait_stream(self.streams.current_stream())

    def follow(self, tickets: Sequence[Ticket]) -> None:
        """Order the side stream, which is the current one here, after other operations."""
        for ticket in tickets:
            ticket.wait()

    def ticket(self, event: Any) -> Ticket:
        """The ticket of an operation that ends at ``event``."""
        return StreamTicket(self.streams, event)

    def close(self) -> None:
        """See ``Lane``; a stream goes with its last reference."""


class Joined:
    """A ticket that is done when those it comes after are done."""

    def __init__(self, after: Sequence[Ticket]) -> None:
        self._after = tuple(after)

    def wait(self) -> None:
        """See ``Ticket``."""
        for ticket in self._after:
            ticket.wait()


class InlineLane:
    """No overlap: an operation has ended, in the order of the caller's stream, when ``submit`` returns.

    For ``enable_sequential_execution``. On a device the operation is enqueued on the caller's own
    stream, whose order is the program's; the host does not block there either.
    """

    def submit(self, operation: Callable[[], None], after: Sequence[Ticket]) -> Ticket:
        """See ``Lane``."""
        Joined(after).wait()
        operation()
        return Joined(())

    def close(self) -> None:
        """See ``Lane``."""
