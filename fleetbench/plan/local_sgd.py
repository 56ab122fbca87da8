"""Local SGD: after which updates trainers average their parameters.

Three published schedules. Updates are counted from 1. Updates numbered 0 and below belong to a warm-up before
training; every schedule synchronises after them, so that training starts from trainers that agree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from fleetbench.strategy import DistributedStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """When a round of Local SGD ends, according to ``schedule``.

    - ``fleet``: after every update up to ``begin_step``, then ``k_steps`` after the last averaging. k = 4,
      begin = 1 averages at 1, 5, 9, 13, ...; k = 4, begin = 6 at 1 to 6, 10, 14, .... An averaging on request
      starts a new round. An outer optimizer steps on whole rounds: its ``begin_step`` of 1, the default,
      becomes 0 here, so that k = 4 averages at 4, 8, ....
    - ``document``: after the updates whose number, counted from 0, is a multiple of their epoch's K; see
      ``k_of``. Rounds therefore have fixed places: if K changes between epochs, or trainers average on
      request, the next round may be shorter.
    - ``torch``: torch's ``PeriodicModelAverager``: from ``begin_step`` on, after every ``k_steps`` updates;
      before, trainers train alone. Its ``warmup_steps``, counted from 0, are ``begin_step - 1``: k = 4 and
      begin = 6 average at 6, 10, 14, .... (In torch's post-local SGD, DDP averages gradients until then,
      which equals ``fleet`` for SGD without momentum.)
    """

    schedule: Literal["fleet", "document", "torch"] = "fleet"
    k_steps: int | None = None
    """Number of local steps per round. None: the K of an adaptive strategy's round."""
    begin_step: int = 1
    warmup_epochs: int = 0
    warmup: Literal["exp", "const", "linear"] = "exp"

    @classmethod
    def of(cls, strategy: DistributedStrategy) -> Cadence:
        """Return the schedule of a strategy with ``localsgd`` or ``adaptive_localsgd``."""
        if strategy.adaptive_localsgd:
            cadence = cls(begin_step=strategy.adaptive_localsgd_configs.begin_step)
        else:
            assert strategy.localsgd
            names = ("schedule", "k_steps", "begin_step", "warmup_epochs", "warmup")
            cadence = cls(**{name: getattr(strategy.localsgd_configs, name) for name in names})
        is_whole = strategy.averaging.has_outer and cadence.schedule == "fleet" and cadence.begin_step == 1
        return replace(cadence, begin_step=0) if is_whole else cadence

    def k_of(self, epoch: int) -> int:
        """Return K of an epoch of the ``document`` schedule, counted from 0.

        K is 1 for ``warmup_epochs`` epochs, then grows as ``warmup`` says. ``exp``: 1, 2, 4, 8, ...;
        ``linear``: 1, 2, 4, 6, ...; both up to ``k_steps``; ``const``: ``k_steps`` at once. With ``exp``,
        ``k_steps`` = 16 and 3 warm-up epochs, K is 1 1 1 1 2 4 8 16 16.
        """
        assert self.k_steps is not None
        grown = epoch - self.warmup_epochs
        if grown < 0:
            return 1
        if self.warmup == "const":
            return self.k_steps
        if self.warmup == "linear":
            return min(max(1, 2 * grown), self.k_steps)
        return min(1 << min(grown, self.k_steps.bit_length()), self.k_steps)

    def synchronises(self, update: int, last_sync: int | None, k: int, epoch: int) -> bool:
        """Whether trainers average after ``update``.

        ``last_sync`` is the update after which they averaged last, or None. ``k`` is the K of an adaptive
        strategy; ``epoch`` is the number of epochs that have ended before this update.
        """
        if self.schedule == "document":
            return update < 1 or (update - 1) % self.k_of(epoch) == 0
        k = k if self.k_steps is None else self.k_steps
        if self.schedule == "torch":
            return update < 1 or (update >= self.begin_step and (update - self.begin_step) % k == 0)
        return update <= self.begin_step or last_sync is None or update - last_sync >= k
