from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tuner_fakes import FakeRunner, FakeSimulate, layers_experiment, profiled_experiment

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.result import RunResult
from fleetbench.strategy import DistributedStrategy
from real.leg import Leg
from real.script.failure import LegFailed, LegLost
from tuner.journal import Journal
from tuner.legs import SPENT
from tuner.recommendation import Recommendation
from tuner.resumption import Resumption
from tuner.script import refuse_beyond_budget
from tuner.tune import tune

DEFAULT, SMALL = DistributedStrategy(), DistributedStrategy(fuse_grad_size_in_MB=1.0)


def formula(strategy: DistributedStrategy) -> float:
    """Buckets of 1 MB take 10 ms a step, others 13."""
    return 0.010 if strategy.fuse_grad_size_in_MB == 1.0 else 0.013


def leg(strategy: DistributedStrategy = DEFAULT) -> Leg:
    """A leg of five steps."""
    return Leg(strategy=strategy, steps=5)


@dataclass
class Breaking:
    """A runner that is interrupted at its n-th leg, or whose small buckets fail."""

    runner: FakeRunner
    at: int | None = None
    failure: type[LegFailed] | None = None
    num_run: int = field(default=0)

    @property
    def startup_s(self) -> float:
        """See ``Runner``."""
        return self.runner.startup_s

    def together(self, legs: Sequence[Leg]) -> None:
        """See ``Runner``."""
        self.runner.together(legs)

    def run(self, leg: Leg) -> RunResult:
        """See ``Runner``."""
        if self.num_run == self.at:
            raise KeyboardInterrupt
        self.num_run += 1
        if self.failure is not None and leg.strategy == SMALL:
            raise self.failure("out of memory", "rank 1", None, "its output: log")
        return self.runner.run(leg)


def test_legs_that_were_run_are_not_run_again(tmp_path: Path) -> None:
    """The second tuning gets the first one's results, and goes on with the third leg."""
    experiment = layers_experiment()
    runner = FakeRunner(experiment, formula)
    first = Journal(runner, tmp_path)
    before = [first.run(leg()), first.run(leg(SMALL))]
    again = Journal(runner, tmp_path)
    found = [again.run(leg()), again.run(leg(SMALL)), again.run(leg())]
    assert [run.summary for run in found[:2]] == [run.summary for run in before]
    assert found[0].steps.equals(before[0].steps)
    assert (len(runner.legs), again.num_replayed) == (3, 2)


def test_another_leg_than_before_forgets_what_follows(tmp_path: Path) -> None:
    """A tuning that goes another way gets nothing of the old one from there on."""
    runner = FakeRunner(layers_experiment(), formula)
    first = Journal(runner, tmp_path)
    for strategy in (DEFAULT, SMALL, DEFAULT):
        first.run(leg(strategy))
    again = Journal(runner, tmp_path)
    for strategy in (DEFAULT, DEFAULT, DEFAULT):
        again.run(leg(strategy))
    assert (len(runner.legs), again.num_replayed) == (5, 1)


def test_half_of_a_pair_is_run_again(tmp_path: Path) -> None:
    """Two legs that are compared are of one launch: one of them from before the interruption is none; a whole pair is taken."""
    runner = FakeRunner(layers_experiment(), formula)
    for num_done, num_replayed in ((1, 0), (2, 2)):
        folder = tmp_path / str(num_done)
        first = Journal(runner, folder)
        first.together([leg(), leg(SMALL)])
        for strategy in (DEFAULT, SMALL)[:num_done]:
            first.run(leg(strategy))
        again = Journal(runner, folder)
        again.together([leg(), leg(SMALL)])
        again.run(leg())
        again.run(leg(SMALL))
        assert again.num_replayed == num_replayed


def test_what_a_strategy_failed_of_is_remembered_and_a_broken_launch_is_not(tmp_path: Path) -> None:
    """Out of memory stays so; a killed process gets another try."""
    experiment = layers_experiment()
    for failure, num_run in ((LegFailed, 1), (LegLost, 2)):
        runner = Breaking(FakeRunner(experiment, formula), failure=failure)
        for _ in range(2):
            with pytest.raises(LegFailed, match="out of memory") as caught:
                Journal(runner, tmp_path / failure.__name__).run(leg(SMALL))
            assert caught.value.where == "rank 1"
        assert runner.num_run == num_run


def tuned(experiment: Experiment, folder: Path, runner: Breaking) -> Recommendation:
    """A tuning through a journal."""
    return tune(experiment, out=folder, runner=Journal(runner, folder / "legs"), simulate=FakeSimulate(formula))[0]


