"""Recompute: drop the activations of named submodules and compute them again in the backward.

The second forward of a submodule sees the random numbers of the first and has no side effects: the running
statistics of batch norms move once per step. ``SavedForBackward`` counts the bytes that autograd keeps.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from fleetbench.config import nearest
from fleetbench.errors import ConfigError
from real.compute.compiled import blocks_of
from real.compute.living import Forward, Undo, override_forward

_WHERE = "recompute_configs.checkpoints"


def apply_recompute(model: nn.Module, checkpoints: Sequence[str]) -> Undo:
    """Keep only the inputs of the submodules named ``checkpoints``, until their backward.

    Raises ``ConfigError`` for an empty list, a name that the model does not have, and a submodule within
    another one of the list.
    """
    check_checkpoints(model, checkpoints)
    undo = contextlib.ExitStack()
    for name in checkpoints:
        undo.callback(override_forward(model.get_submodule(name), _recomputed(model.get_submodule(name))))
    return undo.close


def check_checkpoints(model: nn.Module, checkpoints: Sequence[str]) -> None:
    """Raise ``ConfigError`` unless ``checkpoints`` names submodules of ``model``, none within another."""
    known = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    blocks = blocks_of(model)
    usual = f"for example {', '.join(blocks[:5])}"
    if not checkpoints:
        hint = f"name submodules, {usual}" if blocks else "the model has no submodules"
        raise ConfigError("recompute is on and names no submodule", _WHERE, "[]", hint)
    owner: dict[int, str] = {}
    for name in checkpoints:
        if name not in known:
            hint = nearest(name, known).removeprefix(". ") or usual
            raise ConfigError("not a submodule of this model", _WHERE, repr(name), hint)
        owner[id(known[name])] = name
    for name in checkpoints:
        for module in known[name].modules():
            if isinstance(module, torch.jit.ScriptModule):
                raise ConfigError("is scripted or traced, and cannot be computed again", _WHERE, repr(name), "name plain submodules")
            outer, inner = name, owner.get(id(module), name)
            if inner != outer:
                raise ConfigError(f"lies within {outer!r}, which is recomputed whole", _WHERE, repr(inner), f"drop {inner!r} or {outer!r}")


def _recomputed(module: nn.Module) -> Callable[[Forward], Forward]:
    def contexts() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
        return contextlib.nullcontext(), _StatisticsKept(module)

    def wrap(plain: Forward) -> Forward:
        # A compiled graph around it breaks here, because traced checkpoints would not protect the statistics.
        @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return plain(*args, **kwargs)
            return checkpoint(plain, *args, use_reentrant=False, preserve_rng_state=True, context_fn=contexts, **kwargs)

        return cast(Forward, forward)

    return wrap


class _StatisticsKept:
    """Lets batch norms update copies of their statistics in a second forward; reentered for each backward."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __enter__(self) -> None:
        self._release = hold_statistics(self._module)

    def __exit__(self, *_: object) -> None:
        self._release()


def hold_statistics(model: nn.Module) -> Callable[[], None]:
    """Let batch norms update copies of their statistics; return a function that restores their own.

    Removing the statistics, or a momentum of 0, would not work: the forward would save other tensors, or turn
    an infinite statistic into NaN.
    """
    norms = [item for item in model.modules() if isinstance(item, _NormBase) and item.training]
    buffers = [dict(norm._buffers) for norm in norms]  # noqa: SLF001  # assigning a buffer would clone for good
    for norm in norms:
        norm._buffers.update({name: None if item is None else item.clone() for name, item in norm._buffers.items()})  # noqa: SLF001  # as above

    def release() -> None:
        for norm, own in zip(norms, buffers, strict=True):
            norm._buffers.update(own)  # noqa: SLF001  # as above

    return release


class SavedForBackward:
    """Counts the bytes that forwards inside the ``with`` keep for their backward.

    A storage counts once and in full, where it was saved first. Storages of the model's parameters and
    buffers do not count. It keeps all counted storages alive, so run no backward inside.
    """

    def __init__(self, model: nn.Module, where: Callable[[], str] = str) -> None:
        """``where()`` names the running module: the key of the counts."""
        self.by_name: Counter[str] = Counter()
        """Bytes by the result of ``where()``."""
        self._model = model
        self._where = where
        self._kept: dict[int, torch.UntypedStorage] = {}
        self._own: set[int] = set()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def __enter__(self) -> Self:
        self._own = {_identity(tensor.untyped_storage()) for tensor in (*self._model.parameters(), *self._model.buffers())}
        self._hooks.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._hooks.__exit__(kind, error, traceback)
        self._kept.clear()

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            identity = _identity(storage)
            if identity not in self._own and identity not in self._kept:
                self._kept[identity] = storage
                self.by_name[self._where()] += storage.nbytes()
        return tensor.detach()  # an output that its own node saves would keep itself alive


def _identity(storage: torch.UntypedStorage) -> int:
    """Return a storage's identity, which is valid as long as it lives, also without data."""
    return int(storage._cdata)  # noqa: SLF001  # torch has no other name for it
