"""Knob: what a field of the strategy is to executors and to the tuner, said once, as metadata of the field.

Lists of fields elsewhere are derived from it (``fleetbench.fields``). A field of which nothing is said is an error at import.
"""

from dataclasses import field
from typing import Any, Literal, NamedTuple, TypeVar

T = TypeVar("T")

Need = Literal["", "target", "rounding", "nodes", "loop", "waiting", "model"]
"""The condition that an experiment must meet before a search of the field means anything; ``tuner.space.needs`` checks it."""
_COLLECTIVE = Literal["plan clock", "plan virtual digits", "plan way", "plan virtual way", "plan virtual way restarts"]
_COMPUTE = Literal[
    "plan clock restarts",
    "plan clock time",
    "plan clock memory",
    "plan clock time restarts",
    "plan way time",
    "plan virtual way time restarts",
]
_OF_SERVERS = Literal["servers way", "way", "simulated clock", "plan pieces clock", "plan servers clock time", "plan virtual servers way"]


class Knob(NamedTuple):
    """Called with a default, it is a field of the strategy; with a key and values beside it, one that the tuner searches.

    Called with a table's, it is of all fields of the table that have none of their own.

    In words, who executes the field, while others refuse it by name: trainers that follow a ``plan``, ``virtual`` trainers, trainers of
    parameter ``servers``, ``simulated`` ones alone, or these where they push by bucket (``pieces``). What it acts on: the ``clock``, that
    is, when things happen; the last ``digits`` of what is learnt, or statistics beside it; the updates, which makes another ``way`` of
    training. Whether layer tables hold what it changes, each for one value (``time``), or any table will do (``memory``). Whether a script
    ``restarts`` for it, since a living process does not change it well between two steps.
    """

    says: Literal["", _COLLECTIVE, _COMPUTE, _OF_SERVERS]
    called: str = ""
    """By a person; fields of one name go together."""
    key: str = ""
    """The key of ``[tune]`` that gives other values. Keys of one knob are one parameter of the search if one is its name."""
    values: tuple[Any, ...] = ()
    need: Need = ""

    def __call__(self, default: T, key: str = "", values: tuple[Any, ...] = (), need: Need = "") -> T:
        """The field."""
        return field(default=default, metadata={"knob": self._replace(key=key, values=values, need=need)})
