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
"""Switches of older versions that recorded tunings contain. They are skipped if they are off, else refused."""
_MOVED = {
    "local_sgd_steps": ("localsgd_configs", "k_steps"),
    "local_sgd_is_warm_steps": ("localsgd_configs", "warmup_epochs"),
    "recompute_checkpoints": ("recompute_configs", "checkpoints"),
}
"""Table and field of ours for each older key that stood outside of a table."""


class FieldHasNoEffect(UserWarning):
    """Warns that a Fleet field without an equivalent here was read."""


def translate(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a strategy's table with current names. Raises ``ConfigError`` for a field that is set twice."""
    rows: list[tuple[str, Any]] = []
    for key, value in data.items():
        inside = key in ("execution_strategy", "exec_strategy") and isinstance(value, Mapping)
        rows += [(_of_execution_strategy(name, key), item) for name, item in value.items()] if inside else [(key, value)]
    found: dict[str, Any] = {}
    for key, value in rows:
        if not _without_effect(key) and not (key in _REMOVED and value is False):
            _set(found, ALIASES.get(key, key), value, key)
    build = found.get("build_strategy")
    if isinstance(build, Mapping):
        found["build_strategy"] = {key: item for key, item in build.items() if not _without_effect(key)}
    for old, (table, new) in _MOVED.items():
        if old in found:
            configs = found.setdefault(table, {})
            if not isinstance(configs, Mapping):
                raise ConfigError("expected a table", table, repr(configs), f"give {old} as {new} in it")
            found[table] = dict(configs)
            _set(found[table], new, found.pop(old), old)
            if table == "recompute_configs":
                found.setdefault("recompute", True)
            else:
                found[table].setdefault("schedule", "document")
    _read_old_modes(found)
    return found


def _set(table: dict[str, Any], name: str, value: Any, key: str) -> None:
    if name in table:
        raise ConfigError(f"is set twice, as {name} and by another name", key, repr(value), f"keep {name}")
    table[name] = value


def _of_execution_strategy(name: str, where: str) -> str:
    if name not in EXECUTION_STRATEGY:
        raise unknown_key(name, f"{where}.{name}", EXECUTION_STRATEGY)
    return EXECUTION_STRATEGY[name]


def _without_effect(key: str) -> bool:
    if key in NO_EFFECT:
        warnings.warn(f"{key} has no effect here: torch has no equivalent", FieldHasNoEffect, stacklevel=2)
    return key in NO_EFFECT


def _read_old_modes(data: dict[str, Any]) -> None:
    mode = data.pop("collective_mode", None)
    if data.get("mode") in ("nccl2", "grad_allreduce", "local_sgd"):
        mode, data["mode"] = mode or data["mode"], "collective"
    if mode == "local_sgd" and not data.setdefault("localsgd", True):
        raise ConfigError("local_sgd and localsgd = false contradict each other", "collective_mode", "'local_sgd'", "drop one of them")
    if mode not in (None, "nccl2", "grad_allreduce", "local_sgd"):
        raise ConfigError("not a collective mode", "collective_mode", repr(mode), "grad_allreduce or local_sgd")
