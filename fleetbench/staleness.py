"""Staleness of the parameters from which pushes to parameter servers were computed, and load of the servers."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any


@dataclass(slots=True)
class ServerLoad:
    """Work of one server between ``since_ns`` and ``until_ns``, on its clock in ns."""

    since_ns: int = 0
    until_ns: int = 0
    busy_ns: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    """Number of gradients, or of pushes in GeoSGD, by the number of updates between the parameters that they were
    computed from and their own."""

    def worked(self, took_ns: int, now_ns: int) -> None:
        """Count ``took_ns`` of work that ends at ``now_ns``, except for the part before ``since_ns``."""
        self.until_ns = now_ns
        self.busy_ns += min(took_ns, now_ns - self.since_ns)


def load_of(servers: Sequence[ServerLoad]) -> dict[str, Any]:
    """Return ``gradients_per_s``, ``utilisation`` (share of time busy) and ``staleness_histogram``.

    The first two are means over the servers, the histogram is the sum over them.
    """
    counts = counts_of(servers)
    pairs = [(server, max(server.until_ns - server.since_ns, 1)) for server in servers]
    return {
        "gradients_per_s": sum(1e9 * server.staleness.total() / span_ns for server, span_ns in pairs) / len(servers),
        "utilisation": sum(server.busy_ns / span_ns for server, span_ns in pairs) / len(servers),
        "staleness_histogram": {str(missed): counts[missed] for missed in sorted(counts)},
    }


def counts_of(servers: Sequence[ServerLoad]) -> Counter[int]:
    """Return the number of gradients by staleness, summed over the servers."""
    return sum((server.staleness for server in servers), Counter[int]())


def quantiles_of(counts: Mapping[int, int]) -> dict[str, float] | None:
    """Return ``mean``, ``p50``, ``p95`` and ``max`` of numbers, such as missed updates.

    ``counts`` says how often each number occurs. None if it is empty. A quantile is the smallest number that
    at least this share of the numbers does not exceed.
    """
    total = sum(counts.values())
    if not total:
        return None
    ordered = sorted(counts)
    seen = list(accumulate(counts[number] for number in ordered))
    half, most = (float(ordered[bisect_left(seen, share * total)]) for share in (0.5, 0.95))
    mean = sum(number * times for number, times in counts.items()) / total
    return {"mean": mean, "p50": half, "p95": most, "max": float(ordered[-1])}


def total_variation(a: Mapping[str, int], b: Mapping[str, int]) -> float:
    """Return half the summed differences of two histograms' shares: 0 if equal, 1 if disjoint.

    Raises ``ZeroDivisionError`` for an empty one.
    """
    whole_a, whole_b = sum(a.values()), sum(b.values())
    return 0.5 * sum(abs(a.get(value, 0) / whole_a - b.get(value, 0) / whole_b) for value in a.keys() | b.keys())
