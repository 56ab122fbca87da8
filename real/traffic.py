"""Traffic: all-reduces that go round beside compute, to measure by how much they slow it."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

import torch

from fleetbench.quantities import MIB
from real.communicators import Communicators
from real.lanes import Lane, ThreadLane, Ticket
from real.streams import streams_of

LARGEST_BYTES = 4 * MIB
"""What a collective need carry at most, to be in flight most of the time."""
_ITEM_BYTES = 4


class Traffic:
    """All-reduces of ``num_bytes`` on communicator 0, one behind the other, for as long as the ``with`` lasts.

    The first has ended when the context is entered. Leaving it says stop; the ranks stop behind the
    same all-reduce, which is the first behind the last rank's word: the first element of what they
    sum up counts those who have said it. Nothing else may use the communicator meanwhile.
    """

    def __init__(self, communicators: Communicators, num_bytes: int) -> None:
        communicators.require(1)
        self.num_rounds = 0
        """All-reduces that have ended."""
        self._communicators = communicators
        self._tensor = torch.zeros(max(1, num_bytes // _ITEM_BYTES), device=communicators.device)
        self._streams = streams_of(communicators.device)
        self._stream = self._streams.create()
        self._stop = threading.Event()
        self._goes = threading.Event()
        self._lane: Lane | None = None
        self._ticket: Ticket | None = None

    def __enter__(self) -> Self:
        self._stop.clear()
        self._goes.clear()
        self._lane = ThreadLane("traffic")  # on a device too: whoever keeps a stream busy has to wait for it
        self._ticket = self._lane.submit(self._go_round, ())
        self._goes.wait()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        assert self._lane is not None
        assert self._ticket is not None
        self._stop.set()
        try:
            self._ticket.wait()
        finally:
            self._lane.close()

    def _go_round(self) -> None:
        try:
            with self._streams.use(self._stream), torch.no_grad():
                while not self._all_have_stopped():
                    self._goes.set()
        finally:
            self._goes.set()

    def _all_have_stopped(self) -> bool:
        """One all-reduce; on a device, reading the count waits for this stream alone."""
        self._tensor[0] = float(self._stop.is_set())
        self._communicators.all_reduce(self._tensor, "sum")
        self.num_rounds += 1
        return float(self._tensor[0]) >= self._communicators.trainers
