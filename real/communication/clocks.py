"""Clocks: times of events, taken without waiting for them.

On a device, operations run long after the host has enqueued them. A time is therefore first a mark in the current
stream, and becomes a number after the device has passed it.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch

Mark = Any
"""A moment of one clock, opaque to all other code."""

_MILLISECOND_NS = 1_000_000
_ANCHOR_EVERY_NS = 1_000_000_000
_TRIES = 3
_DRIFT = 10_000
"""Inverse of the largest relative drift between two clocks: oscillators are specified to 100 ppm."""
_DAY_NS = 86_400_000_000_000


class Clock:
    """Marks moments, and later turns them into nanoseconds. This class is the host's clock, for computing on a CPU."""

    def mark(self) -> Mark:
        """Return a mark for now, on the current stream; never waits."""
        return time.monotonic_ns()

    def passed(self, mark: Mark) -> bool:  # noqa: ARG002  # the present is after every mark
        """Whether ``resolve`` would return at once."""
        return True

    def resolve(self, marks: Sequence[Mark]) -> list[int]:
        """Return times in ns on the scale of ``time.monotonic_ns``; waits until the device has passed the marks."""
        return list(marks)


class CudaClock(Clock):
    """Clock of CUDA events, relative to an anchor: an event of an idle stream, between two reads of the host's clock.

    The two clocks drift apart by tens of microseconds per second, so ``resolve`` makes a new anchor once a second. This
    takes the host some ten microseconds, and does not wait for the device's work. If streams share a hardware queue
    (``CUDA_DEVICE_MAX_CONNECTIONS``), an event may have to wait nevertheless; a new anchor is not used if it is less
    exact than the old one is by now.

    CUDA gives the time between two events in milliseconds as a 32-bit float: within a second, to 60 ns.

    Tests replace ``torch.cuda``; those marked ``gpu`` use a device.
    """

    def __init__(self, device: torch.device) -> None:
        """Wait for the device, and make the first anchor; create the clock before training starts."""
        self._device = device
        torch.cuda.synchronize(device)
        self._idle = torch.cuda.Stream(device, priority=-1)
        self._anchored_ns = self._tried_ns = time.monotonic_ns()
        self._error_ns = _DAY_NS
        self._anchor_anew()

    def mark(self) -> Mark:
        """See ``Clock``."""
        return self._record(torch.cuda.current_stream(self._device))

    def passed(self, mark: Mark) -> bool:
        """See ``Clock``."""
        return bool(mark.query())

    def resolve(self, marks: Sequence[Mark]) -> list[int]:
        """See ``Clock``; times of one call are on one scale, and those of two may differ by the drift of a second."""
        for mark in marks:
            mark.synchronize()
        if time.monotonic_ns() - self._tried_ns > _ANCHOR_EVERY_NS:
            self._anchor_anew()
        return [self._anchored_ns + round(self._anchor.elapsed_time(mark) * _MILLISECOND_NS) for mark in marks]

    def _anchor_anew(self) -> None:
        for _ in range(_TRIES):
            before = time.monotonic_ns()
            event = self._record(self._idle)
            event.synchronize()
            self._tried_ns = time.monotonic_ns()
            middle, error = (before + self._tried_ns) // 2, (self._tried_ns - before + 1) // 2
            if error <= self._error_ns + (middle - self._anchored_ns) // _DRIFT:
                self._anchor, self._anchored_ns, self._error_ns = event, middle, error

    def _record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event


def clock_of(device: torch.device) -> Clock:
    """Return the clock of ``device``."""
    return CudaClock(device) if device.type == "cuda" else Clock()
