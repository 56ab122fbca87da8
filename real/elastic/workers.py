"""Workers: rounds of local steps whose members come and go.

A round ends with one exchange over the workers that arrive. Each brings its distance from Theta, which all agreed on
last, and the number of its steps. If a member dies in the exchange, the others keep their distances, and repeat it
without the dead. A worker whose Theta or outer momentum is not its peers' (a newcomer, or one that a round has left
behind) takes theirs, and brings no steps. Nobody has to vote: whoever has completed an exchange is one ahead, and the
others take what it holds, in which their own distances are contained.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from fleetbench.errors import ConfigError, WorkerFailed
from fleetbench.plan.elastic import Elastic, Progress
from real.elastic.gathering import Gathering
from real.engine.buckets import DeltaBucket

if TYPE_CHECKING:
    from real.elastic.collective import ElasticEngine
    from real.engine.optimizers import Controls

_POLL_S = 0.1


class Workers:
    """The workers of a job as this one knows them.

    Life cycle: created -> ``engine`` is set -> ``gather`` -> ``average`` at the end of each round -> ``close``.
    """

    engine: ElasticEngine
    """Engine that trains this worker's model."""

    def __init__(self, gathering: Gathering, rule: Elastic, *, rank: int, nominal: int, timeout_s: float) -> None:
        """``rank`` of ``nominal`` workers: as the launch has numbered them; they hold until the first round."""
        self._gathering, self._rule, self._nominal, self._timeout_s = gathering, rule, nominal, timeout_s
        self.rank, self.num = rank, nominal
        """Rank of this worker, and number of workers, in the last round."""
        self.num_steps = 0
        """Number of this worker's updates in the current round."""
        self._num_exchanges = 0
        """Number of exchanges by which this worker's Theta has come about."""
        self.taken: Progress | None = None
        """Progress of the peer whose state this worker has taken in the last exchange; None if it has kept its own."""

    def scale_lr(self, controls: Controls, lr_scale: float) -> None:
        """Let optimizers scale their learning rates by the strategy's ``lr_scale`` and the factor of the current round."""
        for control in controls.each:
            control.lr_scale = lr_scale * self._rule.lr_factor(self.num, self._nominal)

    def gather(self) -> None:
        """At a job's start, wait until all workers of the launch have come; return at once if others are ahead.

        After the time limit, those that are there begin. Raises ``WorkerFailed`` if all of them were started again:
        nobody is left who knows what the job has learnt.
        """
        deadline = time.monotonic() + self._timeout_s
        self._gathering.begin()
        while True:
            found = self._gathering.find(0)
            if found.max_step:
                return
            if found.replica_world_size >= self._nominal or time.monotonic() > deadline:
                if not self._gathering.any_in_first_life:
                    what = "have all ended, and with them what they have learnt"
                    raise WorkerFailed(what, "the other workers", hint="start the job again")
                return
            time.sleep(_POLL_S)

    def average(self, deltas: Sequence[DeltaBucket]) -> bool:
        """Replace the distances in ``deltas`` with the workers' mean, weighted by their steps.

        If peers agree on another Theta, this worker's becomes theirs first, and its distances do not count. Returns
        whether any worker had steps. Raises ``WorkerFailed`` if no exchange is completed within the time limit.
        """
        self.taken, gathering = None, self._gathering
        found = gathering.find(self._num_exchanges) if self._num_exchanges else gathering.quorum
        deadline = time.monotonic() + self._timeout_s  # the wait for the others has its own
        while True:
            try:
                total = self._exchange(deltas)
            except (RuntimeError, OSError) as error:  # of groups and stores, and of sockets
                gathering.part()
                if time.monotonic() > deadline:
                    what = f"completed no exchange within {self._timeout_s:g} s: {error}"
                    hint = "raise fleet.init(timeout_s=...), or look at the output of those that have died"
                    raise WorkerFailed(what, f"workers {gathering.members}", hint=hint) from None
                found = gathering.find(self._num_exchanges)
                continue
            gathering.complete()
            self._num_exchanges, self.num_steps = found.max_step + 1, 0
            self.rank, self.num = found.replica_rank, found.replica_world_size
            return total > 0

    def close(self) -> None:
        """Leave the other workers."""
        self._gathering.close()

    @torch.no_grad()
    def _exchange(self, deltas: Sequence[DeltaBucket]) -> int:
        """Exchange distances among the quorum's members; return the number of their steps."""
        gathering, engine = self._gathering, self.engine
        gathering.connect()
        own = (gathering.quorum.replica_rank, engine.digest, *engine.told)
        header = torch.tensor([gathering.is_new, *(own if gathering.is_source else [0] * len(own))], dtype=torch.int64)
        is_new, source, digest, *progress = gathering.total(header).tolist()
        if digest != engine.digest:
            hint = "give all workers the same script, model and strategy"
            raise ConfigError("differs from the other workers'", "the model or the strategy", hint=hint)
        distances = engine.in_order(deltas, "distances")
        if is_new:
            state = [*engine.in_order(deltas, "snapshot"), *engine.in_order(deltas, "velocity")]
            flats = [gathering.spread(flat, source) for flat in _flats(state)]
            buffers = [gathering.spread(buffer.detach().cpu().clone(), source) for buffer in engine.model.buffers()]
            is_newcomer = not self._num_exchanges  # whose buffers may differ though its Theta does not
            if is_newcomer or not all(_is_same(*pair) for pair in zip(flats, _flats(state), strict=True)):
                self._say_lost()
                _fill(state, flats)
                torch._foreach_zero_(distances)  # torch has no public name for it
                for buffer, peers in zip(engine.model.buffers(), buffers, strict=True):
                    buffer.copy_(peers)
                self._num_exchanges, self.num_steps, self.taken = gathering.quorum.max_step, 0, Progress(*progress)
        total = int(gathering.total(torch.tensor(self.num_steps)))
        means = [gathering.total(flat * self.num_steps) / max(1, total) for flat in _flats(distances)]
        _fill(distances, means)
        return total

    def _say_lost(self) -> None:
        """Print that this worker's steps of the round do not count; nothing if it has none."""
        if self.num_steps:
            unless = ", unless the exchange that failed has counted them" if self._gathering.has_failed else ""
            what = f"the others have gone on without worker {self.rank}, which takes their parameters"
            print(f"note: {what}: its last {self.num_steps} updates are lost{unless}", file=sys.stderr)  # noqa: T201  # the worker's log


def _of_types(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return the tensors of each type, in their order."""
    found: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.dtype, []).append(tensor)
    return [*found.values()]


def _flats(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return a new flat tensor of the CPU for each type."""
    return [torch.cat([one.reshape(-1) for one in own]).cpu() for own in _of_types(tensors)]


def _fill(tensors: Iterable[torch.Tensor], flats: Iterable[torch.Tensor]) -> None:
    """Copy flat tensors into those that ``_flats`` has made them from."""
    for own, flat in zip(_of_types(tensors), flats, strict=True):
        for one, piece in zip(own, flat.split([one.numel() for one in own]), strict=True):
            one.copy_(piece.view(one.shape))


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same bits; NaNs equal themselves."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
