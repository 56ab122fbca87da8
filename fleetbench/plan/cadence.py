"""Cadence: at which steps trainers meet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from fleetbench.errors import ConfigError
from fleetbench.strategy import DistributedStrategy


class Cadence(Protocol):
    """When a Local SGD round ends. Steps are counted from 1; those before belong to the warm-up."""

    def synchronises(self, step: int, last_sync: int | None) -> bool:
        """Whether trainers average behind ``step``, the last averaging having been at ``last_sync``."""
        ...


@dataclass(frozen=True, slots=True)
class FleetSchedule:
    """Fleet's ``localsgd``: every step up to ``begin_step``, then ``k_steps`` after the last averaging.

    k = 4, begin = 1 averages at 1, 5, 9, 13, ...; k = 4, begin = 6 at 1 to 6, 10, 14, ....
    """

    k_steps: int
    begin_step: int

    def synchronises(self, step: int, last_sync: int | None) -> bool:
        """See ``Cadence``."""
        return step <= self.begin_step or last_sync is None or step - last_sync >= self.k_steps


def cadence_of(strategy: DistributedStrategy) -> Cadence:
    """The Local SGD cadence of a strategy. Raises ``ConfigError`` for one that is not planned yet."""
    configs = strategy.localsgd_configs
    if configs.schedule != "fleet":
        raise ConfigError("is not planned yet", "strategy.localsgd_configs.schedule", repr(configs.schedule), 'use schedule = "fleet"')
    return FleetSchedule(configs.k_steps, configs.begin_step)
