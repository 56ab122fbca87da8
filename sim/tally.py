"""Tally: what a step has cost beside its compute."""

from __future__ import annotations

from dataclasses import dataclass

from fleetbench.timeline import COMPUTE, Span
from sim.spans import Spans

UPDATE = "update"
"""The stream of updates that run beside compute."""


@dataclass(slots=True)
class Tally:
    """One rank's step. While compute goes on nothing counts; from ``compute_ends`` on, every moment is stall or update."""

    rank: int
    spans: Spans | None
    """Where the rank's spans go; none where nobody wants them."""
    stall_ns: int = 0
    update_ns: int = 0
    arrival_ns: int | None = None
    bytes_sent: int = 0
    _counted_ns: int | None = None
    """Up to where time behind compute is stall or update; none while compute goes on."""

    def compute_ends(self, now_ns: int) -> None:
        """The backward is over."""
        self._counted_ns = now_ns

    def stalls(self, until_ns: int) -> None:
        """The rank has waited since the last operation of its own."""
        if self._counted_ns is not None and until_ns > self._counted_ns:
            self.span("wait", self._counted_ns, until_ns)
            self.stall_ns += until_ns - self._counted_ns
            self._counted_ns = until_ns

    def works(self, start_ns: int, end_ns: int) -> None:
        """An update or a merge went on; what of it lies behind compute counts, and time before its start is stall."""
        self.stalls(start_ns)
        if self._counted_ns is not None and end_ns > self._counted_ns:
            self.update_ns += end_ns - self._counted_ns
            self._counted_ns = end_ns

    def span(self, name: str, start_ns: int, end_ns: int, stream: str = COMPUTE) -> None:
        """Remember a span that takes time."""
        if self.spans is not None and end_ns > start_ns:
            self.spans.add(Span(self.rank, stream, name, start_ns, end_ns - start_ns))
