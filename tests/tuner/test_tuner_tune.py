import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tuner_fakes import FakeRunner, FakeSimulate, layers_experiment, profiled_experiment, target_experiment

from fleetbench.errors import ConfigError, WorkerFailed
from fleetbench.experiment import Experiment
from fleetbench.store import load_run
from fleetbench.strategy import DistributedStrategy
from real.leg import Leg
from tuner.recommendation import Recommendation
from tuner.space import name_of
from tuner.tune import tune


def formula(strategy: DistributedStrategy) -> float:
    """Best at buckets of 1 MB on one communicator; the default's 32 MB take 1.3 times as long. K halves the time."""
    base = 0.010 if strategy.fuse_grad_size_in_MB == 1.0 else 0.013 if strategy.fuse_grad_size_in_MB > 4 else 0.012
    return (base + 0.001 * (strategy.nccl_comm_num - 1)) / (1 if strategy.local_steps == 1 else 2)


def test_the_planted_strategy_is_recommended(tmp_path: Path) -> None:
    """The simulator's and the processes' formula agree: the verdict is USE, with the planted strategy and speed-up."""
    experiment = layers_experiment()
    found, folder = tune(experiment, out=tmp_path, runner=FakeRunner(experiment, formula), simulate=FakeSimulate(formula))
    assert found.verdict == "USE"
    assert (found.strategy.fuse_grad_size_in_MB, found.strategy.nccl_comm_num) == (1.0, 1)
    assert found.speedup == pytest.approx(1.3)
    assert found.line == "USE fuse_grad_size_in_MB = 1.0: 1.30x [1.30, 1.30], n = 4 pairs"
    assert found.notes[-1].startswith("the tuning took ")
    assert DistributedStrategy.load(folder / "recommended.toml") == found.strategy


def test_everything_behind_the_verdict_is_kept(tmp_path: Path) -> None:
    """The folder holds the experiment, the runs of every arm by name, and the recommendation reads back equal."""
    experiment = layers_experiment()
    found, folder = tune(experiment, out=tmp_path, runner=FakeRunner(experiment, formula), simulate=FakeSimulate(formula))
    assert folder.parent == tmp_path
    assert folder.name.startswith(f"planted-tune-{experiment.digest()}-")
    assert Recommendation.load(folder) == found
    assert sorted(found.runs) == sorted(path.name for path in (folder / "runs").iterdir())
    for arm in found.arms:
        assert arm.simulated_run is not None
        runs = [load_run(folder / "runs" / name) for name in (arm.simulated_run, *arm.measured_runs)]
        assert [run.summary.executor for run in runs] == ["sim"] + ["real"] * len(arm.measured_runs)
        assert {run.summary.steps for run in runs} == {experiment.tune.leg_steps}
        assert all(run.experiment.strategy == arm.strategy for run in runs)
    pairs = len(found.pairs)
    named = 2 * (len(found.arms) - 5)  # each beside the default
    assert {arm.name: len(arm.measured_runs) - (named if arm.name == "default" else 0) for arm in found.arms} == {
        arm.name: 2 + (pairs if arm.name in ("default", found.finalist) else 0) for arm in found.arms
    }
    assert Experiment.load(folder / "experiment.toml") == experiment


@pytest.mark.slow
def test_the_advice_runs_beside_the_default(tmp_path: Path) -> None:
    """Fleet's advice is an arm of the real runs, and what was left out of it is listed."""
    experiment = layers_experiment()
    found, _ = tune(experiment, out=tmp_path, runner=FakeRunner(experiment, formula), simulate=FakeSimulate(formula))
    assert [arm.name for arm in found.arms][:5] == ["default", "advice", "candidate 1", "candidate 2", "candidate 3"]
    assert all(len(arm.measured_s) == 2 for arm in found.arms[1:])
    assert any(note.startswith("Fleet's advice of mixed precision is not taken: ") for note in found.notes)


@pytest.mark.slow
def test_a_planted_k_that_misses_the_target_loses_to_what_reaches_it(tmp_path: Path) -> None:
    """Every K above 1 is twice as fast and misses the target: the synchronous gain is recommended instead."""
    experiment = target_experiment(trials=100)
    runner = FakeRunner(experiment, formula, lambda strategy: 1.0 if strategy.local_steps == 1 else None)
    found, _ = tune(experiment, out=tmp_path, runner=runner, simulate=FakeSimulate(formula))
    assert found.verdict == "USE"
    assert (found.strategy.local_steps, found.strategy.fuse_grad_size_in_MB) == (1, 1.0)
    rejected = [arm for arm in found.arms if arm.rejected]
    assert rejected
    assert all(arm.strategy.local_steps > 1 and arm.measured_s < (0.008,) for arm in rejected)


