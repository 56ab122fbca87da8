"""Workers: rounds of local steps whose members come and go.

A round ends with one exchange over the workers that arrive. Each brings its distance from Theta, which all agreed on
last, and the number of its steps. If a member dies in the exchange, the others keep their distances, and repeat it
without the dead. A worker whose Theta or outer momentum is not the peers' (a newcomer, or one that a round has left
behind) takes theirs, and brings no steps. Nobody has to be asked: whoever has completed an exchange is one step ahead,
and those that have not take what it holds, in which their own distances are contained.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from fleetbench.errors import ConfigError, WorkerFailed
from fleetbench.plan.elastic import Elastic
from real.elastic.gathering import RESTARTS, Gathering
from real.engine.buckets import DeltaBucket

_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A worker's progress by its plan: numbers of steps, updates and epochs that have ended."""

    step: int
    updates: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What this worker trains, in an order that all workers share."""

    parameters: Sequence[str]
    """Names of the trained parameters."""
    buffers: Sequence[torch.Tensor]
    digest: int
    """Number that differs between workers with another model or strategy."""
    progress: Callable[[], Progress]


class Workers:
    """The workers of a job as this one knows them; ``average`` ends a round.

    Life cycle: created -> ``trains`` and ``gather`` -> ``average`` at the end of each round -> ``close``.
    """

    def __init__(self, gathering: Gathering, rule: Elastic, *, rank: int, nominal: int, timeout_s: float) -> None:
        """``rank`` of ``nominal`` workers: as the launch has numbered them; they hold until the first round."""
        self._gathering, self._rule, self._nominal, self._timeout_s = gathering, rule, nominal, timeout_s
        self._is_again = os.environ.get(RESTARTS, "0") != "0"
        self.rank, self.num = rank, nominal
        """Rank of this worker, and number of workers, in the last round."""
        self.num_steps = 0
        """Number of this worker's updates since workers last agreed."""
        self.step = 0
        """Number of exchanges after which this worker's Theta was agreed on."""
        self.taken: Progress | None = None
        """Progress of the peer whose state this worker has taken in the last exchange; None if it has kept its own."""

    @property
    def lr_factor(self) -> float:
        """Factor on the inner learning rate in the current round."""
        return self._rule.lr_factor(self.num, self._nominal)

    def trains(self, what: Trained) -> None:
        """Set what this worker trains, before the first exchange."""
        self._what = what

    def gather(self) -> None:
        """At a job's start, wait until all workers of the launch have come; return at once if others are ahead.

        After the time limit those that are there begin. Raises ``WorkerFailed`` in a worker that was started again if
        nobody is left who knows what the job has learnt.
        """
        deadline = time.monotonic() + self._timeout_s
        while True:
            found = self._gathering.find(self.step)
            if found.max_step or found.replica_world_size >= self._nominal:
                return
            if time.monotonic() > deadline:
                if self._is_again:
                    raise WorkerFailed("have all ended", "the workers before this one", hint="start the job again")
                return
            time.sleep(_POLL_S)

    def average(self, deltas: Sequence[DeltaBucket]) -> bool:
        """Replace the distances in ``deltas`` with the workers' mean, weighted by their steps.

        If peers agree on another Theta, this worker's becomes theirs first, and its distances do not count. Returns
        whether any worker had steps. Raises ``WorkerFailed`` if workers do not meet within the time limit.
        """
        deadline, model = time.monotonic() + self._timeout_s, _Model(deltas, self._what.parameters)
        self.taken = None
        found = self._gathering.quorum if self.step == 0 else self._gathering.find(self.step)
        while True:
            try:
                total = self._exchange(model)
            except (RuntimeError, OSError) as error:  # of torch's store and groups, and sockets
                self._gathering.part()
                if time.monotonic() > deadline:
                    what = f"no exchange of {self._named(found.replica_ids)} was completed within {self._timeout_s:g} s: {error}"
                    raise WorkerFailed(what, "the workers", hint="raise fleet.init(timeout_s=...), or look at their output") from None
                found = self._gathering.find(self.step)
                continue
            self._gathering.complete()
            self.step, self.num_steps = found.max_step + 1, 0
            self.rank, self.num = found.replica_rank, found.replica_world_size
            return total > 0

    def close(self) -> None:
        """Leave the other workers."""
        self._gathering.close()

    def _exchange(self, model: _Model) -> int:
        """Exchange distances among the quorum's members; return the number of their steps."""
        gathering, what = self._gathering, self._what
        gathering.connect()
        progress = what.progress()
        told = (gathering.quorum.replica_rank, what.digest, progress.step, progress.updates, progress.epoch)
        own = told if gathering.is_source else (0,) * len(told)
        is_new, source, digest, *counted = gathering.total(torch.tensor([int(gathering.is_new), *own])).tolist()
        if digest != what.digest:
            hint = "give all workers the same script, model and strategy"
            raise ConfigError("differs from the other workers'", "the model or the strategy", hint=hint)
        if is_new:
            flats = [gathering.spread(flat.clone(), source) for flat in model.state]
            buffers = [gathering.spread(buffer.detach().cpu().clone(), source) for buffer in what.buffers]
            if not all(_is_same(*pair) for pair in zip(flats, model.state, strict=True)):
                model.take(flats)
                for buffer, peers in zip(what.buffers, buffers, strict=True):
                    buffer.copy_(peers)
                self.num_steps, self.step = 0, gathering.quorum.max_step
                self.taken = Progress(step=counted[0], updates=counted[1], epoch=counted[2])
        total = int(gathering.total(torch.tensor(self.num_steps)))
        sums = [gathering.total(flat * self.num_steps) for flat in model.distances]
        model.put([flat / max(1, total) for flat in sums])
        return total

    @staticmethod
    def _named(names: Iterable[str]) -> str:
        return "workers " + ", ".join(name.partition(":")[0] for name in names)


