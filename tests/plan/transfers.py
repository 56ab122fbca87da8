"""Random gradients to transfer, every partition of them, and when a partition's last transfer ends."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import accumulate

Case = tuple[list[int], list[int], float, float]


def end_ns(groups: Sequence[Sequence[int]], case: Case) -> float:
    """End of the last transfer: each starts when its last gradient is ready and the one before has ended."""
    ready_ns, nbytes, latency_ns, ns_per_byte = case
    end = 0.0
    for group in groups:
        end = max(end, *(ready_ns[index] for index in group)) + latency_ns + ns_per_byte * sum(nbytes[index] for index in group)
    return end


def partitions(count: int) -> Iterator[list[list[int]]]:
    """All 2^(n-1) ways to cut a row into runs."""
    for cuts in range(1 << (count - 1)):
        groups = [[0]]
        for index in range(1, count):
            if cuts >> (index - 1) & 1:
                groups.append([])
            groups[-1].append(index)
        yield groups


def cases(count: int, most: int, seed: int = 0) -> list[Case]:
    """Random gradients with pauses of 10 to 100 ns between them, at latencies and rates around those."""
    draw = random.Random(seed)  # noqa: S311  # test cases, no secret
    found = []
    for _ in range(count):
        number = draw.randint(1, most)
        ready_ns = list(accumulate(draw.choice([0, draw.randint(10, 100), draw.randint(10, 100)]) for _ in range(number)))
        nbytes = [draw.randint(1, 100) for _ in range(number)]
        found.append((ready_ns, nbytes, draw.choice([0.0, 10.0, 50.0, 200.0]), draw.choice([0.125, 0.5, 1.0, 3.0])))
    return found
