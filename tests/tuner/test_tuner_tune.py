import json
import math
import re
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tuner_fakes import FakeRunner, FakeSimulate, layers_experiment, layers_with, profiled_experiment, target_experiment

from fleetbench.errors import ConfigError, WorkerFailed
from fleetbench.experiment import Experiment
from fleetbench.plan.combination import OUTSIDE
from fleetbench.profile import table_for
from fleetbench.result import RunResult
from fleetbench.store import load_run
from fleetbench.strategy import ASyncConfigs, DistributedStrategy
from real.leg import Leg
from tuner.budget import leg_steps_of, seeds_of
from tuner.recommendation import Recommendation
from tuner.served import search_modes, shortened
from tuner.space import name_of
from tuner.tune import tune
from tuner.ways import Ways


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
    assert found.notes[-1].endswith(" steps")
    assert DistributedStrategy.load(folder / "recommended.toml") == found.strategy


@pytest.mark.slow
def test_a_simulator_that_is_wrong_is_corrected_by_real_runs(tmp_path: Path) -> None:
    """What the simulator likes best is slower for real than the default: the default stays."""
    experiment = layers_experiment()
    runner = FakeRunner(experiment, lambda strategy: 0.01 if strategy == DistributedStrategy() else 0.011)
    found, folder = tune(experiment, out=tmp_path, runner=runner, simulate=FakeSimulate(formula))
    assert found.verdict == "KEEP DEFAULT"
    assert found.strategy == experiment.strategy
    assert found.line.startswith("KEEP DEFAULT: ")
    assert tomllib.loads((folder / "recommended.toml").read_text()) == {"schema": 1, "strategy": {}}


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
def test_an_advice_equal_to_the_default_runs_once(tmp_path: Path) -> None:
    """Where Fleet's advice comes to the default's plan, it is no arm of its own, and a note says so."""
    experiment = layers_experiment()
    advised = DistributedStrategy(fuse_grad_size_in_MB=0.3815, nccl_comm_num=2, sync_nccl_allreduce=False, thread_num=3)
    experiment = experiment.replace(strategy=advised)
    found, _ = tune(experiment, out=tmp_path, runner=FakeRunner(experiment, formula), simulate=FakeSimulate(formula))
    assert "advice" not in [arm.name for arm in found.arms]
    assert any("same plan as the default" in note for note in found.notes)


def test_local_steps_need_a_target(tmp_path: Path) -> None:
    """Twice the speed for any K above 1, and no target: K is neither simulated nor run, and a note says why."""
    experiment, simulate = layers_experiment(), FakeSimulate(formula)
    runner = FakeRunner(experiment, formula)
    found, _ = tune(experiment, out=tmp_path, runner=runner, simulate=simulate)
    assert {strategy.local_steps for strategy in simulate.asked} == {1}
    assert {leg.strategy.local_steps for leg in runner.legs} == {1}
    assert any("tune.local_steps stays 1" in note for note in found.notes)


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


def test_fleets_defaults_can_be_what_is_recommended(tmp_path: Path) -> None:
    """An experiment whose own strategy is worse than Fleet's defaults gets a line that says what to use."""
    experiment = layers_experiment(fuse_grad_size_in_MB=(32.0,), nccl_comm_num=(1,))
    experiment = experiment.replace(strategy=DistributedStrategy(fuse_grad_size_in_MB=0.25))
    runner = FakeRunner(experiment, lambda strategy: 0.01 if strategy == DistributedStrategy() else 0.02)
    found, _ = tune(experiment, out=tmp_path, runner=runner, simulate=FakeSimulate(formula))
    assert found.line.startswith("USE Fleet's defaults: 2.00x")


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


