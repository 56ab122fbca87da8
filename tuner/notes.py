"""Notes: remarks about an answer, as values.

``str`` returns a note's sentence; ``kind`` is its heading in the report.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from fleetbench.config import Config, encode
from fleetbench.errors import ConfigError
from fleetbench.quantities import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut(Config):
    """Something that was not searched, trained, run or varied."""

    kind: ClassVar[str] = "left out"
    what: str
    """Subject of the sentence: a setting with its value, a strategy, or runs."""
    how: str
    """Predicate of the sentence, such as ``is not searched``."""
    reason: str
    """Reason, as a clause."""

    def __str__(self) -> str:
        return f"{self.what} {self.how}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt(Config):
    """Numbers of steps to the target, by virtual trainers."""

    kind: ClassVar[str] = "virtual trainers"
    target_loss: float
    """Target loss."""
    seeds: str
    """Text that names the seeds and explains the figures in ``ways``."""
    ways: tuple[str, ...]
    """Texts that name each way of training and its number of steps."""

    def __str__(self) -> str:
        return f"steps to loss {self.target_loss:g}, by virtual trainers of {self.seeds}: {'; '.join(self.ways)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise(Config):
    """Spread of repeated legs and of pairs, as standard deviations of logarithms."""

    kind: ClassVar[str] = "noise"
    default: float | None = None
    """Standard deviation of the default's legs in the pairs; None if there are too few pairs."""
    pairs: float = 0.0
    """Standard deviation of the pairs' ratios."""
    widening: float = 1.0
    """Factor by which correlation between successive pairs widens the interval."""
    num_void: int = 0
    """Number of void runs: those during which other programs used the machine, or the testbed was not as declared."""

    def __str__(self) -> str:
        said = [f"{counted(self.num_void, 'run')} beside other programs did not count"] if self.num_void else []
        if self.widening > 1.1:
            said.insert(0, f"pairs resemble their neighbours, and the interval is {self.widening:.2g} times as wide")
        if self.default is not None:
            said.insert(0, f"the default's own legs differ by {100 * self.default:.2g} %, the pairs by {100 * self.pairs:.2g} %")
        return "; ".join(said)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost(Config):
    """Time that a tuning took."""

    kind: ClassVar[str] = "cost"
    took_s: float
    """Seconds that the tuning took."""

    def __str__(self) -> str:
        return f"the tuning took {self.took_s:.3g} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark(Config):
    """A free text about a condition of the profile, the processes or the simulation."""

    kind: ClassVar[str] = "conditions"
    text: str

    def __str__(self) -> str:
        return self.text


Note = LeftOut | Learnt | Noise | Cost | Remark


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotated(Config):
    """An answer with notes."""

    told: tuple[Note, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences of the notes."""
        return tuple(map(str, self.told))

    def plain(self) -> dict[str, Any]:
        """Return the answer as JSON data, with its notes as values in ``told`` and as sentences in ``notes``."""
        return {**encode(self), "notes": [*self.notes]}


def left_out(what: str, how: str, reason: str | ConfigError) -> LeftOut:
    """Return a ``LeftOut``; if ``reason`` is an error, its location and text are the reason."""
    return LeftOut(what=what, how=how, reason=reason if isinstance(reason, str) else f"{reason.where}: {reason.what}")
