"""The tuner finds a gain that is there, and none where there is none (ten of each, and small gains: reports/planted_truths)."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetbench.experiment import Experiment
from real.job.session import Session
from tuner.real_runs import RealRuns
from tuner.sequential import paired_speedup
from tuner.tune import tune
from tuner.verify import measured_pairs

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
LATE = 2.0
"""Of a step's compute, each trainer in turn: meeting after every step two take 1 + LATE, after every second step 1 + LATE / 2."""


def emulated(late: float) -> Experiment:
    """Two trainers that sleep 12 ms a step and exchange kilobytes; any training reaches the target at its third evaluation."""
    return Experiment.from_dict(
        {
            "name": "planted",
            "workload": {
                "model": "layers",
                "layers": [{"name": "block", "params": 1000, "forward": "2 ms", "backward": "4 ms", "repeat": 2}],
                "steps": 18,
                "target_loss": 100.0,
                "eval_every": 5,
                "loss_curve": {"start": 2.0, "floor": 0.1, "half_life": "20 steps"},
            },
            "cluster": {
                "trainers_per_node": 2,
                "intra": {"bandwidth": "1 Gbit/s", "latency": "50 us"},
                "stragglers": [{"kind": "blocks", "values": [[late, 0.0], [0.0, late]], "block_steps": 10_000}],
            },
            "run": {"device": "emulated", "warmup_steps": 2},
            "tune": {
                "trials": 8,
                "finalists": 1,
                "leg_steps": 12,
                "pairs": 12,  # a quiet machine needs 4
                "min_gain": 0.15,  # trainers oversleep, each in its own steps: meeting half as often gains a few per cent with no one late
                "local_steps": [1, 2],
                "fuse_grad_size_in_MB": [0.01, 32],
                "nccl_comm_num": [1],
                "thread_num": [1],
            },
        }
    )


@pytest.mark.alone
def test_a_gain_of_emulated_trainers_is_found(tmp_path: Path) -> None:
    """Meeting half as often saves a third of the time: USE, with the two local steps that were planted, and no more than they gain."""
    recommendation, _ = tune(emulated(LATE), out=tmp_path / "runs")
    assert recommendation.verdict == "USE", recommendation.line
    assert recommendation.strategy.local_steps == 2
    assert recommendation.speedup is not None
    assert 1.2 < recommendation.speedup < 1.05 * (1 + LATE) / (1 + LATE / 2)


@pytest.mark.slow
@pytest.mark.alone
def test_nothing_is_found_where_emulated_trainers_gain_nothing(tmp_path: Path) -> None:
    """The control: no trainer is late, and a step is compute alone. The verdict is KEEP DEFAULT, after real runs."""
    recommendation, _ = tune(emulated(0.0), out=tmp_path / "runs")
    assert recommendation.verdict == "KEEP DEFAULT", recommendation.line
    assert len(recommendation.arms) > 1
    assert all(arm.measured_s for arm in recommendation.arms)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_a_planted_gain_is_found_and_found_again(tmp_path: Path) -> None:
    """Something at least 1.15 times as fast exists: USE, with an interval that overlaps a re-measurement's."""
    recommendation, folder = tune(Experiment.load(EXAMPLES / "planted_gain.toml"), out=tmp_path)
    assert recommendation.verdict == "USE", recommendation.line
    assert recommendation.speedup is not None
    assert recommendation.speedup > 1.15
    experiment = Experiment.load(folder / "experiment.toml", ["tune.pairs=6"])
    with Session(experiment) as session:
        legs = RealRuns(experiment=experiment, runner=session, folder=tmp_path / "again", step_s=0.0)
        pairs = measured_pairs(experiment, recommendation.strategy, legs)
    again = paired_speedup([pair.default_s for pair in pairs], [pair.finalist_s for pair in pairs])
    assert recommendation.low is not None
    assert recommendation.high is not None
    assert again.low <= recommendation.high, (str(again), recommendation.line)
    assert recommendation.low <= again.high, (str(again), recommendation.line)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_nothing_is_found_where_nothing_was_planted(tmp_path: Path) -> None:
    """A step of pure compute has nothing to gain: KEEP DEFAULT, after real runs and at most eight pairs (the file has 48)."""
    recommendation, _ = tune(Experiment.load(EXAMPLES / "planted_none.toml", ["tune.pairs=8"]), out=tmp_path)
    assert recommendation.verdict == "KEEP DEFAULT", recommendation.line
    assert all(len(arm.measured_s) >= 2 for arm in recommendation.arms)
    assert len(recommendation.arms) > 1
    assert recommendation.arms[0].measured_s[0] > 0.02  # a step computes, for 0.09 s on a fast machine
