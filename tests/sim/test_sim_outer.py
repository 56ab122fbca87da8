"""An outer optimizer and fragments on the simulated clock, by closed forms."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from sim_cases import layered, link, profiled, with_profile

from fleetbench.experiment import Experiment
from fleetbench.result import PARTS, RunResult
from sim.run import Engine, simulate

STEP_NS = 3000
"""Forward 1000, backward 2000."""
TRANSFER_NS = 8000
"""4,000 bytes in a ring of two at 4 Gbit/s: a message of 2,000 bytes each way takes 4,000 ns."""


def experiment_of(**configs: Any) -> Experiment:
    """Two nodes that train two equal layers of 500 weights, or 2,000 bytes, each."""
    layers = [(500, 500, 1000), (500, 500, 1000)]
    alone = {} if configs.get("fragments", 1) > 1 or configs.get("overlap_steps") else {"schedule": "torch", "begin_step": 12}
    strategy = {"localsgd": True, "localsgd_configs": {"k_steps": 12, **alone, **configs}}
    return layered(layers, nodes=2, inter=link(4), steps=24, strategy=strategy)


def times(experiment: Experiment, engine: Engine) -> tuple[list[int], RunResult]:
    """How long each step of rank 0 takes, in ns."""
    run = simulate(experiment, engine=engine)
    assert run.summary.engine.startswith(engine)
    rows = run.steps[run.steps["rank"] == 0].sort_values("step")
    return [round(float(value) * 1e9) for value in rows[list(PARTS)].sum(axis=1)], run


@pytest.mark.sample(3)
@pytest.mark.parametrize("engine", ["reference", "vector"])
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("overlap", [0, 1, 2, 3, 5])
def test_exposed_is_what_the_steps_beside_it_do_not_cover(engine: Engine, number: int, overlap: int) -> None:
    """Each merge waits max(0, transfer - overlap x step); a fragment has 1 / P of the whole, and merges come every H / P steps."""
    took, run = times(experiment_of(fragments=number, overlap_steps=overlap), engine)
    exposed = max(0, TRANSFER_NS // number - overlap * STEP_NS)
    period = 12 // number
    merges = set(range(period, 25, period))
    end = 0 if number == 1 else TRANSFER_NS // number  # the last fragment has just been merged, the other has not met since
    expected = [STEP_NS + (exposed if step in merges else 0) for step in range(1, 25)]
    expected[-1] += end
    assert took == expected
    assert run.summary.exposed_comm_s * 24 == pytest.approx((len(merges) * exposed + end) * 1e-9)
    assert run.summary.bytes_sent_per_trainer == 4000 * 24 // 12 + (0 if number == 1 else 2000)


@pytest.mark.parametrize("engine", ["reference", "vector"])
@pytest.mark.parametrize(("configs", "outer_ns"), [({"outer_lr": 0.7}, 0), ({"outer_momentum": 0.9}, 80)])
def test_the_outer_step_takes_its_passes_over_memory(engine: Engine, configs: dict[str, Any], outer_ns: int) -> None:
    """A merge of 100 ns goes over memory ten times, a step with momentum eight times, a rate alone no time more."""
    rows = [([500], [2000], 500, 1000), ([500], [1000], 500, 1000)]
    options = {"nodes": 2, "inter": link(4), "steps": 3, "strategy": {"localsgd": True, "localsgd_configs": {"k_steps": 2, **configs}}}
    experiment, profile = profiled(rows, {"merge": 100}, **options)
    took, _ = times(with_profile(experiment, profile), engine)
    assert took == [
        STEP_NS,
        STEP_NS + TRANSFER_NS + 100 + outer_ns,
        STEP_NS + TRANSFER_NS + 100 + outer_ns,
    ]  # after update 2, and at the end
    fragments = dataclasses.replace(experiment.strategy.localsgd_configs, fragments=2)
    parts = experiment.replace(strategy=experiment.strategy.replace(localsgd_configs=fragments))
    took, _ = times(with_profile(parts, profile), engine)
    half = TRANSFER_NS // 2 + (100 + outer_ns) // 2
    assert took == [STEP_NS + half, STEP_NS + half, STEP_NS + 2 * half]  # at the end the other fragment, too
