"""Streams: the seam between what the executor enqueues and the device that runs it.

A device runs what is enqueued on one stream in order, and what is enqueued on two streams in any
order, unless an event orders them. So the executor says which stream works, and which waits for
which; nothing here blocks the host. Three implementations: ``CudaStreams``; ``HostStreams``, where
the host itself works and there is nothing to order; and one in the tests, which finds what was
left unordered.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Protocol, cast

import torch

_MAY_WAIT: ContextVar[bool] = ContextVar("fleetbench_host_may_wait", default=False)


class StreamEvent(Protocol):
    """A place in a stream, passed once all that was enqueued before it has run. Opaque."""


class Stream(Protocol):
    """A queue of a device's work."""

    def wait_event(self, event: StreamEvent) -> None:
        """Order what is enqueued here from now on behind ``event``."""
        ...

    def wait_stream(self, stream: Stream) -> None:
        """Order what is enqueued here from now on behind all that ``stream`` holds now."""
        ...

    def record_event(self) -> StreamEvent:
        """The place behind all that is enqueued here now."""
        ...


class Streams(Protocol):
    """The streams of one device."""

    def create(self, priority: int = 0) -> Stream:
        """A new stream; of two, the device prefers the one with the lower ``priority``."""
        ...

    def current(self) -> Stream:
        """The stream that this thread enqueues on."""
        ...

    def use(self, stream: Stream) -> AbstractContextManager[None]:
        """Let this thread enqueue on ``stream`` inside the context."""
        ...


class CudaStreams:
    """The streams of a CUDA device; ``torch.cuda.Stream`` is the protocol's shape already.

    Never executed by this project's tests: no machine of theirs has a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def create(self, priority: int = 0) -> Stream:
        """See ``Streams``."""
        return cast("Stream", torch.cuda.Stream(self._device, priority=priority))

    def current(self) -> Stream:
        """See ``Streams``."""
        return cast("Stream", torch.cuda.current_stream(self._device))

    def use(self, stream: Stream) -> AbstractContextManager[None]:
        """See ``Streams``."""
        return cast("AbstractContextManager[None]", torch.cuda.stream(cast("torch.cuda.Stream", stream)))


class HostStream:
    """The host's own program order, which needs no help."""

    def wait_event(self, event: StreamEvent) -> None:
        """What came before has run."""

    def wait_stream(self, stream: Stream) -> None:
        """What came before has run."""

    def record_event(self) -> StreamEvent:
        """Any object: there is nothing to wait for."""
        return self


class HostStreams:
    """Streams where operations run as they are called: on a CPU."""

    def __init__(self) -> None:
        self._only = HostStream()

    def create(self, priority: int = 0) -> Stream:  # noqa: ARG002  # one stream has no priority over itself
        """The one there is."""
        return self._only

    def current(self) -> Stream:
        """The one there is."""
        return self._only

    def use(self, stream: Stream) -> AbstractContextManager[None]:  # noqa: ARG002  # there is only one
        """Changes nothing."""
        return nullcontext()


def streams_of(device: torch.device) -> Streams:
    """The streams of ``device``."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams()


@contextmanager
def host_reads() -> Iterator[None]:
    """Marks a place where the host may read a device value, and so wait for the device.

    There are few: a scalar that a strategy observes (found_inf behind the last bucket, a loss at a
    synchronisation), and the losses that are read every so many steps. The mark does nothing by
    itself; the tests' streams refuse every other read inside a step.
    """
    token = _MAY_WAIT.set(True)
    try:
        yield
    finally:
        _MAY_WAIT.reset(token)


def host_may_wait() -> bool:
    """Whether the caller runs inside ``host_reads``."""
    return _MAY_WAIT.get()
