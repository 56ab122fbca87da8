"""The choice between synchronous training and elastic local steps on nodes that leave and come back."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from fleetbench.experiment import Experiment
from fleetbench.strategy import DistributedStrategy
from sim.churn.intervals import daly, young
from tuner.simulated.answer import tune_simulated
from tuner.simulated.churn import UnderChurn, by_local_steps, under_churn

S = 10**9


def _experiment(churn: dict[str, Any], **tune: Any) -> Experiment:
    """Compute of 1 s, and all-reduces of 1 s: a step of K local steps takes 1 + 1 / K s."""
    layers = [{"name": "block", "params": 1, "forward": "400 ms", "backward": "600 ms"}]
    link = {"bandwidth": "1000000 Gbit/s", "latency": "500 ms", "payload": True}
    costs = {"checkpoint_time": "30 s", "restart_time": "2 min"}
    return Experiment.from_dict(
        {
            "workload": {"model": "layers", "batch_size": 32, "steps": 10, "layers": layers},
            "cluster": {"nodes": 2, "inter": link, "churn": {**costs, **churn}},
            "tune": {"local_steps": [1, 4], **tune},
        }
    )


def _chosen(experiment: Experiment, **samples: float) -> UnderChurn:
    strategies = by_local_steps(experiment, [experiment.strategy], others=True)
    return under_churn(experiment, strategies, lambda one: samples.get(f"k{one.local_steps}"))


def test_elastic_local_steps_win_where_nodes_leave_often() -> None:
    """Choices are in order, both rivals are there, and the price is that of the time paid for."""
    experiment = _experiment({"mean_up": "2 h", "mean_down": "5 min", "duration": "50 h"}, price_per_trainer_hour=2.0)
    found = _chosen(experiment)
    rates = [one.rate for one in found.choices]
    assert rates == sorted(rates, reverse=True)
    best, rivals = found.choices[0], found.rivals
    assert (best.goodput.policy, best.strategy.local_steps) == ("elastic", 4)
    assert set(rivals) == {"Young", "Daly"}
    assert {one.goodput.policy for one in rivals.values()} == {"synchronous"}
    assert best.price == pytest.approx(2.0 * best.goodput.paid_trainer_s / 3600 / best.goodput.samples * 1e6)
    assert best.goodput.samples_per_s == pytest.approx(best.goodput.samples / best.goodput.wall_s)
    assert best.rate < 2 * 32 / 1.25
    assert "elastic training, K = 4" in found.line
    assert "(Daly)" in found.line
    assert not any(one.goodput.policy == "elastic" and one.strategy.local_steps == 1 for one in found.choices)


def test_the_rivals_intervals_are_those_of_the_losses_that_were_drawn() -> None:
    """Four losses in 6,000 s: M = 1,500 s. Elastic training never loses all nodes, and has at most Daly's interval for 6,000 s."""
    rows = [(0, 2), (1000, 1), (1100, 2), (2000, 1), (2100, 2), (3000, 1), (3100, 2), (4000, 1), (4100, 2), (6000, 2)]
    trace = [{"at": f"{at} s", "nodes": nodes} for at, nodes in rows]
    found = _chosen(_experiment({"trace": trace, "checkpoint_interval": "77 s"}))
    intervals = {
        kind: {one.rule: one.goodput.interval_s for one in found.choices if one.goodput.policy == kind}
        for kind in ("synchronous", "elastic")
    }
    assert intervals["synchronous"]["Young"] == young(30 * S, 1500 * S) / S == math.sqrt(2 * 30 * 1500)
    assert intervals["synchronous"]["Daly"] == daly(30 * S, 1500 * S) / S
    assert intervals["elastic"]["Daly"] == daly(30 * S, 6000 * S) / S
    assert intervals["elastic"]["declared"] == 77
    assert max(one.goodput.interval_s for one in found.choices if one.goodput.policy == "elastic") == daly(30 * S, 6000 * S) / S
    assert "Young" not in intervals["elastic"]
    assert {one.origin for one in found.choices if one.goodput.policy == "elastic"} == {"no loss of all nodes seen", "declared", ""}
    assert "(no loss of all nodes seen)" in found.line or "declared" in found.line
    longer = _chosen(_experiment({"trace": trace, "checkpoint_interval": "1 h"}))
    assert "declared" not in {one.rule for one in longer.choices if one.goodput.policy == "elastic"}
    assert all(one.goodput.interval == (one.goodput.samples_per_s,) * 2 for one in found.choices)


