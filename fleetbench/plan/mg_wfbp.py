"""MG-WFBP: its rule for merging gradients into transfers, and the exact partition.

Transfers run one at a time, in order, and start when their last gradient is ready. For MG-WFBP, S bytes take
``latency_ns + S ns_per_byte``; for the exact partition, the longest of several such lines.
"""

from collections.abc import Sequence


def merge(ready_ns: Sequence[int], nbytes: Sequence[int], latency_ns: float, ns_per_byte: float) -> list[list[int]]:
    """Return the indices of each transfer's gradients by the rule of MG-WFBP, in order of readiness.

    Shi, Chu and Li, "MG-WFBP: Efficient Data Communication for Distributed Synchronous SGD Algorithms" (arXiv
    1811.11141), algorithm 1: starting with the gradient that is ready first, the current transfer takes in
    the next gradient if that is ready before the start of the transfer plus the latency. Waiting for it then
    costs less than a second latency, so the last transfer never ends later than with one transfer per
    gradient. The paper calls the rule optimal, and for two gradients it is. From three on it may not be,
    because it never undoes a merge: with a latency of 10, 1 per byte, and gradients of 1, 1 and 20 bytes
    ready at 0, 8 and 16, it merges all and ends at 48, while sending the first alone ends at 47. Starting
    with the last gradient is not exact, either. Up to ten gradients it is within 2 % of the best partition on
    average (tests/plan/test_mg_wfbp.py); if no pause between many gradients exceeds the latency, it merges
    them all. ``best_partition`` is exact.
    """
    groups: list[list[int]] = []
    group: list[int] = []
    start_ns, free_ns = 0.0, 0.0
    for index, ready in enumerate(ready_ns):
        if group and ready >= start_ns + latency_ns:
            free_ns = start_ns + latency_ns + ns_per_byte * sum(nbytes[member] for member in group)
            groups.append(group)
            group = []
        group.append(index)
        start_ns = max(free_ns, float(ready))
    return [*groups, group] if group else groups


def best_partition(
    ready_ns: Sequence[float], nbytes: Sequence[int], dtypes: Sequence[str], lines: Sequence[tuple[float, float]]
) -> list[list[int]]:
    """Return the indices of each group's gradients, such that no other partition into runs ends earlier.

    Gradients are in order of readiness. Each of ``lines`` is a latency in ns and the ns per byte; a transfer
    takes the longest of their times. A group is one transfer per dtype. Dynamic programming in O(n^2): a
    group never ends earlier if the group before it ends later, so some best partition contains a best one of
    its first gradients. With one dtype and one line, groups that are not runs do not end earlier, either:
    runs with the same last gradients leave no transfer more bytes to wait for.
    """
    ends = [0.0]
    """Time in ns at which the best partition of the first n gradients ends, by n."""
    cuts: list[int] = []
    """Index of the first gradient in that partition's last group, by n - 1."""
    for last in range(len(ready_ns)):
        parts: dict[str, tuple[float, int]] = {}  # when a type's last gradient is ready, and bytes, from the last type to the first
        best, cut = float("inf"), last
        for first in range(last, -1, -1):
            ready, size = parts.get(dtypes[first], (ready_ns[first], 0))
            parts[dtypes[first]] = (ready, size + nbytes[first])
            end = ends[first]
            for ready, size in reversed(parts.values()):
                end = max(end, ready) + max(latency_ns + ns_per_byte * size for latency_ns, ns_per_byte in lines)
            if end <= best:
                best, cut = end, first
            if ends[first] <= ready_ns[first]:
                break  # the wire is free before this gradient is ready: adding earlier ones only adds bytes
        ends.append(best)
        cuts.append(cut)
    groups: list[list[int]] = []
    end_of_group = len(cuts)
    while end_of_group:
        groups.insert(0, list(range(cuts[end_of_group - 1], end_of_group)))
        end_of_group = cuts[end_of_group - 1]
    return groups
