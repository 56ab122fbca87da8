"""Rounds of local steps (Local SGD, DiLoCo): workers are shard groups, and average their shards as the plan says."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from fleetbench.plan.combination import Combination
from fleetbench.plan.drive import answers, events_of
from fleetbench.plan.events import Flush
from fleetbench.plan.operations import Operation, Operations, wire_bytes
from fleetbench.plan.replay import Decider
from fleetbench.plan.state import State, closed_round
from fleetbench.plan.training import begin_anew
from real.communication.communicators import Communicators
from real.engine.stopwatch import Stopwatch


class Rounds:
    """This trainer's shards as the workers last agreed on them; the strategy decides when they average next."""

    def __init__(
        self, decider: Decider, shards: Sequence[Sequence[torch.Tensor]], communicators: Communicators, stopwatch: Stopwatch
    ) -> None:
        """``shards``: this trainer's parts of the parameters of each bucket; averaging changes them in place."""
        self.decider, self._shards, self._communicators, self._stopwatch = decider, shards, communicators, stopwatch
        self._what: Combination = decider.strategy.combination
        self.agreed = [_flat(own) for own in shards]
        """Shards as they were last agreed on: one flat tensor per bucket."""
        self.velocity = [torch.zeros_like(own) for own in self.agreed] if self._what.outer else []
        """Momentum of the outer optimizer: one flat tensor per bucket; empty without an outer optimizer."""

    @property
    def has_agreed(self) -> bool:
        """Whether no worker has updated alone since all of them last agreed."""
        return self.decider.strategy.has_agreed(self.decider.state)

    def step_ends(self, step: int, *, overflows: bool) -> None:
        """Handle the end of an optimizer's step, skipped if ``overflows``; workers average at the end of a round."""
        before = self.decider.state
        for event in events_of(self.decider.strategy.plan, step):
            for decided in answers(self.decider, event, lambda _: float(overflows), time.monotonic_ns):
                self._execute(decided.operations)
        self._note_round(before)

    def meet(self) -> None:
        """Average now, if any worker has updated since the last time."""
        before = self.decider.state
        self._stopwatch.update_begins()
        self._execute(self.decider.on(time.monotonic_ns(), Flush()))
        self._stopwatch.update_ends()
        self._note_round(before)

    def _note_round(self, before: State) -> None:
        local_steps = closed_round(before, self.decider.state)
        if local_steps is not None:
            self._stopwatch.closes_round(local_steps)

    def resume(self, saved: State, agreed_velocity: Sequence[torch.Tensor], *, same_strategy: bool) -> None:
        """Continue from shards that all workers share, and from the outer momentum, if there is any."""
        self.decider.state = begin_anew(saved, self.decider.strategy, self.decider.rank, same_strategy=same_strategy)
        for own, shards in zip(self.agreed, self._shards, strict=True):
            own.copy_(_flat(shards))
        for own in self.velocity:
            own.zero_()
        for own, found in zip(self.velocity, agreed_velocity, strict=False):
            own.copy_(found)

    @torch.no_grad()
    def _execute(self, operations: Operations) -> None:
        """Average distances, step the outer optimizer, and set the shards to the result; torch has done the rest."""
        averages = [one for one in operations if one.kind == "all_reduce" and one.payload == "delta"]
        if not averages:
            return
        self._stopwatch.stall_begins()
        self._stopwatch.arrives(of_average=True)
        distances = {operation.bucket: self._averaged(operation) for operation in averages}
        self._stopwatch.stall_ends()
        outer = self._what.outer
        for bucket, step in distances.items():
            assert bucket is not None
            if outer is not None and outer.momentum:
                velocity = self.velocity[bucket].mul_(outer.momentum).add_(step)
                step = step.add(velocity, alpha=outer.momentum) if outer.nesterov else velocity  # noqa: PLW2901  # what is stepped
            agreed = self.agreed[bucket].sub_(step, alpha=1.0 if outer is None else outer.lr)
            place = 0
            for shard in self._shards[bucket]:
                shard.copy_(agreed[place : place + shard.numel()].view_as(shard))
                place += shard.numel()

    def _averaged(self, operation: Operation) -> torch.Tensor:
        """Return the workers' mean distance in a round: the agreed shards minus the current ones."""
        assert operation.bucket is not None
        self._stopwatch.sends(wire_bytes(operation, len(self._communicators.part(operation.group))))
        agreed = self.agreed[operation.bucket]
        distance = (agreed - _flat(self._shards[operation.bucket])).to(getattr(torch, operation.wire_dtype or "float32"))
        self._communicators.all_reduce(distance, "mean", operation.group, operation.communicator)
        return distance.to(agreed.dtype)


def _flat(shards: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([shard.detach().reshape(-1) for shard in shards])
