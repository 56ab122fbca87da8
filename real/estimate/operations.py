"""Operations: the compute and memory traffic of a step, counted on tensors with shapes and no data.

The tensors are on the CPU, so differences of CUDA are corrected here. For example, attention with dropout
stays one kernel, and operations that CUDA's autocast computes in float32 move more bytes.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from real.communication.clocks import Clock, Mark

Kind = Literal["matmul", "convolution", "attention", "fused_attention", "memory"]
"""Kind of an operation. ``attention``: products of batches of matrices. ``memory``: few FLOPs per byte."""

_KINDS: dict[str, Kind] = {"convolution": "convolution", "convolution_backward": "convolution", "bmm": "attention", "baddbmm": "attention"}
_ROWS = ("embedding", "index_select", "gather", "index", "_embedding_bag")
"""Operations that read as many bytes as they write, however large their table is."""
_NOTHING = ("empty", "new_empty", "empty_like", "empty_strided", "detach", "lift_fresh", "scalar_tensor", "_local_scalar_dense")
_TWICE = ("native_batch_norm", "native_batch_norm_backward")
"""Operations that read their inputs twice: once to sum over the batch, and once to compute the result."""
_IN_FLOAT32 = ("native_layer_norm", "_softmax", "_log_softmax")
"""Operations that CUDA's autocast computes in float32, as far as they matter here (torch's documentation,
"CUDA Ops that can autocast to float32")."""
_WIDENED = 3
"""Factor on the bytes of ``_IN_FLOAT32``: a half is read, widened, and read and written as float32, not only
read and written."""

_UNALIGNED = 1.5
"""Factor on the FLOPs of a matrix product whose rows do not all begin at multiples of 16 bytes, such as one
for a vocabulary of 50,257 words. Its kernels reach half the rate in TF32 on an H200 (``reports/estimate``)."""
_NARROW_NORM = 4
"""Factor on the bytes of a batch norm of bfloat16 with channels first, which cuDNN does not compute
(``reports/estimate``)."""

_TRANSPOSED = 3
"""Factor on the bytes of 16-bit convolutions with channels first. Tensor cores need channels last (cuDNN's
documentation), so tensors are written and read again."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a step: a kernel on the GPU."""

    kind: Kind
    flops: int
    nbytes: int
    """Bytes that it reads and writes."""
    dtype: torch.dtype
    """Type of its elements."""
    model_flops: int = 0
    """FLOPs by the model's definition: causal attention counts in full, and slower kernels add nothing."""


class Recorder(Clock):
    """Records operations between ``__enter__`` and ``__exit__``, inside ``nothing_computed``.

    A mark is the number of operations so far. ``price_ns`` returns the time in ns of an operation, which
    turns a mark into a time.
    """

    def __init__(self, price_ns: Callable[[Operation], float]) -> None:
        self.operations: list[Operation] = []
        self._price_ns = price_ns
        self._entered = ExitStack()

    def __enter__(self) -> Self:
        self._entered.enter_context(_Counting(self.operations))
        self._entered.enter_context(_AsOnCuda())
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.close()

    def mark(self) -> Mark:
        """See ``Clock``."""
        return len(self.operations)

    def resolve(self, marks: Sequence[Mark]) -> list[int]:
        """See ``Clock``."""
        ends = [0.0]
        for operation in self.operations[: max(marks, default=0)]:
            ends.append(ends[-1] + self._price_ns(operation))
        return [round(ends[mark]) for mark in marks]


def nothing_computed() -> FakeTensorMode:
    """Return a context in which tensors have shapes and no data, even if they meet tensors with data."""
    return FakeTensorMode(allow_non_fake_inputs=True)


class _AsOnCuda(TorchFunctionMode):
    """Makes dropout one kernel, or a part of fused attention's, as on CUDA.

    On a CPU, dropout would be three kernels, and attention with dropout would be computed matrix by matrix.
    """

    # torch's signature
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is scaled_dot_product_attention:
            args = (*args[:4], *((0.0, *args[5:]) if len(args) > 4 else ()))
            kwargs.pop("dropout_p", None)
        elif func is torch.dropout:
            return torch.native_dropout(*args, **kwargs)[0]
        return func(*args, **kwargs)


class _Counting(TorchDispatchMode):
    """Records every operation that reaches a device."""

    def __init__(self, operations: list[Operation]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._operations = operations
        self._autocast = False

    # torch's signature
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        self._autocast |= torch.is_autocast_enabled("cpu")  # the backward follows the forward's types
        inputs, outputs = _tensors((args, kwargs)), _tensors(result)
        if name not in _NOTHING and not _is_view(func, inputs, outputs):
            operation = _operation(func, name, args, inputs, outputs, result)
            if self._autocast and operation.dtype.itemsize == 2 and name.removesuffix("_data").removesuffix("_backward") in _IN_FLOAT32:
                operation = dataclasses.replace(operation, nbytes=_WIDENED * operation.nbytes)
            self._operations.append(operation)
        return result


def _operation(func: Any, name: str, args: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor], result: Any) -> Operation:
    numbers = [tensor for tensor in (*inputs, *outputs) if tensor.is_floating_point()]
    dtype = numbers[0].dtype if numbers else torch.float32
    nbytes = sum(map(_nbytes, outputs))
    nbytes = 2 * nbytes if name in _ROWS else nbytes + sum(map(_nbytes, inputs)) * (2 if name in _TWICE else 1)
    if "scaled_dot_product" in name:
        backward = "backward" in name
        shapes = [tensor.shape for tensor in (args[:4] if backward else args[:3])]
        flops = sdpa_backward_flop_count(*shapes) if backward else sdpa_flop_count(*shapes)
        halved = 2 if any(argument is True for argument in args) else 1  # the only flag: causal
        return Operation("fused_attention", flops // halved, nbytes, dtype, flops)
    if name in _TWICE and dtype == torch.bfloat16 and _channels_first(args[name.count("backward")]):
        nbytes *= _NARROW_NORM
    if name.startswith("convolution") and dtype.itemsize == 2 and _channels_first(args[name.count("backward")]):
        nbytes *= _TRANSPOSED
    if func.overloadpacket in flop_registry:
        kind, flops = _KINDS.get(name, "matmul"), flop_registry[func.overloadpacket](*args, out_val=result)
        slower = _UNALIGNED if kind == "matmul" and not _aligned([*inputs, *outputs]) else 1
        return Operation(kind, round(flops * slower), nbytes, dtype, flops)
    return Operation("memory", 0, nbytes, dtype)


def _channels_first(tensor: torch.Tensor) -> bool:
    return not tensor.is_contiguous(memory_format=torch.channels_last)


def _aligned(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether every row of the matrices among ``tensors`` begins at a multiple of 16 bytes."""
    return all(max(tensor.stride()[-2:]) * tensor.element_size() % 16 == 0 for tensor in tensors if tensor.dim() > 1)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return list({id(leaf): leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)}.values())


def _is_view(func: Any, inputs: Iterable[torch.Tensor], outputs: Iterable[torch.Tensor]) -> bool:
    if func._schema.is_mutable:  # noqa: SLF001  # torch has no other name for it
        return False
    if any(each.alias_info is not None for each in func._schema.returns):  # noqa: SLF001  # also for a tensor with data
        return True
    own = {tensor.untyped_storage()._cdata for tensor in inputs}  # noqa: SLF001  # as above
    return all(tensor.untyped_storage()._cdata in own for tensor in outputs)  # noqa: SLF001  # as above


def _nbytes(tensor: torch.Tensor) -> int:
    """Return the stored bytes of a tensor: an expanded one is not read in full."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
