"""Folded: ranks that are alike as one class. Equal to all ranks in law, not in draws.

A class is all ranks with the same persistent factors. Two lanes stand for it: its first rank, with that
rank's own draws, and the slowest of the others, whose X is drawn at a stroke: of N independent draws
from a law F the largest is F^-1(U^(1/N)). Where all trainers meet in every step, and so begin the
next together, what happens in it follows from these alone: the times of steps have the law that
all ranks would give them. Means over ranks are the first ranks', each weighted by its class: right in
expectation, and with the spread of few ranks. So the cost does not grow with ranks.

Refused is what this is not exact for: several steps between two meetings (the largest of sums is
no sum of largest), groups that are not all trainers, delays that bind ranks or steps together
(shocks of single nodes, episodes, traces), and two laws multiplied, of whose product nobody knows the quantiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from fleetbench.cluster import Cluster
from fleetbench.errors import ConfigError
from fleetbench.plan.operations import Operation
from fleetbench.result import uncountable
from fleetbench.stragglers import FOLDED, Integers, Jitter, NodeShock, SlowNode, SlowRank, draws_of
from sim.draws import Draws
from sim.execution import Execution
from sim.links import Links
from sim.routes import Routes
from sim.scenario import Scenario
from sim.setting import times
from sim.vector.engine import Engine
from sim.vector.execute import Prepared, mean_bytes
from sim.vector.groups import Groups
from sim.vector.heads import Heads
from sim.vector.layout import Layout
from sim.vector.reach import OutOfReach
from sim.vector.script import script_of
from sim.vector.sights import Ends, Sums
from sim.work import Route, Work

_HINT = "engine = vector runs every rank by itself"


@dataclass(frozen=True, slots=True, kw_only=True)
class Classes:
    """Ranks by what sets them apart."""

    draws: Draws
    first: Integers
    """The first rank of each class."""
    sizes: Integers
    factors: npt.NDArray[np.float64]
    """By which each class's nodes are slow by themselves."""
    spared: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, draws: Draws) -> Classes:
        """The classes of a run's ranks. Raises ``ConfigError`` for delays that do not fold."""
        cluster = draws.cluster
        _refuse_bound(cluster)
        ranks = np.arange(cluster.trainers)
        nodes = ranks // cluster.trainers_per_node
        apart = [np.isin(ranks, entry.ranks) for entry in cluster.stragglers if isinstance(entry, SlowRank)]
        apart += [np.isin(nodes, entry.nodes) for entry in cluster.stragglers if isinstance(entry, SlowNode)]
        factors = np.ones(cluster.nodes)
        for override in cluster.node_overrides:
            if override.slowdown != 1.0:
                factors[list(override.nodes)] = override.slowdown
        is_spared = np.isin(ranks, draws.spared)
        columns = np.stack([is_spared, factors[nodes], *apart], axis=1).astype(np.float64)
        if (columns == columns[0]).all():
            first, sizes = np.zeros(1, dtype=np.int64), np.asarray([len(ranks)])
        else:
            _, first, sizes = np.unique(columns, axis=0, return_index=True, return_counts=True)
        return cls(draws=draws, first=first, sizes=sizes, factors=factors[nodes[first]], spared=is_spared[first])

    def rows(self, begin: int, end: int) -> Integers:
        """X of steps by their indices, a row a step: of each class its first rank's, then the largest of the others'."""
        steps, draws = self.draws.steps[begin:end], self.draws
        stragglers, each = draws.cluster.stragglers, draws.cluster.trainers_per_node
        first = draws_of(stragglers, draws.seed, self.first, each, steps.start, len(steps))
        others = draws_of(stragglers, draws.seed, self.first, each, steps.start, len(steps), np.maximum(self.sizes - 1, 1))
        others = np.where(self.sizes[:, None] > 1, others, first)
        x = np.stack([first, others], axis=1)
        x[self.spared] = 0
        slow = self.factors != 1.0
        x[slow] = times(x[slow], self.factors[slow][:, None, None])
        return np.ascontiguousarray(x.reshape(-1, len(steps)).T)

    def first_rows(self, begin: int, end: int) -> Integers:
        """X of steps by their indices, a row a step: of each class its first rank's."""
        return self.rows(begin, end)[:, ::2]


