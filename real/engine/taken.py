"""Taken: gradients that an update in the backward has used, so that a later change of them is noticed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from real.communication.streams import host_reads


@dataclass(frozen=True, slots=True)
class Taken:
    """Gradients at one moment: the tensors, how often each was written to in place, and what they add up to.

    ``torch.amp.GradScaler`` and ``grad.data.mul_()`` write to gradients without being counted: sum and norm of
    each bucket show that. The host waits for them, on every device.
    """

    gradients: tuple[torch.Tensor, ...]
    versions: tuple[int, ...]
    fingerprint: torch.Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, gradients: Sequence[torch.Tensor], buckets: Sequence[torch.Tensor]) -> Self:
        """``buckets``: where the numbers of ``gradients`` lie."""
        versions = tuple(gradient._version for gradient in gradients)  # noqa: SLF001  # torch documents it, and has no other name for it
        numbers = [
            number
            for values in buckets
            for number in (values.sum(dtype=torch.float64), torch.linalg.vector_norm(values, dtype=torch.float64))
        ]
        return cls(tuple(gradients), versions, torch.stack(numbers).view(torch.int64))

    def is_same(self, other: Taken) -> bool:
        """Whether no gradient was replaced or changed in between; NaNs are equal to themselves."""
        if [id(gradient) for gradient in self.gradients] != [id(gradient) for gradient in other.gradients]:
            return False
        with host_reads():
            return self.versions == other.versions and torch.equal(self.fingerprint, other.fingerprint)
