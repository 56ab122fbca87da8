"""Support of fields: executors refuse fields that they do not execute, by name, and never ignore one silently."""

from collections.abc import Set as AbstractSet
from typing import Any

from fleetbench.config import Config, defaults_of
from fleetbench.errors import ConfigError

_WORKLOAD = """
model model_options data data_options dtype batch_size steps steps_per_epoch uneven_data unlike_data optimizer lr momentum weight_decay
lr_decay target_loss eval_every profile layers host
"""
WORKLOAD: frozenset[str] = frozenset(f"workload.{name}" for name in _WORKLOAD.split())
"""Workload fields that every executor carries out, or that do not affect its clock.

A table of layers is included: an executor that needs a model refuses ``model = "layers"`` itself.
"""

_RUN = "seed device backend launcher port warmup_steps startup_timeout timeout environment"
RUN: frozenset[str] = frozenset(f"run.{name}" for name in _RUN.split())
"""Run fields that every executor carries out, or that, for an executor without processes, describe how the
layer table was measured."""


def changed_fields(value: Config, prefix: str) -> list[tuple[str, Any]]:
    """Return the dotted names and values of the fields that differ from their defaults."""
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
    "cluster.churn": "leave it out: the nodes of collective training alone leave and come back, in the simulator",
    "cluster.servers": 'set strategy.mode = "ps", which is for servers, or leave them out',
    "cluster.server_placement": 'set strategy.mode = "ps", which is for servers, or leave it out',
}
"""Hints for fields that need another field."""


def refuse_unexecuted(value: Config, prefix: str, executes: AbstractSet[str], executor: str, hint: str = _HINT) -> None:
    """Raise ``ConfigError`` for the first changed field of ``value`` that ``executes`` does not name.

    ``executes`` holds dotted names such as ``strategy.localsgd_configs.k_steps``; ``hint`` is for fields that
    have no hint of their own.
    """
    for name, current in changed_fields(value, prefix):
        if name not in executes:
            raise ConfigError(f"{executor} does not execute this field yet", name, repr(current), _HINTS.get(name, hint))
