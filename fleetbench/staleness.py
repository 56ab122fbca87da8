"""Staleness: how old the parameters were that a parameter server's pushes came from."""

from __future__ import annotations

from collections.abc import Mapping


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
