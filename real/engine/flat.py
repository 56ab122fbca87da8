"""Flat storage: many parameters' data in one buffer, so that one operation reaches them all.

A parameter stays the object it was, with its hooks, its gradient and its place in an optimizer;
only its data move. A flattened parameter saves the whole buffer with ``torch.save``, and a tensor
that shared its old storage follows it no longer: release before saving, flatten only what
``flattenable`` admits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import nn

_TURNS = 8
_MARK = "_fleetbench_flat"  # an attribute of the storages that FlatParameters made


def views_of(buffer: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of a flat buffer, one a parameter, one behind the other, in the parameters' shapes and strides.

    A parameter whose strides leave gaps or overlap has a contiguous view.
    """
    ends = accumulate(parameter.numel() for parameter in parameters)
    return [
        buffer[end - parameter.numel() : end].as_strided(parameter.shape, _strides(parameter))
        for parameter, end in zip(parameters, ends, strict=True)
    ]


def can_flatten(parameter: nn.Parameter) -> bool:
    """Whether the parameter's data may move: plain, strided and dense, and the only content of their storage.

    A parameter that ``FlatParameters`` holds already may move on. Two parameters may share a whole
    storage, which one alone does not tell: ask ``flattenable`` about a model.
    """
    if nn.parameter.is_lazy(parameter) or type(parameter.data) is not torch.Tensor:
        return False
    if parameter.layout != torch.strided or parameter.is_meta or parameter.is_quantized or not is_dense(parameter):
        return False
    storage = parameter.untyped_storage()
    if getattr(storage, _MARK, False):
        return True
    if parameter.device.type == "cpu" and parameter.is_shared():  # other processes hold this storage
        return False
    return storage.nbytes() == parameter.numel() * parameter.element_size()


def flattenable(parameters: Sequence[nn.Parameter], others: Iterable[torch.Tensor] = ()) -> list[bool]:
    """``can_flatten`` for each of a model's parameters, and False where two tensors share memory.

    ``others``: the model's buffers and frozen parameters.
    """
    tensors = {id(tensor): tensor for tensor in (*parameters, *others)}.values()
    owners = Counter(_place(tensor) for tensor in tensors if _has_memory(tensor))
    return [can_flatten(parameter) and (parameter.numel() == 0 or owners[_place(parameter)] == 1) for parameter in parameters]


class FlatParameters:
    """Parameters whose data are slices of one buffer, in the order given.

    ``flat`` (from the start) -> ``released`` (each parameter has storage of its own again). Whoever
    assigns ``parameter.data``, as ``Module.to`` does, ends it for that parameter: ``intact`` tells.
    Move parameters between a backward and the next forward only: a graph still reads the old storage.
    """

    buffer: torch.Tensor
    """Shape ``[sum of numel]``, of the parameters' dtype and on their device."""
    views: list[torch.Tensor]
    """Each parameter's slice, in the parameter's shape and strides."""

    @torch.no_grad()
    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        assert parameters, "nothing to flatten"
        assert len({(parameter.dtype, parameter.device) for parameter in parameters}) == 1, "one dtype and one device a buffer"
        assert all(flattenable(parameters)), "a parameter's storage is not its own"
        self.parameters = tuple(parameters)
        first = parameters[0]
        self.buffer = torch.empty(sum(parameter.numel() for parameter in parameters), dtype=first.dtype, device=first.device)
        setattr(self.buffer.untyped_storage(), _MARK, True)
        self.views = views_of(self.buffer, parameters)
        for parameter, view in zip(parameters, self.views, strict=True):
            view.copy_(parameter)
            parameter.data = view
        self._places = [view.data_ptr() for view in self.views]
        self._turn = 0

    @property
    def intact(self) -> bool:
        """Whether every parameter still lives in the buffer."""
        return [parameter.data_ptr() for parameter in self.parameters] == self._places

    def seems_intact(self) -> bool:
        """Whether some parameters, at every call others, still live in the buffer: for what is asked in every step.

        A model that was moved or converted is found at once, a single parameter within 8 calls.
        """
        self._turn = (self._turn + 1) % _TURNS
        some = slice(self._turn % len(self._places), None, _TURNS)
        return [parameter.data_ptr() for parameter in self.parameters[some]] == self._places[some]

    @torch.no_grad()
    def release(self) -> None:
        """Give every parameter that still lives here storage of its own, with the same values and strides."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if _same_place(parameter, view):
                parameter.data = own_copy(view)


def own_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in storage of its own, with the strides of a dense ``tensor``."""
    copy = torch.empty_strided(tensor.shape, _strides(tensor), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gap or overlap, in whatever order of dimensions."""
    if tensor.numel() == 0:
        return True
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    if is_dense(tensor):
        return tensor.stride()
    return torch.empty(tensor.shape, device="meta").stride()


def _same_place(parameter: torch.Tensor, view: torch.Tensor) -> bool:
    return parameter.data_ptr() == view.data_ptr() and parameter.stride() == view.stride() and parameter.shape == view.shape


def _place(tensor: torch.Tensor) -> int:
    """The address of the storage; in a flat buffer, which many share by right, the tensor's own."""
    storage = tensor.untyped_storage()
    return tensor.data_ptr() if getattr(storage, _MARK, False) else storage.data_ptr()


def _has_memory(tensor: torch.Tensor) -> bool:
    born = not nn.parameter.is_lazy(tensor) and not tensor.is_meta
    return born and tensor.layout == torch.strided and tensor.numel() > 0
