"""Mixed precision: the model's forward under autocast with scaled gradients; the user's loop is unchanged.

Inputs and outputs of the model pass a border that changes gradients but not values. A gradient that comes in
through an output is multiplied by the loss scale, one that leaves through an input is divided by it. So the
gradients of parameters are scaled and the rest of the user's graph is not, and a model may feed another, or
itself.

Outputs in half precision leave as float32. The gradient that comes back is then multiplied by the scale while
it is still float32; otherwise it would underflow in the very place that the scale is for. A loss taken
outside of autocast then also has float32's resolution.

Losses must reach the parameters through the model's outputs. A term that reaches them in another way (a
penalty on the weights in the loss, a tensor that the model keeps as an attribute) is not scaled, and
unscaling would make it too small. Use ``weight_decay`` and return the tensor, or use bf16, which has no
scale. Gradients that are part of a loss themselves (``create_graph``) reach the parameters in both ways, and
are refused.
"""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fleetbench.errors import ConfigError
from fleetbench.strategy import AmpConfigs
from real.compute.living import Undo, living_hook

Scale = Callable[[], float | torch.Tensor]

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def apply_mixed_precision(model: nn.Module, configs: AmpConfigs, device_type: str, scale: Scale) -> Undo:
    """Run every forward of ``model`` under autocast; scale the gradients of forwards that train.

    ``device_type`` is ``cpu`` or ``cuda``. ``scale()`` is read in the backward, and the parameters' gradients
    are multiplied by it. It is not used with bf16, nor in a forward in evaluation mode or under ``no_grad``.
    Raises ``ConfigError``, in the forward, if an output hides a tensor with a gradient in an object that is
    not a dataclass.
    """
    dtype = DTYPES[configs.dtype]
    scaled = configs.dtype == "fp16"
    entered: list[torch.autocast] = []

    def scales(module: nn.Module) -> bool:
        return scaled and module.training and torch.is_grad_enabled()

    def enter(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        context = torch.autocast(device_type, dtype=dtype)
        context.__enter__()
        entered.append(context)
        if len(entered) > 1 or not scales(module):
            return None
        return cast(tuple[Any, Any], _map_tensors(lambda tensor: _scaled(tensor, lambda: 1.0 / scale(), keep_dtype=True), (args, kwargs)))

    def leave(module: nn.Module, _args: Any, output: Any) -> Any:
        if not entered:  # a hook before `enter` has raised
            return None
        entered.pop().__exit__(None, None, None)
        if entered or output is None:  # within another forward of this model, or after an exception
            return None
        return _map_tensors((lambda tensor: _scaled(tensor, scale)) if scales(module) else in_float32, output)

    undo = contextlib.ExitStack()
    undo.callback(model.register_forward_pre_hook(living_hook(enter), prepend=True, with_kwargs=True).remove)
    undo.callback(model.register_forward_hook(living_hook(leave), always_call=True).remove)
    return undo.close


class _Border(torch.autograd.Function):
    """Passes values, half precision as float32; multiplies gradients by ``factor()`` in the backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, factor: Scale, keep_dtype: bool) -> torch.Tensor:
        ctx.factor = factor
        ctx.dtype = tensor.dtype
        # An input returned as it is, or as a view, may not be changed in place by the user's loop.
        return tensor.detach() if keep_dtype else in_float32(tensor.detach())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        factor = ctx.factor()
        if torch.is_grad_enabled() and factor != 1.0:
            what = "keeps the graph of gradients (create_graph) of a scaled loss, and results computed from them would not be scaled"
            hint = 'set amp_configs.dtype = "bf16", which has no scale, or drop the penalty on gradients'
            raise ConfigError(what, "a backward, or torch.autograd.grad", f"a scale of {float(factor):g}", hint)
        return (gradient * factor).to(ctx.dtype), None, None


def _scaled(tensor: torch.Tensor, factor: Scale, *, keep_dtype: bool = False) -> torch.Tensor:
    if not tensor.requires_grad:
        return tensor if keep_dtype else in_float32(tensor)
    return _Border.apply(tensor, factor, keep_dtype)  # type: ignore[no-untyped-call, no-any-return]  # torch's


def in_float32(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of half precision as float32, and any other as it is."""
    return tensor.float() if tensor.dtype in DTYPES.values() else tensor


def _map_tensors(change: Callable[[torch.Tensor], torch.Tensor], nest: Any) -> Any:
    """Return ``nest`` with its tensors changed, in dataclasses and in all containers of torch's pytree."""

    def visit(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return change(leaf)
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            fresh = copy.copy(leaf)
            for field in dataclasses.fields(leaf):
                object.__setattr__(fresh, field.name, pytree.tree_map(visit, getattr(leaf, field.name)))
            return fresh
        if any(isinstance(item, torch.Tensor) and item.requires_grad for item in pytree.tree_leaves(getattr(leaf, "__dict__", {}))):
            hint = 'pass tensors in tuples, lists, dicts or dataclasses, or use amp_configs.dtype = "bf16"'
            raise ConfigError("holds a tensor whose gradient cannot be scaled", "amp", type(leaf).__name__, hint)
        return leaf

    return pytree.tree_map(visit, nest)


def own_gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """Return this rank's gradients, or the values of sparse ones, to be changed in place."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [gradient._values() if gradient.is_sparse else gradient for gradient in gradients]  # noqa: SLF001  # values() needs coalesced


@torch.no_grad()
def unscale(tensors: list[torch.Tensor], scale: float, device: torch.device) -> torch.Tensor:
    """Divide ``tensors`` by ``scale`` in place; return one element: 1 if any is not finite, else 0."""
    found = torch.zeros(1, dtype=torch.float32, device=device)
    inverse = torch.full_like(found, 1.0 / scale)
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for group in by_dtype.values():
        # as torch.amp.GradScaler does
        torch._amp_foreach_non_finite_check_and_unscale_(group, found, inverse)
    return found
