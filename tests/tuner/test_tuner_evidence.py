"""A tuning that was interrupted goes on with what it has measured; a decision depends on that alone."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import pytest
from tuner_fakes import FakeRunner, FakeSimulate, layers_experiment, profiled_experiment, target_experiment

from fleetbench.config import encode
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.result import RunResult
from fleetbench.strategy import DistributedStrategy
from real.leg import Leg
from real.processes.diagnosis import LegFailed, LegLost
from real.processes.place import Place, start_ticks
from tuner.decide import decide
from tuner.evidence import Done, Evidence, Run
from tuner.folder import Folder
from tuner.jobs import Script
from tuner.real_runs import RealRuns
from tuner.recommendation import Arm, Recommendation
from tuner.state import Setting
from tuner.tune import tune
from tuner.verify import verify

DEFAULT, SMALL = DistributedStrategy(), DistributedStrategy(fuse_grad_size_in_MB=1.0)
WAYS = (
    SMALL,
    DistributedStrategy(fuse_grad_size_in_MB=4.0),
    *(DistributedStrategy().replace(localsgd=True, localsgd_configs={"k_steps": k}) for k in (2, 4, 16)),
)
OTHERS = (DistributedStrategy(fp16_allreduce=True), DistributedStrategy(nccl_comm_num=2, sync_nccl_allreduce=False))
FEW: dict[str, object] = {"fusion": (), "update_by_bucket": (False,), "nccl_comm_num": (1,), "sync_nccl_allreduce": (True,)}


SEEDS, FIRST, CUTS = 40, 3, 13
"""Of random tunings: so many are drawn, the first ones in an ordinary run, and each is cut at so many places."""


def dice(*seed: object) -> Random:
    """Draws that are the same again."""
    return Random(str(seed))  # noqa: S311  # no secret


def formula(strategy: DistributedStrategy) -> float:
    """Buckets of 1 MB take 10 ms a step, others 13."""
    return 0.010 if strategy.fuse_grad_size_in_MB == 1.0 else 0.013


@dataclass
class Breaking(FakeRunner):
    """A runner that is interrupted at its n-th leg, or whose small buckets fail."""

    at: int | None = None
    failure: type[LegFailed] | None = None
    num_run: int = 0

    def run(self, leg: Leg) -> RunResult:
        """See ``Runner``."""
        if self.num_run == self.at:
            raise KeyboardInterrupt
        self.num_run += 1
        if self.failure is not None and leg.strategy == SMALL:
            raise self.failure("out of memory", "rank 1", None, "its output: log")
        return super().run(leg)


@dataclass
class Unsteady(FakeRunner):
    """Legs of which some are noisy, some void, some fail and some are lost, by a seed."""

    seed: int = 0
    chance: float = 0.05

    def run(self, leg: Leg) -> RunResult:
        """See ``Runner``."""
        drawn = dice(self.seed, len(self.legs))
        self.noise = lambda _: drawn.gauss(1.0, 0.02)
        if leg.strategy != DEFAULT and drawn.random() < self.chance:
            raise LegFailed("out of memory", "rank 1")
        self.void = lambda _: drawn.random() < self.chance
        return super().run(leg)


def drawn(seed: int, folder: Path) -> tuple[Setting, RealRuns]:
    """A tuning by a seed: some arms beside the default, with a target or without one, in a budget or without one."""
    one = dice(seed)
    tune = {"pairs": one.choice((4, 8, 16)), "finalists": one.choice((1, 2)), "budget_minutes": one.choice((None, None, 0.5, 2.0))}
    experiment = target_experiment(**tune) if one.random() < 0.6 else layers_experiment(**tune)
    if one.random() < 0.5:
        experiment = experiment.replace(run=replace(experiment.run, device="cpu"))
    step_s: dict[DistributedStrategy, float] = {}
    updates: dict[DistributedStrategy, float] = {}

    def taken(strategy: DistributedStrategy) -> float:
        return step_s.setdefault(strategy, 0.01 * one.uniform(0.9, 1.1) / strategy.local_steps**0.2)

    def arrives(leg: Leg) -> float | None:
        own = updates.setdefault(leg.strategy, one.uniform(20, 60))
        return None if own > 55 else own * dice(seed, leg.seed, leg.strategy.local_steps).gauss(1, 0.05)

    chosen = one.sample(WAYS, one.choice((1, 2, 3)))
    arms = [Arm(name=f"arm {number}", strategy=strategy, simulated_s=0.01) for number, strategy in enumerate(chosen)]
    others = {strategy: one.uniform(0.8, 1.1) for strategy in (*chosen, *one.sample((*WAYS, *OTHERS), 3))}
    setting = Setting(
        experiment=experiment,
        arms=(Arm(name="default", strategy=DEFAULT, simulated_s=0.01), *arms),
        others=others if one.random() < 0.7 else {},
        step_s=0.01,
    )
    runner = Unsteady(experiment, taken, updates=arrives, seed=seed)
    clock = (0.4 * number for number in range(10_000))
    return setting, RealRuns(experiment=experiment, runner=runner, folder=folder, step_s=0.01, clock=lambda: next(clock))


def decided(setting: Setting, runs: RealRuns) -> Done | None:
    """The verdict; none where the machine broke in a pair."""
    with contextlib.suppress(LegLost):
        while not isinstance(wanted := decide(runs.evidence, setting), Done):
            runs.carry_out(wanted)
        runs.close(wanted.comparisons)
        return wanted
    return None


def replayed(setting: Setting, whole: Evidence, known: Evidence) -> tuple[Done, list[str]]:
    """The verdict from part of the evidence, and what was asked for, all of which ``whole`` answers."""
    there, asked = {outcome.ran: outcome for outcome in whole.outcomes}, list[str]()
    while not isinstance(wanted := decide(known, setting), Done):
        if not isinstance(wanted, Run):
            known = known.with_comparison(wanted.comparison)
        for run in (wanted,) if isinstance(wanted, Run) else wanted.runs:
            asked.append(run.ran)
            known = known.with_outcome(there[run.ran])
            if there[run.ran].failure:
                break
    return wanted, asked


@pytest.mark.sample(8)
@pytest.mark.parametrize("seed", [seed if seed < FIRST else pytest.param(seed, marks=pytest.mark.slow) for seed in range(SEEDS)])
def test_a_decision_depends_on_its_evidence_alone(seed: int, tmp_path: Path) -> None:
    """Cut anywhere, a random tuning goes on to the same verdict by the same legs; and all of its evidence at once gives it, too."""
    setting, runs = drawn(seed, tmp_path)
    done = decided(setting, runs)
    assert done is not None
    whole = runs.evidence
    assert decide(whole, setting) == Done(recommendation=done.recommendation, comparisons=whole.comparisons)
    begun = {one.among: replace(one, ended=()) for one in whole.comparisons}
    for cut in dice(seed, "cuts").sample(range(len(whole.outcomes)), min(CUTS, len(whole.outcomes))):
        first = whole.outcomes[:cut]
        known = replace(whole, outcomes=first, comparisons=tuple(begun[name] for name in begun if any(one.among == name for one in first)))
        found, asked = replayed(setting, whole, known)
        assert found == done, cut
        assert [one for one in asked if one not in {outcome.ran for outcome in first}] == [one.ran for one in whole.outcomes[cut:]], cut


@pytest.mark.slow
def test_random_tunings_come_to_every_end(tmp_path: Path) -> None:
    """Those above: USE, no gain, undecided, budgets that end, arms that fail and runs that are void are all among them."""
    ends: set[str] = set()
    for seed in range(SEEDS):
        setting, runs = drawn(seed, tmp_path / str(seed))
        done = decided(setting, runs)
        assert done is not None
        found = done.recommendation
        ends |= {found.verdict, "undecided" if found.undecided else "", "ended" if "--from goes on" in found.reason else ""}
        ends |= {"failed" for arm in found.arms if "failed" in (arm.rejected or "")} | {"void" for arm in found.arms if arm.void_runs}
        ends |= {"to target" if found.to_target else "", "several" if len(runs.evidence.comparisons) > 1 else ""}
    assert ends >= {"USE", "KEEP DEFAULT", "undecided", "ended", "failed", "void", "to target", "several"}


def test_half_of_a_pair_is_run_again(tmp_path: Path) -> None:
    """Two legs that are compared are of one launch: one of them from before the interruption is none."""
    experiment = layers_experiment()
    arms = [Arm(name="default", strategy=DEFAULT, simulated_s=0.01), Arm(name="small", strategy=SMALL, simulated_s=0.01)]
    runner = Breaking(experiment, formula, at=5)
    clock = iter(range(1000))
    runs = RealRuns(experiment=experiment, runner=runner, folder=tmp_path, clock=lambda: float(next(clock)))
    with pytest.raises(KeyboardInterrupt):
        verify(experiment, arms, runs)
    assert len(runs.evidence.outcomes) == 5
    runner.at = None
    known = runs.evidence.taken_up()
    again = RealRuns(experiment=experiment, runner=runner, folder=tmp_path, clock=lambda: float(next(clock)), evidence=known)
    found = verify(experiment, arms, again)
    assert [leg.strategy for leg in runner.legs[4:7]] == [DEFAULT, DEFAULT, SMALL]
    assert [[leg.strategy for leg in row] for row in runner.rows[:2]] == [[DEFAULT, SMALL]] * 2
    assert len(found.pairs) == 4


@pytest.mark.parametrize(("failure", "again"), [(LegFailed, 0), (LegLost, 1)])
def test_what_a_strategy_failed_of_is_remembered_and_a_broken_launch_is_not(failure: type[LegFailed], again: int, tmp_path: Path) -> None:
    """Out of memory stays so; a launch that broke at last gets another try."""
    experiment = layers_experiment()
    arms = [Arm(name="default", strategy=DEFAULT, simulated_s=0.01), Arm(name="small", strategy=SMALL, simulated_s=0.01)]
    runner = Breaking(experiment, formula, at=2, failure=failure)
    runs = RealRuns(experiment=experiment, runner=runner, folder=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        verify(experiment, arms, runs)
    runner.at = None
    known = RealRuns(experiment=experiment, runner=runner, folder=tmp_path, evidence=runs.evidence.taken_up())
    found = verify(experiment, arms, known)
    assert (runner.num_run, found.arms[1].rejected) == (3 + again, "failed on rank 1: out of memory")


@pytest.mark.parametrize("damaged", ["evidence.json", "runs/*/manifest.json"])
def test_what_cannot_be_read_is_run_again(tmp_path: Path, damaged: str) -> None:
    """Half of a file is what a full disk or a machine that went down may leave: of the evidence, all; of a run, it and what followed."""
    experiment = layers_experiment(**FEW, fuse_grad_size_in_MB=(1.0, 32.0))
    runner = Breaking(experiment, formula, at=3)
    with pytest.raises(KeyboardInterrupt):
        tuned(experiment, tmp_path, runner)
    (left,) = tmp_path.glob("resume-*")
    kept = json.loads((left / "evidence.json").read_text())["outcomes"]
    path = left / "evidence.json" if damaged == "evidence.json" else left / "runs" / kept[1]["run"] / "manifest.json"
    if damaged == "evidence.json":
        path.write_bytes(path.read_bytes()[:99])
    else:
        path.unlink()
    runner.at = None
    found = tuned(experiment, tmp_path, runner)
    assert runner.num_run == 3 + sum(len(arm.measured_runs) for arm in found.arms) - (0 if damaged == "evidence.json" else 1)


def tuned(experiment: Experiment, folder: Path, runner: FakeRunner) -> Recommendation:
    """A tuning by formula."""
    return tune(experiment, out=folder, runner=runner, simulate=FakeSimulate(formula))[0]


@pytest.mark.slow
@pytest.mark.parametrize("at", [9, *(pytest.param(other, marks=pytest.mark.slow) for other in (0, 3, 12))])
def test_an_interrupted_tuning_ends_with_the_same_table(tmp_path: Path, at: int) -> None:
    """Wherever it stops, in the choosing round or within a pair, the tuning that goes on has the same arms, pairs and verdict."""
    experiment = layers_experiment()
    whole = tuned(experiment, tmp_path / "whole", Breaking(experiment, formula))
    with pytest.raises(KeyboardInterrupt):
        tuned(experiment, tmp_path / "broken", Breaking(experiment, formula, at=at))
    runner = Breaking(experiment, formula)
    found = tuned(experiment, tmp_path / "broken", runner)
    assert (found.verdict, found.pairs, found.line) == (whole.verdict, whole.pairs, whole.line)
    assert [(arm.name, arm.measured_s) for arm in found.arms] == [(arm.name, arm.measured_s) for arm in whole.arms]
    num_legs = sum(len(arm.measured_runs) for arm in whole.arms)
    assert num_legs - at <= runner.num_run <= num_legs - at + 1
    (folder,) = (tmp_path / "broken").glob("planted-tune-*")
    assert {path.name for path in (folder / "runs").iterdir()} == set(found.runs)
    assert not list((tmp_path / "broken").glob("resume-*"))


def test_what_was_measured_of_something_else_is_not_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module beside the script that changed, or a variable that an experiment may set, makes another tuning of it; other files do not."""
    (tmp_path / "src").mkdir()
    train, model = tmp_path / "src" / "train.py", tmp_path / "src" / "model.py"
    train.write_text("import model")
    model.write_text("width = 10")
    command, base = ("python", str(train)), Experiment(name="mine")
    Folder(command, base, tmp_path).begin(profiled_experiment(tmp_path), Evidence())
    (tmp_path / "src" / "notes.txt").write_text("a file that the script may read")
    monkeypatch.setenv("EDITOR", "another")
    assert Folder(command, base, tmp_path).experiment() is not None
    model.write_text("width = 20")
    assert Folder(command, base, tmp_path).experiment() is None
    model.write_text("width = 10")
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    assert Folder(command, base, tmp_path).experiment() is None
    monkeypatch.delenv("NCCL_ALGO")
    assert Folder(command, base, tmp_path).experiment() is not None


