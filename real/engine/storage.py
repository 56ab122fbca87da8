"""Storage: the buffers of one plan, built for a model, and what moves between them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from fleetbench.plan.build import Plan
from fleetbench.plan.fusion import Bucket
from real.communication.cargo import Cargo
from real.communication.communicators import Communicators
from real.engine.buckets import DeltaBucket, GradientBucket, SparseBucket

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
    ) -> None:
        """``gathers``: buckets of gradients are needed.

        ``origin``: values that deltas are measured from, the parameters' own where it names none; none where trainers never part.
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
        self._cargo: dict[tuple[str, int], Cargo] = {}

    def snapshot(self) -> dict[str, torch.Tensor]:
        """The values that deltas are measured from, by parameter."""
        return {name: view for delta in self.deltas for name, view in zip(delta.names, delta.snapshot, strict=True)}

    def sums(self) -> dict[str, torch.Tensor]:
        """The gradients that are being summed up for an update, by parameter; empty between updates."""
        return {name: total for bucket in self._plan.buckets for name, total in self._sums_of(bucket)}

    def _sums_of(self, bucket: Bucket) -> list[tuple[str, torch.Tensor]]:
        sums = self.gradients[bucket.id].sums if self.gradients else []
        return list(zip(bucket.gradients, sums, strict=True)) if sums else []

    def resume(self, origin: Mapping[str, torch.Tensor], sums: Mapping[str, torch.Tensor], merged: int) -> None:
        """Measure deltas from ``origin``, where any are measured, and go on with ``sums`` of so many steps.

        ``sums`` is empty where no sum has begun. Both hold a tensor for each parameter.
        """
        for delta in self.deltas:
            delta.resume([origin[name] for name in delta.names])
        if sums:
            for bucket, gradients in zip(self._plan.buckets, self.gradients, strict=True):
                gradients.resume([sums[name] for name in bucket.gradients], merged)

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
