"""Compiled: fuse operations by torch.compile, block by block.

A graph that is compiled as a whole returns its gradients at the end of its backward, so nothing overlaps.
Compiled block by block, hooks fire as they do without compilation. A block is a child of a list of the model
that owns parameters, or else a child of the model. A sequence of single layers is one block, and a sequence of
other modules is a list. A single layer of torch is one operation and is not compiled.
"""

import contextlib
import types
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fleetbench.errors import ConfigError
from fleetbench.strategy import BuildStrategy
from real.compute.living import Forward, Undo, override_forward


def apply_compiled(
    model: nn.Module, build_strategy: BuildStrategy, *, alone: Collection[str] = (), backend: str | Callable[..., Any] = "inductor"
) -> Undo:
    """Compile the blocks of ``model`` that a field of ``build_strategy`` asks to fuse.

    ``fuse_elewise_add_act_ops`` compiles every block, ``fuse_bn_act_ops`` those with a batch norm. ``alone``
    names submodules at which a graph breaks (those that are recomputed); they are compiled instead of the block
    around them. Compilation happens in the first forward. Raises ``ConfigError`` for operations that
    torch does not fuse, and for a model without anything to fuse.
    """
    if build_strategy.fuse_relu_depthwise_conv:
        what = "torch has no kernel that fuses a ReLU with the convolution after it"
        hint = "drop it; fuse_elewise_add_act_ops fuses the operations between convolutions"
        raise ConfigError(what, "build_strategy.fuse_relu_depthwise_conv", "true", hint)
    if not (build_strategy.fuse_elewise_add_act_ops or build_strategy.fuse_bn_act_ops):
        return lambda: None
    wanted = [name for name in blocks_of(model) if _is_worth(model.get_submodule(name), build_strategy)]
    if not wanted:
        what = "fuse_elewise_add_act_ops" if build_strategy.fuse_elewise_add_act_ops else "fuse_bn_act_ops"
        hint = "put its layers into blocks (modules in an nn.Sequential or nn.ModuleList), or drop it"
        raise ConfigError("the model has no block in which this could fuse anything", f"build_strategy.{what}", "true", hint)
    codes: dict[str, types.CodeType] = {}
    with contextlib.ExitStack() as undo:
        for block in wanted:
            inner = [name for name in alone if name.startswith(f"{block}.") and not _is_one_operation(model.get_submodule(name))]
            for name in inner or [block]:
                module = model.get_submodule(name)
                # The second forward of a recomputed module must find the graph of its first.
                own = name if any(f"{name}.".startswith(f"{other}.") for other in alone) else ""
                shapes = [(tuple(item.shape), item.dtype, item.requires_grad) for item in module.parameters()]
                undo.callback(override_forward(module, partial(_compiled, codes, f"{own} {module!r} {shapes}", backend)))
        return undo.pop_all().close


def blocks_of(container: nn.Module, prefix: str = "") -> list[str]:
    """Return the names of a model's blocks."""
    found: list[str] = []
    for name, child in container.named_children():
        is_sequence = isinstance(child, nn.Sequential) and type(child).forward is nn.Sequential.forward
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)) or (is_sequence and not all(map(_is_one_operation, child.children()))):
            found += blocks_of(child, f"{prefix}{name}.")
        elif next(child.parameters(), None) is not None:
            found.append(prefix + name)
    return found


def _is_worth(block: nn.Module, build_strategy: BuildStrategy) -> bool:
    has_norm = any(isinstance(inner, _BatchNorm) for inner in block.modules())
    return not _is_one_operation(block) and (build_strategy.fuse_elewise_add_act_ops or has_norm)


def _is_one_operation(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.") and next(module.children(), None) is None


def _compiled(codes: dict[str, types.CodeType], signature: str, backend: str | Callable[..., Any], run: Forward) -> Forward:
    """Return ``run`` compiled; blocks of one ``signature`` share a code object.

    torch.compile caches by code object, at most eight graphs each. One object for all blocks would send the ninth
    structure back to eager. One object per block would compile equal blocks again and again.
    """

    def block(*args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    block.__code__ = codes.setdefault(signature, block.__code__.replace(co_name=f"block_{len(codes)}"))
    return torch.compile(block, backend=backend)