@pytest.mark.slow
def test_progress_is_told_in_order(tmp_path: Path) -> None:
    """Search, the legs that rank the arms, then seeds and pairs, whose numbers grow."""
    experiment = target_experiment(trials=8)
    told: list[tuple[str, int, int]] = []
    runner = FakeRunner(experiment, formula)
    tune(experiment, out=tmp_path, runner=runner, simulate=FakeSimulate(formula), progress=lambda *what: told.append(what))
    stages = list(dict.fromkeys(what for what, _, _ in told))
    searched, *rest = [stage for stage in stages if stage.startswith(("search", "run", "verify"))]
    assert searched == f"search {told[0][2]} strategies"
    assert rest[0].startswith("run the best 4")
    assert rest[-1].startswith("verify: 1 seed, ")
    assert [stage.split()[0] for stage in rest] == sorted(stage.split()[0] for stage in rest)


@pytest.mark.slow
def test_the_real_simulator_drives_a_whole_tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Search and stored runs by the simulator, over a profile: local steps, sizes and threads all take part."""
    monkeypatch.setattr("tuner.tune._VIRTUAL_SEEDS", 2)
    wire = ("fp32", "fp16", "bf16")
    few: dict[str, object] = {"local_steps": (1, 4), "fuse_grad_size_in_MB": (1.0, 32.0), "fusion": ("off",), "lr_scale": (1.0,)}
    experiment = profiled_experiment(tmp_path, **few, wire=wire)
    experiment = experiment.replace(workload=replace(experiment.workload, steps=20, eval_every=2, target_loss=2.25))
    runner = FakeRunner(experiment, lambda strategy: 0.05 / strategy.local_steps)
    found, folder = tune(experiment, out=tmp_path / "runs", runner=runner)
    assert found.verdict == "USE"
    assert {name for name, values in _varied(found).items() if len(values) > 1} == {
        "local_steps",
        "fusion",
        "wire",
        "nccl_comm_num",
        "sync_nccl_allreduce",
        "thread_num",
    }
    assert json.loads((folder / "recommendation.json").read_text())["verdict"] == "USE"


def _varied(recommendation: Recommendation) -> dict[str, set[object]]:
    return {name: {trial.parameters[name] for trial in recommendation.trials} for name in recommendation.trials[0].parameters}


def test_a_metric_needs_a_target(tmp_path: Path) -> None:
    """Refused before anything is done."""
    with pytest.raises(ConfigError, match=r"tune\.metric"):
        tune(layers_experiment(metric="accuracy"), out=tmp_path, simulate=FakeSimulate(formula))
    assert list(tmp_path.iterdir()) == []


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


def test_legs_of_servers_hold_a_round_of_every_k(tmp_path: Path) -> None:
    """Also of the K that Fleet chooses, which is 800, and no trial or leg is longer than the training, in which it is never reached."""
    experiment = served_experiment(tmp_path)
    fleets = experiment.replace(strategy=DistributedStrategy(mode="ps", a_sync=True))
    assert [leg_steps_of(one) for one in (experiment, fleets)] == [OUTSIDE + 16, 40]
    assert [shortened(one).workload.steps for one in (experiment, fleets)] == [32, 40]
    longer = fleets.replace(workload=replace(fleets.workload, steps=2000))
    assert (leg_steps_of(longer), shortened(longer).workload.steps) == (OUTSIDE + 800, 1600)
    assert name_of(fleets.strategy) == "servers in the mode that Fleet chooses"
    assert [*seeds_of(experiment.replace(tune=replace(experiment.tune, target_seeds=None)))] == [0, 1, 2, 3, 4]


def test_what_waits_for_more_gradients_waits_as_long_as_the_experiment_says(tmp_path: Path) -> None:
    """Pauses are the experiment's, where one and a half steps' compute take fewer; sums and rounds mean nothing with fewer than that."""
    experiment = served_experiment(tmp_path)
    compute_ns = sum(layer.forward + layer.backward for layer in table_for(experiment).layers)
    least = math.ceil(1.5 * compute_ns / 1e7)
    for own in (1, least + 2):
        configs = ASyncConfigs(send_wait_times=own)
        asked = experiment.replace(strategy=DistributedStrategy(mode="ps", a_sync=True, a_sync_configs=configs))
        modes = [tried.strategy.a_sync_configs for tried in search_modes(asked, lambda _: 0.01).tried]
        waiting = [mode for mode in modes if mode.k_steps > 0 or mode.max_merge_var_num > 1]
        assert len(waiting) > 3
        assert {mode.send_wait_times for mode in waiting} == {max(own, least)}


@pytest.mark.slow
def test_twice_as_many_ways_as_finalists_have_further_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside Fleet's advice: one lucky seed is not to keep a good way out."""
    experiment = profiled_experiment(tmp_path, finalists=2, search_seconds=60.0)
    experiment = experiment.replace(workload=replace(experiment.workload, steps=20, eval_every=2, target_loss=2.25))
    asked: list[int] = []

    def counting(_experiment: object, ways: Ways, best: Sequence[DistributedStrategy], *_: object, **__: object) -> Ways:
        asked.append(len(best))
        return ways

    monkeypatch.setattr("tuner.tune.over_seeds", counting)
    tune(experiment, out=tmp_path / "runs", runner=FakeRunner(experiment, lambda strategy: 0.05 / strategy.local_steps))
    assert asked == [2 * 2 + 1]


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


