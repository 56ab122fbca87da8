"""A tuning that goes on from an earlier one's folder: what has moved, what is measured again, and what is not."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from scipy import stats
from tuner_fakes import FakeRunner, FakeSimulate, layers_experiment, profiled_experiment, target_experiment

from fleetbench.config import encode
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.result import RunResult
from fleetbench.strategy import DistributedStrategy
from real.leg import Leg
from tuner.earlier import Earlier, Held
from tuner.real_runs import ROUNDS, RealRuns
from tuner.recommendation import Arm, Pair, Recommendation
from tuner.resumption import inputs_of
from tuner.sequential import gone
from tuner.tune import tune
from tuner.verify import verify

FEW: dict[str, object] = {"fusion": (), "update_by_bucket": (False,), "nccl_comm_num": (1,), "sync_nccl_allreduce": (True,)}


def formula(strategy: DistributedStrategy) -> float:
    """Buckets of 2 MB take 9 ms a step, of 1 MB 10, and others 13; K halves it."""
    return {2.0: 0.009, 1.0: 0.010}.get(strategy.fuse_grad_size_in_MB, 0.013) / (1 if strategy.local_steps == 1 else 2)


Tuned = tuple[Recommendation, Path, FakeRunner]


def tuned(experiment: Experiment, out: Path, earlier: Path | None = None) -> Tuned:
    """A tuning by formula, and what it asked for."""
    runner = FakeRunner(experiment, formula)
    return *tune(experiment, out=out, runner=runner, simulate=FakeSimulate(formula), earlier=earlier), runner


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Experiment, Tuned]:
    """Buckets of 1 and 32 MB."""
    experiment = layers_experiment(**FEW, fuse_grad_size_in_MB=(1.0, 32.0))
    with pytest.MonkeyPatch.context() as patch:  # as in the tests
        patch.setattr("tuner.space.os.cpu_count", lambda: 64)
        return experiment, tuned(experiment, tmp_path_factory.mktemp("first"))


def test_nothing_is_measured_again_where_nothing_has_moved(first: tuple[Experiment, Tuned], tmp_path: Path) -> None:
    """The same verdict from the same pairs, without a leg; the new folder has the runs of the old one."""
    experiment, (before, folder, _) = first
    found, again, runner = tuned(experiment, tmp_path, folder)
    assert (runner.legs, found.line, found.pairs) == ([], before.line, before.pairs)
    assert any(note.startswith(f"since {folder.name} moved: nothing. Taken from it: legs") for note in found.notes)
    assert {run for arm in found.arms for run in arm.measured_runs} <= {path.name for path in (again / "runs").iterdir()}
    third, _, runner = tuned(experiment, tmp_path, again)
    assert (runner.legs, third.line) == ([], before.line)


def test_a_larger_space_measures_what_is_new_beside_the_default(first: tuple[Experiment, Tuned], tmp_path: Path) -> None:
    """Buckets of 2 MB may be tried now: they are the only new strategy, and run against the default alone."""
    experiment, (_, folder, _) = first
    larger = experiment.replace(tune=replace(experiment.tune, fuse_grad_size_in_MB=(1.0, 2.0, 32.0)))
    found, _, runner = tuned(larger, tmp_path, folder)
    assert found.strategy.fuse_grad_size_in_MB == 2.0
    assert {leg.strategy.fuse_grad_size_in_MB for leg in runner.legs} == {2.0, 32.0}
    assert any("moved: tune.fuse_grad_size_in_MB [1.0, 32.0] -> [1.0, 2.0, 32.0]." in note for note in found.notes)


@pytest.mark.parametrize(
    ("change", "moved", "held"),
    [
        (lambda data: data["cluster"]["inter"].update(bandwidth="10 Gbit/s"), "cluster.inter.bandwidth", (False, False, False)),
        (lambda data: data["workload"].update(batch_size=9), "workload.batch_size", (False, False, False)),
        (lambda data: data["workload"].update(eval_every=7), "workload.eval_every", (True, False, True)),
        (lambda data: data["tune"].update(pairs=6), "tune.pairs", (True, True, False)),
        (lambda data: data["tune"].update(min_gain=0.03), "tune.min_gain", (True, True, False)),
        (lambda data: data["tune"].update(metric="accuracy"), "tune.metric", (True, False, True)),
        (lambda data: data["tune"].update(leg_steps=6), "tune.leg_steps", (False, False, False)),
        (lambda data: data["run"].update(seed=1), "run.seed", (False, False, False)),
    ],
)
def test_what_has_moved_decides_what_holds(
    first: tuple[Experiment, Tuned], change: Callable[[dict[str, dict[str, dict[str, object]]]], None], moved: str, held: tuple[bool, ...]
) -> None:
    """Of emulated trainers, whose legs follow the links."""
    experiment, (_, folder, _) = first
    data = encode(experiment)
    change(data)
    found = Earlier.load(folder).beside(Experiment.from_dict(data), inputs_of(()))
    assert [line.split()[0] for line in found.moved] == [moved]
    assert (found.legs, found.targets, found.has_pairs) == held


def test_links_of_real_machines_and_layer_times_move_no_legs(tmp_path: Path) -> None:
    """A profile that was taken again has other times, a script other text: legs hold beside the first, and not beside the second."""
    experiment = profiled_experiment(tmp_path, **FEW, local_steps=(1,), fuse_grad_size_in_MB=(1.0, 32.0), thread_num=(1,), wire=("fp32",))
    script = tmp_path / "train.py"
    script.write_text("one")
    _, folder, _ = tuned(experiment, tmp_path / "runs")
    earlier, inputs = Earlier.load(folder), inputs_of(())
    assert earlier.beside(experiment, inputs).moved == ()
    cluster = replace(experiment.cluster, intra=replace(experiment.cluster.intra, bandwidth=10**10))  # type: ignore[type-var]  # declared
    faster = earlier.beside(experiment.replace(cluster=cluster), inputs)
    assert (faster.legs, faster.targets) == (True, True)
    profile = Path(experiment.workload.profile or "")
    profile.write_text("\n".join(profile.read_text().splitlines()[1:]).replace("1 ms", "3 ms"))
    slower = earlier.beside(experiment, inputs)
    assert slower.moved == ("layer times, of a step 30 -> 50 ms",)
    assert slower.legs
    other = earlier.beside(experiment, inputs_of(("python", str(script))))
    assert other.moved[-2:] == ("the command", "the files")
    assert not other.legs


def test_a_script_that_has_not_changed_keeps_its_profile(tmp_path: Path) -> None:
    """Under what is asked for now; another script is found out again, and so is one that may not report its loss."""
    base = Experiment.from_dict({"workload": {"target_loss": 0.5, "steps": 77}, "tune": {"pairs": 9}})
    experiment = profiled_experiment(tmp_path, **FEW, local_steps=(1,), fuse_grad_size_in_MB=(1.0, 32.0), thread_num=(1,), wire=("fp32",))
    experiment = experiment.replace(run=replace(experiment.run, launcher="command"))
    _, folder, _ = tuned(experiment, tmp_path / "runs")
    earlier, inputs = Earlier.load(folder), inputs_of(())
    found = earlier.script(base, inputs)
    assert found is not None
    assert (found.workload.steps, found.tune.pairs, found.workload.model) == (77, 9, experiment.workload.model)
    assert found.workload.profile == str(folder / "profile.toml")
    assert earlier.script(base.replace(workload=replace(base.workload, target_loss=None)), inputs) is None
    assert earlier.script(base, inputs_of(("python",))) is None


def test_a_folder_that_is_no_tuning_is_refused(tmp_path: Path) -> None:
    """Before anything is done."""
    with pytest.raises(ConfigError, match="is no folder of a complete tuning") as caught:
        tuned(layers_experiment(), tmp_path / "runs", tmp_path)
    assert (caught.value.where, caught.value.value) == ("--from", str(tmp_path))
    assert not (tmp_path / "runs").exists()


def test_legs_of_another_pace_are_run_again(tmp_path: Path) -> None:
    """Adaptive K to another target has other rounds in the mean, so the fixed K that its legs ran is not what has its seconds now."""
    strategy = DistributedStrategy(adaptive_localsgd=True)
    eight, two = (DistributedStrategy().replace(localsgd=True, localsgd_configs={"k_steps": k}) for k in (8, 2))
    arm = Arm(name="candidate 1", strategy=strategy, simulated_s=0.01, paced_by=eight, ratio=0.5, measured_s=(0.01,))
    pairs = (Pair(default_s=2.0, finalist_s=1.0, default_first=True),)
    known = Recommendation(
        experiment="0123abcd", name="x", verdict="USE", reason="none", strategy=strategy, arms=(arm,), finalist=arm.name, pairs=pairs
    )
    held = Held(earlier=Earlier(tmp_path, known, layers_experiment(), {}), moved=(), legs=True, targets=True, has_pairs=True)
    assert (held.arm(arm), held.compared(arm)) == (arm, known)
    other = replace(arm, paced_by=two)
    assert (held.arm(other), held.compared(other)) == (None, None)


FUSED = DistributedStrategy(fuse_grad_size_in_MB=1.0)
MEAN, SPREAD = 0.0344, (0.035, -0.01, 0.03, -0.015, 0.04, -0.02, 0.03, -0.01)
"""Of the log ratios of pairs, and each one's distance from it."""


