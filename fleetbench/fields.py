"""Fields: lists of the strategy's fields, derived from each field's metadata (``fleetbench.knobs``).

Names are dotted, such as ``strategy.localsgd_configs.k_steps``.
"""

import dataclasses
from collections.abc import Iterator, KeysView

from fleetbench.config import Config
from fleetbench.knobs import Knob
from fleetbench.strategy import DistributedStrategy


def knobs_of(value: Config, prefix: str = "strategy", of_table: Knob | None = None) -> Iterator[tuple[str, Knob]]:
    """Yield the name and knob, or else the table's knob, of each field. Raises ``TypeError`` if it has none."""
    for item in dataclasses.fields(value):  # type: ignore[arg-type]  # Config's subclasses are dataclasses
        current, name = getattr(value, item.name), f"{prefix}.{item.name}"
        knob = item.metadata.get("knob", of_table)
        if isinstance(current, Config):
            yield from knobs_of(current, name, knob)
        elif knob is None:
            raise TypeError(f"{name}: call a Knob with its default: who executes the field, and what does it act on?")
        else:
            yield name, knob


KNOBS = dict(knobs_of(DistributedStrategy()))
SEARCHES = {knob.key: (name.removeprefix("strategy."), knob) for name, knob in KNOBS.items() if knob.key}
"""Name (below the strategy) and knob of the field whose values a key of ``[tune]`` lists, by key."""
PARAMETERS = {key: knob.called if knob.called in SEARCHES else key for key, (_, knob) in SEARCHES.items()}
"""Name of the search parameter to which a key of ``[tune]`` belongs, by key."""


def named(words: str) -> KeysView[str]:
    """Return the names of the fields whose ``Knob.says`` contains all of these words."""
    return {name: knob for name, knob in KNOBS.items() if set(words.split()) <= set(knob.says.split())}.keys()


def tables_of(words: str) -> tuple[str, ...]:
    """Return the names of the strategy's top-level fields, and of tables, that have fields as in ``named``."""
    return tuple(dict.fromkeys(name.split(".")[1] for name in named(words)))


CALLED = {
    one.called: tuple(dict.fromkeys(name.split(".")[1] for name, knob in KNOBS.items() if knob.called == one.called))
    for one in KNOBS.values()
    if one.called
}
"""Names of the strategy's top-level fields that belong together, by their common ``Knob.called``."""