@pytest.mark.slow
def test_trials_are_as_short_as_asked_and_share_their_draws(tmp_path: Path) -> None:
    """A trial counts ``simulated_steps``, at most the workload's, under the experiment's own seed and stragglers; arms as long as a leg.

    Beside them a first and a last step. Three, where no straggler makes a step differ from the next.
    """
    jitter = {"stragglers": [{"kind": "jitter", "mean": 0.2}]}
    for simulated_steps, stragglers, expected in ((7, jitter, 7), (1000, jitter, 40), (7, {}, 3)):
        experiment = layers_with({}, stragglers, trials=3, simulated_steps=simulated_steps)
        seen: list[Experiment] = []

        def watched(asked: Experiment, seen: list[Experiment] = seen) -> RunResult:
            seen.append(asked)
            return FakeSimulate(formula)(asked)

        tune(experiment, out=tmp_path, runner=FakeRunner(experiment, formula), simulate=watched)
        assert {asked.workload.steps for asked in seen} == {expected + 2, experiment.tune.leg_steps}
        assert all((asked.run.seed, asked.cluster) == (experiment.run.seed, experiment.cluster) for asked in seen)


def test_a_budget_without_room_for_a_verdict_ends_after_the_first_leg(tmp_path: Path) -> None:
    """Of two trainers whose launches take 10 s: half a minute has room for one, and what would do is said. It is enough.

    The answer has the simulated ranking, and a folder.
    """
    small = layers_experiment(budget_minutes=0.5)
    runner = FakeRunner(small, formula, startup_s=10.0)
    found, folder = tune(small, out=tmp_path / "small", runner=runner, simulate=FakeSimulate(formula))
    assert len(runner.legs) == 1
    assert (found.verdict, found.undecided, found.pairs) == ("KEEP DEFAULT", True, ())
    assert len(found.trials) > 1
    assert Recommendation.load(folder).line == found.line
    says = r"\d+ runs of 5 steps to choose among \d strategies and 2 pairs would take [\d.]+ minutes by the first run"
    assert re.search(r"tune\.budget_minutes = 0\.5 has no room for a verdict: " + says, found.line)
    wanted = float(re.findall(r"set tune\.budget_minutes = ([\d.]+)", found.line)[0])
    runner = FakeRunner(small, formula, startup_s=10.0)
    assert tune(layers_experiment(budget_minutes=wanted), out=tmp_path, runner=runner, simulate=FakeSimulate(formula))[0].pairs


def test_a_strategy_is_stored_after_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tuning that is killed before it stores the strategy has left the complete folder, and none that is stored is without one."""
    experiment = layers_experiment()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tuner.tune.keep", killed)
    with pytest.raises(KeyboardInterrupt):
        tune(experiment, out=tmp_path, runner=FakeRunner(experiment, formula), simulate=FakeSimulate(formula))
    (folder,) = tmp_path.glob("planted-tune-*")
    assert Recommendation.load(folder).verdict == "USE"
    assert not (tmp_path / "recommended").exists()
