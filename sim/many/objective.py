"""Objective: seconds per step of one experiment under any strategy, without the other results of a run."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from fleetbench.experiment import Experiment
from fleetbench.plan.combination import Combination
from fleetbench.plan.layers import LayerTable
from fleetbench.profile import compute_part, computes_locally
from fleetbench.result import step_s_of, takes_no_time
from fleetbench.strategy import DistributedStrategy
from sim.arrays.engine import Engine
from sim.arrays.layout import Layout
from sim.arrays.supported import Unsupported
from sim.network.routes import Routes
from sim.run import simulate
from sim.scenario import Draws, Scenario


def table_key(strategy: DistributedStrategy) -> tuple[DistributedStrategy, bool]:
    """Return a key that is equal for two strategies of an experiment if they have the same layer table."""
    return compute_part(strategy), computes_locally(strategy)


@dataclass(slots=True)
class StepTime:
    """Computes the same as ``step_s_of(simulate(...))``, up to float rounding.

    Draws do not depend on the strategy, so all strategies share them. A strategy that the vector engine does
    not support is simulated by the reference engine.
    """

    experiment: Experiment
    seeds: Sequence[int] = ()
    """Seeds of the runs; if empty, the experiment's own."""
    tables: dict[tuple[DistributedStrategy, bool], LayerTable] = field(default_factory=dict)
    """Layer tables by ``table_key``. A caller may put in tables other than the experiment's own."""
    _draws: Sequence[Draws] = ()
    _found: dict[DistributedStrategy, list[float]] = field(default_factory=dict)

    def of_run(self, run: int, strategy: DistributedStrategy) -> float:
        """Return the seconds per step under the seed of index ``run``; each strategy is simulated once."""
        if strategy not in self._found:
            self._found[strategy] = self.by_seed(strategy)
        return self._found[strategy][run]

    def __call__(self, strategy: DistributedStrategy) -> float:
        """Return the seconds per step under the first seed; see ``step_s_of``. Raises what ``simulate`` raises."""
        return self.by_seed(strategy)[0]

    def by_seed(self, strategy: DistributedStrategy) -> list[float]:
        """Return the seconds per step under each seed; see ``step_s_of``. Raises what ``simulate`` raises."""
        experiment, seeds = self.experiment.replace(strategy=strategy), self.seeds or (self.experiment.run.seed,)
        compute = table_key(strategy)
        scenario = Scenario.of(experiment, table=self.tables.get(compute))
        self.tables[compute] = scenario.table
        self._draws = self._draws or [dataclasses.replace(scenario.draws, seed=seed) for seed in seeds]
        try:
            engine = Engine(scenario, Layout(scenario.plan, Routes(scenario.links)), self._draws)
            engine.run([], lambda _: None, looks=False)
        except Unsupported:
            runs = [dataclasses.replace(experiment.run, seed=seed) for seed in seeds]
            one = [simulate(experiment.replace(run=run), timeline=False, table=True, engine="reference") for run in runs]
            return [*map(step_s_of, one)]
        first, last = Combination.of(strategy).whole_rounds(experiment.workload.steps) or (0, experiment.workload.steps)
        found = []
        for run in range(len(seeds)):
            begin_ns, end_ns = engine.counted_ns(run)
            if end_ns == 0:
                raise takes_no_time()
            if first:
                begin_ns, end_ns = (int(engine.last_end[run, scenario.steps.index(step)]) for step in (first, last))
            found.append((end_ns - begin_ns) / 1e9 / (last - first))
        return found
