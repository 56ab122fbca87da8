"""Objective: seconds of a step of one experiment, strategy after strategy, and nothing else of a run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from fleetbench.experiment import Experiment
from fleetbench.plan.layers import LayerTable
from fleetbench.profile import Profile, compute_part
from fleetbench.result import takes_no_time
from fleetbench.strategy import DistributedStrategy
from sim.arrays.engine import Engine, Prepared
from sim.arrays.layout import Layout
from sim.arrays.reach import OutOfReach
from sim.arrays.sights import Ends
from sim.draws import Draws
from sim.network.routes import Routes
from sim.run import simulate
from sim.scenario import Scenario

MOST_KEPT = 20_000_000
"""Draws that are kept from one strategy to the next."""


@dataclass(slots=True)
class StepTime:
    """What ``simulate`` says of ``wall_s`` over steps, to a rounding of floats.

    Strategies share what does not depend on them: draws, and what collectives take. A strategy whose
    steps are not of the vector engine's kind is simulated as ever.
    """

    experiment: Experiment
    profile: Profile | None = None
    _tables: dict[DistributedStrategy, LayerTable] = field(default_factory=dict)
    _draws: list[Draws] = field(default_factory=list)
    _layouts: list[Layout] = field(default_factory=list)

    def __call__(self, strategy: DistributedStrategy) -> float:
        """Seconds of a step, from the first start to the last end. Raises what ``simulate`` raises."""
        experiment = self.experiment.replace(strategy=strategy)
        compute = compute_part(strategy)
        scenario = Scenario.of(experiment, self.profile, table=self._tables.get(compute))
        self._tables[compute] = scenario.table
        scenario = dataclasses.replace(scenario, draws=self._drawn(scenario.draws))
        ends = Ends(len(scenario.steps))
        try:
            Engine(Prepared.of(scenario, self._layout(scenario)), [ends], looks=False).run(lambda _: None)
        except OutOfReach:
            summary = simulate(experiment, profile=self.profile, timeline=False, engine="reference").summary
            return summary.wall_s / summary.steps
        begin_ns, end_ns = ends.of_counted(scenario.steps.index(1))
        if end_ns == 0:
            raise takes_no_time()
        return (end_ns - begin_ns) / 1e9 / experiment.workload.steps

    def _drawn(self, draws: Draws) -> Draws:
        """The same draws, kept where they are few."""
        if len(draws.steps) * draws.cluster.trainers > MOST_KEPT:
            return draws
        kept = dataclasses.replace(draws, kept=True)
        if not self._draws or self._draws[0] != kept:
            self._draws = [kept]
        return self._draws[0]

    def _layout(self, scenario: Scenario) -> Layout:
        plan = scenario.plan
        for layout in self._layouts:
            if layout.parts == plan.parts and layout.routes.links == scenario.links:
                return layout
        routes = next((layout.routes for layout in self._layouts if layout.routes.links == scenario.links), Routes(scenario.links))
        self._layouts.append(Layout.of(scenario, routes))
        return self._layouts[-1]