def test_samples_to_the_target_count_where_they_are_known() -> None:
    """Local steps that need thrice the samples lose; a K whose samples are unknown is left out, with a note."""
    experiment = _experiment({"mean_up": "20 h", "mean_down": "5 min", "duration": "200 h"})
    assert _chosen(experiment, k1=1.0, k4=1.0).choices[0].strategy.local_steps == 4
    dear = _chosen(experiment, k1=1.0, k4=3.0)
    assert dear.choices[0].strategy.local_steps == 1
    assert dear.is_to_target
    (equal,) = {one.goodput.samples_per_s / one.rate for one in dear.choices if one.strategy.local_steps == 4}
    assert equal == pytest.approx(3)
    unknown = _chosen(experiment, k1=1.0)
    assert {one.strategy.local_steps for one in unknown.choices} == {1}
    assert any(note.startswith("K = 4 is not compared") for note in unknown.told)


def test_an_answer_has_the_choice_beside_that_of_an_undisturbed_cluster(tmp_path: Path) -> None:
    """The undisturbed recommendation stays; the choice under churn is in the JSON, with a strategy file of its own."""
    found, folder = tune_simulated(_experiment({"mean_up": "2 h", "duration": "20 h"}, fusion=[], nccl_comm_num=[1]), out=tmp_path)
    assert found.churn is not None
    assert found.strategy.local_steps == 1
    assert DistributedStrategy.load(folder / "recommended_churn.toml") == found.churn.choices[0].strategy
    assert found.plain()["churn"]["choices"][0]["goodput"]["policy"] == "elastic"


def _with_target() -> Experiment:
    """Two nodes of which K = 4 has far shorter steps, and a target loss."""
    churn = {"mean_up": "2 h", "duration": "10 h", "checkpoint_time": "30 s", "restart_time": "2 min"}
    link = {"bandwidth": "10 Gbit/s", "latency": "100 ms", "payload": True}
    return Experiment.from_dict(
        {
            "workload": {"model": "digits_mlp", "steps": 20_000, "target_loss": 0.5, "eval_every": 100},
            "cluster": {"nodes": 2, "gpu": "A100", "inter": link, "churn": churn},
            "tune": {
                "local_steps": [1, 4],
                "diloco": False,
                "gradient_merge": [1],
                "lr_scale": [1.0],
                "target_seeds": 2,
            },
            "run": {"device": "cuda"},
        }
    )


@pytest.mark.parametrize(("more", "k"), [(1.5, 4), (20.0, 1)])
def test_virtual_trainers_say_what_local_steps_cost(tmp_path: Path, more: float, k: int) -> None:
    """K = 4 needs 1.5 times the steps of K = 1, and wins; at 20 times it loses, and its rate is a twentieth of its goodput."""

    def learn(one: Experiment, _: float, _at_least: int = 0) -> float:
        return 100.0 * (more if one.strategy.local_steps == 4 else 1.0)

    found, _ = tune_simulated(_with_target(), out=tmp_path, learn=learn)
    assert found.churn is not None
    assert found.churn.is_to_target
    assert found.churn.choices[0].strategy.local_steps == k
    known = {one.strategy.local_steps: one.samples_to_target for one in found.churn.choices}
    assert known == pytest.approx({1: 1.0, 4: more})
    assert any("global batch is smaller" in note for note in found.churn.told)
