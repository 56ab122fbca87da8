"""Knob: what executors and the tuner need to know about a field of the strategy, as the field's metadata.

Lists of fields elsewhere are derived from it (``fleetbench.fields``). A field without a knob is an error at
import.
"""

from dataclasses import field
from typing import Any, Literal, NamedTuple, TypeVar

T = TypeVar("T")

Need = Literal["", "target", "rounding", "nodes", "loop", "waiting", "model"]
"""Condition on an experiment under which it makes sense to search a field; ``tuner.space.needs`` checks it."""


class Knob(NamedTuple):
    """Metadata of a strategy field. Call the knob with a default to declare the field.

    A key and values make the tuner search the field. A table's knob applies to its fields without a knob.

    ``says`` lists, in words:

    - who executes the field (others refuse it by name): trainers that follow a ``plan``, ``virtual``
      trainers, or trainers of parameter ``servers``;
    - what the field changes: the ``clock``, that is, when things happen; the last ``digits`` of the result,
      or statistics such as batch norm's; or the updates, which is another ``way`` of training;
    - whether each value needs its own layer table (``time``), or any layer table will do (``memory``);
    - whether a script ``restarts`` for a new value, because a running process cannot change it well between two
      steps.
    """

    says: str
    called: str = ""
    """Name of the field for people. Fields with the same name belong together."""
    key: str = ""
    """Key of ``[tune]`` that lists the values to search. If ``called`` is itself a key, all keys of fields with
    this ``called`` are one parameter of the search."""
    values: tuple[Any, ...] = ()
    """Values that the tuner searches by default."""
    need: Need = ""
    """Condition for the search."""

    def __call__(self, default: T, key: str = "", values: tuple[Any, ...] = (), need: Need = "") -> T:
        """Return a dataclass field with the knob in its metadata."""
        return field(default=default, metadata={"knob": self._replace(key=key, values=values, need=need)})
