"""The exact partition: transfers of gradients whose last one ends as early as the cost model allows."""

from __future__ import annotations

from collections.abc import Sequence


def best_partition(
    ready_ns: Sequence[int], nbytes: Sequence[int], dtypes: Sequence[str], latency_ns: float, ns_per_byte: float
) -> list[list[int]]:
    """Indices of the gradients of each group, from gradients in order of readiness: no other partition into runs ends earlier.

    A transfer of S bytes takes ``latency_ns + S ns_per_byte``, one at a time, in order, each from when its last
    gradient is ready; a group is a transfer a dtype. Dynamic programming in O(n^2): the end of a group only grows
    with that of the group before it, so the best partition of the first gradients is part of a best one of more.
    For one dtype groups that are no runs end no earlier either: the runs with the same last gradients leave no
    transfer more bytes to wait for.
    """
    ends = [0.0]
    """Of the best partition of the first so many gradients."""
    cuts: list[int] = []
    """Where its last group begins."""
    for last in range(len(ready_ns)):
        parts: dict[str, tuple[int, int]] = {}  # when a type's last gradient is ready, and bytes, from the last type to the first
        best, cut = float("inf"), last
        for first in range(last, -1, -1):
            ready, size = parts.get(dtypes[first], (ready_ns[first], 0))
            parts[dtypes[first]] = (ready, size + nbytes[first])
            end = ends[first]
            for ready, size in reversed(parts.values()):
                end = max(end, ready) + latency_ns + ns_per_byte * size
            if end <= best:
                best, cut = end, first
            if ends[first] <= ready_ns[first]:
                break  # the wire is free before this gradient is ready: taking in those before it only adds bytes
        ends.append(best)
        cuts.append(cut)
    groups: list[list[int]] = []
    end_of_group = len(cuts)
    while end_of_group:
        groups.insert(0, list(range(cuts[end_of_group - 1], end_of_group)))
        end_of_group = cuts[end_of_group - 1]
    return groups
