"""Staleness: how old the parameters were that a parameter server's pushes came from, and how many it had to work on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoad:
    """Of one server, over ``span_s`` seconds of counted steps."""

    span_s: float
    busy_s: float
    staleness: Mapping[int, int]
    """Gradients, or in GeoSGD pushes, by the updates that each has missed."""


def load_of(servers: Sequence[ServerLoad]) -> dict[str, Any]:
    """Means over the servers: ``gradients_per_s`` and ``utilisation``, the share of time busy; and ``staleness_histogram`` of all."""
    counts = counts_of(servers)
    spans_s = [max(server.span_s, 1e-9) for server in servers]
    return {
        "gradients_per_s": sum(sum(one.staleness.values()) / span for one, span in zip(servers, spans_s, strict=True)) / len(servers),
        "utilisation": sum(one.busy_s / span for one, span in zip(servers, spans_s, strict=True)) / len(servers),
        "staleness_histogram": {str(missed): counts[missed] for missed in sorted(counts)},
    }


def counts_of(servers: Sequence[ServerLoad]) -> Counter[int]:
    """The staleness of all servers' pushes."""
    return sum((Counter(server.staleness) for server in servers), Counter[int]())


def staleness_of(counts: Mapping[int, int]) -> dict[str, float] | None:
    """``mean``, ``p50``, ``p95`` and ``max`` of pushes, counted by the updates that each has missed; none without any.

    A quantile is the smallest number that at least this share of the pushes does not exceed.
    """
    total = sum(counts.values())
    if not total:
        return None

    def quantile(share: float) -> float:
        seen = 0
        for missed in sorted(counts):
            seen += counts[missed]
            if seen >= share * total:
                return float(missed)
        return float(max(counts))

    mean = sum(missed * num for missed, num in counts.items()) / total
    return {"mean": mean, "p50": quantile(0.5), "p95": quantile(0.95), "max": quantile(1.0)}


def total_variation(a: Mapping[str, int], b: Mapping[str, int]) -> float:
    """Half the sum of the differences of two histograms' shares: 0 where they are alike, 1 where they have no value in common.

    Raises ``ZeroDivisionError`` for an empty one.
    """
    whole_a, whole_b = sum(a.values()), sum(b.values())
    return 0.5 * sum(abs(a.get(value, 0) / whole_a - b.get(value, 0) / whole_b) for value in a.keys() | b.keys())
