"""A tuning that goes on from an earlier one's folder: what has moved, what is measured again, and what is not."""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from scipy import stats
from tuner_fakes import FakeRunner, FakeSimulate, layers_experiment, profiled_experiment, target_experiment

from fleetbench.config import encode
from fleetbench.experiment import Experiment
from fleetbench.profile import Profile
from fleetbench.result import RunResult
from fleetbench.strategy import DistributedStrategy
from real.leg import Leg
from real.processes.diagnosis import LegFailed
from tuner.evidence import ROUNDS, Evidence
from tuner.folder import FRESH_S, Earlier, inputs_of, recent
from tuner.ledger import Ledger
from tuner.real_runs import RealRuns
from tuner.recommendation import Arm, Recommendation
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
    assert f"legs of {folder.name}, and runs to the same target, are taken over" in found.notes
    assert {run for arm in found.arms for run in arm.measured_runs} <= {path.name for path in (again / "runs").iterdir()}
    third, _, runner = tuned(experiment, tmp_path, again)
    assert (runner.legs, third.line) == ([], before.line)


def test_a_larger_space_is_ranked_anew(first: tuple[Experiment, Tuned], tmp_path: Path) -> None:
    """Buckets of 2 MB may be tried now: another strategy takes part, so that all are ranked in one round again."""
    experiment, (_, folder, _) = first
    larger = experiment.replace(tune=replace(experiment.tune, fuse_grad_size_in_MB=(1.0, 2.0, 32.0)))
    found, _, runner = tuned(larger, tmp_path, folder)
    assert found.strategy.fuse_grad_size_in_MB == 2.0
    assert {leg.strategy.fuse_grad_size_in_MB for leg in runner.legs} >= {1.0, 2.0, 32.0}


@pytest.mark.parametrize(
    ("change", "moved", "legs", "fresh"),
    [
        (lambda data: data["cluster"]["inter"].update(bandwidth="10 Gbit/s"), "cluster.inter.bandwidth", False, True),
        (lambda data: data["workload"].update(batch_size=9), "workload.batch_size", False, True),
        (lambda data: data["workload"].update(eval_every=7), "workload.eval_every", True, False),
        (lambda data: data["tune"].update(pairs=6), "tune.pairs", True, True),
        (lambda data: data["tune"].update(min_gain=0.03), "tune.min_gain", True, True),
        (lambda data: data["tune"].update(leg_steps=6), "tune.leg_steps", False, True),
        (lambda data: data["run"].update(seed=1), "run.seed", False, True),
    ],
)
def test_what_has_moved_decides_what_is_measured_again(
    first: tuple[Experiment, Tuned],
    change: Callable[[dict[str, dict[str, dict[str, object]]]], None],
    moved: str,
    legs: bool,  # whether those that rank hold
    fresh: bool,  # whether there are new pairs
    tmp_path: Path,
) -> None:
    """Of emulated trainers, whose legs follow the links; pairs are judged again where what they are judged by has moved."""
    experiment, (_, folder, _) = first
    data = encode(experiment)
    change(data)
    found, _, runner = tuned(Experiment.from_dict(data), tmp_path, folder)
    assert any(note.endswith(f"are measured again: changed since: {moved}") for note in found.notes) == (fresh and not legs)
    assert any(leg.window < ROUNDS for leg in runner.legs) is not legs
    assert any(leg.window >= ROUNDS for leg in runner.legs) is fresh


def test_runs_to_another_target_are_run_again(tmp_path: Path) -> None:
    """Each is found by what it was to reach: another target has other runs, and the same legs; the same target has the same runs."""
    experiment = target_experiment(**FEW, fuse_grad_size_in_MB=(32.0,), local_steps=(1, 4))
    _, folder, before = tuned(experiment, tmp_path / "first")
    assert any(leg.evaluate for leg in before.legs)
    for target in (0.5, 0.6):
        asked = experiment.replace(workload=replace(experiment.workload, target_loss=target))
        _, _, runner = tuned(asked, tmp_path / str(target), folder)
        assert {leg.evaluate for leg in runner.legs} == ({True} if target == 0.6 else set())


