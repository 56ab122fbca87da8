"""Noise: other work of the machine during a measurement, and repetition of measurements that it makes void.

If another process takes a core for a moment, every trainer waits. The measurement then shows that, not the
strategy.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import psutil

from fleetbench.measurements import FOREIGN_LIMIT, is_busy
from real.processes.place import processes_with

if TYPE_CHECKING:
    from real.testbed.testbed import Testbed

T = TypeVar("T")
SENTINEL_LIMIT = 0.02
"""Largest relative change of the fixed ring's time from before to after a measurement."""
_SHORT_S = 1.0
"""Shortest measurement in seconds that is judged by itself, because the kernel counts time in ticks of 10 ms.

Shorter ones are judged together with the sentinels around them, or as if they took this long.
"""
TRIES = 3
"""Largest number of tries of a measurement."""
BUSY = "FLEETBENCH_BUSY"
"""Environment variable: with the value ``accept``, other work is ignored, for a machine that is never quiet."""
Counters = Mapping[str, int]
"""Values of TCP's counters, summed over all namespaces, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The machine's clocks and counters at one time. Times are in seconds since some fixed time."""

    at_s: float
    user_s: float
    """User time of all processes, including nice ones."""
    own_user_s: float
    """User time of this process, its descendants, and other processes that belong to it."""
    counters: Counters


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Other work of the machine between two readings."""

    seconds: float
    foreign_cores: float
    """Mean number of cores that other processes used: their user time per second."""
    retransmits: int = 0
    timeouts: int = 0
    reorders: int = 0
    """Number of times that the kernel found segments out of order (SACK, timestamps or Reno)."""


def read(counters: Counters, mark: str | None = None) -> Reading:
    """Return the machine's current reading.

    ``counters``: current counters. ``mark``: prefix of an environment variable that marks more
    processes as ours.
    """
    all_cores = psutil.cpu_times()
    return Reading(at_s=time.monotonic(), user_s=all_cores.user + all_cores.nice, own_user_s=_own_user_s(mark), counters=counters)


def between(before: Reading, after: Reading) -> Noise:
    """Return the noise from one reading to the next."""
    seconds = after.at_s - before.at_s
    foreign = (after.user_s - before.user_s) - (after.own_user_s - before.own_user_s)
    happened = {name: value - before.counters[name] for name, value in after.counters.items()}
    return Noise(seconds=seconds, foreign_cores=max(0.0, foreign / seconds), **happened)


def why_void(noise: Noise, sentinel_before_s: float, sentinel_after_s: float) -> list[str]:
    """Return reasons not to trust a measurement; an empty list if there are none."""
    reasons = []
    if noise.timeouts:
        reasons.append(f"{noise.timeouts} TCP timeouts")
    if is_busy(noise.foreign_cores):
        reasons.append(f"other processes took {100 * noise.foreign_cores:.0f} % of a core (limit {100 * FOREIGN_LIMIT:.0f} %)")
    if abs(moved := sentinel_after_s / sentinel_before_s - 1.0) > SENTINEL_LIMIT:
        reasons.append(f"the sentinel moved by {100 * moved:+.1f} % (limit {100 * SENTINEL_LIMIT:.0f} %)")
    return reasons


def _own_user_s(mark: str | None) -> float:
    """Return the seconds of user time of this process, its descendants and processes with ``mark``.

    Ended processes count if their parent has waited for them.
    """
    me = psutil.Process()
    own = {process.pid: process for process in (me, *me.children(recursive=True))}
    total = 0.0
    marked = () if mark is None else processes_with(lambda variable: variable.startswith(mark.encode()))
    for pid in {*own, *marked}:
        try:
            times = (own.get(pid) or psutil.Process(pid)).cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.children_user
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Noise during one measurement, and the sentinel's times before and after it, in s."""

    sentinel_before_s: float
    sentinel_after_s: float
    noise: Noise
    void: list[str]
    """Reasons why the measurement does not count; empty if it does."""

    @property
    def moved(self) -> float:
        """Relative change of the sentinel's time from before to after the measurement."""
        return self.sentinel_after_s / self.sentinel_before_s - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial(Generic[T]):
    """The last measurement, which counts unless it is void, and the blocks of all tries."""

    value: T
    blocks: tuple[Block, ...]

    @property
    def counts(self) -> bool:
        """Whether the value was measured on a quiet machine."""
        return not self.blocks[-1].void

    @property
    def num_void(self) -> int:
        """Number of measurements that do not count."""
        return sum(bool(block.void) for block in self.blocks)


def quietly(testbed: Testbed, measure: Callable[[], T], tries: int = TRIES) -> Trial[T]:
    """Measure between two runs of ``Testbed.sentinel``, until a measurement counts or ``tries`` are used up."""
    blocks: list[Block] = []
    while True:
        outer = testbed.read()
        before = testbed.sentinel()
        inner = testbed.read()
        value = measure()
        noise = between(inner, testbed.read())
        after = testbed.sentinel()
        if noise.seconds < _SHORT_S:
            noise = between(outer, testbed.read())
        blocks.append(Block(sentinel_before_s=before, sentinel_after_s=after, noise=noise, void=why_void(noise, before, after)))
        if not blocks[-1].void or len(blocks) >= tries:
            return Trial(value=value, blocks=tuple(blocks))


class Load:
    """Load of the machine by other processes; known after the ``with`` of ``watching``."""

    cores: float | None = None
    """Mean number of cores; ``None`` if it was not measured, or the system does not report it."""


@contextmanager
def watching(mark: str | None = None) -> Iterator[Load]:
    """Yield a ``Load`` that, after the ``with``, has the number of cores that other processes used.

    Processes that this one has started do not count as others. Neither do processes with an environment variable that
    begins with ``mark``: a batch system starts a command's trainers itself.
    """
    load = Load()
    if os.environ.get(BUSY) == "accept" or not Path("/proc/stat").exists():
        yield load
        return
    before = read({}, mark)
    yield load
    found = between(before, read({}, mark))
    load.cores = round(found.foreign_cores * found.seconds / max(found.seconds, _SHORT_S), 3)


def quietest(measure: Callable[[], T], load_of: Callable[[T], float | None], tries: int = TRIES) -> T:
    """Measure, and repeat while the machine was busy; return the quietest of at most ``tries``.

    ``load_of``: returns the number of cores that other processes used during a measurement.
    """
    best = measure()
    for _ in range(tries - 1):
        if not is_busy(load_of(best)):
            break
        best = min(best, measure(), key=lambda value: load_of(value) or 0.0)
    return best
