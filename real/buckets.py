"""Buckets: flat buffers that carry many tensors in one collective."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fleetbench.plan.fusion import Bucket

copy_all = torch._foreach_copy_  # torch has no public name for copying a list of tensors at once


class FlatBucket:
    """One flat buffer, with a view in its shape for each of a bucket's parameters."""

    def __init__(self, bucket: Bucket, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.id = bucket.id
        self.names = bucket.gradients
        self.parameters = tuple(parameters)
        self.buffer = torch.zeros(bucket.numel, dtype=parameters[0].dtype, device=parameters[0].device)
        self.views = self._views(self.buffer)

    def _views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        pieces = torch.split(buffer, [parameter.numel() for parameter in self.parameters])
        return [piece.view(parameter.shape) for piece, parameter in zip(pieces, self.parameters, strict=True)]

    @torch.no_grad()
    def pack_gradients(self) -> None:
        """Copy the gradients into the buffer, unless they already live there."""
        pairs = [(view, parameter.grad) for view, parameter in zip(self.views, self.parameters, strict=True)]
        moving = [(view, gradient) for view, gradient in pairs if gradient is not None and gradient.data_ptr() != view.data_ptr()]
        if moving:
            copy_all([view for view, _ in moving], [gradient for _, gradient in moving])

    def expose_gradients(self) -> None:
        """Let every ``.grad`` be its view of the buffer."""
        for view, parameter in zip(self.views, self.parameters, strict=True):
            parameter.grad = view


class DeltaBucket(FlatBucket):
    """A bucket that carries the parameters' distance from a snapshot (Local SGD)."""

    def __init__(self, bucket: Bucket, parameters: Sequence[torch.nn.Parameter], origin: Sequence[torch.Tensor]) -> None:
        """``origin``: the values that deltas are measured from, in the parameters' order and shapes."""
        super().__init__(bucket, parameters)
        self._snapshot = torch.empty_like(self.buffer)
        self.snapshot = self._views(self._snapshot)
        with torch.no_grad():
            copy_all(self.snapshot, list(origin))

    @torch.no_grad()
    def pack_delta(self) -> None:
        """Put the parameters minus the snapshot into the buffer."""
        copy_all(self.views, self.parameters)
        self.buffer.sub_(self._snapshot)

    @torch.no_grad()
    def merge_delta(self) -> None:
        """Make snapshot plus buffer the new parameters and the new snapshot."""
        self._snapshot.add_(self.buffer)
        copy_all(self.parameters, self.snapshot)
