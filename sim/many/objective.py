"""Objective: seconds of a step of one experiment, strategy after strategy, and nothing else of a run."""

import dataclasses
from dataclasses import dataclass, field

from fleetbench.experiment import Experiment
from fleetbench.plan.build import Plan
from fleetbench.plan.groups import Parts
from fleetbench.plan.layers import LayerTable
from fleetbench.profile import compute_part
from fleetbench.result import takes_no_time
from fleetbench.strategy import DistributedStrategy
from sim.arrays.engine import Engine
from sim.arrays.layout import Layout
from sim.arrays.observers import EndTimes
from sim.arrays.supported import Unsupported
from sim.network.links import Links
from sim.network.routes import Routes
from sim.run import simulate
from sim.scenario import Draws, Scenario

MOST_KEPT = 20_000_000
"""Draws that are kept from one strategy to the next."""


@dataclass(slots=True)
class StepTime:
    """What ``simulate`` says of ``wall_s`` over steps, to a rounding of floats.

    Strategies share what does not depend on them: draws, and what collectives take. A strategy whose
    steps are not of the vector engine's kind is simulated as ever.
    """

    experiment: Experiment
    tables: dict[DistributedStrategy, LayerTable] = field(default_factory=dict)
    """By what changes compute of a strategy; others than the experiment's own may be put in."""
    _draws: Draws | None = None
    _layouts: dict[tuple[tuple[str, Parts], ...], Layout] = field(default_factory=dict)

    def __call__(self, strategy: DistributedStrategy) -> float:
        """Seconds of a step, from the first start to the last end. Raises what ``simulate`` raises."""
        experiment = self.experiment.replace(strategy=strategy)
        compute = compute_part(strategy)
        scenario = Scenario.of(experiment, table=self.tables.get(compute))
        self.tables[compute] = scenario.table
        scenario = dataclasses.replace(scenario, draws=self._drawn(scenario.draws))
        ends = EndTimes(len(scenario.steps))
        try:
            Engine(scenario, self._layout(scenario.plan, scenario.links)).run([ends], lambda _: None, looks=False)
        except Unsupported:
            summary = simulate(experiment, timeline=False, engine="reference").summary
            return summary.wall_s / summary.steps
        begin_ns, end_ns = ends.of_counted(scenario.steps.index(1))
        if end_ns == 0:
            raise takes_no_time()
        return (end_ns - begin_ns) / 1e9 / experiment.workload.steps

    def _drawn(self, draws: Draws) -> Draws:
        """The same draws, kept where they are few."""
        if len(draws.steps) * draws.cluster.trainers > MOST_KEPT:
            return draws
        self._draws = self._draws or dataclasses.replace(draws, kept=True)
        return self._draws

    def _layout(self, plan: Plan, links: Links) -> Layout:
        """That of the plan's groups; links, and what collectives take on them, are the same for all strategies."""
        if plan.groups not in self._layouts:
            known = next((layout.routes for layout in self._layouts.values()), None)
            self._layouts[plan.groups] = Layout(plan, known or Routes(links))
        return self._layouts[plan.groups]
