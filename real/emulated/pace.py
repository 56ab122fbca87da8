"""Pace: the deadlines of emulated compute.

Emulated compute sleeps until deadlines that are fixed once a step has begun. A layer that ends late does not delay the
next one, so lateness does not add up over layers. Nor does it add up over steps if the host runs ahead of its device: a
step begins when the device is free, even if the host comes a little later.
"""

import ctypes
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from fleetbench.staleness import quantiles_of
from fleetbench.stragglers import stretch

_BLINK_NS = 100_000
"""Shortest wait that counts: after a shorter one, what the host waited for was already there."""
Nanoclock = Callable[[], int]
Sleep = Callable[[float], None]

_SET_TIMERSLACK, _GET_TIMERSLACK = 29, 30  # linux/prctl.h


def lateness_of(ranks: Sequence[Mapping[str, Sequence[Sequence[int]]]]) -> dict[str, float]:
    """Return ``lateness_s`` of a summary: the lateness of all deadlines in seconds, at ``p50``, ``p95`` and ``max``.

    ``ranks``: for each rank, pairs of microseconds and a count for its ``layer`` and its ``step`` deadlines.
    """
    found: dict[str, float] = {}
    for name in ("layer", "step"):
        counts: Counter[int] = Counter()
        for rank in ranks:
            counts.update(dict(rank[name]))  # type: ignore[arg-type]  # pairs
        spread = quantiles_of(counts) or {}
        found |= {f"{name}_{key}": 1e-6 * spread[key] for key in ("p50", "p95", "max") if spread}
    return found


class Pace:
    """Deadlines of one trainer's steps, until which emulated compute sleeps.

    A step is one ``begin``, a ``reach`` for every mark, and a ``finish`` at the last. A mark is a point of the step's
    compute, in ns since the start of the forward if nothing slows it. ``reach`` returns round((1 + X) mark) ns after
    ``begin``, where X is the step's straggler delay as a share of compute.

    Between two marks, the thread runs hooks, packs buckets and starts collectives. As on a device that computes by
    itself, this work costs no time unless it outlasts the compute up to the next mark. With ``holds_up``, work after a
    mark that ``hands_over`` delays all later deadlines of the step, as if a collective blocked the only stream. Work
    between two steps is hidden by the second one, up to ``lead_ns``, if the caller reports waits for other trainers
    with ``stalled``.
    """

    def __init__(
        self, *, holds_up: bool = False, lead_ns: int = 0, clock: Nanoclock = time.monotonic_ns, sleep: Sleep = time.sleep
    ) -> None:
        self.layers: Counter[int] = Counter()
        """Number of marks in counted steps by lateness, in whole microseconds."""
        self.steps: Counter[int] = Counter()
        """Number of counted steps by the lateness of their last mark, in whole microseconds."""
        self.begun = False
        """Whether a step has begun and not finished."""
        self._holds_up = holds_up
        self._lead_ns = lead_ns
        self._free_ns: int | None = None
        """Time in ns at which the device has done all work given so far; None before the first."""
        self._clock = clock
        self._sleep = sleep
        self._x = 0
        self._counted = False
        self._origin_ns = 0
        self._left_ns: int | None = None

    def begin(self, x: int = 0, *, counted: bool = True) -> None:
        """Begin a step's forward; ``x``: the step's X in units of 2^-24. ``counted``: whether to keep its lateness."""
        self._origin_ns = self.ready()
        self._x, self._counted, self.begun = x, counted, True
        self._left_ns = self._clock() if self._holds_up else None

    def reach(self, mark_ns: int, *, hands_over: bool = False) -> int:
        """Sleep until a mark's deadline, and return by how many ns it was missed.

        ``hands_over``: whether work after this mark delays later deadlines, if the pace ``holds_up``.
        """
        if self._left_ns is not None:
            self._origin_ns += self._clock() - self._left_ns
            self._left_ns = None
        late_ns = self.sleep_until(self._origin_ns + stretch(mark_ns, self._x))
        if self._counted:
            self.layers[late_ns // 1000] += 1
        if self._holds_up and hands_over:
            self._left_ns = self._clock()
        return late_ns

    def finish(self, mark_ns: int) -> None:
        """Sleep until the deadline of the backward's end, and end the step."""
        late_ns = self.reach(mark_ns)
        if self._counted:
            self.steps[late_ns // 1000] += 1
        self._free_ns = max(self._free_ns or 0, self._origin_ns + stretch(mark_ns, self._x))
        self.begun = False

    def ready(self) -> int:
        """Return the time in ns at which the device starts on work given now.

        That is when it becomes free, or ``lead_ns`` ago if that is later: the host counts as so far ahead.
        """
        return self._clock() if self._free_ns is None else max(self._free_ns, self._clock() - self._lead_ns)

    def stalled(self, begin_ns: int, end_ns: int) -> None:
        """Note that the host, and therefore the device, waited for other trainers."""
        if end_ns - begin_ns > _BLINK_NS:
            self._free_ns = max(self._free_ns or 0, end_ns)

    def busy_until(self, deadline_ns: int) -> None:
        """Keep the device busy with something other than forward and backward, and return at the deadline."""
        self.sleep_until(deadline_ns)
        self._free_ns = max(self._free_ns or 0, deadline_ns)

    def deadline(self, took_ns: int) -> int:
        """Return the time in ns, for ``sleep_until``, at which work that begins now and takes ``took_ns`` ends."""
        return self._clock() + took_ns

    def sleep_until(self, deadline_ns: int) -> int:
        """Sleep, without spinning, and return by how many ns the deadline was missed."""
        while (missing_ns := deadline_ns - self._clock()) > 0:
            self._sleep(missing_ns * 1e-9)
        return -missing_ns


def sharpen_sleep(slack_ns: int = 1) -> int | None:
    """Set the timer slack of this thread, and of threads that it starts, and return the previous slack in ns.

    The kernel then wakes them within ``slack_ns`` of a deadline. Linux's default of 50 us is about what a sleep
    overshoots by. On other systems nothing changes, and None is returned.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl
    before = int(prctl(_GET_TIMERSLACK, 0, 0, 0, 0))
    prctl(_SET_TIMERSLACK, slack_ns, 0, 0, 0)
    return before
