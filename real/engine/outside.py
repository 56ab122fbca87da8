"""Outside changes: a script's writes to parameters outside of optimizer steps, such as loading weights.

Under an outer optimizer or with fragments, trainers measure their progress from values that all agreed on (Theta).
Weights that are loaded, copied or drawn anew become these values. Otherwise the outer optimizer would step along them.
In plain averaging a change needs no care: the average of parameters is the same wherever distances are measured from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from fleetbench.errors import ConfigError
from real.communication.communicators import agree_on
from real.communication.lanes import host_reads
from real.engine.gradients import COUNT
from real.engine.refusals import refuse_open

if TYPE_CHECKING:
    from real.engine.engine import Engine

OUTSIDE = "parameters changed outside of optimizer.step()"
ALIKE = (
    "change them alike on every rank, after fleet.synchronize(); what belongs to an update goes into optimizer.step(), "
    "or into a hook of it that is registered before fleet.distributed_optimizer"
)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class OutsideChanges:
    """Finds outside changes between local steps: ``note`` follows fleet's writes, ``take_over`` precedes each step.

    A change is a new storage, or an in-place write that torch counts. A write that leaves a parameter's values as
    trainers agreed on them is not a change.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._noted: list[tuple[int, int]] = []
        """Address of each parameter and its number of in-place writes at the last ``note``; empty before the first."""

    def note(self) -> None:
        """Note the parameters as they are; later writes are outside changes."""
        self._noted = self._marks()

    @torch.no_grad()
    def take_over(self, engine: Engine) -> None:
        """Make changed parameters the base of the engine's round.

        Raises ``ConfigError`` for a change within a round, and on every rank unless all have made the same.
        """
        marks = self._marks()
        if marks == self._noted:
            return
        refuse_open(engine.has_agreed, 0, OUTSIDE)
        storage = engine.executor.storage
        origin = storage.snapshot()
        with host_reads():
            changed = {name: own.detach() for name, own in self._parameters.items() if not torch.equal(own, origin[name].to(own.device))}
            if changed:
                if engine.communicators.workers is not None:
                    hint = "load weights before fleet.distributed_model: the first worker's become those of all"
                    raise ConfigError("elastic workers do not meet to change them alike", OUTSIDE, f"{len(changed)} parameters", hint)
                if engine.meeting is not None:
                    engine.meeting.meet(OUTSIDE)
                engine.communicators.order_lanes()
                lines = [f"{name} of checksum {_checksum(value):x}" for name, value in changed.items()]
                agree_on(lines, OUTSIDE, engine.communicators, ALIKE)
                storage.rebase(changed)
        self._noted = marks

    def _marks(self) -> list[tuple[int, int]]:
        own = self._parameters.values()
        return [*zip(map(torch.Tensor.data_ptr, own), map(COUNT, own), strict=True)]  # in C: each step does it


def _checksum(value: torch.Tensor) -> int:
    """Return a sum of the values' bits, which is the same for any order of summation."""
    flat = value.reshape(-1)
    return int(flat.view(_BITS.get(flat.element_size(), torch.int64)).sum(dtype=torch.int64))
