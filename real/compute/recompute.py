"""Recompute: drop the activations of named submodules and compute them again in the backward.

The second forward of a submodule sees the random numbers of the first and leaves no trace: the
running statistics of batch norms move once a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fleetbench.config import nearest
from fleetbench.errors import ConfigError
from real.compute.living import Forward, Undo, override_forward
from real.compute.saved import SavedForBackward
from real.compute.statistics import hold_statistics

_WHERE = "recompute_configs.checkpoints"
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def apply_recompute(model: nn.Module, checkpoints: Sequence[str]) -> Undo:
    """Keep only the inputs of the submodules named ``checkpoints``, until their backward.

    Raises ``ConfigError`` for an empty list, a name that the model does not have, and a submodule
    within another one of the list.
    """
    check_checkpoints(model, checkpoints)
    undos = [override_forward(model.get_submodule(name), _recomputed(model.get_submodule(name))) for name in checkpoints]

    def undo() -> None:
        for take_back in reversed(undos):
            take_back()

    return undo


def check_checkpoints(model: nn.Module, checkpoints: Sequence[str]) -> None:
    """Raise ``ConfigError`` unless ``checkpoints`` names submodules of ``model``, none within another."""
    known = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    if not checkpoints:
        hint = f"name submodules, for example {', '.join(candidates(model)[:5])}" if candidates(model) else "the model has no submodules"
        raise ConfigError("recompute is on and names no submodule", _WHERE, "[]", hint)
    owner: dict[int, str] = {}
    for name in checkpoints:
        if name not in known:
            hint = nearest(name, known).removeprefix(". ") or f"for example {', '.join(candidates(model)[:5])}"
            raise ConfigError("not a submodule of this model", _WHERE, repr(name), hint)
        if owner.setdefault(id(known[name]), name) != name or list(checkpoints).count(name) > 1:
            raise ConfigError("names one submodule twice", _WHERE, repr(name), "keep one of its names")
    for name in checkpoints:
        for module in known[name].modules():
            outer, inner = name, owner.get(id(module), name)
            if inner != outer:
                raise ConfigError(f"lies within {outer!r}, which is recomputed whole", _WHERE, repr(inner), f"drop {inner!r} or {outer!r}")


def candidates(model: nn.Module) -> list[str]:
    """The usual checkpoints: children of the model, and of its lists and sequences, that own parameters."""
    found = []
    for name, child in model.named_children():
        inner = [f"{name}.{rest}" for rest in candidates(child)] if isinstance(child, _CONTAINERS) else []
        if inner:
            found += inner
        elif any(True for _ in child.parameters()):
            found.append(name)
    return found


def activation_bytes(model: nn.Module, run: Callable[[], torch.Tensor]) -> int:
    """Bytes that autograd keeps for the backward of ``run()``, which returns the loss.

    A storage counts once and whole; those of the model's parameters and buffers do not count. There
    is no backward, but the forward is a real one: running statistics move.
    """
    with SavedForBackward(model) as saved:
        loss = run()
    del loss
    return saved.num_bytes


def _recomputed(module: nn.Module) -> Callable[[Forward], Forward]:
    def contexts() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
        return contextlib.nullcontext(), _StatisticsKept(module)

    def wrap(plain: Forward) -> Forward:
        # A compiled graph around it breaks here: traced checkpoints would not know of the statistics.
        @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return plain(*args, **kwargs)
            return checkpoint(plain, *args, use_reentrant=False, preserve_rng_state=True, context_fn=contexts, **kwargs)

        return cast(Forward, forward)

    return wrap


class _StatisticsKept:
    """Lets batch norms move copies of their statistics in the second forward; entered again for every backward of one graph."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __enter__(self) -> None:
        self._release = hold_statistics(self._module)

    def __exit__(self, *_: object) -> None:
        self._release()
