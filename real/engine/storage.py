"""Storage: the buffers of one plan, built for a model, and how they travel."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from fleetbench.plan.build import Plan
from fleetbench.plan.operations import Operation, Operations
from real.communication.communicators import Communicators
from real.communication.lanes import Started
from real.engine.buckets import DeltaBucket, GradientBucket
from real.engine.sparse import SparseBucket

Gradients = GradientBucket | SparseBucket


class Storage:
    """Where a plan's buckets lie.

    ``gradients`` is empty where nothing gathers them: trainers that update alone, parameter by
    parameter. ``deltas`` is empty where trainers never part.
    """

    def __init__(
        self,
        plan: Plan,
        parameters: Mapping[str, nn.Parameter],
        communicators: Communicators,
        *,
        gathers: bool,
        origin: Mapping[str, torch.Tensor] | None,
        sums: Mapping[str, torch.Tensor],
        merged: int,
    ) -> None:
        """``gathers``: buckets of gradients are needed.

        ``origin``: values that deltas are measured from, the parameters' own where it names none; none where trainers never part.
        ``sums``: the gradients of ``merged`` steps, which wait for their update; empty where none do.
        """
        self._plan = plan
        self._communicators = communicators
        self.parameters = {bucket.id: [parameters[name] for name in bucket.gradients] for bucket in plan.buckets}
        self.gradients: list[Gradients] = []
        if gathers:
            self.gradients = [
                (SparseBucket if bucket.sparse else GradientBucket)(bucket, self.parameters[bucket.id]) for bucket in plan.buckets
            ]
        self.deltas: list[DeltaBucket] = []
        if origin is not None:
            self.deltas = [
                DeltaBucket(bucket, self.parameters[bucket.id], [origin.get(name, parameters[name].detach()) for name in bucket.gradients])
                for bucket in plan.buckets
            ]
        for bucket, gradients in zip(plan.buckets if sums else (), self.gradients, strict=False):
            gradients.resume([sums[name] for name in bucket.gradients], merged)
        self._cargo: dict[tuple[str, int], Cargo] = {}

    def snapshot(self) -> dict[str, torch.Tensor]:
        """The values that deltas are measured from, by parameter."""
        return {name: view for delta in self.deltas for name, view in zip(delta.names, delta.snapshot, strict=True)}

    def sums(self) -> dict[str, torch.Tensor]:
        """The gradients that are being summed up for an update, by parameter; empty between updates."""
        summed = ((bucket, gradients) for bucket, gradients in zip(self._plan.buckets, self.gradients, strict=False) if gradients.sums)
        return {name: total for bucket, gradients in summed for name, total in zip(bucket.gradients, gradients.sums, strict=True)}

    def cargo(self, payload: str, bucket: int) -> Cargo:
        """What the bucket's chain of operations carries."""
        found = self._cargo.get((payload, bucket))
        if found is None:
            found = self._cargo[payload, bucket] = Cargo(self._buffer(payload, bucket), self._plan.of_bucket[bucket], self._communicators)
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


class Cargo:
    """What one chain of operations carries: a bucket's gradients, deltas, or optimizer state.

    ``chain`` is the plan's operations of the bucket. Where it travels in a smaller type, or is cut
    into equal pieces, it is copied before the first operation and back after the last.

    A plain all-reduce averages. Everything else divides by the number of trainers, casts and then
    sums, so that a small type overflows neither in the cast nor in the sum (Fleet; DistributedDataParallel's
    ``fp16_compress_hook`` casts first).
    """

    def __init__(self, buffer: torch.Tensor, chain: Operations, communicators: Communicators) -> None:
        self.buffer = buffer
        self._communicators = communicators
        self._first, self._last = _place(chain[0]), _place(chain[-1])
        pieces = len(communicators.part(chain[0].group)) if chain[0].kind == "reduce_scatter" else 1
        dtype = getattr(torch, chain[0].wire_dtype or str(buffer.dtype).removeprefix("torch."))
        padded = -(-buffer.numel() // pieces) * pieces
        self._copies = dtype != buffer.dtype or padded != buffer.numel()
        self._averages = len(chain) == 1 and dtype == buffer.dtype
        self._whole = torch.zeros(padded, dtype=dtype, device=buffer.device) if self._copies else buffer
        self._own = torch.empty(padded // pieces, dtype=dtype, device=buffer.device) if pieces > 1 else self._whole

    def is_first(self, operation: Operation) -> bool:
        """Whether the bucket sets out with this operation."""
        return _place(operation) == self._first

    @torch.no_grad()
    def run(self, operation: Operation) -> None:
        """Execute one operation of the chain; runs on its lane."""
        if _place(operation) == self._first:
            self._load()
        communicators, group, number = self._communicators, operation.group, operation.communicator
        match operation.kind:
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
            self.buffer.copy_(self._whole[: self.buffer.numel()])

    @property
    def is_plain(self) -> bool:
        """Whether the buffer itself is averaged, and nothing is to be done before or after it."""
        return self._averages and not self._copies

    def begin(self, operation: Operation, ended: Callable[[], None] | None) -> Started | None:
        """Begin the operation of a plain chain; see ``Communicators.start_average``."""
        return self._communicators.start_average(self.buffer, operation.communicator, ended)

    def _load(self) -> None:
        if not self._averages:
            torch.div(self.buffer, self._communicators.trainers, out=self._whole[: self.buffer.numel()])


def _place(operation: Operation) -> tuple[str, str]:
    return operation.kind, operation.group