@pytest.mark.parametrize("at", [0, pytest.param(3, marks=pytest.mark.slow), pytest.param(9, marks=pytest.mark.slow), 12])
def test_an_interrupted_tuning_ends_with_the_same_table(tmp_path: Path, at: int) -> None:
    """Wherever it stops, in the choosing round or within a pair, the tuning that goes on has the same arms, pairs and verdict."""
    experiment = layers_experiment()
    whole = tuned(experiment, tmp_path / "whole", Breaking(FakeRunner(experiment, formula)))
    with pytest.raises(KeyboardInterrupt):
        tuned(experiment, tmp_path / "broken", Breaking(FakeRunner(experiment, formula), at=at))
    runner = Breaking(FakeRunner(experiment, formula))
    found = tuned(experiment, tmp_path / "broken", runner)
    assert (found.verdict, found.pairs, found.line) == (whole.verdict, whole.pairs, whole.line)
    assert [(arm.name, arm.measured_s) for arm in found.arms] == [(arm.name, arm.measured_s) for arm in whole.arms]
    num_legs = sum(len(arm.measured_runs) for arm in whole.arms)
    assert num_legs - at <= runner.num_run <= num_legs - at + 1


def test_a_strategy_that_fails_is_rejected_and_the_tuning_goes_on(tmp_path: Path) -> None:
    """The simulator's favourite runs out of memory: it is rejected with the rank, and the default stays."""
    experiment = layers_experiment(fuse_grad_size_in_MB=(1.0, 32.0), nccl_comm_num=(1,), sync_nccl_allreduce=(True,))
    found = tuned(experiment, tmp_path, Breaking(FakeRunner(experiment, formula), failure=LegFailed))
    assert found.verdict == "KEEP DEFAULT"
    (rejected,) = (arm for arm in found.arms if arm.rejected)
    assert rejected.strategy == SMALL
    assert rejected.rejected == "failed on rank 1: out of memory"
    assert rejected.measured_s == ()


def test_a_default_that_fails_ends_the_tuning(tmp_path: Path) -> None:
    """Nothing can be compared with it."""
    experiment = layers_experiment().replace(strategy=SMALL)
    with pytest.raises(LegFailed):
        tuned(experiment, tmp_path, Breaking(FakeRunner(experiment, formula), failure=LegFailed))


def test_what_is_kept_of_a_script_is_found_again(tmp_path: Path) -> None:
    """By the same command and script; another script, another command or a profile that is gone begin anew."""
    script = tmp_path / "train.py"
    script.write_text("one")
    command, base = ("python", str(script)), Experiment(name="mine")
    experiment = profiled_experiment(tmp_path)
    Resumption(command, base, tmp_path).keep(experiment, 12.5)
    assert Resumption(command, base, tmp_path).held_s() == 12.5
    assert Resumption(command, base, tmp_path).experiment() == experiment
    assert Resumption((*command, "--lr", "1"), base, tmp_path).experiment() is None
    script.write_text("two")
    assert Resumption(command, base, tmp_path).experiment() is None
    script.write_text("one")
    (tmp_path / "profile.toml").unlink()
    assert Resumption(command, base, tmp_path).experiment() is None
    Resumption(command, base, tmp_path).close()
    assert not list(tmp_path.glob("resume-*"))


def test_a_draft_is_a_recommendation_when_it_is_whole(tmp_path: Path) -> None:
    """An interruption leaves nothing beside the draft; the next tuning replaces that, and leaves its folder there for its caller."""
    experiment, draft = layers_experiment(), tmp_path / "resume" / "draft"
    out = tmp_path / "runs"
    for at in (3, None):
        runner = Breaking(FakeRunner(experiment, formula), at=at)
        if at is not None:
            with pytest.raises(KeyboardInterrupt):
                tune(experiment, out=out, runner=runner, simulate=FakeSimulate(formula), draft=draft)
            assert [path.name for path in out.iterdir()] == ["studies"]
            assert len(list(draft.iterdir())) == 1
    found, folder = tune(experiment, out=out, runner=runner, simulate=FakeSimulate(formula), draft=draft)
    assert [path.name for path in out.iterdir()] == ["studies"]
    assert list(draft.iterdir()) == [folder]
    assert Recommendation.load(folder) == found


def test_the_budget_is_shown_from_what_the_profile_took(tmp_path: Path) -> None:
    """Seconds of all trainers beside the bound, before the first real leg and behind every one."""
    told: list[tuple[str, int, int]] = []
    experiment = layers_experiment(budget_gpu_hours=0.5)
    runner = FakeRunner(experiment, formula)

    def progress(*what: Any) -> None:
        told.append(what)

    tune(experiment, out=tmp_path, runner=runner, simulate=FakeSimulate(formula), progress=progress, spent_s=lambda: 50.0)
    shown = [(done, total) for stage, done, total in told if stage == SPENT]
    assert shown[0] == (50, 1800)
    assert len(shown) == 1 + len(runner.legs)


def test_a_profile_is_refused_beyond_the_budget() -> None:
    """Two trainers held for 80 seconds: a leg of 9 seconds stays within 100, one of 11 would not."""
    experiment = layers_experiment(budget_gpu_hours=100 / 3600)
    session = cast("Any", SimpleNamespace(experiment=experiment, held_s=80.0))
    refuse_beyond_budget(session, 9.0)
    with pytest.raises(ConfigError, match="budget_gpu_hours"):
        refuse_beyond_budget(session, 11.0)
    session.experiment = layers_experiment()
    refuse_beyond_budget(session, 1e9)
