"""The tuner finds a gain that is there, and none where there is none (ten of each: reports/planted_truths)."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetbench.experiment import Experiment
from real.job.session import Session
from tuner.real_runs import RealRuns
from tuner.recommendation import Pair
from tuner.tune import tune
from tuner.verify import measure_pairs, paired_speedup

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_planted_gain_is_found_and_found_again(tmp_path: Path) -> None:
    """Something at least 1.15 times as fast exists: USE, with an interval that overlaps a re-measurement's."""
    recommendation, folder = tune(Experiment.load(EXAMPLES / "planted_gain.toml"), out=tmp_path)
    assert recommendation.verdict == "USE", recommendation.line
    assert recommendation.speedup is not None
    assert recommendation.speedup > 1.15
    experiment, pairs = Experiment.load(folder / "experiment.toml"), list[Pair]()
    with Session(experiment) as session:
        legs = RealRuns(experiment=experiment, runner=session, folder=tmp_path / "again", step_s=0.0)
        measure_pairs(experiment, legs, "again", recommendation.strategy, pairs.append)
    again = paired_speedup([pair.default_s for pair in pairs], [pair.finalist_s for pair in pairs])
    assert recommendation.low is not None
    assert recommendation.high is not None
    assert again.low <= recommendation.high, (str(again), recommendation.line)
    assert recommendation.low <= again.high, (str(again), recommendation.line)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_is_found_where_nothing_was_planted(tmp_path: Path) -> None:
    """A step of pure compute has nothing to gain: KEEP DEFAULT, after real runs, with a reason."""
    recommendation, _ = tune(Experiment.load(EXAMPLES / "planted_none.toml"), out=tmp_path)
    assert recommendation.verdict == "KEEP DEFAULT", recommendation.line
    assert all(len(arm.measured_s) == 2 for arm in recommendation.arms)
    assert len(recommendation.arms) > 1
    assert recommendation.arms[0].measured_s[0] > 0.1