def test_a_tuning_that_another_process_is_at_is_refused(tmp_path: Path) -> None:
    """From its beginning, or when its profile is complete; where that process is dead, or on another host, one goes on."""
    experiment, found = profiled_experiment(tmp_path), Folder(("train",), Experiment(name="mine"), tmp_path)
    found.claim()
    assert not found.path.exists()
    found.begin(experiment, Evidence(before_s=1.0))
    here, owner = Place.here(), found.path / "owner.json"
    assert json.loads(owner.read_text()) == encode(here)
    for pid, boot in ((2**22 + 1, here.boot), (os.getppid(), "another")):
        owner.write_text(json.dumps(encode(replace(here, pid=pid, boot=boot))))
        found.claim()
        assert json.loads(owner.read_text()) == encode(here)
    owner.write_text(json.dumps(encode(replace(here, pid=os.getppid(), started=start_ticks(os.getppid()) or 0))))
    for refused in (found.claim, lambda: found.begin(experiment, Evidence(before_s=2.0))):
        with pytest.raises(ConfigError, match=f"another process is at this tuning .got process {os.getppid()}") as caught:
            refused()
        assert "--out" in (caught.value.hint or "")
    assert found.evidence() == Evidence(before_s=1.0)


def test_a_metric_needs_a_target(tmp_path: Path) -> None:
    """It is refused before anything is started."""
    base = Experiment.from_dict({"tune": {"metric": "accuracy"}})
    with pytest.raises(ConfigError, match=r"tune.metric: .* there is none \(got accuracy\)\nHINT: set workload.target_loss"):
        tune(base, script=Script(("no-such-program",)), out=tmp_path)
    assert not list(tmp_path.iterdir())