class AlikeRoutes(Routes):
    """Ways over all trainers. Where nodes are alike, those of a ring follow from one hop of each kind, however many there are."""

    def of(self, operation: Operation, ranks: tuple[int, ...]) -> Route:
        """See ``Routes``."""
        links = self.links
        is_ring = links.collective == "ring" and operation.kind in ("all_reduce", "all_gather")
        if not is_ring or links.intra_of or links.inter_of or len(ranks) != links.nodes * links.trainers_per_node:
            return super().of(operation, ranks)
        steps, rows = len(ranks) - 1, operation.payload == "rows"
        ends = {0, links.trainers_per_node - 1, len(ranks) - 1}
        if links.racks is not None:
            ends |= set(range(links.racks.nodes * links.trainers_per_node - 1, len(ranks), links.racks.nodes * links.trainers_per_node))
        share = Fraction(1) if rows else Fraction(1, len(ranks))
        pairs = [(rank, (rank + 1) % len(ranks)) for rank in sorted(ends)]
        times = 2 * steps if operation.kind == "all_reduce" else steps
        key = (operation.kind, rows)
        if key not in self._alike:
            self._alike[key] = Work(links).rounds([(times, share, pairs)])
        return self._alike[key].route(operation.nbytes)

    def __init__(self, links: Links) -> None:
        super().__init__(links)
        self._alike: dict[tuple[str, bool], Work] = {}


def execute(scenario: Scenario) -> Execution:
    """Run two lanes a class to the last step. Raises ``ConfigError`` where ranks cannot be folded; see the module."""
    classes = Classes.of(scenario.draws)
    plan, script = scenario.plan, script_of(scenario)
    num_lanes = 2 * len(classes.first)
    lanes = Groups({name: (tuple(range(num_lanes)),) for name, _ in plan.groups}, num_lanes)
    layout = Layout(lanes, plan.parts, num_lanes, plan.queue_depth, AlikeRoutes(scenario.links))
    used = {join.operation.group for program in script.programs for join in program.joins}
    if used - {"world"}:
        raise _refused("not all trainers meet in every collective", "strategy.use_hierarchical_allreduce", "true")
    if plan.trainers > 1 and (max(script.lengths) > 1 or not all(program.joins for program in script.programs)):
        raise _refused("trainers take several steps between two meetings", "strategy", "local steps, or merged gradients")
    try:
        prepared = Prepared.of(scenario, script, layout)
    except OutOfReach as found:
        raise _refused(str(found), "strategy") from None
    ends = Ends(len(scenario.steps))
    weights = np.ravel([[float(size), 0.0] for size in classes.sizes])
    counted = scenario.steps.index(1)
    sums = Sums(script, mean_bytes(script, layout), counted, weights)
    heads = Heads(scenario.table, scenario.fetch_every, len(scenario.steps))
    engine = Engine(layout, script, heads, classes.rows, prepared.carrier, [ends, sums])
    try:
        engine.run(lambda _: None)
    except OutOfReach:
        raise uncountable() from None
    if not engine.is_even:
        raise _refused("trainers end a step apart, and the slowest of one step is late in the next", "workload")
    begin_ns, end_ns = ends.of_counted(counted)
    return Execution(
        engine="folded",
        begin_ns=begin_ns,
        end_ns=end_ns,
        step_ends_ns=dict(zip(scenario.steps, ends.last_end.tolist(), strict=True)),
        table=None,
        totals=sums.totals(begin_ns, end_ns),
        no_spans="ranks are folded into classes, which have no events of their own",
    )


def _refuse_bound(cluster: Cluster) -> None:
    random = 0
    for entry, straggler in enumerate(cluster.stragglers):
        where = f"cluster.stragglers[{entry}]"
        if isinstance(straggler, FOLDED):
            random += not (isinstance(straggler, Jitter) and (straggler.distribution == "constant" or straggler.mean == 0.0))
            if random > 1:
                raise _refused("the largest of products of two laws is not known", where, repr(straggler.kind))
        elif isinstance(straggler, NodeShock):
            if straggler.scope == "node":
                raise _refused("binds a node's ranks together", where, repr(straggler.kind))
        elif not isinstance(straggler, SlowRank | SlowNode):
            raise _refused("binds ranks or steps together", where, repr(straggler.kind))


def _refused(what: str, where: str, value: str | None = None) -> ConfigError:
    return ConfigError(f"ranks cannot be folded: {what}", where, value, _HINT)
