"""Buckets: flat buffers of gradients and parameters, in which one collective carries many, and their exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.modules.batchnorm import _NormBase

from fleetbench.errors import ConfigError
from fleetbench.plan.build import Plan
from fleetbench.plan.combination import Combination
from fleetbench.plan.fusion import Bucket
from fleetbench.plan.operations import Operation, Operations
from fleetbench.plan.outer import Outer
from real.communication.communicators import Communicators
from real.communication.lanes import Started
from real.communication.quantised import Timed, average_quantised
from real.engine.sparse import SparseBucket

copy_all = torch._foreach_copy_  # torch has no public name for copying a list of tensors at once
_SUM_DTYPES = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""Type in which gradients of a half-precision type are summed over steps."""


def _put(function: Callable[..., Any], pairs: Iterable[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    """Call a function of two lists of tensors, leaving out pairs whose gradient is None."""
    whole = [(view, gradient) for view, gradient in pairs if gradient is not None]
    if whole:
        function(*map(list, zip(*whole, strict=True)))


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor, without the gaps and overlaps that it may have."""
    return torch.empty_like(tensor, device="meta").stride()


def views_of(buffer: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return consecutive views of a flat buffer, one per parameter, in the parameters' shapes and strides.

    If a parameter's strides have gaps or overlaps, its view has dense strides instead.
    """
    ends = accumulate(parameter.numel() for parameter in parameters)
    return [
        buffer[end - parameter.numel() : end].as_strided(parameter.shape, dense_strides(parameter))
        for parameter, end in zip(parameters, ends, strict=True)
    ]


class GradientBucket:
    """A flat buffer of gradients.

    If gradients are exchanged in the backward, the Reducer keeps them in its buffer (``place``). If steps share an
    update, ``accumulate`` adds a step's gradients to a separate sum, and ``release`` makes the sum the gradient, in
    the buffer.
    """

    def __init__(self, bucket: Bucket, parameters: Sequence[nn.Parameter]) -> None:
        self.id = bucket.id
        self.parameters = tuple(parameters)
        self.merged = 0
        """Number of steps whose gradients are in the sum."""
        self._numel = bucket.numel
        self._buffer: torch.Tensor | None = None

    @property
    def buffer(self) -> torch.Tensor:
        """The flat buffer: the Reducer's after its first backward; before, or without one, allocated at first use."""
        if self._buffer is None:
            first = self.parameters[0]
            self._buffer = torch.zeros(self._numel, dtype=first.dtype, device=first.device)
        return self._buffer

    def place(self, buffer: torch.Tensor) -> bool:
        """Use ``buffer`` as the flat buffer, and return whether it differs from the one before."""
        if self._buffer is not None and buffer.numel() and self._buffer.data_ptr() == buffer.data_ptr():
            return False
        is_pairs = self.parameters[0].is_complex() and not buffer.is_complex()  # as the Reducer shows complex numbers
        self._buffer = torch.view_as_complex(buffer.view(-1, 2)) if is_pairs else buffer
        return True

    @property
    def values(self) -> torch.Tensor:
        """The gradients' values as one flat tensor, once the bucket is ready."""
        if self._buffer is None:
            return torch.cat([gradient.reshape(-1) for parameter in self.parameters if (gradient := parameter.grad) is not None])
        return self._buffer

    @cached_property
    def _sum(self) -> torch.Tensor:
        return torch.zeros_like(self.buffer, dtype=_SUM_DTYPES.get(self.buffer.dtype, self.buffer.dtype))

    @cached_property
    def _sum_views(self) -> list[torch.Tensor]:
        return views_of(self._sum, self.parameters)

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add the step's gradients to the sum; ``.grad`` stays as it is."""
        gradients = [parameter.grad for parameter in self.parameters]
        if self.merged == 0 and any(gradient is None for gradient in gradients):
            self._sum.zero_()
        _put(copy_all if self.merged == 0 else torch._foreach_add_, zip(self._sum_views, gradients, strict=True))
        self.merged += 1

    @torch.no_grad()
    def release(self, divisor: int) -> None:
        """Make the sum divided by ``divisor`` the gradient, and begin a new sum."""
        assert self.merged, "there is a sum"
        torch.div(self._sum, divisor, out=self.buffer)
        for view, parameter in zip(views_of(self.buffer, self._sum_views), self.parameters, strict=True):  # with the strides of the sum
            parameter.grad = view
        self.merged = 0

    def drop(self) -> None:
        """Discard the sum, so that a new one begins."""
        self.merged = 0

    @property
    def sums(self) -> list[torch.Tensor]:
        """The sum so far, one tensor per parameter; empty if it has not begun."""
        return self._sum_views if self.merged else []

    @torch.no_grad()
    def resume(self, sums: Sequence[torch.Tensor], merged: int) -> None:
        """Continue from the sum of ``merged`` steps."""
        copy_all(self._sum_views, list(sums))
        self.merged = merged


class DeltaBucket:
    """The parameters' distances from a snapshot, which Local SGD averages; ``origin``: the snapshot's first values.

    From its first step on, an outer optimizer also keeps a ``velocity``, equal on all trainers. Snapshot and velocity
    are on the parameters' device or, with ``on_host``, in pinned memory of the host, and are copied when they are
    used.
    """

    def __init__(
        self, bucket: Bucket, parameters: Sequence[nn.Parameter], origin: Sequence[torch.Tensor], *, on_host: bool = False
    ) -> None:
        self.id = bucket.id
        self.names = bucket.gradients
        self.parameters = tuple(parameters)
        first = parameters[0]
        self._device = first.device
        home = torch.device("cpu") if on_host else first.device
        self._snapshot = torch.zeros(bucket.numel, dtype=first.dtype, device=home, pin_memory=home != first.device)
        self.snapshot = views_of(self._snapshot, parameters)
        self._velocity: torch.Tensor | None = None
        self.resume(origin)

    @cached_property
    def buffer(self) -> torch.Tensor:
        """Flat tensor of the distances, which is exchanged; allocated at first use."""
        return torch.zeros_like(self._snapshot, device=self._device)

    @cached_property
    def distances(self) -> list[torch.Tensor]:
        """Views of ``buffer``, one per parameter."""
        return views_of(self.buffer, self.parameters)

    @cached_property
    def residual(self) -> torch.Tensor:
        """Flat rounding errors of earlier quantised distances, in FP32, to add to the next ones; made at first use."""
        return torch.zeros_like(self.buffer, dtype=torch.float32)

    @torch.no_grad()
    def pack(self) -> None:
        """Write the parameters minus the snapshot into the buffer."""
        copy_all(self.distances, self.parameters)
        self.buffer.sub_(self._snapshot.to(self._device, non_blocking=True))

    def hold_velocity(self) -> torch.Tensor:
        """Return the flat outer momentum, which begins as zeros."""
        if self._velocity is None:
            self._velocity = torch.zeros_like(self._snapshot, pin_memory=self._snapshot.is_pinned())
        return self._velocity

    @torch.no_grad()
    def step(self, outer: Outer) -> None:
        """Replace the mean distance in the buffer with the outer optimizer's step, before its learning rate.

        A distance points in the direction of descent, opposite to its gradient.
        """
        if outer.momentum == 0:
            return
        kept = self.hold_velocity()
        velocity = kept.to(self._device, non_blocking=True)
        velocity.mul_(outer.momentum).add_(self.buffer)
        kept.copy_(velocity)
        if outer.nesterov:
            self.buffer.add_(velocity, alpha=outer.momentum)
        else:
            self.buffer.copy_(velocity)

    @torch.no_grad()
    def merge(self, rate: float = 1.0, share: float = 0.0) -> None:
        """Add ``rate`` times the buffer to the snapshot, and set the parameters to the result.

        ``share``: share of the parameters' own values that stays.
        """
        agreed = self._snapshot.to(self._device, non_blocking=True).add_(self.buffer, alpha=rate)
        values = self.snapshot
        if agreed is not self._snapshot:  # the snapshot lies on the host
            self._snapshot.copy_(agreed)
            values = views_of(agreed, self.parameters)
        if share == 0:
            copy_all(self.parameters, values)
        else:
            torch._foreach_mul_(self.parameters, share)
            torch._foreach_add_(self.parameters, values, alpha=1 - share)

    @property
    def velocity(self) -> list[torch.Tensor]:
        """The outer optimizer's momentum, one tensor per parameter; empty before its first step."""
        return [] if self._velocity is None else views_of(self._velocity, self.parameters)

    @property
    def residuals(self) -> list[torch.Tensor]:
        """The residual, one tensor per parameter; empty before its first use."""
        return views_of(self.residual, self.parameters) if "residual" in self.__dict__ else []

    @property
    def is_at_rest(self) -> bool:
        """Whether the parameters equal the snapshot."""
        return all(torch.equal(own, kept.to(self._device)) for own, kept in zip(self.parameters, self.snapshot, strict=True))

    @torch.no_grad()
    def averages(self) -> list[torch.Tensor]:
        """Return snapshot plus mean distances, one tensor per parameter, without changing anything."""
        return views_of(self._snapshot.to(self._device) + self.buffer, self.parameters)

    @torch.no_grad()
    def resume(self, origin: Sequence[torch.Tensor]) -> None:
        """Set the snapshot to these values, from which distances are measured."""
        copy_all(self.snapshot, list(origin))

    @torch.no_grad()
    def restore(
        self, velocity: Mapping[str, torch.Tensor], landed: Mapping[str, torch.Tensor], residual: Mapping[str, torch.Tensor]
    ) -> None:
        """Restore outer momentum, averaged distances that are not merged yet, and quantisation errors, by parameter."""
        if set(self.names) <= velocity.keys():
            self.hold_velocity()
            copy_all(self.velocity, [velocity[name] for name in self.names])
        if set(self.names) <= landed.keys():
            copy_all(self.distances, [landed[name] for name in self.names])
        if set(self.names) <= residual.keys():
            copy_all(views_of(self.residual, self.parameters), [residual[name] for name in self.names])


_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class ModelBuffers:
    """A model's buffers, for their exchange: rank 0's are sent to all trainers, or they are averaged.

    Only buffers that the model has when this object is made are exchanged. In an average, floating-point buffers get
    the mean, a count (a single ``int32`` or ``int64``) gets the largest value, and others stay as they are.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}  # noqa: SLF001  # fake tensors have it too
        plain = {name: buffer for name, buffer in model.named_buffers() if buffer.layout == torch.strided and buffer.numel()}
        self._shapes = {name: own.shape for name, own in plain.items() if own.untyped_storage()._cdata not in parameters}  # noqa: SLF001  # as above
        norms = [prefix for prefix, module in model.named_modules() if isinstance(module, _NormBase)]
        self._unread = {f"{prefix}.{name}".lstrip(".") for prefix in norms for name in _STATISTICS}
        """Names of the buffers that no training forward reads."""
        self._packed: list[tuple[list[torch.Tensor], torch.Tensor, str]] = []
        """For each type on the wire: buffers, one flat tensor of their values, and the all-reduce's operator."""

    @property
    def nbytes(self) -> int:
        """Number of bytes of all exchanged buffers."""
        return sum(buffer.nbytes for name, buffer in self._model.named_buffers() if name in self._shapes)

    @property
    def averaged_nbytes(self) -> int:
        """Number of bytes that an average sends: averaged buffers only, in their types on the wire."""
        return sum(buffer.numel() * _carrier(buffer).itemsize for buffer in filter(_is_averaged, self._found().values()))

    def _found(self) -> dict[str, torch.Tensor]:
        """Return the current buffers by name. Raises ``ConfigError`` if one is missing or has another shape."""
        now = dict(self._model.named_buffers(remove_duplicate=False))
        for name, shape in self._shapes.items():
            if name not in now or now[name].shape != shape:
                found = str(list(now[name].shape)) if name in now else "none"
                what = "has changed its shape, and trainers send or average it"
                hint = 'keep the shapes of buffers, or set broadcast_buffers = false, with local steps buffers = "local"'
                raise ConfigError(what, f"buffer {name}", f"{found}, before {list(shape)}", hint)
        return {name: now[name] for name in self._shapes}

    @torch.no_grad()
    def send(self, communicators: Communicators, *, read: bool = False, source: int = 0) -> int:
        """Replace the buffers with rank ``source``'s, and return the bytes sent.

        ``read``: send only buffers that a training forward reads.
        """
        found = self._found()
        kept = [buffer for name, buffer in found.items() if name in self._unread]  # so that graphs of earlier forwards stay valid
        sent = [buffer for name, buffer in found.items() if not (read and name in self._unread)]
        with ExitStack() as stack:
            for buffer in kept:  # as DDP does
                stack.enter_context(_unsafe_preserve_version_counter(buffer))
            communicators.broadcast(*sent, source=source)
        return sum(buffer.nbytes for buffer in sent)

    @torch.no_grad()
    def pack(self) -> None:
        """Copy the buffers to be averaged into flat tensors."""
        kinds: dict[torch.dtype, list[torch.Tensor]] = {}
        for buffer in filter(_is_averaged, self._found().values()):
            kinds.setdefault(_carrier(buffer), []).append(buffer)
        self._packed = [
            (buffers, torch.cat([buffer.reshape(-1).to(dtype) for buffer in buffers]), "mean" if dtype.is_floating_point else "max")
            for dtype, buffers in kinds.items()
        ]

    def run(self, operation: Operation, communicators: Communicators) -> None:
        """Average the flat tensors; runs on a lane."""
        for _, flat, how in self._packed:
            communicators.all_reduce(flat, how, operation.group, operation.communicator)

    @torch.no_grad()
    def unpack(self) -> None:
        """Copy the averages into the model's buffers."""
        for buffers, flat, _ in self._packed:
            pieces = torch.split(flat, [buffer.numel() for buffer in buffers])
            copy_all(buffers, [piece.view(buffer.shape).to(buffer.dtype) for piece, buffer in zip(pieces, buffers, strict=True)])


def _is_averaged(buffer: torch.Tensor) -> bool:
    is_count = buffer.dim() == 0 and buffer.dtype in (torch.int32, torch.int64)
    return 0 not in buffer.stride() and (buffer.is_floating_point() or is_count)


def _carrier(buffer: torch.Tensor) -> torch.dtype:
    """Return the type in which a buffer is averaged."""
    if not buffer.is_floating_point():
        return torch.int64
    return torch.promote_types(torch.float32, buffer.dtype) if buffer.dtype.itemsize > 1 else torch.float32  # torch promotes no FP8


class Storage:
    """The buckets of a plan.

    ``gradients`` is empty if trainers update alone without gradient merge. ``deltas`` is empty if trainers never
    update alone.
    """

    def __init__(
        self,
        plan: Plan,
        parameters: Mapping[str, nn.Parameter],
        communicators: Communicators,
        *,
        gathers: bool,
        what: Combination,
        origin: Mapping[str, torch.Tensor] | None,
        sums: Mapping[str, torch.Tensor],
        merged: int,
    ) -> None:
        """Create the buckets; ``gathers``: whether buckets of gradients are needed.

        ``origin``: values that deltas are measured from, by parameter; the parameter's own value for a missing name.
        None if trainers never update alone. ``sums``: gradient sums of ``merged`` steps that wait for their update,
        or empty.
        """
        self._plan = plan
        self._communicators = communicators
        self._feeds_back = what.feeds_back
        self.parameters = {bucket.id: [parameters[name] for name in bucket.gradients] for bucket in plan.buckets}
        self.gradients: list[GradientBucket | SparseBucket] = []
        self.deltas: list[DeltaBucket] = []
        for bucket in plan.buckets:
            own = self.parameters[bucket.id]
            if gathers:
                self.gradients.append(SparseBucket(bucket, own) if bucket.sparse else GradientBucket(bucket, own))
            if origin is not None:
                values = [origin.get(name, parameters[name].detach()) for name in bucket.gradients]
                self.deltas.append(DeltaBucket(bucket, own, values, on_host=what.keeps_on_host))
        for bucket, gradients in zip(plan.buckets if sums else (), self.gradients, strict=False):
            gradients.resume([sums[name] for name in bucket.gradients], merged)
        self._transfers: dict[tuple[str, int], Transfer] = {}

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Return the values that deltas are measured from, by parameter."""
        return {name: view for delta in self.deltas for name, view in zip(delta.names, delta.snapshot, strict=True)}

    def rebase(self, values: Mapping[str, torch.Tensor]) -> None:
        """Measure the deltas of these parameters from ``values``."""
        for delta in self.deltas:
            delta.resume([values.get(name, kept) for name, kept in zip(delta.names, delta.snapshot, strict=True)])

    def sums(self) -> dict[str, torch.Tensor]:
        """Return the gradient sums that wait for an update, by parameter; empty if there are none."""
        summed = ((bucket, gradients) for bucket, gradients in zip(self._plan.buckets, self.gradients, strict=False) if gradients.sums)
        return {name: total for bucket, gradients in summed for name, total in zip(bucket.gradients, gradients.sums, strict=True)}

    def place(self, bucket: int, buffer: torch.Tensor) -> None:
        """Use ``buffer`` as the flat buffer of a bucket's gradients."""
        gradients = self.gradients[bucket]
        if isinstance(gradients, GradientBucket) and gradients.place(buffer):
            self._transfers.pop(("gradient", bucket), None)

    def transfer(self, payload: str, bucket: int) -> Transfer:
        """Return the transfer of a bucket's gradients, deltas or state, as ``payload`` says."""
        found = self._transfers.get((payload, bucket))
        if found is None:
            residual = self.deltas[bucket].residual if payload == "delta" and self._feeds_back else None
            found = self._transfers[payload, bucket] = Transfer(
                self._buffer(payload, bucket), self._plan, self._plan.chain(bucket, payload), self._communicators, residual
            )
        return found

    def _buffer(self, payload: str, bucket: int) -> torch.Tensor:
        if payload == "delta":
            return self.deltas[bucket].buffer
        if payload == "state":
            like = self.parameters[bucket][0]
            numel = self._plan.buckets[bucket].numel * self._plan.num_state_slots
            return torch.zeros(numel, dtype=like.dtype, device=like.device)
        gradients = self.gradients[bucket]
        assert isinstance(gradients, GradientBucket)
        return gradients.buffer


class Transfer:
    """A flat tensor that a chain of operations exchanges: a bucket's gradients, deltas, or optimizer state.

    ``chain``: the plan's operations of the bucket. If they use a smaller type or equal pieces, the tensor is copied
    before the first operation and back after the last.

    A single all-reduce in the tensor's own type, or in INT8, averages. Every other chain divides by the number of
    values, casts and then sums, so that a small type overflows neither in the cast nor in the sum (Fleet;
    DistributedDataParallel's ``fp16_compress_hook`` casts first). Complex numbers travel as pairs of real ones, which
    every backend supports.
    """

    def __init__(
        self, buffer: torch.Tensor, plan: Plan, chain: Operations, communicators: Communicators, residual: torch.Tensor | None = None
    ) -> None:
        """``residual``: error feedback of an all-reduce in INT8, see ``average_quantised``."""
        self.buffer = buffer
        """The flat tensor that is packed before the exchange and read after it, in the parameters' type."""
        self._numbers = numbers = torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer
        self._residual = residual
        self._communicators = communicators
        self._first, self._last = _place(chain[0]), _place(chain[-1])
        self._divisor = plan.num_summed(chain)
        inside = communicators.part(chain[-1].group)
        pieces = len(inside) if chain[-1].kind == "all_gather" else 1
        self._quantises = chain[0].wire_dtype == "int8"
        wire = None if self._quantises or buffer.is_complex() else chain[0].wire_dtype
        dtype = getattr(torch, wire or str(numbers.dtype).removeprefix("torch."))
        padded = -(-numbers.numel() // pieces) * pieces
        self._copies = dtype != numbers.dtype or padded != numbers.numel()
        self._averages = len(chain) == 1 and dtype == numbers.dtype
        self._whole = torch.zeros(padded, dtype=dtype, device=buffer.device) if self._copies else numbers
        self._own = torch.empty(padded // pieces, dtype=dtype, device=buffer.device) if pieces > 1 else self._whole
        self._cut = inside.index(communicators.rank) if pieces > 1 and chain[0].kind == "all_reduce" else None
        """Place of this rank's piece if the chain begins with it, because all ranks of its part have the same values."""

    def is_first(self, operation: Operation) -> bool:
        """Whether this operation is the first of the chain."""
        return _place(operation) == self._first

    @torch.no_grad()
    def run(self, operation: Operation, timed: Timed) -> None:
        """Execute one operation of the chain, on its lane; ``timed`` times the operation's parts."""
        if _place(operation) == self._first and not self._averages:
            torch.div(self._numbers, self._divisor, out=self._whole[: self._numbers.numel()])
            if self._cut is not None:
                self._own.copy_(self._whole.view(-1, self._own.numel())[self._cut])
        communicators, group, number = self._communicators, operation.group, operation.communicator
        match operation.kind:
            case "all_reduce" if self._quantises:
                average_quantised(self._numbers, communicators, number, timed, self._residual)
            case "all_reduce":
                communicators.all_reduce(self._own, "mean" if self._averages else "sum", group, number)
            case "reduce":
                communicators.reduce(self._whole, group, number)
            case "broadcast":
                communicators.spread(self._whole, group, number)
            case "reduce_scatter":
                communicators.reduce_scatter(self._own, self._whole, group, number)
            case "all_gather":
                communicators.all_gather(self._whole, self._own, group, number)
            case _:
                raise AssertionError(f"nothing executes {operation.kind}")
        if _place(operation) == self._last and self._copies:
            self._numbers.copy_(self._whole[: self._numbers.numel()])

    @property
    def is_plain(self) -> bool:
        """Whether one all-reduce averages the buffer itself, with nothing to do before or after it."""
        return self._averages and not self._copies and not self._quantises

    def begin(self, communicator: int, group: str, ended: Callable[[], None] | None) -> Started:
        """Begin a plain chain's all-reduce on this communicator; see ``Communicators.start_average``."""
        return self._communicators.start_average(self._numbers, communicator, ended, group)


def _place(operation: Operation) -> tuple[str, str]:
    return operation.kind, operation.group