class _Model:
    """Flat CPU tensors, one per type, of what workers exchange, in the order of ``names``, whatever the buckets are."""

    def __init__(self, deltas: Sequence[DeltaBucket], names: Sequence[str]) -> None:
        self._deltas, self._names = deltas, names
        self.distances = self._flats({name: own for delta in deltas for name, own in zip(delta.names, delta.distances, strict=True)})
        """This worker's distances from Theta."""

    @cached_property
    def state(self) -> list[torch.Tensor]:
        """Theta, and then the outer momentum; zeros before its first step."""
        theta = {name: own for delta in self._deltas for name, own in zip(delta.names, delta.snapshot, strict=True)}
        velocity = {name: own for delta in self._deltas for name, own in zip(delta.names, delta.velocity, strict=False)}
        flats = self._flats(theta)
        return [*flats, *(self._flats(velocity) or map(torch.zeros_like, flats))]

    def take(self, state: Sequence[torch.Tensor]) -> None:
        """Replace Theta and the outer momentum, and drop the distances."""
        half = len(state) // 2
        theta, velocity = self._views(state[:half]), self._views(state[half:])
        for delta in self._deltas:
            delta.resume([theta[name] for name in delta.names])
            delta.restore(velocity, {}, {})
        del self.state  # is made anew
        self.distances = [torch.zeros_like(flat) for flat in self.distances]

    def put(self, distances: Sequence[torch.Tensor]) -> None:
        """Write the mean distances back."""
        found = self._views(distances)
        for delta in self._deltas:
            delta.restore({}, found, {})

    def _flats(self, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        found: dict[torch.dtype, list[torch.Tensor]] = {}
        for name in self._names if tensors else ():
            found.setdefault(tensors[name].dtype, []).append(tensors[name].detach().reshape(-1))
        return [torch.cat(own).cpu() for own in found.values()]

    def _views(self, flats: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return a tensor for each parameter from flat ones: the inverse of ``_flats``."""
        like = {name: own for delta in self._deltas for name, own in zip(delta.names, delta.snapshot, strict=True)}
        found = dict[str, torch.Tensor]()
        for flat in flats:
            names = [name for name in self._names if like[name].dtype == flat.dtype]
            pieces = flat.split([like[name].numel() for name in names])
            found |= {name: piece.view(like[name].shape) for name, piece in zip(names, pieces, strict=True)}
        return found


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same bits; NaNs equal themselves."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
