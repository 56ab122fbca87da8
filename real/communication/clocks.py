"""Clocks: when something happened, said without waiting for it.

On a device, operations run long after the host has enqueued them, so a time is first a mark in the
current stream, and a number once the device has passed it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch

Mark = Any
"""A moment of one clock; only that clock knows what it is."""

_MILLISECOND_NS = 1_000_000


class Clock(Protocol):
    """Marks moments, and turns them into nanoseconds later."""

    def mark(self) -> Mark:
        """Now, on the current stream; never waits."""
        ...

    def passed(self, mark: Mark) -> bool:
        """Whether ``resolve`` would return at once."""
        ...

    def resolve(self, marks: Sequence[Mark]) -> list[int]:
        """Nanoseconds on the scale of ``time.monotonic_ns``; waits until the device has passed the marks."""
        ...


class HostClock:
    """The host's monotonic clock: for a CPU, where what was called has run."""

    def mark(self) -> Mark:
        """See ``Clock``."""
        return time.monotonic_ns()

    def passed(self, mark: Mark) -> bool:  # noqa: ARG002  # the present is behind every mark
        """Always."""
        return True

    def resolve(self, marks: Sequence[Mark]) -> list[int]:
        """The marks themselves."""
        return list(marks)


class CudaClock:
    """CUDA events, relative to a base event that the host has waited for once.

    CUDA gives the time between two events in milliseconds as a 32-bit float, which after an hour
    counts in quarters of a millisecond. So the base moves along with what is resolved: within a
    second the rounding is 60 ns. ``resolve`` expects marks roughly in the order they were made.

    Never executed by this project's tests: no machine of theirs has a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        """Waits for the device: make it before training starts."""
        self._device = device
        torch.cuda.synchronize(device)
        self._base = self._record()
        self._base.synchronize()
        self._base_ns = time.monotonic_ns()

    def mark(self) -> Mark:
        """See ``Clock``."""
        return self._record()

    def passed(self, mark: Mark) -> bool:
        """See ``Clock``."""
        return bool(mark.query())

    def resolve(self, marks: Sequence[Mark]) -> list[int]:
        """See ``Clock``."""
        for mark in marks:
            mark.synchronize()
        times = [self._base_ns + round(self._base.elapsed_time(mark) * _MILLISECOND_NS) for mark in marks]
        if times:
            latest = max(range(len(times)), key=times.__getitem__)
            self._base, self._base_ns = marks[latest], times[latest]
        return times

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def clock_of(device: torch.device) -> Clock:
    """The clock of ``device``."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
