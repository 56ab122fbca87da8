"""Cadence: behind which updates trainers meet.

Three published schedules of Local SGD. Updates are counted from 1. Those numbered 0 and below
belong to a warm-up before training, and every schedule synchronises behind them, so that
training starts from trainers that agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from fleetbench.strategy import DistributedStrategy


class Cadence(Protocol):
    """When a round of Local SGD ends."""

    def synchronises(self, update: int, last_sync: int | None, k: int, epoch: int) -> bool:
        """Whether trainers average behind ``update``, the last averaging having been behind ``last_sync`` (none: never).

        ``k`` is the K of an adaptive strategy, which a schedule with a K of its own ignores;
        ``epoch`` is the number of epochs that have ended before this update.
        """
        ...


@dataclass(frozen=True, slots=True)
class FleetSchedule:
    """Fleet's ``localsgd``: every update up to ``begin_step``, then ``k_steps`` after the last averaging.

    k = 4, begin = 1 averages at 1, 5, 9, 13, ...; k = 4, begin = 6 at 1 to 6, 10, 14, .... An
    averaging on request starts a new round.
    """

    k_steps: int
    begin_step: int

    def synchronises(self, update: int, last_sync: int | None, k: int, epoch: int) -> bool:  # noqa: ARG002  # K is fixed, and epochs do not count
        """See ``Cadence``."""
        return _round_ends(update, last_sync, self.begin_step, self.k_steps)


@dataclass(frozen=True, slots=True)
class AdaptiveSchedule:
    """Fleet's ``adaptive_localsgd``: as ``FleetSchedule``, with the K of the round."""

    begin_step: int

    def synchronises(self, update: int, last_sync: int | None, k: int, epoch: int) -> bool:  # noqa: ARG002  # epochs do not count
        """See ``Cadence``."""
        return _round_ends(update, last_sync, self.begin_step, k)


@dataclass(frozen=True, slots=True)
class DocumentSchedule:
    """The older document's: the updates whose number, counted from 0, K of their epoch divides.

    A round so has a fixed place: where K changes between epochs, or trainers average on request,
    the next round may be shorter. ``warmup_epochs`` epochs have K = 1; behind them K grows by
    ``warmup``, epoch by epoch: ``exp`` 1, 2, 4, 8, ...; ``linear`` 1, 2, 4, 6, ...; both up to
    ``k_steps``; ``const`` is ``k_steps`` at once.
    """

    k_steps: int
    warmup_epochs: int = 0
    warmup: Literal["exp", "const", "linear"] = "exp"

    def k_of(self, epoch: int) -> int:
        """K of an epoch, counted from 0. K = 16 by ``exp`` after 3 epochs: 1 1 1 1 2 4 8 16 16."""
        grown = epoch - self.warmup_epochs
        if grown < 0:
            return 1
        if self.warmup == "const":
            return self.k_steps
        if self.warmup == "linear":
            return min(max(1, 2 * grown), self.k_steps)
        return min(1 << min(grown, self.k_steps.bit_length()), self.k_steps)

    def synchronises(self, update: int, last_sync: int | None, k: int, epoch: int) -> bool:  # noqa: ARG002  # rounds have fixed places, and K of their own
        """See ``Cadence``."""
        return update < 1 or (update - 1) % self.k_of(epoch) == 0


@dataclass(frozen=True, slots=True)
class TorchSchedule:
    """torch's ``PeriodicModelAverager``: from ``warmup_steps`` on, every ``period`` updates, counted from 0.

    The averager averages nothing before ``warmup_steps``: trainers train alone. (In torch's
    post-local SGD it is DDP that averages, namely gradients, until then; with SGD and without
    momentum ``FleetSchedule`` with the same ``begin_step`` comes to that.) ``begin_step``, counted
    from 1, is the first update that averages, so ``warmup_steps = begin_step - 1``: k = 4 and
    begin = 6 average at 6, 10, 14, ....
    """

    period: int
    warmup_steps: int = 0

    def synchronises(self, update: int, last_sync: int | None, k: int, epoch: int) -> bool:  # noqa: ARG002  # rounds have fixed places, and K of their own
        """See ``Cadence``."""
        since = update - 1 - self.warmup_steps
        return update < 1 or (since >= 0 and since % self.period == 0)


def cadence_of(strategy: DistributedStrategy) -> Cadence:
    """The schedule of a strategy with ``localsgd`` or ``adaptive_localsgd``."""
    if strategy.adaptive_localsgd:
        return AdaptiveSchedule(strategy.adaptive_localsgd_configs.begin_step)
    assert strategy.localsgd
    configs = strategy.localsgd_configs
    if configs.schedule == "document":
        return DocumentSchedule(configs.k_steps, configs.warmup_epochs, configs.warmup)
    if configs.schedule == "torch":
        return TorchSchedule(configs.k_steps, configs.begin_step - 1)
    return FleetSchedule(configs.k_steps, configs.begin_step)


def _round_ends(update: int, last_sync: int | None, begin_step: int, k: int) -> bool:
    return update <= begin_step or last_sync is None or update - last_sync >= k
