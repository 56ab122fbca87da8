"""Nodes that leave and come back: times by hand, Daly's closed form, and what both policies pay for."""

from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np
import pytest
from scipy import optimize

from fleetbench.churn import Churn
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.result import step_s_of
from sim.churn.availability import Availability, Change, availability
from sim.churn.goodput import KINDS, RoundTimes, availabilities, failures, goodput, goodputs, with_nodes
from sim.churn.intervals import daly, young
from sim.churn.job import Job, Policy
from sim.run import simulate

S = 10**9
HOUR_NS = 3600 * S


def _experiment(churn: dict[str, Any], nodes: int = 3, **sections: Any) -> Experiment:
    """A step of 1 s and 32 samples per node, whatever their number: links take no time."""
    layers = [{"name": "block", "params": 1, "forward": "400 ms", "backward": "600 ms"}]
    own = {"model": "layers", "batch_size": 32, "steps": 10, "layers": layers} | sections.pop("workload", {})
    cluster = {"nodes": nodes, "inter": {"bandwidth": "1000000 Gbit/s", "payload": True}} | sections.pop("cluster", {})
    costs = {"checkpoint_time": "2 s", "restart_time": "3 s"}
    return Experiment.from_dict({"workload": own, "cluster": {**cluster, "churn": costs | churn}, **sections})


def _trace(*rows: tuple[float, int]) -> list[dict[str, Any]]:
    return [{"at": f"{at} s", "nodes": nodes} for at, nodes in rows]


def _ran(experiment: Experiment, kind: Any, interval_s: float, **policy: Any) -> tuple[int, dict[str, float]]:
    """Useful rounds of all nodes, and their seconds by cause; causes without a second are left out."""
    (one,), churn = availabilities(experiment), experiment.cluster.churn
    assert churn is not None
    job = Job(churn, one, RoundTimes(experiment), Policy(kind=kind, interval_ns=round(interval_s * S), **policy))
    job.run()
    return job.useful_rounds, {cause: ns / S for cause, ns in job.spent_ns.items() if ns}


def _failures(experiment: Experiment, kind: Any, rejoin: str = "checkpoint") -> tuple[int, float]:
    churn = experiment.cluster.churn
    assert churn is not None
    return failures(churn, availabilities(experiment), kind, rejoin)


BY_HAND = _trace((0, 3), (10.5, 2), (20, 3), (30.25, 1), (50, 1))
"""Three nodes; one leaves, one comes, the two oldest leave: 31.5 + 19 + 30.75 + 19.75 = 101 node-seconds."""


def test_synchronous_training_by_hand() -> None:
    """Rounds to 4, a checkpoint to 6, rounds to 10; the checkpoint fails at 10.5, and 12 node-seconds are lost.

    A restart to 13.5; two nodes: rounds to 17.5, a checkpoint to 19.5, rounds to 23.5, a checkpoint to 25.5; then a restart
    to 28.5 for the node of second 20; 1.75 s of rounds with three nodes are lost at 30.25; the last node waits.
    """
    churn = {"trace": BY_HAND, "least_nodes": 2}
    lost, checkpoints = 12 + 3 * 1.75, 3 * 2 + 3 * 0.5 + 2 * 2 + 2 * 2
    spent = {"useful": 28.0, "lost_steps": lost, "checkpoints": checkpoints, "restarts": 2 * 3 + 3 * 3.0, "waiting": 19.75, "joining": 5.5}
    assert _ran(_experiment(churn), "synchronous", 4) == (3 * 4 + 2 * 4 + 2 * 4, spent)
    assert sum(spent.values()) == 101


def test_elastic_training_by_hand() -> None:
    """The checkpoint from 10 to 12 ends with two nodes, which regroup to 12.5: rounds to 16.5, a checkpoint to 18.5.

    The node of second 20 is ready at 22 and joins at 22.5: regrouping to 23, a checkpoint to 25, rounds of three nodes to 29,
    a checkpoint to 31, at whose end one node is left. It regroups, and waits.
    """
    churn = {"trace": BY_HAND, "least_nodes": 2, "join_time": "2 s", "regroup_time": "500 ms"}
    checkpoints = 3 * 2 + (3 * 0.5 + 2 * 1.5) + 2 * 2 + 3 * 2 + (3 * 1.25 + 0.75)
    spent = {"useful": 52.0, "checkpoints": checkpoints, "restarts": 2 * 0.5 + 3 * 0.5 + 0.5, "waiting": 18.5, "joining": 2.5}
    assert _ran(_experiment(churn), "elastic", 4) == (24 + 8 + 8 + 12, spent)
    assert sum(spent.values()) == 101


