"""Elastic local steps in the simulator: while nobody comes or goes, they are plain Local SGD."""

from __future__ import annotations

from typing import Literal

import pytest
from sim_cases import layered, link

from fleetbench.result import RunResult
from sim.run import simulate


@pytest.mark.parametrize("engine", ["reference", "vector"])
@pytest.mark.parametrize("outer", [{}, {"outer_lr": 0.7, "outer_momentum": 0.9}], ids=["averaging", "outer"])
def test_undisturbed_the_clock_is_that_of_plain_local_sgd(outer: dict[str, float], engine: Literal["reference", "vector"]) -> None:
    """Both engines tell the same times of every step."""
    found: list[RunResult] = []
    for own in ({}, {"elastic": True, "elastic_lr": "linear"}):
        strategy = {"localsgd": True, "localsgd_configs": {"k_steps": 4, **outer, **own}}
        found.append(simulate(layered([(250, 100, 200), (50, 30, 60)], inter=link(8, 10), steps=13, strategy=strategy), engine=engine))
    assert found[0].steps.equals(found[1].steps)
