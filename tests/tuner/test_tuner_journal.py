from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, cast

import pytest
from tuner_fakes import FakeRunner, FakeSimulate, layers_experiment, profiled_experiment

from fleetbench.config import encode
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.profile import Profile
from fleetbench.result import RunResult
from fleetbench.strategy import DistributedStrategy
from real.leg import Leg
from real.processes.diagnosis import LegFailed, LegLost
from real.processes.place import Place, start_ticks
from tuner import script
from tuner.real_runs import SPENT, BudgetSpent, RealRuns
from tuner.recommendation import Recommendation
from tuner.resumption import Journal, Resumption
from tuner.script import refuse_beyond_budget, tune_script
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


def test_a_candidate_that_was_lost_keeps_what_follows(tmp_path: Path) -> None:
    """A tuning that went on without it goes on again after the last leg, and does not try the candidate another time."""
    runner = Breaking(FakeRunner(layers_experiment(), formula), failure=LegLost)
    for num_replayed in (0, 3):
        journal = Journal(runner, tmp_path)
        journal.run(leg())
        with pytest.raises(LegFailed, match="out of memory"):
            journal.run(leg(SMALL))
        journal.run(leg())
        assert journal.num_replayed == num_replayed
    assert runner.num_run == 3


@pytest.mark.parametrize("damaged", ["leg.json", "*/steps.parquet", "*/manifest.json", "failure"])
def test_a_leg_that_cannot_be_read_is_run_again(tmp_path: Path, damaged: str) -> None:
    """Half of a file is what a full disk or a machine that went down may leave."""
    failure = LegFailed if damaged == "failure" else None
    runner = Breaking(FakeRunner(layers_experiment(), formula), failure=failure)
    strategy = DEFAULT if failure is None else SMALL
    for _ in range(2):
        journal = Journal(runner, tmp_path)
        try:
            journal.run(leg(strategy))
        except LegFailed:
            assert failure is not None
        (path,) = (tmp_path / "00000").glob("leg.json" if damaged == "failure" else damaged)
        path.write_bytes(path.read_bytes()[:9])
    assert (runner.num_run, journal.num_replayed) == (2, 0)


def test_whoever_counts_hears_of_every_leg_that_was_run(tmp_path: Path) -> None:
    """Of one that fails too, and of none that was there."""
    heard: list[int] = []
    runner = Breaking(FakeRunner(layers_experiment(), formula), failure=LegFailed)
    for _ in range(2):
        journal = Journal(runner, tmp_path, lambda: heard.append(runner.num_run))
        journal.run(leg())
        with pytest.raises(LegFailed):
            journal.run(leg(SMALL))
    assert heard == [1, 2]


def tuned(experiment: Experiment, folder: Path, runner: Breaking) -> Recommendation:
    """A tuning through a journal."""
    return tune(experiment, out=folder, runner=Journal(runner, folder / "legs"), simulate=FakeSimulate(formula))[0]


@pytest.mark.sample(3)
@pytest.mark.parametrize("at", [0, *(pytest.param(other, marks=pytest.mark.slow) for other in (3, 9, 12))])
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


@dataclass
class Entered(FakeRunner):
    """A session of an experiment's own trainers, which may be interrupted within the second pair."""

    breaks: bool = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, leg: Leg) -> RunResult:
        """See ``Runner``."""
        if self.breaks and leg.window == 3 and leg.strategy == DEFAULT:
            raise KeyboardInterrupt
        return super().run(leg)