def test_a_trace_by_zone() -> None:
    """At second 5 zone a goes and b grows: its own two nodes survive. At 8 b goes, too, and at 9 new nodes come: nothing survives."""
    counts = [(0, "a", 2), (0, "b", 2), (5, "a", 0), (5, "b", 3), (8, "b", 0), (9, "a", 1), (12, "a", 1)]
    trace = [{"at": f"{at} s", "zone": zone, "nodes": nodes} for at, zone, nodes in counts]
    experiment = _experiment({"trace": trace, "join_time": "1 s"}, nodes=4)
    (found,) = availabilities(experiment)
    assert [(change.at_ns // S, change.lost, change.came) for change in found.changes] == [
        (0, (), (0, 1, 2, 3)),
        (5, (0, 1), (4,)),
        (8, (2, 3, 4), ()),
        (9, (), (5,)),
        (12, (), ()),
    ]
    assert [_failures(experiment, kind)[0] for kind in KINDS] == [2, 1]
    # 5 rounds of 4, a round of 2, two of 3; all lost without a checkpoint; a restart to 12
    assert _ran(experiment, "elastic", 100) == (0, {"lost_steps": 20 + 2 + 6.0, "joining": 1.0, "restarts": 3.0})


def test_without_churn_goodput_is_the_plain_simulations_rate() -> None:
    """To the last digit, under both policies, with links that take time and K = 4."""
    local = {"localsgd": True, "localsgd_configs": {"k_steps": 4}}
    slow = {"inter": {"bandwidth": "1 Gbit/s", "latency": "5 ms", "payload": True}}
    for strategy in ({}, local):
        sections = {"cluster": slow, "strategy": strategy, "workload": {"steps": 42}}
        plain = with_nodes(_experiment({"mean_up": "1 h"}, **sections), 3)
        steps, round_s = (4, 4 * step_s_of(simulate(plain))) if strategy else (1, step_s_of(simulate(plain)))
        end = f"{100 * round(round_s * S)} ns"
        trace = [{"at": at, "nodes": 3} for at in ("0 s", end)]
        for one in goodputs(_experiment({"trace": trace, "checkpoint_time": "0 s"}, **sections)):
            assert (one.samples_per_s, one.share, one.idle) == (3 * 32 * 100 * steps / (100 * round(round_s * S) / S), 1.0, "nothing")
            if not strategy:
                assert one.samples_per_s == simulate(plain).summary.samples_per_s


@pytest.fixture(scope="module")
def failing() -> tuple[RoundTimes, list[Availability]]:
    """Four nodes that live 4 h each and are replaced at once, over 1,000 mean times between failures, with eight seeds."""
    costs = {"checkpoint_time": "60 s", "restart_time": "120 s"}
    experiment = _experiment({"mean_up": "4 h", "duration": "1000 h", **costs}, nodes=4)
    return RoundTimes(experiment), availabilities(experiment)


def _daly_share(interval_s: float, checkpoint_s: float = 60, restart_s: float = 120, mean_s: float = 3600) -> float:
    """Daly 2006, equation 13: an interval of work takes M e^(R/M) (e^((tau + C)/M) - 1)."""
    return interval_s / (mean_s * math.exp(restart_s / mean_s) * math.expm1((interval_s + checkpoint_s) / mean_s))


@pytest.mark.parametrize("interval_s", [150, 600, 2400])
def test_synchronous_training_has_dalys_expectation(failing: tuple[RoundTimes, list[Availability]], interval_s: int) -> None:
    """Within three standard errors of eight seeds, below a percent."""
    found = goodput(*failing, Policy(kind="synchronous", interval_ns=interval_s * S))
    error = statistics.stdev(found.by_seed) / math.sqrt(len(found.by_seed))
    assert error < 0.01 * found.samples_per_s
    assert abs(found.samples_per_s - 4 * 32 * _daly_share(interval_s)) < 3 * error
    assert found.share == pytest.approx(_daly_share(interval_s), rel=0.01)


def test_intervals_are_the_papers() -> None:
    """Young's first order; Daly's is within 1 % of the minimum of the expectation where C is up to a fifth of M."""
    assert young(50 * S, 10_000 * S) == 1000 * S
    for checkpoint_s in (1, 60, 700):
        least = optimize.minimize_scalar(
            lambda tau, cost=checkpoint_s: -_daly_share(tau, cost), bounds=(1, 7200), method="bounded", options={"xatol": 1e-6}
        )
        assert daly(checkpoint_s * S, HOUR_NS) / S == pytest.approx(least.x, rel=0.01)
    assert daly(9000 * S, HOUR_NS) == HOUR_NS


DRAWN = {"mean_up": "2 h", "mean_down": "40 min", "zones": 2, "zone_mean_up": "20 h", "duration": "60 h", "least_nodes": 3}


def _drawn(**changes: Any) -> tuple[Churn, Availability]:
    churn = _experiment({**DRAWN, "regroup_time": "7 s", **changes}, nodes=6).cluster.churn
    assert churn is not None
    return churn, availability(churn, 6, 0)


def _round_ns(nodes: int) -> int:
    return 11 * S + nodes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rejoin", ["checkpoint", "restart"])
def test_every_paid_second_has_one_cause_and_skipped_rounds_are_those_done_one_by_one(kind: Any, rejoin: Any) -> None:
    """The node-seconds add up to those of the availability; changes of nothing every 9 s leave all figures as they are."""
    churn, drawn = _drawn()
    edges = [change.at_ns for change in drawn.changes] + [drawn.end_ns]
    sizes = np.cumsum([len(change.came) - len(change.lost) for change in drawn.changes])
    nothing = {at: Change(at, (), ()) for at in range(0, drawn.end_ns, 9 * S)}
    finer = {**nothing, **{change.at_ns: change for change in drawn.changes}}
    found = []
    for changes in (drawn.changes, tuple(finer[at] for at in sorted(finer))):
        job = Job(churn, Availability(changes, drawn.end_ns), _round_ns, Policy(kind=kind, interval_ns=300 * S, rejoin=rejoin))
        job.run()
        found.append((job.useful_rounds, job.spent_ns))
    assert found[0] == found[1]
    assert sum(found[0][1].values()) == int((sizes * np.diff(edges)).sum())
    assert all(found[0][1][cause] for cause in ("useful", "lost_steps", "checkpoints", "restarts", "waiting", "joining"))


def test_drawn_nodes_are_there_as_often_as_declared() -> None:
    """2 h of 2 h 40 min, and their zone 20 h of 20 h 40 min; whole zones go; and each seed has draws of its own."""
    churn, drawn = _drawn(duration="8000 h")
    edges = [change.at_ns for change in drawn.changes] + [drawn.end_ns]
    sizes = np.cumsum([len(change.came) - len(change.lost) for change in drawn.changes])
    share = (sizes * np.diff(edges)).sum() / drawn.end_ns / 6
    assert share == pytest.approx(2 / (2 + 2 / 3) * 20 / (20 + 2 / 3), rel=0.01)
    together = [change.lost for change in drawn.changes if len(change.lost) > 1]
    assert all(set(lost) <= {0, 1, 2} or set(lost) <= {3, 4, 5} for lost in together)
    num = sum(bool(set(change.lost) & {0, 1, 2}) for change in drawn.changes)
    rate = 3 / (2 + 2 / 3) * 20 / (20 + 2 / 3) + 1 / (20 + 2 / 3) * (1 - (1 / 4) ** 3)
    assert num == pytest.approx(8_000 * rate, rel=0.03)
    assert drawn == availability(churn, 6, 0) != availability(churn, 6, 1)


def test_a_round_is_simulated_with_the_nodes_that_are_there() -> None:
    """Node 2 is twice as slow and has a straggler: without it, a step takes 1 s. Numbers of nodes above 7 are interpolated."""
    slow = {"node_overrides": [{"nodes": [2], "slowdown": 2.0}], "stragglers": [{"kind": "slow_rank", "ranks": [2, 1], "factor": 1.5}]}
    times = RoundTimes(_experiment({"mean_up": "1 h"}, cluster=slow))
    assert [times(nodes) for nodes in (1, 2, 3)] == [S, 1.5 * S, 3 * S]
    linked = _experiment({"mean_up": "1 h"}, nodes=30, cluster={"inter": {"bandwidth": "1 Gbit/s", "latency": "1 ms", "payload": True}})
    latencies = [round((RoundTimes(linked)(nodes) - S) / 2e6, 3) for nodes in (7, 9, 17, 25, 30)]
    assert latencies == pytest.approx([6, 8, 16, 24, 29], abs=0.01)  # a ring of n takes 2 (n - 1) latencies


def test_what_has_no_rounds_of_one_length_is_refused() -> None:
    """Adaptive K, and parameter servers, by name; so are nodes of different sizes."""
    adaptive = {"adaptive_localsgd": True}
    curve = {"loss_curve": {"start": 2.3, "floor": 0.2, "half_life": "150 steps"}}
    uneven = {"cluster": {"trainers_per_node": 2, "intra": {"bandwidth": "1 Gbit/s"}, "node_overrides": [{"nodes": [0], "trainers": 1}]}}
    for sections, place in (({"strategy": adaptive, "workload": curve}, "cluster.churn"), (uneven, "cluster.node_overrides")):
        with pytest.raises(ConfigError, match=place):
            goodputs(_experiment({"mean_up": "1 h"}, **sections))
    served = _experiment({"mean_up": "1 h"}, strategy={"mode": "ps"}, cluster={"servers": 1})
    with pytest.raises(ConfigError, match=r"cluster\.churn"):
        simulate(served)
