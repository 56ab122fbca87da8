"""Differences: why a trainer's description of its job is refused, in a user's words."""

from __future__ import annotations

import dataclasses

from real.servers.spec import Spec

_FIELDS_OF_RULES = {
    "max_merge": "max_merge_var_num",
    "queue_size": "send_queue_size",
    "pushes_in_flight": "thread_pool_size",
    "idle_ns": "send_wait_times",
    "independent_receive": "independent_recv_thread",
    "sends_before_receive": "min_send_grad_num_before_recv",
    "has_dense": "dense parameters",
}
"""What users call them, where that is another name."""
_NAMED = 4
"""Differences that are named; there may be one a parameter."""


def differences(held: Spec | None, told: Spec, trainers: int, servers: int, *, of_another_job: bool) -> str:
    """In what ``told`` does not fit a server of so many trainers and servers that holds a part of ``held``; empty where it fits.

    ``of_another_job``: what is held is from a checkpoint, and nobody has joined yet: rules and the optimizer's options may be
    other ones.
    """
    if (told.rules.trainers, told.rules.servers) != (trainers, servers):
        return (
            f"trainers and servers ({trainers} and {servers} on the server, {told.rules.trainers} and {told.rules.servers} on the trainer)"
        )
    if held is None:
        return ""
    return _of_models(held, told) or ("" if of_another_job else _of_rules(held, told))


def _of_models(held: Spec, told: Spec) -> str:
    """In what the models and optimizers of two descriptions differ, options of an optimizer apart; empty where in nothing."""
    found = []
    for name in ("dtype", "optimizer", "dense"):
        found += _difference("dense parameters" if name == "dense" else name, getattr(held, name), getattr(told, name))
    for kind, one, other in (("parameter", _parts(held), _parts(told)), ("embedding", _tables(held), _tables(told))):
        for name in sorted(one.keys() | other.keys()):
            found += _difference(f"{kind} {name}", one.get(name), other.get(name))
    if not found and (held.names, held.tables) != (told.names, told.tables):
        found = ["the order of the parameters"]
    return "; ".join(found[:_NAMED]) + (f"; and {len(found) - _NAMED} more" if len(found) > _NAMED else "")


def _of_rules(held: Spec, told: Spec) -> str:
    """... and in what their rules and their optimizers' options differ."""
    found = []
    for name, value in dataclasses.asdict(held.rules).items():
        found += _difference(_FIELDS_OF_RULES.get(name, name), value, getattr(told.rules, name))
    for name in sorted(held.options.keys() | told.options.keys()):
        found += _difference(name, held.options.get(name), told.options.get(name))
    return "; ".join(found)


def _difference(name: str, held: object, told: object) -> list[str]:
    if held == told:
        return []
    return [f"{name} ({'none' if held is None else held} on the server, {'none' if told is None else told} on the trainer)"]


def _parts(spec: Spec) -> dict[str, int]:
    return dict(zip(spec.names, spec.sizes, strict=True))


def _tables(spec: Spec) -> dict[str, str]:
    return {table.name: f"{table.rows} x {table.width}" for table in spec.tables}