def test_links_of_real_machines_and_layer_times_move_no_legs(tmp_path: Path) -> None:
    """A profile that was taken again has other times, a script other text: legs hold beside the first, and not beside the second."""
    experiment = profiled_experiment(tmp_path, **FEW, local_steps=(1,), fuse_grad_size_in_MB=(1.0, 32.0), thread_num=(1,), wire=("fp32",))
    script = tmp_path / "train.py"
    script.write_text("one")
    _, folder, _ = tuned(experiment, tmp_path / "runs")
    earlier, inputs = Earlier.load(folder), inputs_of(())
    evidence, _ = earlier.beside(experiment, inputs)
    assert evidence.earlier
    cluster = replace(experiment.cluster, intra=replace(experiment.cluster.intra, bandwidth=10**10))  # type: ignore[type-var]  # declared
    assert earlier.beside(experiment.replace(cluster=cluster), inputs)[0] == evidence
    profile = Path(experiment.workload.profile or "")
    profile.write_text(profile.read_text().replace("1 ms", "3 ms"))
    slower, _ = earlier.beside(experiment, inputs)
    assert slower == evidence
    other, note = earlier.beside(experiment, inputs_of(("python", str(script))))
    assert str(note).endswith("are measured again: changed since: the command, the files")
    assert other == Evidence()


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


def test_a_profile_of_the_last_hour_is_found_by_what_was_run(tmp_path: Path) -> None:
    """One of the same command and files; none of another command, none that is older, and none of a busy machine."""
    experiment = profiled_experiment(tmp_path, **FEW, local_steps=(1,), fuse_grad_size_in_MB=(1.0, 32.0), thread_num=(1,), wire=("fp32",))
    out, inputs = tmp_path / "runs", inputs_of(())
    assert recent(out, inputs) is None
    tuned(experiment, out)
    found = recent(out, inputs)
    assert found is not None
    assert found.experiment.workload.profile == str(found.path / "profile.toml")
    assert recent(out, inputs_of(("python", "train.py"))) is None
    profiles = list(out.glob("*-tune-*/profile.toml"))
    for path in profiles:
        os.utime(path, (0, time.time() - FRESH_S - 1))
    assert recent(out, inputs) is None
    for path in profiles:
        replace(Profile.load(path), foreign_cores=1.5).save(path)
    assert recent(out, inputs) is None


FUSED = DistributedStrategy(fuse_grad_size_in_MB=1.0)
MEAN, SPREAD = 0.0344, (0.035, -0.01, 0.03, -0.015, 0.04, -0.02, 0.03, -0.01)
"""Of the log ratios of pairs, and each one's distance from it."""


@dataclass
class Paired(FakeRunner):
    """Ten seconds a leg; small buckets are chosen, and a pair's log ratio is ``mean`` and ``SPREAD`` by its window."""

    mean: float = 0.0

    def run(self, leg: Leg) -> RunResult:
        """See ``Runner``."""
        gain = 0.1 if leg.window < ROUNDS else self.mean + SPREAD[(leg.window - ROUNDS) % len(SPREAD)]
        self.noise = lambda _: math.exp(-gain) if leg.strategy == FUSED else 1.0
        return super().run(leg)


Found = tuple[Recommendation, Evidence, Paired]


def inherited(earlier: Evidence, experiment: Experiment) -> Evidence:
    """What a tuning of an experiment that goes on from an earlier one begins with."""
    return earlier.inherited(experiment.tune.pairs, experiment.tune.min_gain)


def share(evidence: Evidence) -> float:
    """Chance of a USE without the gain that the last comparison may have."""
    return evidence.comparisons[-1].error


def left(evidence: Evidence) -> float:
    """The chance that is left for finalists to come."""
    return Ledger(layers_experiment(), evidence, 0.01).error_left()


