"""Fleet's names: translate Fleet's field names, and older spellings, into the current names."""

import warnings
from collections.abc import Mapping
from typing import Any

from fleetbench.config import unknown_key
from fleetbench.errors import ConfigError

ALIASES: dict[str, str] = {
    "fuse_grad_size_in_TFLOPS": "fuse_grad_count",
    "hierarchical_allreduce_inter_nranks": "hierarchical_inner_ranks",
    "num_iteration_per_drop_scope": "fetch_every_n_steps",
    "forward_recompute": "recompute",
    "use_local_sgd": "localsgd",
}
"""Our name for each name of Fleet's that is misleading or an older spelling."""

EXECUTION_STRATEGY: dict[str, str] = {"num_threads": "thread_num"} | {
    name: name for name in ("num_iteration_per_drop_scope", "num_iteration_per_run", "use_thread_barrier")
}
"""Our name for each field of Fleet's table ``execution_strategy`` (or ``exec_strategy``), which does not exist here."""

_NO_EFFECT = """
cudnn_batchnorm_spatial_persistent num_iteration_per_run use_thread_barrier enable_inplace fuse_broadcast_ops cache_runtime_context
"""
NO_EFFECT = frozenset(_NO_EFFECT.split())
"""Names of Fleet's fields for details of Paddle's executor that have no equivalent in torch."""
_REMOVED = frozenset({"overlap_push", "reduce_in_node"})
"""Switches of older versions that stored results may contain. They are skipped if they are off, else refused."""


class FieldHasNoEffect(UserWarning):
    """Warns that a Fleet field without an equivalent here was read."""


def translate(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a strategy's table with current names. Raises ``ConfigError`` for a field that is set twice."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        inside = key in ("execution_strategy", "exec_strategy") and isinstance(value, Mapping)
        for name, item in _of_execution_strategy(value, key) if inside else ((key, value),):
            if name in flat:
                raise ConfigError("is set twice, here and in another table", name, repr(item), f"keep {name}")
            flat[name] = item
    build = flat.get("build_strategy")
    if isinstance(build, Mapping):
        flat["build_strategy"] = {key: item for key, item in build.items() if not _without_effect(key)}
    translated: dict[str, Any] = {}
    for key, value in flat.items():
        if _without_effect(key) or (key in _REMOVED and value is False):
            continue
        name = ALIASES.get(key, key)
        if name in translated or (name != key and name in flat):
            raise ConfigError(f"is set twice, as {name} and by an older name", key, repr(value), f"keep {name}")
        translated[name] = value
    _read_old_local_sgd(translated)
    _read_old_modes(translated)
    if "recompute_checkpoints" in translated:
        _move_into(translated, "recompute_configs", {"recompute_checkpoints": "checkpoints"})
        translated.setdefault("recompute", True)
    return translated


def _of_execution_strategy(table: Mapping[str, Any], where: str) -> list[tuple[str, Any]]:
    for name in table:
        if name not in EXECUTION_STRATEGY:
            raise unknown_key(name, f"{where}.{name}", EXECUTION_STRATEGY, repr(table[name]))
    return [(EXECUTION_STRATEGY[name], value) for name, value in table.items()]


def _move_into(data: dict[str, Any], table: str, names: Mapping[str, str]) -> None:
    """Move older top-level keys into a ``*_configs`` table, under their current names."""
    configs = data.get(table, {})
    if not isinstance(configs, Mapping):
        raise ConfigError("expected a table", table, repr(configs), "give its keys as a table, or drop the older names")
    for old, new in names.items():
        if old in data and new in configs:
            raise ConfigError(f"is set twice, as {table}.{new} and by an older name", old, repr(data[old]), f"keep {table}.{new}")
    data[table] = {new: data.pop(old) for old, new in names.items() if old in data} | dict(configs)


def _without_effect(key: str) -> bool:
    if key in NO_EFFECT:
        warnings.warn(f"{key} has no effect here: torch has no equivalent", FieldHasNoEffect, stacklevel=2)
    return key in NO_EFFECT


def _read_old_local_sgd(data: dict[str, Any]) -> None:
    """Move the old keys ``local_sgd_steps`` and ``local_sgd_is_warm_steps`` into ``localsgd_configs``.

    The schedule becomes ``document``, unless one is set.
    """
    old = {"local_sgd_steps": "k_steps", "local_sgd_is_warm_steps": "warmup_epochs"}
    if old.keys() & data.keys():
        _move_into(data, "localsgd_configs", old)
        data["localsgd_configs"] = {"schedule": "document"} | data["localsgd_configs"]


def _read_old_modes(data: dict[str, Any]) -> None:
    collective_mode = data.pop("collective_mode", None)
    if data.get("mode") in ("nccl2", "grad_allreduce", "local_sgd"):
        collective_mode = collective_mode or data["mode"]
        data["mode"] = "collective"
    if collective_mode == "local_sgd":
        if not data.setdefault("localsgd", True):
            raise ConfigError("local_sgd and localsgd = false contradict each other", "collective_mode", "'local_sgd'", "drop one of them")
    elif collective_mode not in (None, "nccl2", "grad_allreduce"):
        raise ConfigError("not a collective mode", "collective_mode", repr(collective_mode), "grad_allreduce or local_sgd")
