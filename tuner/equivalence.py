"""Equivalence: two strategies that a simulation cannot tell apart are simulated once."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from fleetbench.experiment import Experiment
from fleetbench.plan.build import build_plan
from fleetbench.plan.cadence import cadence_of
from fleetbench.plan.layers import LayerTable
from fleetbench.profile import Profile, compute_key, table_for
from fleetbench.strategy import DistributedStrategy, LocalSGDConfigs
from sim.setting import setting_of
from tuner.space import Parameters, Space, Value, parameters_of


@dataclass(slots=True)
class Equivalence:
    """Keys of strategies for one experiment; remembers the tables and plans it has seen."""

    experiment: Experiment
    profile: Profile | None = None
    _tables: dict[str, LayerTable] = field(default_factory=dict)
    _digests: dict[tuple[DistributedStrategy, str], str] = field(default_factory=dict)

    def key(self, strategy: DistributedStrategy) -> str:
        """Plan digest, cadence, what else is decided in a run, and layer-table key: equal keys mean equal simulated runs."""
        table = self._table(strategy)
        cadence = repr(cadence_of(strategy)) if strategy.is_local else "every step"
        return f"{self._digest(strategy, table)} {cadence} {_decided(strategy)} {table.key}"

    def _table(self, strategy: DistributedStrategy) -> LayerTable:
        key = compute_key(self.experiment, strategy)
        if key not in self._tables:
            self._tables[key] = table_for(self.experiment.replace(strategy=strategy), self.profile)
        return self._tables[key]

    def _digest(self, strategy: DistributedStrategy, table: LayerTable) -> str:
        # A plan depends on the gradients and their order, not on how often it is carried out.
        planned = strategy.replace(localsgd=False, localsgd_configs=LocalSGDConfigs(), thread_num=1)
        if (planned, table.key) not in self._digests:
            self._digests[planned, table.key] = build_plan(
                planned, table.by_readiness(), setting_of(self.experiment, table, self.profile)
            ).digest
        return self._digests[planned, table.key]


def _decided(strategy: DistributedStrategy) -> str:
    """What a strategy decides from step to step beside its cadence, where a plan does not show it."""
    averaging, build = strategy.averaging, strategy.build_strategy
    averaged = (averaging.momentum, averaging.buffers, averaging.optimizer_state) if strategy.is_local else None
    adaptive = strategy.adaptive_localsgd_configs if strategy.adaptive_localsgd else None
    merged = strategy.gradient_merge_configs if strategy.gradient_merge else None
    scaling = strategy.amp_configs if strategy.scales_loss else None
    order = (strategy.find_unused_parameters, build.enable_backward_optimizer_op_deps, build.enable_sequential_execution)
    return repr((averaged, adaptive, merged, scaling, order))


def without_equal_values(space: Space, same: Equivalence) -> Space:
    """The space without values that are equal, at every point, to one that stays.

    The base strategy's own value stays before others, then the first.
    """
    keys = {_frozen(point): same.key(space.strategy(point)) for point in space.points()}
    base = parameters_of(space.base)
    choices, fixed = [], list(space.fixed)
    for name, values in space.choices:
        kept: list[Value] = []
        effects: set[tuple[str, ...]] = set()
        for value in sorted(values, key=lambda value: value != base[name]):
            effect = tuple(key for point, key in keys.items() if (name, value) in point)
            if effect not in effects:
                effects.add(effect)
                kept.append(value)
        if len(kept) == 1:
            fixed.append((name, kept[0]))
        else:
            choices.append((name, tuple(value for value in values if value in kept)))
    return dataclasses.replace(space, choices=tuple(choices), fixed=tuple(fixed))


def _frozen(point: Parameters) -> tuple[tuple[str, Value], ...]:
    return tuple(point.items())
