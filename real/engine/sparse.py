"""Sparse gradients of embeddings: their buckets, and the exchange of their rows."""

from collections.abc import Collection, Sequence

import torch
from torch import nn

from fleetbench.errors import ConfigError
from fleetbench.plan.fusion import Bucket
from fleetbench.plan.operations import Operation
from real.communication.communicators import Communicators
from real.communication.lanes import host_reads


def refuse_unknown_sparse(name: str, gradient: torch.Tensor | None, sparse: Collection[str]) -> None:
    """Raise ``ConfigError`` for a sparse gradient that was planned as dense, or the other way round."""
    if gradient is not None and not gradient.is_sparse and name in sparse:
        hint = "a weight that a dense layer shares needs sparse=False"
        raise ConfigError("has a dense gradient, though its embedding is sparse", f"parameter {name}", hint=hint)
    if gradient is not None and gradient.is_sparse and name not in sparse:
        raise ConfigError(
            "has a sparse gradient, and is no embedding's weight", f"parameter {name}", hint="use torch.nn.Embedding(sparse=True)"
        )


class SparseBucket:
    """The sparse gradient of one embedding: row indices and row values.

    ``pack`` takes the rows that this rank touched, an exchange puts those of all ranks into ``gathered``, and
    ``finish`` makes these the gradient. Tensors that the exchange allocates on its lane are kept until the lane
    replaces them, so that their memory is not reused while another stream still reads it.
    """

    def __init__(self, bucket: Bucket, parameters: Sequence[nn.Parameter]) -> None:
        self.id = bucket.id
        (self.parameter,) = self.parameters = tuple(parameters)
        self.own = self._none()
        """Indices ``(rows,)`` and values ``(rows, ...)`` of this rank's rows, each row once."""
        self.gathered: tuple[torch.Tensor, torch.Tensor] | None = None
        """Indices and values of all ranks' rows, one rank after the other; None before the first exchange."""
        self.merged = 0
        self._sum: torch.Tensor | None = None

    @torch.no_grad()
    def pack(self) -> None:
        """Take this rank's rows; a parameter without a gradient has none."""
        gradient = self._gradient().coalesce()
        self.own = gradient.indices()[0], gradient.values()

    @torch.no_grad()
    def finish(self) -> None:
        """Make the gathered rows the gradient, adding up those with the same index."""
        if self.gathered is not None:
            indices, values = self.gathered
            self.parameter.grad = self._of_rows(indices, values).coalesce()

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add the step's rows to the sum."""
        gradient = self._gradient()
        self._sum = gradient.clone() if self._sum is None else (self._sum + gradient).coalesce()
        self.merged += 1

    @torch.no_grad()
    def release(self, divisor: int) -> None:
        """Make the sum divided by ``divisor`` the gradient, and begin a new sum."""
        assert self._sum is not None
        self.parameter.grad = self._sum.coalesce() / divisor
        self.drop()

    def drop(self) -> None:
        """Discard the sum, so that a new one begins."""
        self.merged, self._sum = 0, None

    @property
    def values(self) -> torch.Tensor:
        """The values of the gradient's rows, after ``finish``."""
        return self._gradient()._values()  # noqa: SLF001  # values() wants coalesced ones

    @property
    def sums(self) -> list[torch.Tensor]:
        """The sum so far, as one sparse tensor; empty if it has not begun."""
        return [self._sum] if self._sum is not None else []

    def resume(self, sums: Sequence[torch.Tensor], merged: int) -> None:
        """Continue from the sum of ``merged`` steps."""
        (self._sum,) = sums
        self.merged = merged

    def _gradient(self) -> torch.Tensor:
        if self.parameter.grad is None:
            self.parameter.grad = self._of_rows(*self._none())
        return self.parameter.grad

    def _none(self) -> tuple[torch.Tensor, torch.Tensor]:
        indices = torch.empty(0, dtype=torch.int64, device=self.parameter.device)
        return indices, self.parameter.detach().new_empty((0, *self.parameter.shape[1:]))

    def _of_rows(self, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        shape, place = self.parameter.shape, values.device
        return torch.sparse_coo_tensor(indices[None], values, shape, device=place, check_invariants=False)


@torch.no_grad()
def gather_rows(bucket: SparseBucket, operation: Operation, communicators: Communicators) -> int:
    """Average a sparse gradient over all ranks by gathering all ranks' rows, on a lane; return the bytes sent.

    Ranks touch different numbers of rows, so they exchange these numbers first; the host reads them, on every
    backend.
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
    gathered, sent = [], own.nbytes
    for rows in (indices, values):
        padded = torch.cat([rows, rows.new_zeros((most - len(rows), *rows.shape[1:]))])
        of_all = rows.new_empty((trainers * most, *rows.shape[1:]))
        communicators.all_gather(of_all, padded, operation.group, number)
        gathered.append(torch.cat([part[:length] for part, length in zip(of_all.split(most), lengths, strict=True)]))
        sent += padded.nbytes
    bucket.gathered = gathered[0], gathered[1] / trainers
    return sent * (trainers - 1)
