"""Clocks: times of events, taken without waiting for them.

On a device, operations run long after the host has enqueued them, so a time is first a mark in the
current stream, and a number once the device has passed it.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch

Mark = Any
"""A moment of one clock, opaque to everybody else."""

_MILLISECOND_NS = 1_000_000
_ANCHOR_EVERY_NS = 1_000_000_000
_TRIES = 3
_DRIFT = 10_000
"""Clocks drift apart by one part in so many at most: oscillators are specified to 100 ppm."""
_DAY_NS = 86_400_000_000_000


class Clock:
    """Marks moments, and turns them into nanoseconds later. This one is the host's, for a CPU: what was called has run."""

    def mark(self) -> Mark:
        """Now, on the current stream; never waits."""
        return time.monotonic_ns()

    def passed(self, mark: Mark) -> bool:  # noqa: ARG002  # the present is after every mark
        """Whether ``resolve`` would return at once."""
        return True

    def resolve(self, marks: Sequence[Mark]) -> list[int]:
        """Nanoseconds on the scale of ``time.monotonic_ns``; waits until the device has passed the marks."""
        return list(marks)


class CudaClock(Clock):
    """CUDA events, relative to an anchor: an event of an idle stream, between two looks at the host's clock.

    The two clocks drift apart by tens of microseconds a second, so ``resolve`` anchors again once a second. That
    takes the host some ten microseconds, and no work of the device is waited for. Where streams share a
    hardware queue (``CUDA_DEVICE_MAX_CONNECTIONS``) an event may have to wait all the same; an anchor that is
    less sure than the one before has become is not taken.

    CUDA gives the time between two events in milliseconds as a 32-bit float: within a second, to 60 ns.

    The tests put another ``torch.cuda`` in its place; those marked ``gpu`` take a device.
    """

    def __init__(self, device: torch.device) -> None:
        """Waits for the device: make it before training starts."""
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
        """See ``Clock``; the marks of one call are on one scale, those of two may differ by the drift of a second."""
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
    """The clock of ``device``."""
    return CudaClock(device) if device.type == "cuda" else Clock()
