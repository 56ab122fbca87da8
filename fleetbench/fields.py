"""Fields: lists of the strategy's fields, derived from what each says of itself (``fleetbench.knobs``)."""

import dataclasses
from collections.abc import Callable, Mapping

from fleetbench.config import Config, defaults_of
from fleetbench.knobs import Knob, Search
from fleetbench.strategy import DistributedStrategy


def knobs_of(cls: type[Config], prefix: str = "") -> dict[str, Knob]:
    """By dotted name, tables within tables. Raises ``TypeError`` for a field of which nothing is said."""
    found: dict[str, Knob] = {}
    for item in dataclasses.fields(cls):  # type: ignore[arg-type]  # Config's subclasses are dataclasses
        name, default = prefix + item.name, defaults_of(cls)[item.name]  # type: ignore[arg-type]  # classes are hashable
        if isinstance(default, Config):
            found |= knobs_of(type(default), f"{name}.")
        elif (knob := item.metadata.get("knob")) is None:
            raise TypeError(f"{name}: call a Knob with its default: who executes the field, and what does it act on?")
        else:
            found[name] = knob
    return found


KNOBS = knobs_of(DistributedStrategy)
"""By dotted name such as ``localsgd_configs.k_steps``."""
SEARCHES: Mapping[str, tuple[str, Search]] = {knob.search.key: (name, knob.search) for name, knob in KNOBS.items() if knob.search}
"""The field, and how it is searched, by key of ``[tune]``."""
PARAMETERS = {key: search.part_of or key for key, (_, search) in SEARCHES.items()}
"""The parameter of the search that a key's values are of."""


def named(holds: Callable[[Knob], object]) -> tuple[str, ...]:
    """Names such as ``strategy.localsgd_configs.k_steps`` of the fields of whose knob this holds."""
    return tuple(f"strategy.{name}" for name, knob in KNOBS.items() if holds(knob))


def executed_by(who: str) -> frozenset[str]:
    """Such names of the fields that one of ``fleetbench.knobs.By`` executes."""
    return frozenset(named(lambda knob: who in knob.by.split()))


def tables_of(holds: Callable[[Knob], object]) -> tuple[str, ...]:
    """The strategy's own fields, whole tables among them, that hold these."""
    return tuple(dict.fromkeys(name.split(".")[1] for name in named(holds)))


def known_as(words: str) -> tuple[str, ...]:
    """The strategy's own fields that are a knob, by what a person calls it."""
    return tables_of(lambda knob: knob.words == words)


WORDS = {words: known_as(words) for words in dict.fromkeys(knob.words for knob in KNOBS.values()) if words}
"""All knobs that have words."""
