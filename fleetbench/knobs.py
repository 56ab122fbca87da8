"""Knob: what a field of the strategy is to executors and to the tuner, said once, as metadata of the field.

Lists of fields elsewhere are derived from it (``fleetbench.fields``). A field of which nothing is said is an error at import.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

T = TypeVar("T")

By = Literal["", "plan", "plan virtual", "plan servers", "plan virtual servers", "plan pieces", "servers", "simulated"]
"""Who executes a field; others refuse it by name. ``plan``: trainers that follow a plan; ``virtual``: virtual trainers;
``servers``: trainers of parameter servers; ``simulated``: simulated ones alone; ``pieces``: these, where they push bucket by bucket."""
Need = Literal["", "target", "rounding", "nodes", "loop", "waiting", "model"]
"""What an experiment must have for a search to mean anything: ``tuner.space.needs`` asks, and says why."""


@dataclass(frozen=True, slots=True)
class Search:
    """How the tuner searches a knob."""

    key: str
    """Of ``[tune]``, which gives other values; the name of the parameter that they are of, unless it is ``part_of`` one."""
    values: tuple[Any, ...]
    need: Need = ""
    part_of: str = ""


@dataclass(frozen=True, slots=True)
class Knob:
    """Called with a default, it is a field of the strategy."""

    by: By
    acts: Literal["", "clock", "digits", "way"]
    """``clock``: on when things happen; ``digits``: on the last digits of what is learnt, or on statistics alone; ``way``: on updates."""
    words: str = ""
    """What a person calls it; fields of the same words go together."""
    compute: Literal["", "time", "memory"] = ""
    """``time``: layer tables hold what it changes, each for one value; ``memory``: it changes memory alone, and any table will do."""
    restarts: bool = False
    """A living process does not change it well between two steps: a script is started again."""
    search: Search | None = None

    def __call__(self, default: T, search: Search | None = None) -> T:
        """The field."""
        return field(default=default, metadata={"knob": dataclasses.replace(self, search=search)})
