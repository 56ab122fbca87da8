"""Trial: a measurement between two sentinels, repeated where the machine was not quiet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from real.testbed.ground import Testbed
from real.testbed.noise import Noise, between, why_void

T = TypeVar("T")
_SHORT_S = 1.0
"""The kernel counts time in ticks of 10 ms: of anything shorter, the noise is taken with the sentinels around it."""
REPEATS = 2
"""A void measurement is repeated so often at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """What happened around one measurement."""

    sentinel_before_s: float
    sentinel_after_s: float
    noise: Noise
    void: tuple[str, ...]
    """Reasons why it does not count; none where it does."""

    @property
    def moved(self) -> float:
        """By which share the sentinel took longer afterwards."""
        return self.sentinel_after_s / self.sentinel_before_s - 1.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "sentinel_before_s": self.sentinel_before_s,
            "sentinel_after_s": self.sentinel_after_s,
            "void": list(self.void),
            "noise": self.noise.to_dict(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial(Generic[T]):
    """The last of the measurements, which counts unless it is void as well, and the blocks of all."""

    value: T
    blocks: tuple[Block, ...]

    @property
    def counts(self) -> bool:
        """Whether the value was measured on a quiet machine."""
        return not self.blocks[-1].void

    @property
    def num_void(self) -> int:
        """How many measurements do not count."""
        return sum(bool(block.void) for block in self.blocks)


def quietly(testbed: Testbed, measure: Callable[[], T], repeats: int = REPEATS) -> Trial[T]:
    """Measure between two sentinels, until a measurement counts or there were ``repeats`` more."""
    blocks: list[Block] = []
    while True:
        outer = testbed.read()
        before = testbed.sentinel()
        inner = testbed.read()
        value = measure()
        noise = between(inner, testbed.read())
        after = testbed.sentinel()
        if noise.seconds < _SHORT_S:
            noise = between(outer, testbed.read())
        blocks.append(Block(sentinel_before_s=before, sentinel_after_s=after, noise=noise, void=tuple(why_void(noise, before, after))))
        if not blocks[-1].void or len(blocks) > repeats:
            return Trial(value=value, blocks=tuple(blocks))
