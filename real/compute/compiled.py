"""Compiled: fuse operations by torch.compile, block by block.

A graph that is compiled as a whole returns its gradients at the end of its backward, so nothing overlaps.
Compiled block by block, hooks fire as they do without compilation. A block is a child of a list or sequence
of the model that owns parameters, or else a child of the model. In a sequence, children without parameters
(activations) belong to the block before them. A single layer of torch is one operation and is not compiled.
"""

import contextlib
import types
from collections.abc import Callable, Collection, Sequence
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
    names submodules that are compiled by themselves, because the graph around them breaks there (those that
    are recomputed). Compilation happens in the first forward. Raises ``ConfigError`` for operations that
    torch does not fuse, and for a model without anything to fuse.
    """
    if build_strategy.fuse_relu_depthwise_conv:
        what = "torch has no kernel that fuses a ReLU with the convolution after it"
        hint = "drop it; fuse_elewise_add_act_ops fuses the operations between convolutions"
        raise ConfigError(what, "build_strategy.fuse_relu_depthwise_conv", "true", hint)
    if not (build_strategy.fuse_elewise_add_act_ops or build_strategy.fuse_bn_act_ops):
        return lambda: None
    wanted = [block for block in blocks_of(model) if _is_worth(model, block, everything=build_strategy.fuse_elewise_add_act_ops)]
    if not wanted:
        what = "fuse_elewise_add_act_ops" if build_strategy.fuse_elewise_add_act_ops else "fuse_bn_act_ops"
        hint = "put its layers into blocks (modules in an nn.Sequential or nn.ModuleList), or drop it"
        raise ConfigError("the model has no block in which this could fuse anything", f"build_strategy.{what}", "true", hint)
    return _Compilation(model, alone, backend).compile(wanted)


def blocks_of(container: nn.Module, prefix: str = "") -> list[list[str]]:
    """Return a model's blocks: a module with parameters and those without that follow it in a sequence."""
    found: list[list[str]] = []
    is_open = False
    for name, child in container.named_children():
        if _is_sequence(child) or isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            found += blocks_of(child, f"{prefix}{name}.")
            is_open = False
        elif next(child.parameters(), None) is not None:
            found.append([prefix + name])
            is_open = _is_sequence(container)
        elif is_open:
            found[-1].append(prefix + name)
    return found


def _is_sequence(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _is_worth(model: nn.Module, group: Sequence[str], *, everything: bool) -> bool:
    modules = [model.get_submodule(name) for name in group]
    if len(modules) == 1 and _is_one_operation(modules[0]):
        return False
    return everything or any(isinstance(inner, _BatchNorm) for module in modules for inner in module.modules())


def _is_one_operation(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.") and next(module.children(), None) is None


class _Compilation:
    """Compiles groups of one model; groups of the same structure share their code object.

    torch.compile caches by code object, at most eight graphs each. One object for all blocks would send the
    ninth structure back to eager. One object per block would compile equal blocks again and again. A
    recomputed submodule has its own, because its second forward must find the graph of its first.
    """

    def __init__(self, model: nn.Module, alone: Collection[str], backend: str | Callable[..., Any]) -> None:
        self._model = model
        self._alone = alone
        self._backend = backend
        self._codes: dict[str, types.CodeType] = {}
        self._undo = contextlib.ExitStack()

    def compile(self, groups: Sequence[Sequence[str]]) -> Undo:
        """Install compiled forwards; a run of a sequence's children is part of the sequence's forward."""
        runs: dict[str, list[list[str]]] = {}
        with self._undo:
            for group in groups:
                if len(group) == 1:
                    self._compile_module(group[0])
                else:
                    runs.setdefault(group[0].rpartition(".")[0], []).append([name.rpartition(".")[2] for name in group])
            for owner, parts in runs.items():
                self._compile_runs(owner, parts)
            for name in self._alone:
                inside = any(name.startswith(f"{member}.") or (name == member and len(group) > 1) for group in groups for member in group)
                if inside and not _is_one_operation(self._model.get_submodule(name)):
                    self._compile_module(name)
            return self._undo.pop_all().close

    def _compile_module(self, name: str) -> None:
        module = self._model.get_submodule(name)
        signature = self._signature([name])
        self._undo.callback(override_forward(module, lambda plain: self._compiled(plain, signature)))

    def _compile_runs(self, owner: str, runs: Sequence[Sequence[str]]) -> None:
        sequence = self._model.get_submodule(owner)
        places = sequence.named_modules(remove_duplicate=False)  # a module may have several names
        children = {name: child for name, child in places if name and "." not in name}
        starting = {run[0]: run for run in runs}
        inside = {name for run in runs for name in run}
        steps: list[Forward] = []
        for name, child in children.items():
            if name in starting:
                members = [children[member] for member in starting[name]]
                signature = self._signature([f"{owner}.{member}".removeprefix(".") for member in starting[name]])
                steps.append(self._compiled(nn.Sequential(*members), signature))
            elif name not in inside:
                steps.append(child)

        def forward(value: Any) -> Any:
            for step in steps:
                value = step(value)
            return value

        self._undo.callback(override_forward(sequence, lambda _: forward))

    def _compiled(self, run: Forward, signature: str) -> Forward:
        def block(*args: Any, **kwargs: Any) -> Any:
            return run(*args, **kwargs)

        block.__code__ = self._codes.setdefault(signature, block.__code__.replace(co_name=f"block_{len(self._codes)}"))
        return torch.compile(block, backend=self._backend)

    def _signature(self, names: Sequence[str]) -> str:
        pairs = [(f"{name}.", f"{other}.") for name in names for other in self._alone]
        if any(name.startswith(other) or other.startswith(name) for name, other in pairs):
            return f"recomputed {names!r}"
        modules = [self._model.get_submodule(name) for name in names]
        shapes = [(tuple(item.shape), item.dtype, item.requires_grad) for module in modules for item in module.parameters()]
        return f"{modules!r} {shapes}"