@pytest.mark.slow
def test_local_steps_that_reach_the_target_are_recommended(tmp_path: Path) -> None:
    """The control of the test above: with the target reached in half of the time, K above 1 wins."""
    experiment = target_experiment(trials=100)
    runner = FakeRunner(experiment, formula, lambda strategy: 1.0 if strategy.local_steps == 1 else 0.5)
    found, _ = tune(experiment, out=tmp_path, runner=runner, simulate=FakeSimulate(formula))
    assert found.verdict == "USE"
    assert found.strategy.local_steps > 1


def test_a_worker_that_dies_leaves_no_recommendation(tmp_path: Path) -> None:
    """The error reaches the caller, and the folder is not taken for a complete one."""
    experiment = layers_experiment()

    class Dying:
        startup_s = 0.0

        def run(self, leg: Leg) -> None:
            raise WorkerFailed("died", f"rank 1 in a leg of {leg.steps} steps")

    with pytest.raises(WorkerFailed):
        tune(experiment, out=tmp_path, runner=Dying(), simulate=FakeSimulate(formula))
    assert not list(tmp_path.glob("planted-tune-*"))
    (folder,) = tmp_path.glob("resume-planted-*")
    with pytest.raises(ConfigError, match="no recommendation"):
        Recommendation.load(folder)


def served_experiment(folder: Path) -> Experiment:
    """The profiled experiment with one server on the trainers' machine, and synchronous; every mode is a finalist."""
    base = profiled_experiment(folder, finalists=6)
    return base.replace(
        cluster=replace(base.cluster, servers=1, server_placement="shared"),
        strategy=DistributedStrategy(mode="ps"),
        workload=replace(base.workload, optimizer="sgd"),
    )


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"workload": {"target_loss": None}}, r"workload\.target_loss"),
        ({"run": {"device": "emulated"}}, r"run\.device"),
        ({"cluster": {"server_placement": "own"}}, r"cluster\.inter"),
    ],
)
def test_servers_without_a_price_or_a_link_are_refused_before_anything_is_done(tmp_path: Path, changes: dict[str, Any], where: str) -> None:
    """Modes differ in what they learn: without a target, or where nothing is learnt, no real run compares them."""
    experiment = served_experiment(tmp_path)
    changed = {name: replace(getattr(experiment, name), **fields) for name, fields in changes.items()}
    with pytest.raises(ConfigError, match=where):
        tune(experiment.replace(**changed), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_servers_modes_are_compared_to_the_target(tmp_path: Path) -> None:
    """GeoSGD with K = 16 has the fastest step and needs too many; what sums 16 gradients never arrives; sums of 4 are there first."""
    experiment = served_experiment(tmp_path)

    def step_s(strategy: DistributedStrategy) -> float:
        configs = strategy.a_sync_configs
        return 0.01 if not strategy.a_sync else 0.005 - 1e-5 * (configs.k_steps + configs.max_merge_var_num)

    def updates(leg: Leg) -> float | None:
        configs = leg.strategy.a_sync_configs
        return 40.0 + 10 * max(0, configs.k_steps) if configs.max_merge_var_num < 16 else None

    runner = FakeRunner(experiment, step_s, updates=updates, noise=lambda number: 1 + 1e-4 * (number % 3))
    recommendation, folder = tune(experiment, out=tmp_path, simulate=FakeSimulate(step_s), runner=runner)
    assert recommendation.verdict == "USE"
    assert name_of(recommendation.strategy) == "asynchronous servers, sums of 4 gradients"
    assert recommendation.to_target == pytest.approx(0.01 / 0.00496, rel=1e-3)
    assert {leg.strategy.mode for leg in runner.legs} == {"ps"}
    assert not any("advice" in note for note in recommendation.notes)
    assert (folder / "recommended.toml").is_file()


def test_a_budget_without_room_for_a_verdict_ends_after_the_first_leg(tmp_path: Path) -> None:
    """Of two trainers whose launches take 10 s: half a minute has room for one, and what would do is said. It is enough.

    The answer has the simulated ranking, and a folder.
    """
    small = layers_experiment(budget_minutes=0.5)
    runner = FakeRunner(small, formula, startup_s=10.0)
    found, folder = tune(small, out=tmp_path / "small", runner=runner, simulate=FakeSimulate(formula))
    assert len(runner.legs) == 1
    assert (found.verdict, found.undecided, found.pairs) == ("KEEP DEFAULT", True, ())
    assert found.num_trials > 1
    assert Recommendation.load(folder).line == found.line
    says = r"to rank \d strategies and run 2 pairs would take [\d.]+ minutes by the first run"
    assert re.search(r"tune\.budget_minutes = 0\.5 has no room for a verdict: " + says, found.line)
    wanted = float(re.findall(r"set tune\.budget_minutes = ([\d.]+)", found.line)[0])
    runner = FakeRunner(small, formula, startup_s=10.0)
    assert tune(layers_experiment(budget_minutes=wanted), out=tmp_path, runner=runner, simulate=FakeSimulate(formula))[0].pairs