def in_a_budget(num_legs: int, mean: float, folder: Path, earlier: Evidence | None = None, **changes: object) -> Found:
    """The verdict on small buckets where a budget has room for so many legs, after an earlier one, if any."""
    used = changes.pop("used", FUSED)
    experiment = layers_experiment(**{"pairs": 48, "budget_minutes": num_legs / 6} | changes)
    runner = Paired(experiment, lambda _: 0.01, mean=mean)
    now = iter(10.0 * ((number + 1) // 2) for number in range(100))
    known = Evidence() if earlier is None else inherited(earlier, experiment)
    legs = RealRuns(experiment=experiment, runner=runner, folder=folder, step_s=1.0, clock=lambda: next(now), evidence=known)
    arms = [Arm(name=name, strategy=one, simulated_s=0.01) for name, one in (("default", DistributedStrategy()), ("one", used))]
    return verify(experiment, arms, legs), legs.evidence, runner  # type: ignore[arg-type]  # strategies


@pytest.mark.slow
def test_a_larger_budget_goes_on_with_the_error_that_is_left(tmp_path: Path) -> None:
    """Three pairs were undecided; a larger budget has five. Student's t of these is 95 % sure; the look at three has left less."""
    three, evidence, _ = in_a_budget(10, MEAN, tmp_path / "three")
    assert (three.verdict, three.undecided, len(three.pairs)) == ("KEEP DEFAULT", True, 3)
    assert evidence.comparisons[-1].ended == (3,)
    assert "--from goes on with the error that is left, up to 48 pairs, which would prove a gain above" in three.reason
    assert (share(evidence), left(evidence)) == (pytest.approx(0.85 * 0.05), pytest.approx(0.15 * 0.05))
    five, later, _ = in_a_budget(4, MEAN, tmp_path / "five", evidence)
    assert stats.ttest_1samp([MEAN + one for one in SPREAD[:5]], math.log(1.02), alternative="greater").pvalue < 0.04
    assert five.pairs[:3] == three.pairs
    assert (five.undecided, len(five.pairs), later.comparisons[-1].ended) == (True, 5, (3, 5))
    assert (share(later), left(later)) == (share(evidence), pytest.approx(left(evidence)))


@pytest.mark.slow
def test_what_an_earlier_finalist_has_spent_is_gone(tmp_path: Path) -> None:
    """Where it is judged otherwise it has what its looks had not spent; another has what was left beside it alone; all is 5 %."""
    _, evidence, _ = in_a_budget(10, MEAN, tmp_path / "three")
    _, again, _ = in_a_budget(10, MEAN, tmp_path / "again", evidence, min_gain=0.03)
    unspent = share(evidence) * (1 - gone(3, 48, (3,)))
    assert 0.4 * share(evidence) < unspent < 0.5 * share(evidence)
    assert share(again) == pytest.approx(0.85 * (left(evidence) + unspent))
    _, other, _ = in_a_budget(10, MEAN, tmp_path / "other", evidence, used=DistributedStrategy(fuse_grad_size_in_MB=4.0))
    assert share(other) == pytest.approx(0.85 * left(evidence))
    assert share(other) + left(other) + share(evidence) == pytest.approx(0.05)


@pytest.mark.slow
def test_settings_that_come_back_spend_no_error_twice(tmp_path: Path) -> None:
    """Judged at 2 %, then at 3 %, and at 2 % again: all looks together have 5 %, however often they come back."""
    evidence, spent = None, 0.0
    for number, gain in enumerate((0.02, 0.03, 0.02, 0.03)):
        _, evidence, _ = in_a_budget(10, MEAN, tmp_path / str(number), evidence, min_gain=gain)
        assert left(evidence) >= 0
        begun = [one for one in evidence.comparisons if not one.closed]
        assert begun[-1].error > 0
        assert sum(one.error for one in evidence.comparisons) + left(evidence) == pytest.approx(0.05)
        assert [one.min_gain for one in begun] == [gain]
        spent = sum(one.error for one in evidence.comparisons if one.closed)
    assert 0 < spent < 0.05


def test_a_finalist_that_failed_leaves_no_more_error_to_a_tuning_that_goes_on(tmp_path: Path) -> None:
    """Its looks have spent what they have; the second finalist's share is of the rest, and a third one's of what is left then."""
    other = DistributedStrategy(fuse_grad_size_in_MB=4.0)
    experiment = layers_experiment(pairs=8)

    class Failing(FakeRunner):
        def run(self, leg: Leg) -> RunResult:
            if leg.strategy == FUSED and leg.window == ROUNDS + 5:
                raise LegFailed("out of memory", "rank 1")
            self.noise = lambda number: 1 + 0.1 * (-1) ** number
            return super().run(leg)

    arms = [
        Arm(name=name, strategy=one, simulated_s=0.01) for name, one in (("default", DistributedStrategy()), ("one", FUSED), ("two", other))
    ]
    runner = Failing(experiment, lambda one: {FUSED: 0.0095, other: 0.0096}.get(one, 0.01))
    legs = RealRuns(experiment=experiment, runner=runner, folder=tmp_path, step_s=0.01)
    found = verify(experiment, arms, legs)
    assert "failed on rank 1" in (found.arms[1].rejected or "")
    known = inherited(legs.evidence, experiment)
    assert sum(one.error for one in known.comparisons) <= 0.05
    assert [one.closed for one in known.comparisons] == [True, False]
    assert Ledger(experiment, known, 0.01).error_left() == pytest.approx(left(legs.evidence))


def test_what_was_void_is_measured_again(tmp_path: Path) -> None:
    """Two of the six legs of pairs were: the tuning that goes on has two pairs more, after those that were looked at."""
    experiment = layers_experiment(pairs=3)
    arms = [Arm(name=name, strategy=one, simulated_s=0.01) for name, one in (("default", DistributedStrategy()), ("one", FUSED))]
    runner = FakeRunner(experiment, formula, void=lambda number: number in (4, 7))
    legs = RealRuns(experiment=experiment, runner=runner, folder=tmp_path, step_s=1.0)
    assert len(verify(experiment, arms, legs).pairs) == 1
    again = FakeRunner(experiment, formula)
    later = RealRuns(experiment=experiment, runner=again, folder=tmp_path, step_s=1.0, evidence=inherited(legs.evidence, experiment))
    assert len(verify(experiment, arms, later).pairs) == 3
    assert [leg.window for leg in again.legs] == [5, 5, 6, 6]


def test_seeds_that_were_judged_are_no_more_in_a_tuning_that_goes_on(tmp_path: Path) -> None:
    """Five were undecided, and ``tune.target_seeds = 8`` adds none. To three, which prove nothing, it adds five."""
    local = DistributedStrategy().replace(localsgd=True, localsgd_configs={"k_steps": 16})
    more = (1.2, 1.7, 2.4, 1.4, 2.0, 1.2, 1.2, 1.2)

    def found(seeds: int, folder: Path, earlier: Evidence | None = None) -> tuple[Recommendation, list[int | None], Evidence]:
        experiment = target_experiment(target_seeds=seeds)
        experiment = experiment.replace(run=replace(experiment.run, device="cpu"))
        updates = lambda leg: (80.0 + (leg.seed or 0)) * (more[leg.seed or 0] if leg.strategy.localsgd else 1.0)  # noqa: E731  # one line
        runner = FakeRunner(experiment, lambda one: 0.01 / (2 if one.localsgd else 1), updates=updates)
        arms = [Arm(name=name, strategy=one, simulated_s=0.01) for name, one in (("default", DistributedStrategy()), ("one", local))]
        known = Evidence() if earlier is None else inherited(earlier, experiment)
        legs = RealRuns(experiment=experiment, runner=runner, folder=folder, step_s=0.01, evidence=known)
        return verify(experiment, arms, legs), [leg.seed for leg in runner.legs if leg.evaluate], legs.evidence

    five, _, evidence = found(5, tmp_path / "five")
    assert (five.undecided, five.seeds) == (True, 5)
    eight, ran, _ = found(8, tmp_path / "eight", evidence)
    assert (ran, eight.seeds, eight.line) == ([], 5, five.line)
    _, _, evidence = found(3, tmp_path / "three")
    later, ran, _ = found(8, tmp_path / "later", evidence)
    assert (ran, later.seeds) == ([seed for seed in range(3, 8) for _ in range(2)], 8)
