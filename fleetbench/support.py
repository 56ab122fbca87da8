"""What an executor does not execute yet is refused by name, never silently ignored."""

from collections.abc import Set as AbstractSet
from typing import Any

from fleetbench.config import Config, defaults_of
from fleetbench.errors import ConfigError

_WORKLOAD = """
model model_options data data_options dtype batch_size steps steps_per_epoch uneven_data unlike_data optimizer lr momentum weight_decay
lr_decay target_loss eval_every profile layers host
"""
WORKLOAD: frozenset[str] = frozenset(f"workload.{name}" for name in _WORKLOAD.split())
"""Fields of a workload that every executor carries out, or that leave its clock alone.

A table of layers is among them: an executor that needs a model refuses ``model = "layers"`` itself.
"""

_RUN = "seed device backend launcher port warmup_steps startup_timeout timeout environment"
RUN: frozenset[str] = frozenset(f"run.{name}" for name in _RUN.split())
"""Fields of a run that every executor carries out, or, where it starts no process, that say what the layer table was measured with."""


def changed_fields(value: Config, prefix: str) -> list[tuple[str, Any]]:
    """Dotted names of the fields that differ from their defaults, with their values."""
    changed: list[tuple[str, Any]] = []
    for name, default in defaults_of(type(value)).items():  # type: ignore[arg-type]  # classes are hashable
        current = getattr(value, name)
        if isinstance(current, Config) and isinstance(default, Config):
            changed += changed_fields(current, f"{prefix}.{name}")
        elif current != default:
            changed.append((f"{prefix}.{name}", current))
    return changed


_HINT = "leave it at its default, or choose another executor"
_HINTS = {
    "cluster.servers": 'set strategy.mode = "ps", which is for servers, or leave them out',
    "cluster.server_placement": 'set strategy.mode = "ps", which is for servers, or leave it out',
}
"""Of fields that another field makes sense of."""


def refuse_unexecuted(value: Config, prefix: str, executes: AbstractSet[str], executor: str, hint: str = _HINT) -> None:
    """Raise ``ConfigError`` for the first changed field of ``value`` that ``executes`` does not name.

    ``executes`` holds dotted names such as ``strategy.localsgd_configs.k_steps``; ``hint`` is for fields that have none of their own.
    """
    for name, current in changed_fields(value, prefix):
        if name not in executes:
            raise ConfigError(f"{executor} does not execute this field yet", name, repr(current), _HINTS.get(name, hint))
