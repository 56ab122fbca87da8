"""Rounds of local steps (Local SGD, DiLoCo): workers are shard groups, and average their shards as the plan says."""

from __future__ import annotations

import time
from collections.abc import Mapping

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

    def __init__(self, decider: Decider, shards: Mapping[str, torch.Tensor], communicators: Communicators, stopwatch: Stopwatch) -> None:
        """``shards``: this trainer's part of each parameter; averaging changes them in place."""
        self.decider, self._shards, self._communicators, self._stopwatch = decider, shards, communicators, stopwatch
        self._what: Combination = decider.strategy.combination
        self.agreed = {name: own.clone() for name, own in shards.items()}
        """Shards as they were last agreed on."""
        self.velocity = {name: torch.zeros_like(own) for name, own in shards.items()} if self._what.outer else {}
        """Momentum of the outer optimizer; empty without one."""

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

    def resume(self, saved: State, velocity: Mapping[str, torch.Tensor], *, same_strategy: bool) -> None:
        """Continue from shards that all workers share, and from the outer momentum, if there is any."""
        self.decider.state = begin_anew(saved, self.decider.strategy, self.decider.rank, same_strategy=same_strategy)
        for name, own in self.agreed.items():
            own.copy_(self._shards[name])
        for name, own in self.velocity.items():
            own.zero_().add_(velocity.get(name, own))

    @torch.no_grad()
    def _execute(self, operations: Operations) -> None:
        """Average distances, step the outer optimizer, and set the shards to the result; torch has done the rest."""
        averages = [one for one in operations if one.kind == "all_reduce" and one.payload == "delta"]
        if not averages:
            return
        self._stopwatch.stall_begins()
        self._stopwatch.arrives(of_average=True)
        distances = {name: mean for operation in averages for name, mean in self._averaged(operation).items()}
        self._stopwatch.stall_ends()
        outer = self._what.outer
        for name, step in distances.items():
            if outer is not None and outer.momentum:
                velocity = self.velocity[name].mul_(outer.momentum).add_(step)
                step = step.add(velocity, alpha=outer.momentum) if outer.nesterov else velocity  # noqa: PLW2901  # what is stepped
            self._shards[name].copy_(self.agreed[name].sub_(step, alpha=1.0 if outer is None else outer.lr))

    def _averaged(self, operation: Operation) -> dict[str, torch.Tensor]:
        """Return the workers' mean distances in a bucket: the agreed shards minus the current ones."""
        assert operation.bucket is not None
        self._stopwatch.sends(wire_bytes(operation, len(self._communicators.part(operation.group))))
        names = self.decider.strategy.plan.buckets[operation.bucket].gradients
        agreed = [self.agreed[name] for name in names]
        flat = torch.cat([(own - self._shards[name]).reshape(-1) for name, own in zip(names, agreed, strict=True)])
        distance = flat.to(getattr(torch, operation.wire_dtype or "float32"))
        self._communicators.all_reduce(distance, "mean", operation.group, operation.communicator)
        pieces = distance.to(flat.dtype).split([own.numel() for own in agreed])
        return {name: piece.view_as(own) for name, piece, own in zip(names, pieces, agreed, strict=True)}