@dataclass
class Paired(FakeRunner):
    """Ten seconds a leg; small buckets are chosen, and a pair's log ratio is ``mean`` and ``SPREAD`` by its window."""

    mean: float = 0.0

    def run(self, leg: Leg) -> RunResult:
        """See ``Runner``."""
        gain = 0.1 if leg.window < ROUNDS else self.mean + SPREAD[leg.window - ROUNDS]
        self.noise = lambda _: math.exp(-gain) if leg.strategy == FUSED else 1.0
        return super().run(leg)


def in_a_budget(num_legs: int, mean: float, folder: Path, earlier: Recommendation | None = None, **held: bool) -> Recommendation:
    """The verdict on small buckets where a budget has room for so many legs, after an earlier one, if any."""
    experiment = layers_experiment(pairs=48, budget_minutes=num_legs / 6)
    runner = Paired(experiment, lambda _: 0.01, mean=mean)
    now = iter(10.0 * ((number + 1) // 2) for number in range(100))
    legs = RealRuns(experiment=experiment, runner=runner, folder=folder, step_s=1.0, clock=lambda: next(now))
    arms = [Arm(name=name, strategy=one, simulated_s=0.01) for name, one in (("default", DistributedStrategy()), ("one", FUSED))]
    holds = {"legs": True, "targets": True, "has_pairs": True} | held
    before = None if earlier is None else Held(earlier=Earlier(folder, earlier, experiment, {}), moved=(), **holds)
    return verify(experiment, arms, legs, held=before)


@pytest.mark.slow
def test_a_larger_budget_goes_on_with_the_error_that_is_left(tmp_path: Path) -> None:
    """Three pairs were undecided; a larger budget has five. Student's t of these is 95 % sure; the look at three has left less."""
    three = in_a_budget(10, MEAN, tmp_path / "three")
    assert (three.verdict, three.undecided, len(three.pairs), three.ended) == ("KEEP DEFAULT", True, 3, (3,))
    assert "--from goes on with the error that is left, up to 48 pairs, which would prove a gain above" in three.reason
    assert (three.error, three.error_left) == (pytest.approx(0.85 * 0.05), pytest.approx(0.15 * 0.05))
    five = in_a_budget(4, MEAN, tmp_path / "five", three)
    assert stats.ttest_1samp([MEAN + one for one in SPREAD[:5]], math.log(1.02), alternative="greater").pvalue < 0.04
    assert five.pairs[:3] == three.pairs
    assert (five.undecided, len(five.pairs), five.ended) == (True, 5, (3, 5))
    assert (five.error, five.error_left) == (three.error, three.error_left)


@pytest.mark.slow
def test_what_an_earlier_finalist_has_spent_is_gone(tmp_path: Path) -> None:
    """Fresh pairs of it have what its looks had not spent, and what was left beside it; another finalist has that alone; all is 5 %."""
    three = in_a_budget(10, MEAN, tmp_path / "three")
    again = in_a_budget(6, MEAN, tmp_path / "again", three, has_pairs=False)
    unspent = three.error * (1 - gone(3, 48, (3,)))
    assert 0.4 * three.error < unspent < 0.5 * three.error
    assert again.error == pytest.approx(0.85 * (three.error_left + unspent))
    other = in_a_budget(6, MEAN, tmp_path / "other", replace(three, finalist="default"))
    assert other.error == pytest.approx(0.85 * three.error_left)
    assert other.error + other.error_left + three.error == pytest.approx(0.05)
    new = in_a_budget(10, MEAN, tmp_path / "new", three, legs=False, has_pairs=False)
    assert new.error == three.error


def test_seeds_that_were_judged_are_no_more_in_a_tuning_that_goes_on(tmp_path: Path) -> None:
    """Five were undecided, and ``tune.target_seeds = 8`` adds none. To three, which prove nothing, it adds five."""
    local = DistributedStrategy().replace(localsgd=True, localsgd_configs={"k_steps": 16})
    more = (1.2, 1.7, 2.4, 1.4, 2.0, 1.2, 1.2, 1.2)

    def found(seeds: int, folder: Path, earlier: Recommendation | None = None) -> tuple[Recommendation, list[int | None]]:
        experiment = target_experiment(target_seeds=seeds)
        experiment = experiment.replace(run=replace(experiment.run, device="cpu"))
        updates = lambda leg: (80.0 + (leg.seed or 0)) * (more[leg.seed or 0] if leg.strategy.localsgd else 1.0)  # noqa: E731  # one line
        runner = FakeRunner(experiment, lambda one: 0.01 / (2 if one.localsgd else 1), updates=updates)
        arms = [Arm(name=name, strategy=one, simulated_s=0.01) for name, one in (("default", DistributedStrategy()), ("one", local))]
        held = earlier and Held(earlier=Earlier(folder, earlier, experiment, {}), moved=(), legs=True, targets=True, has_pairs=True)
        legs = RealRuns(experiment=experiment, runner=runner, folder=folder, step_s=0.01)
        return verify(experiment, arms, legs, held=held), [leg.seed for leg in runner.legs if leg.evaluate]

    five, _ = found(5, tmp_path / "five")
    assert (five.undecided, five.seeds) == (True, 5)
    eight, ran = found(8, tmp_path / "eight", five)
    assert (ran, eight.seeds, eight.line) == ([], 5, five.line)
    three, _ = found(3, tmp_path / "three")
    later, ran = found(8, tmp_path / "later", three)
    assert (ran, later.seeds) == ([seed for seed in range(3, 8) for _ in range(2)], 8)