def test_an_interrupted_tuning_of_an_experiment_goes_on_after_its_last_leg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the second pair: the whole legs are not run again, the table is that of an undisturbed tuning, and nothing is left over."""
    experiment = layers_experiment(
        fuse_grad_size_in_MB=(1.0, 32.0), fusion=(), update_by_bucket=(False,), nccl_comm_num=(1,), sync_nccl_allreduce=(True,)
    )
    sessions: list[Entered] = []

    def session(_: Experiment, **__: object) -> Entered:
        sessions.append(Entered(experiment, formula, breaks=len(sessions) == 1))
        return sessions[-1]

    monkeypatch.setattr("real.job.session.Session", session)
    whole, _ = tune(experiment, out=tmp_path / "whole", simulate=FakeSimulate(formula))
    with pytest.raises(KeyboardInterrupt):
        tune(experiment, out=tmp_path / "broken", simulate=FakeSimulate(formula))
    (left,) = (tmp_path / "broken").glob("resume-planted-*")
    held_s = float((left / "held_s").read_text())
    kept_s = Journal(sessions[-1], left / "legs").kept_s
    assert 0 < experiment.cluster.trainers * kept_s < held_s
    monkeypatch.setattr("tuner.tune.RealRuns", partial(_kept_running, seen := list[float]()))
    found, folder = tune(experiment, out=tmp_path / "broken", simulate=FakeSimulate(formula))
    assert seen == [pytest.approx(held_s - experiment.cluster.trainers * kept_s)]
    assert (found.line, found.pairs) == (whole.line, whole.pairs)
    assert [(arm.name, arm.measured_s) for arm in found.arms] == [(arm.name, arm.measured_s) for arm in whole.arms]
    undisturbed, broken, again = (len(one.legs) for one in sessions)
    assert broken + again == undisturbed + 1  # half of the second pair
    assert sorted(path.name for path in (tmp_path / "broken").iterdir()) == sorted([folder.name, "recommended", "studies"])
    assert Recommendation.load(folder) == found


def test_a_budget_decides_about_kept_legs_as_it_did_when_they_ran(tmp_path: Path) -> None:
    """Of 20 s three legs of 5 s are gone: they are given again, a fourth fits, and a fifth does not. Legs that are forgotten stay spent."""
    experiment = layers_experiment(budget_minutes=21 / 60)
    now = [0.0]

    class Slow(FakeRunner):
        def run(self, leg: Leg) -> RunResult:
            now[0] += 5.0
            return super().run(leg)

    def runs(folder: str) -> tuple[RealRuns, Journal]:
        journal = Journal(Slow(experiment, formula), tmp_path / "legs", timer=lambda: now[0])
        kept_s = experiment.cluster.trainers * journal.kept_s
        spent_s = experiment.cluster.trainers * 15.0 if folder == "again" else 0.0
        fields = {"experiment": experiment, "runner": journal, "folder": tmp_path / folder, "step_s": 0.0, "clock": journal.clock}
        return RealRuns(**fields, spent_s=spent_s - kept_s), journal

    first, _ = runs("first")
    for window in range(3):
        first.run("default", DEFAULT, steps=10, window=window)
    assert first.spent_s == 15.0 * experiment.cluster.trainers
    again, journal = runs("again")
    assert again.spent_s == 0.0
    for window in range(3):
        again.run("default", DEFAULT, steps=10, window=window)
    assert (journal.num_replayed, again.spent_s) == (3, 15.0 * experiment.cluster.trainers)
    again.step_s = 0.5 / 10
    again.run("default", DEFAULT, steps=10, window=3)
    with pytest.raises(BudgetSpent):
        again.run("default", DEFAULT, steps=200, window=4)
    other, journal = runs("other")
    other.spent_s = 0.0
    other.run("small", SMALL, steps=10)
    assert (journal.num_replayed, other.spent_s) == (0, 25.0 * experiment.cluster.trainers)


def _kept_running(seen: list[float], **fields: Any) -> RealRuns:
    seen.append(fields["spent_s"])
    return RealRuns(**fields)


def test_a_strategy_that_fails_is_rejected_and_the_tuning_goes_on(tmp_path: Path) -> None:
    """The simulator's favourite runs out of memory: it is rejected with the rank, and the default stays."""
    experiment = layers_experiment(
        fuse_grad_size_in_MB=(1.0, 32.0), fusion=(), update_by_bucket=(False,), nccl_comm_num=(1,), sync_nccl_allreduce=(True,)
    )
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
    """By the same command and script; another script, another command or a profile that is gone begin again."""
    path = tmp_path / "train.py"
    path.write_text("one")
    command, base = ("python", str(path)), Experiment(name="mine")
    experiment = profiled_experiment(tmp_path)
    Resumption(command, base, tmp_path).keep(experiment, 12.5)
    assert Resumption(command, base, tmp_path).held_s() == 12.5
    Resumption(command, base, tmp_path).hold(20.25)
    assert Resumption(command, base, tmp_path).held_s() == 20.25
    assert Resumption(command, base, tmp_path).experiment() == experiment
    assert Resumption((*command, "--lr", "1"), base, tmp_path).experiment() is None
    path.write_text("two")
    assert Resumption(command, base, tmp_path).experiment() is None
    path.write_text("one")
    (tmp_path / "profile.toml").unlink()
    assert Resumption(command, base, tmp_path).experiment() is None
    Resumption(command, base, tmp_path).close()
    assert not list(tmp_path.glob("resume-*"))


