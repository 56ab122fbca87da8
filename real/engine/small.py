"""Small payloads: what no bucket carries."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fleetbench.plan.operations import Operation
from real.communication.communicators import Communicators
from real.communication.streams import host_reads
from real.engine.buckets import SparseBucket, copy_all


class BufferAverage:
    """A model's buffers on their way: statistics are averaged, counts take the largest."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._find()
        self._mean = torch.empty(0)
        self._largest = torch.empty(0, dtype=torch.int64)

    def _find(self) -> None:
        """The buffers that the model has now: a module may put others in their place."""
        buffers = [buffer for buffer in self._model.buffers() if buffer.numel()]
        self._floats = [buffer for buffer in buffers if buffer.is_floating_point()]
        self._counts = [buffer for buffer in buffers if not buffer.is_floating_point() and buffer.dtype != torch.bool]

    @property
    def nbytes(self) -> int:
        """Size of all that travels, in bytes."""
        return sum(buffer.numel() * 8 for buffer in (*self._floats, *self._counts))

    @torch.no_grad()
    def pack(self) -> None:
        """Gather the buffers, in float64 and int64."""
        self._find()
        if self._floats:
            self._mean = torch.cat([buffer.reshape(-1).to(torch.float64) for buffer in self._floats])
        if self._counts:
            self._largest = torch.cat([buffer.reshape(-1).to(torch.int64) for buffer in self._counts])

    def run(self, operation: Operation, communicators: Communicators) -> None:
        """Exchange them; runs on a lane."""
        if self._floats:
            communicators.all_reduce(self._mean, "mean", operation.group, operation.communicator)
        if self._counts:
            communicators.all_reduce(self._largest, "max", operation.group, operation.communicator)

    @torch.no_grad()
    def unpack(self) -> None:
        """Put the results into the model."""
        for buffers, flat in ((self._floats, self._mean), (self._counts, self._largest)):
            if buffers:
                pieces = torch.split(flat, [buffer.numel() for buffer in buffers])
                copy_all(buffers, [piece.view(buffer.shape).to(buffer.dtype) for piece, buffer in zip(pieces, buffers, strict=True)])


@torch.no_grad()
def gather_rows(bucket: SparseBucket, operation: Operation, communicators: Communicators) -> int:
    """Average a sparse gradient over all ranks: everybody gathers everybody's rows. Runs on a lane; returns the bytes sent.

    Ranks touch different numbers of rows, which they tell each other first: the host reads these
    numbers, on every backend.
    """
    indices, values = bucket.own
    trainers, number = communicators.trainers, operation.communicator
    own = torch.tensor([len(indices)], dtype=torch.int64, device=values.device)
    counts = torch.empty(trainers, dtype=torch.int64, device=values.device)
    communicators.all_gather(counts, own, operation.group, number)
    with host_reads():
        lengths = counts.tolist()
    most = max(lengths)
    if most == 0:
        bucket.gathered = bucket.own
        return own.nbytes * (trainers - 1)
    padded_indices, padded_values = _padded(indices, most), _padded(values, most)
    all_indices = indices.new_empty((trainers * most,))
    all_values = values.new_empty((trainers * most, *values.shape[1:]))
    communicators.all_gather(all_indices, padded_indices, operation.group, number)
    communicators.all_gather(all_values, padded_values, operation.group, number)
    bucket.gathered = _unpadded(all_indices, lengths, most), _unpadded(all_values, lengths, most) / trainers
    return (own.nbytes + padded_indices.nbytes + padded_values.nbytes) * (trainers - 1)


def _padded(tensor: torch.Tensor, length: int) -> torch.Tensor:
    whole = tensor.new_zeros((length, *tensor.shape[1:]))
    whole[: len(tensor)] = tensor
    return whole


def _unpadded(tensor: torch.Tensor, lengths: Sequence[int], padded: int) -> torch.Tensor:
    return torch.cat([tensor[rank * padded : rank * padded + length] for rank, length in enumerate(lengths)])
