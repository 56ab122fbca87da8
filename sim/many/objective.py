"""Objective: the step time in seconds of one experiment, strategy after strategy, without other results."""

import dataclasses
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
    """Return a key that is equal for strategies of an experiment with the same layer table."""
    return compute_part(strategy), computes_locally(strategy)


@dataclass(slots=True)
class StepTime:
    """Step time in seconds: ``step_s_of`` the result of ``simulate``, up to the rounding of floats.

    Strategies share draws, which do not depend on them. The reference engine simulates a strategy whose steps
    the vector engine does not support.
    """

    experiment: Experiment
    tables: dict[tuple[DistributedStrategy, bool], LayerTable] = field(default_factory=dict)
    """Layer tables by ``table_key``; a caller may add tables that the experiment does not have itself."""
    _draws: Draws | None = None

    def __call__(self, strategy: DistributedStrategy) -> float:
        """Return the step time in seconds; see ``step_s_of``. Raises as ``simulate`` does."""
        experiment = self.experiment.replace(strategy=strategy)
        compute = table_key(strategy)
        scenario = Scenario.of(experiment, table=self.tables.get(compute))
        self.tables[compute] = scenario.table
        self._draws = self._draws or scenario.draws
        scenario = dataclasses.replace(scenario, draws=self._draws)
        try:
            engine = Engine(scenario, Layout(scenario.plan, Routes(scenario.links)))
            engine.run([], lambda _: None, looks=False)
        except Unsupported:
            return step_s_of(simulate(experiment, timeline=False, table=True, engine="reference"))
        begin_ns, end_ns = engine.counted_ns()
        if end_ns == 0:
            raise takes_no_time()
        first, last = Combination.of(strategy).whole_rounds(experiment.workload.steps) or (0, experiment.workload.steps)
        if first:
            begin_ns, end_ns = (int(engine.last_end[scenario.steps.index(step)]) for step in (first, last))
        return (end_ns - begin_ns) / 1e9 / (last - first)