def test_what_was_measured_of_something_else_is_not_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module beside the script that changed, or a variable that an experiment may set, makes another tuning of it; other files do not."""
    (tmp_path / "src").mkdir()
    train, model = tmp_path / "src" / "train.py", tmp_path / "src" / "model.py"
    train.write_text("import model")
    model.write_text("width = 10")
    command, base = ("python", str(train)), Experiment(name="mine")
    Resumption(command, base, tmp_path).keep(profiled_experiment(tmp_path), 1.0)
    (tmp_path / "src" / "notes.txt").write_text("a file that the script may read")
    monkeypatch.setenv("EDITOR", "another")
    assert Resumption(command, base, tmp_path).experiment() is not None
    model.write_text("width = 20")
    assert Resumption(command, base, tmp_path).experiment() is None
    model.write_text("width = 10")
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    assert Resumption(command, base, tmp_path).experiment() is None
    monkeypatch.delenv("NCCL_ALGO")
    assert Resumption(command, base, tmp_path).experiment() is not None


def test_a_tuning_that_another_process_is_at_is_refused(tmp_path: Path) -> None:
    """From its beginning, or when its profile is complete; where that process is dead, or on another host, one goes on."""
    experiment, found = profiled_experiment(tmp_path), Resumption(("train",), Experiment(name="mine"), tmp_path)
    found.claim()
    assert not found.folder.exists()
    found.keep(experiment, 1.0)
    here, owner = Place.here(), found.folder / "owner.json"
    assert json.loads(owner.read_text()) == encode(here)
    for pid, boot in ((2**22 + 1, here.boot), (os.getppid(), "another")):
        owner.write_text(json.dumps(encode(replace(here, pid=pid, boot=boot))))
        found.claim()
        assert json.loads(owner.read_text()) == encode(here)
    owner.write_text(json.dumps(encode(replace(here, pid=os.getppid(), started=start_ticks(os.getppid()) or 0))))
    for refused in (found.claim, lambda: found.keep(experiment, 2.0)):
        with pytest.raises(ConfigError, match=f"another process is at this tuning .got process {os.getppid()}") as caught:
            refused()
        assert "--out" in (caught.value.hint or "")
    assert found.held_s() == 1.0


def test_a_profile_is_stored_beside_anothers_draft(tmp_path: Path) -> None:
    """Several tunings below one folder store theirs at one time; what another one is writing stays."""
    experiment = profiled_experiment(tmp_path)
    assert experiment.workload.profile is not None
    profile = Profile.load(experiment.workload.profile)
    (tmp_path / "profiles").mkdir()
    draft = tmp_path / "profiles" / "draft.toml"
    draft.write_text("half of a")
    profile.save(path := tmp_path / "profiles" / "script.toml")
    assert draft.read_text() == "half of a"
    assert sorted((tmp_path / "profiles").iterdir()) == [draft, path]
    assert Profile.load(path) == profile


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
    """Seconds of all trainers beside the bound, before the first real leg and after every one."""
    told: list[tuple[str, int, int]] = []
    experiment = layers_experiment(budget_gpu_hours=0.5)
    runner = FakeRunner(experiment, formula)

    def progress(*what: Any) -> None:
        told.append(what)

    tune(experiment, out=tmp_path, runner=runner, simulate=FakeSimulate(formula), progress=progress, spent_s=lambda: 50.0)
    shown = [(done, total) for stage, done, total in told if stage == SPENT]
    assert shown[0] == (50, 1800)
    assert len(shown) == 1 + len(runner.legs)


@dataclass
class Held(FakeRunner):
    """A session whose legs hold their trainers for five seconds, and are interrupted then."""

    held_s: float = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, leg: Leg) -> RunResult:  # noqa: ARG002  # as the seam has it
        """See ``Runner``."""
        self.held_s += 5.0
        raise KeyboardInterrupt


def test_a_budget_holds_for_all_attempts_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred seconds for the profile; every attempt after that begins with what the ones before have spent on their legs, too."""
    experiment = profiled_experiment(tmp_path)
    command, base = ("train",), Experiment(name="mine")
    Resumption(command, base, tmp_path).keep(experiment, 100.0)
    spent: list[float] = []

    def tunes(_: Experiment, *, runner: Journal, spent_s: Callable[[], float], **__: object) -> None:
        spent.append(spent_s())
        runner.run(leg())

    monkeypatch.setattr(script, "ScriptSession", lambda *_, **__: Held(experiment, formula))
    monkeypatch.setattr(script, "tune", tunes)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            script.tune_script(command, base, out=tmp_path)
    assert spent == [100.0, 105.0, 110.0]
    assert Resumption(command, base, tmp_path).held_s() == 115.0


