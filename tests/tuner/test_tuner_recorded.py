"""Real tunings that were recorded (``reports/tuner/recorded.py``) ask for the same again, and come to the same verdict."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleetbench.config import decode
from fleetbench.experiment import Experiment
from fleetbench.strategy import DistributedStrategy
from tuner.decide import decide
from tuner.evidence import Done, Evidence, Outcome, Run
from tuner.recommendation import Arm
from tuner.state import Setting

RECORDED = sorted((Path(__file__).parents[2] / "reports" / "tuner" / "recorded").glob("*.json"))


def setting_of(record: dict[str, Any]) -> Setting:
    """What its decisions depended on, besides what was measured."""
    later = {arm.strategy: arm for arm in (decode(data, Arm, "later") for data in record["later"])}
    return Setting(
        experiment=Experiment.from_dict(record["experiment"]),
        arms=tuple(decode(data, Arm, "arms") for data in record["arms"]),
        others={decode(data, DistributedStrategy, "others"): ratio for data, ratio in record["others"]},
        prepare=lambda arm: replace(later[arm.strategy], name=arm.name),
        step_s=record["step_s"],
    )


def test_there_are_recorded_tunings() -> None:
    """Of an experiment with a target, and of a script as it is."""
    assert len(RECORDED) >= 2


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_recorded_tuning_comes_to_its_verdict_by_its_own_legs(path: Path) -> None:
    """Each request is the next of the record, which answers it; none is left over; and all evidence at once gives the verdict, too."""
    record = json.loads(path.read_text(encoding="utf-8"))
    setting, known = setting_of(record), decode(record["begun"], Evidence, "begun")
    left = list(record["asked"])
    while not isinstance(wanted := decide(known, setting), Done):
        if not isinstance(wanted, Run):
            known = known.with_comparison(wanted.comparison)
        for run in (wanted,) if isinstance(wanted, Run) else wanted.runs:
            (arm, side, window, seed, to_target), data = left.pop(0)
            assert (run.arm, run.side, run.leg.window, run.leg.seed, run.leg.ends_at_target) == (arm, side, window, seed, to_target)
            outcome = replace(decode(data, Outcome, "asked"), ran=run.ran, among=run.among)
            assert to_target or outcome.failure or outcome.steps == run.leg.steps
            known = known.with_outcome(outcome)
            if outcome.failure:
                break
    assert not left
    for found in (wanted.recommendation, decide(known, setting).recommendation):  # type: ignore[union-attr]  # it is done
        for name, value in record["found"].items():
            own = getattr(found, name)
            if name == "pairs":
                assert [(pair.default_s, pair.finalist_s) for pair in own] == [(one["default_s"], one["finalist_s"]) for one in value]
            else:
                assert own == (pytest.approx(value, rel=1e-9) if isinstance(value, float) else value)
