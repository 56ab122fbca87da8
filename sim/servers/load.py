"""Load: what a server's queue looked like, and how old the parameters were that pushes came from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from fleetbench.staleness import ServerLoad, counts_of, load_of, quantiles_of


@dataclass(slots=True)
class Load:
    """One server, from ``since_ns`` on. The queue is what waits and what is worked on."""

    since_ns: int = 0
    until_ns: int = 0
    busy_ns: int = 0
    length: int = 0
    longest: int = 0
    length_ns: int = 0
    """Integral of the queue's length over time."""
    waits_ns: list[int] = field(default_factory=list)
    """Of every message, from its arrival until the server hears it."""
    staleness: Counter[int] = field(default_factory=Counter)
    """Gradients, or GeoSGD's pushes, by the number of updates between the parameters that they came from and their own."""

    @property
    def told(self) -> ServerLoad:
        """What a real server knows of itself, too."""
        return ServerLoad(span_s=(self.until_ns - self.since_ns) / 1e9, busy_s=self.busy_ns / 1e9, staleness=self.staleness)

    def count(self, more: int, now_ns: int) -> None:
        """The queue changes."""
        passed_ns = now_ns - self.until_ns
        self.length_ns += self.length * passed_ns
        self.busy_ns += passed_ns if self.length else 0
        self.until_ns = now_ns
        self.length += more
        self.longest = max(self.longest, self.length)

    def restart(self, now_ns: int) -> None:
        """Forget all before now but the queue."""
        self.since_ns = self.until_ns = now_ns
        self.busy_ns = self.length_ns = 0
        self.longest = self.length
        self.waits_ns.clear()
        self.staleness.clear()


def staleness_summary(loads: Sequence[Load]) -> dict[str, float] | None:
    """``quantiles_of`` the pushes of all servers."""
    return quantiles_of(counts_of([load.told for load in loads]))


def load_summary(loads: Sequence[Load]) -> dict[str, object]:
    """``load_of`` the servers, and what only a simulated one sees: the length of its queue, and the seconds that a message waits."""
    spans_s = [max(1, load.until_ns - load.since_ns) / 1e9 for load in loads]
    waits = np.concatenate([np.asarray(load.waits_ns, dtype=np.float64) for load in loads]) / 1e9
    return {
        **load_of([load.told for load in loads]),
        "queue_length": {
            "mean": sum(load.length_ns / 1e9 / span for load, span in zip(loads, spans_s, strict=True)) / len(loads),
            "max": max(load.longest for load in loads),
        },
        "wait_s": {"mean": float(waits.mean()), "p95": float(np.quantile(waits, 0.95)), "max": float(waits.max())} if len(waits) else None,
    }
