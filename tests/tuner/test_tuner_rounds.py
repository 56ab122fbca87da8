"""What a step costs where rounds differ: trials and legs, which are short, against the whole training."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from fleetbench.experiment import Experiment
from fleetbench.plan.rounds import in_leg, levels
from fleetbench.result import step_s_of
from sim.run import simulate
from tests.sim_cases import layered, link
from tuner.search import shortened
from tuner.simulated.candidates import step_time

LATE = {"k_steps": 16, "begin_step": 1000}
WARMED = {"k_steps": 16, "schedule": "document", "warmup_epochs": 1, "warmup": "exp"}


def training(configs: dict[str, Any], **options: Any) -> Experiment:
    """Four trainers over 8 Gbit/s, 2,000 steps in epochs of 200."""
    strategy = {"localsgd": True, "localsgd_configs": configs}
    found = layered([(4_000_000, 1_000_000, 2_000_000)], nodes=4, inter=link(8), steps=2000, strategy=strategy, **options)
    return found.replace(workload=dataclasses.replace(found.workload, steps_per_epoch=200))


def mean_s(experiment: Experiment) -> float:
    """Of a step, from the first start to the last end."""
    return simulate(experiment).summary.wall_s / experiment.workload.steps


def check(experiment: Experiment, within: float) -> None:
    """A trial, and a leg of 120 steps, beside the whole training."""
    whole_s = mean_s(experiment)
    assert step_time(shortened(experiment))(experiment.strategy) == pytest.approx(whole_s, rel=within)
    found = levels(experiment.strategy, experiment.workload.steps, experiment.workload.steps_per_epoch)
    leg = experiment.replace(strategy=in_leg(found, 118), workload=dataclasses.replace(experiment.workload, steps=120))
    assert step_s_of(simulate(leg)) == pytest.approx(whole_s, rel=2 * within)


@pytest.mark.parametrize("configs", [{"k_steps": 16}, WARMED, LATE], ids=["fixed", "document", "late"])
def test_a_trial_and_a_leg_cost_what_the_training_does(configs: dict[str, Any]) -> None:
    """By hand, 24 ms an exchange and 3 ms of compute: 4.5, 10.7 and 15.8 ms a step."""
    check(training(configs), within=0.02)
    sixteenth, every = 0.003 + 0.024 / 16, 0.003 + 0.024
    by_hand = {"begin_step": (sixteenth + every) / 2, "k_steps": sixteenth}.get([*configs][-1])
    assert by_hand is None or mean_s(training(configs)) == pytest.approx(by_hand, rel=0.01)


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", range(12))
def test_random_schedules_cost_what_the_training_does(seed: int) -> None:
    """With an outer optimizer or fragments, too."""
    random = np.random.default_rng(seed)
    k = random.choice([4, 8, 16]).item()
    schedule = random.choice(["fleet", "torch"]).item()
    configs: dict[str, Any] = {"k_steps": k, "begin_step": int(random.integers(2, 1900)), "schedule": schedule}
    if random.random() < 0.5:
        warmup = random.choice(["exp", "linear", "const"]).item()
        configs = {"k_steps": k, "schedule": "document", "warmup_epochs": int(random.integers(1, 4)), "warmup": warmup}
    elif random.random() < 0.5:
        configs |= {"outer_lr": 0.7, "outer_momentum": 0.9}
    elif schedule == "fleet":
        configs |= {"overlap_steps": 2}
    check(training(configs), within=0.02)
