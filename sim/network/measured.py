"""Measured collectives: their times by size, and NCCL's times transferred to other numbers of ranks."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from fractions import Fraction

from fleetbench.measurements import CollectivePoint
from fleetbench.plan.operations import Collective
from sim.clock import half_up
from sim.network.algorithms import Ranks, ring
from sim.network.links import Links
from sim.network.nccl import GENERATIONS, Choice, Nccl
from sim.network.turns import taken_in_turns
from sim.network.work import Cost, Route


class Times:
    """Times of a collective by size, interpolated linearly between measured sizes.

    Above the largest measured size, times lie on the line through it and the largest size that is at most
    half of it. A line through two close sizes would mostly show their noise. Below the smallest size, its own
    time applies.
    """

    def __init__(self, points: Iterable[tuple[int, int | Fraction]]) -> None:
        """``points``: sizes in bytes with times in ns, for at least two sizes."""
        self._points = sorted(dict(points).items())
        self._half = max(bisect_right(self._points, self._points[-1][0] // 2, key=lambda point: point[0]) - 1, 0)

    @property
    def largest(self) -> int:
        """Largest measured size, in bytes."""
        return self._points[-1][0]

    def ns(self, nbytes: int) -> Fraction:
        """Return the time of ``nbytes`` in ns."""
        if nbytes <= self._points[0][0]:
            return Fraction(self._points[0][1])
        above = bisect_left(self._points, nbytes, key=lambda point: point[0])
        first, second = (above - 1, above) if above < len(self._points) else (self._half, -1)
        (small, fast_ns), (large, slow_ns) = self._points[first], self._points[second]
        return max(fast_ns + Fraction(slow_ns - fast_ns, large - small) * (nbytes - small), Fraction(0))


class Measured:
    """A collective of any library, which takes its measured time on the ports of a ring."""

    def __init__(self, kind: Collective, points: Sequence[CollectivePoint], ranks: Ranks, links: Links) -> None:
        """``points`` has at least two sizes."""
        self._times = Times((point.nbytes, point.took) for point in points)
        self._ring = ring(kind, ranks, links)
        self._messages = (2 if kind == "all_reduce" else 1) * (len(ranks) - 1)
        self._latency_ns = self._ring.route(0).cost.latency_ns

    def route(self, nbytes: int) -> Route:
        """Return the time and ports of a collective of ``nbytes``.

        Its latency is that of a ring's messages without bytes, at most the measured time.
        """
        took_ns = self._times.ns(nbytes)
        latency_ns = min(self._latency_ns, int(took_ns))
        turns = taken_in_turns(latency_ns, half_up(took_ns - latency_ns), self._messages)
        return self._ring.routed(Cost(latency_ns, took_ns - latency_ns), nbytes, turns)


class MeasuredNccl:
    """NCCL's collectives of one kind, some of which were measured.

    With the measured numbers of ranks and nodes, a collective takes its measured time. For other numbers, it
    depends on what NCCL's model chooses:

    - a ring: a step takes as long as a measured step of as many bytes in the same protocol;
    - a tree: time is linear in the levels of nodes, through the two nearest measured numbers of levels; one
      node counts if fewer than two others were measured. With one number alone, times have the ratio of the
      model's.

    A tree's time per byte still falls with size, so sizes beyond the largest usable measurement add what the
    model adds. Without a usable measurement, a collective takes the model's time.
    """

    def __init__(self, kind: Collective, ranks: Ranks, links: Links) -> None:
        """Keep the measured collectives with the same number of ranks per node, and those on one node."""
        generation = GENERATIONS[links.collective]
        self._own = Nccl(generation, kind, ranks, links)
        self._num_ranks = len(ranks)
        self._sets: list[tuple[Nccl, int, Times]] = []
        for one in links.declared:
            if one.kind == kind and (links.inter is not None or one.trainers <= links.trainers_per_node):  # others need links between nodes
                model = Nccl(generation, kind, range(one.trainers), links)
                if model.nodes == 1 or one.trainers * self._own.nodes == len(ranks) * model.nodes:
                    self._sets.append((model, one.trainers, Times((point.nbytes, point.took) for point in one.points)))
        self._sizes = sorted({point.nbytes for one in links.declared if one.kind == kind for point in one.points})
        alike = [times for model, number, times in self._sets if (model.nodes, number) == (self._own.nodes, len(ranks))]
        self._exact = alike[-1] if alike else None
        self._curves: dict[str, Times | None] = {}

    def route(self, nbytes: int) -> Route:
        """Return the time and ports of a collective of ``nbytes``."""
        own, way = self._own.cost(nbytes), _way(self._own.choice(nbytes))
        times = self._exact or self._curve(way)
        if times is None:
            return self._own.route(nbytes)
        took_ns = times.ns(nbytes)
        if not self._exact and way == TREE and nbytes > times.largest:
            took_ns = times.ns(times.largest) + max(Fraction(0), own.total_ns - self._own.cost(times.largest).total_ns)
        latency_ns = min(own.latency_ns, int(took_ns))
        return self._own.route(nbytes, Cost(latency_ns, took_ns - latency_ns))

    def _curve(self, way: str) -> Times | None:
        if way not in self._curves:
            found = self._tree() if way == TREE else self._ring(way)
            self._curves[way] = Times(found) if len(dict(found)) > 1 else None
        return self._curves[way]

    def _ring(self, way: str) -> list[tuple[int, Fraction]]:
        found: dict[int, list[Fraction]] = {}
        for model, number, times in self._sets:
            for nbytes in self._sizes if (model.nodes > 1) == (self._own.nodes > 1) else ():
                if _way(model.choice(nbytes)) == way:
                    as_many = nbytes * self._num_ranks // number
                    found.setdefault(as_many, []).append(times.ns(nbytes) * self._own.steps / model.steps)
        return [(nbytes, sum(took, Fraction(0)) / len(took)) for nbytes, took in found.items()]

    def _tree(self) -> list[tuple[int, Fraction]]:
        found: list[tuple[int, Fraction]] = []
        for nbytes in self._sizes:
            known = [(model, times.ns(nbytes), _way(model.choice(nbytes))) for model, _, times in self._sets]
            several = {own.levels: (own, ns) for own, ns, way in known if way == TREE and self._own.nodes > 1 < own.nodes}
            if len(several) < 2 and (several or self._own.nodes == 1):
                several |= {0: (own, ns) for own, ns, way in known if own.nodes == 1 and (several or way == TREE)}  # noqa: B035
            near = sorted(several, key=lambda levels: abs(levels - self._own.levels))[:2]
            if len(near) == 2:
                (_, first_ns), (_, second_ns) = (several[levels] for levels in near)
                slope = (second_ns - first_ns) / (near[1] - near[0])
                found.append((nbytes, max(first_ns + slope * (self._own.levels - near[0]), first_ns / 2)))
            elif near:
                model, took_ns = several[near[0]]
                found.append((nbytes, took_ns * self._own.cost(nbytes).total_ns / model.cost(nbytes).total_ns))
        return found


TREE = "tree"
"""Name for all methods that are not rings: trees and those of NVLS."""


def _way(choice: Choice) -> str:
    return f"ring {choice.protocol}" if choice.method == "ring" else TREE
