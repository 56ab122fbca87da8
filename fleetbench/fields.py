"""Fields: lists of the strategy's fields, derived from each field's metadata (``fleetbench.knobs``).

Names are dotted, such as ``strategy.localsgd_configs.k_steps``.
"""

import dataclasses
from collections.abc import Iterator, KeysView

from fleetbench.config import Config
from fleetbench.knobs import Knob
from fleetbench.strategy import DistributedStrategy


def knobs_of(value: Config, prefix: str = "strategy", of_table: Knob | None = None) -> Iterator[tuple[str, Knob]]:
    """Yield all fields with their own or their table's knob. Raises ``TypeError`` for a field without one."""
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
"""Name of a field below the strategy, and its knob, by key of ``[tune]``."""
PARAMETERS = {key: knob.called if knob.called in SEARCHES else key for key, (_, knob) in SEARCHES.items()}
"""Parameter of the search to which a key's values belong."""


def named(words: str) -> KeysView[str]:
    """Return the fields whose knobs say all of these words."""
    return {name: knob for name, knob in KNOBS.items() if set(words.split()) <= set(knob.says.split())}.keys()


def tables_of(words: str) -> tuple[str, ...]:
    """Return the top-level fields of the strategy, including tables, that contain such fields."""
    return tuple(dict.fromkeys(name.split(".")[1] for name in named(words)))


CALLED = {
    one.called: tuple(dict.fromkeys(name.split(".")[1] for name, knob in KNOBS.items() if knob.called == one.called))
    for one in KNOBS.values()
    if one.called
}
"""Top-level fields of the strategy that belong together, by their name for people."""
