"""Control of the user's optimizer: it steps when the strategy says so, and in the way it says.

The object stays the user's own. Its ``step()`` is let through, kept from finding any gradient, or
replaced by the same update in one kernel or of one bucket's parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

import torch
from torch import nn

from fleetbench.errors import ConfigError
from fleetbench.plan.combination import Combination
from real.engine.fused import FusedOptimizer
from real.engine.optimizer_state import reset_state, state_slots, state_tensors
from real.engine.storage import Storage
from real.engine.twins import PartialOptimizer, hide, refuse_whole, shape_of


class OptimizerControl:
    """One optimizer under one plan. ``begin`` and ``end`` stand around the user's ``optimizer.step()``."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        combination: Combination,
        storage: Storage,
        parameters: Mapping[str, nn.Parameter],
    ) -> None:
        self.optimizer = optimizer
        refuse_whole(optimizer)
        self._known = {id(parameter) for parameter in parameters.values()}
        self._shape: Hashable = None
        self._foreign: list[nn.Parameter] = []
        self._refuse_foreign()
        self._storage = storage
        self._parameters = parameters
        self._restore: Callable[[], None] | None = None
        self.averages_state = combination.averages_state
        self.slots = state_slots(optimizer) if combination.averages_state or combination.resets_state else ()
        """Names of the state tensors that trainers average or reset."""
        self._fused = FusedOptimizer(optimizer) if combination.fuses_update else None
        self._partial: dict[int, PartialOptimizer] = {}
        if combination.updates_by_bucket:
            self._partial = {bucket: PartialOptimizer(optimizer, members) for bucket, members in storage.parameters.items()}

    @property
    def lr(self) -> float:
        """The learning rate of the first group."""
        return float(self.optimizer.param_groups[0]["lr"])

    def begin(self, *, updates: bool) -> None:
        """The user's optimizer is about to step; where it must not, or another does it, it finds nothing to do."""
        self._refuse_foreign()
        if not updates or self._fused is not None:
            self._restore = hide(self.optimizer, self._parameters.values())

    def end(self, *, updates: bool) -> None:
        """The user's optimizer has stepped."""
        if self._restore is not None:
            self._restore()
            self._restore = None
        if updates and self._fused is not None:
            self._fused.step()

    def step_between(self) -> None:
        """Update outside the user's ``step()``."""
        if self._fused is not None:
            self._fused.step()
        else:
            PartialOptimizer(self.optimizer, self._parameters.values()).step()

    def bucket_step(self, bucket: int) -> Callable[[], None]:
        """What updates one bucket's parameters."""
        return self._partial[bucket].step

    def state(self, bucket: int) -> list[torch.Tensor]:
        """The averaged state of a bucket's parameters, one tensor a slot and parameter."""
        return [tensor for parameter in self._storage.parameters[bucket] for tensor in state_tensors(self.optimizer, parameter, self.slots)]

    @torch.no_grad()
    def pack_state(self, bucket: int, buffer: torch.Tensor) -> None:
        """Gather a bucket's state."""
        torch.cat([tensor.reshape(-1) for tensor in self.state(bucket)], out=buffer)

    @torch.no_grad()
    def unpack_state(self, bucket: int, buffer: torch.Tensor) -> None:
        """Put a bucket's state back."""
        tensors = self.state(bucket)
        for tensor, piece in zip(tensors, torch.split(buffer, [tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(piece.view(tensor.shape))

    def reset(self) -> None:
        """Clear the state."""
        reset_state(self.optimizer, self.slots)

    def _refuse_foreign(self) -> None:
        """Raise ``ConfigError`` for trained parameters that nobody averages: ranks would drift apart in them."""
        shape = shape_of(self.optimizer)
        if shape != self._shape:  # a group was added, or this is the first time
            self._shape = shape
            self._foreign = [item for group in self.optimizer.param_groups for item in group["params"] if id(item) not in self._known]
        trained = [parameter for parameter in self._foreign if parameter.requires_grad]
        if trained:
            raise ConfigError(
                "holds parameters that are not the distributed model's, or did not require gradients when it was distributed",
                "the optimizer",
                f"{len(trained)}, the first of shape {list(trained[0].shape)}",
                "put all that is trained into one module, let it require gradients, and give that to fleet.distributed_model",
            )
