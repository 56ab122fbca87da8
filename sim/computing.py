"""Computing: which ranks compute, and by how much that slows the collectives that they take part in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction

Changed = Callable[[Fraction], None]


class Computing:
    """The ranks whose forward or backward is under way.

    A collective goes at full pace while none of its ranks computes, and at 1 / (1 + ``slowdown``) of it
    otherwise: a ring is as slow as its slowest member.
    """

    def __init__(self, slowdown: float = 0.0) -> None:
        self._slow = 1 / (1 + Fraction(repr(slowdown)))  # the decimal that a file writes
        self._ranks: set[int] = set()
        self._watched: dict[Changed, Sequence[int]] = {}

    @property
    def slows(self) -> bool:
        """Whether computing slows anything."""
        return self._slow != 1

    def begins(self, rank: int) -> None:
        """A rank's forward begins."""
        self._change(rank, self._ranks.add)

    def ends(self, rank: int) -> bool:
        """A rank's backward has ended, or waits; whether it was under way."""
        computed = rank in self._ranks
        self._change(rank, self._ranks.discard)
        return computed

    def pace(self, ranks: Sequence[int]) -> Fraction:
        """Of a collective among ``ranks``, as a share of full pace."""
        return Fraction(1) if self._slow == 1 or self._ranks.isdisjoint(ranks) else self._slow

    @contextmanager
    def watching(self, ranks: Sequence[int], changed: Changed) -> Iterator[None]:
        """Tell ``changed`` the pace of a collective among ``ranks`` whenever it changes."""
        self._watched[changed] = ranks
        try:
            yield
        finally:
            del self._watched[changed]

    def _change(self, rank: int, change: Callable[[int], None]) -> None:
        if self._slow == 1:
            return
        before = {changed: self.pace(ranks) for changed, ranks in self._watched.items() if rank in ranks}
        change(rank)
        for changed, pace in before.items():
            now = self.pace(self._watched[changed])
            if now != pace:
                changed(now)