def test_a_profile_is_refused_beyond_the_budget() -> None:
    """Two trainers held for 80 seconds: a leg of 9 seconds stays within 100, one of 11 would not."""
    experiment = layers_experiment(budget_gpu_hours=100 / 3600)
    session = cast("Any", SimpleNamespace(experiment=experiment, held_s=80.0))
    refuse_beyond_budget(session, 9.0)
    with pytest.raises(ConfigError, match="budget_gpu_hours"):
        refuse_beyond_budget(session, 11.0)
    session.experiment = layers_experiment()
    refuse_beyond_budget(session, 1e9)


def test_room_for_legs_is_room_for_the_launches_of_their_pairs(tmp_path: Path) -> None:
    """Twenty legs of 1 s on one trainer, and ten launches of 5 s: 70 s. A launch for all of them would be 25."""
    tune = {"leg_steps": 10, "budget_minutes": 1.0}
    experiment = Experiment.from_dict({"cluster": {"trainers_per_node": 1}, "run": {"warmup_steps": 0}, "tune": tune})
    runs = RealRuns(experiment=experiment, runner=SimpleNamespace(startup_s=5.0), folder=tmp_path, step_s=0.1)  # type: ignore[arg-type]  # asked for that alone
    assert not runs.affords(20)
    assert runs.affords(16)


def test_a_metric_needs_a_target(tmp_path: Path) -> None:
    """It is refused before anything is started."""
    base = Experiment.from_dict({"tune": {"metric": "accuracy"}})
    with pytest.raises(ConfigError, match=r"tune.metric: .* there is none \(got accuracy\)\nHINT: set workload.target_loss"):
        tune_script(["no-such-program"], base, out=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_target_needs_a_loss_that_the_script_reports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Else local steps would be left out without a word: it is an error before the profile."""

    class Silent(contextlib.nullcontext[Any]):
        def __init__(self, *_: object, **__: object) -> None:
            super().__init__(SimpleNamespace(experiment=Experiment()))

    monkeypatch.setattr("tuner.script.ScriptSession", Silent)
    base = Experiment.from_dict({"workload": {"target_loss": 0.2}})
    with pytest.raises(ConfigError, match=r"workload.target_loss: the script reports no loss \(got 0.2\)") as caught:
        tune_script(["python", "train.py"], base, out=tmp_path)
    assert "fleet.report(loss=loss)" in str(caught.value.hint)
