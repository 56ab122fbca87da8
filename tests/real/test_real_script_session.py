"""The driver of a user's script: launches, legs, failures, and a script whose data end; with a script that trains nothing."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from fleetbench.cli.your_script import refuse_what_is_the_scripts
from fleetbench.errors import ConfigError, EnvironmentLacks
from fleetbench.experiment import Experiment
from fleetbench.plan.build import Setting, build_plan
from fleetbench.plan.layers import Gradient
from fleetbench.quantities import Nanoseconds
from fleetbench.strategy import DistributedStrategy
from real.job import script_session
from real.job.script_session import ScriptSession
from real.leg import Leg
from real.processes.diagnosis import LegFailed, LegLost

SCRIPT = Path(__file__).with_name("fake_script.py")
DEFAULT = DistributedStrategy()
SMALL = DistributedStrategy(fuse_grad_size_in_MB=1.0)
MIXED = DistributedStrategy(amp=True)
Open = Callable[..., ScriptSession]


def leg(strategy: DistributedStrategy = DEFAULT, steps: int = 10, start: str = "continue", *, evaluate: bool = False) -> Leg:
    """A leg with two steps of warm-up."""
    return Leg(strategy=strategy, steps=steps, warmup_steps=2, start=start, evaluate=evaluate)  # type: ignore[arg-type]  # one of two texts


@pytest.fixture(autouse=True)
def kept_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output that a failed command leaves goes with the test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """Where the script says what it was told."""
    return tmp_path / "notes"


@pytest.fixture
def script(notes: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    """A session of the script with some behaviours."""
    gradients = [Gradient(name="a.weight", numel=100, ready=Nanoseconds(1))]
    monkeypatch.setenv("FAKE_PLAN", json.dumps(build_plan(DEFAULT, gradients, Setting(trainers=2)).to_dict()))

    def session(*behaviours: str, base: Experiment | None = None) -> ScriptSession:
        return ScriptSession([sys.executable, str(SCRIPT), str(notes), *behaviours], base or Experiment(name="mine"))

    return session


def launches(notes: Path) -> list[str]:
    """What every launch was told, and how it ended."""
    return notes.read_text().splitlines()


def test_what_the_script_is_becomes_an_experiment(script: Open) -> None:
    """Trainers, batch, optimizer and strategy are the script's; the model is named after its file; a target needs the loss it reports."""
    base = Experiment.from_dict({"name": "mine", "workload": {"target_loss": 0.2}, "tune": {"pairs": 3}})
    with script(base=base) as session:
        found = session.experiment
    assert (found.workload.model, found.workload.batch_size, found.workload.optimizer) == ("script:fake_script.py", 8, "momentum")
    assert (found.cluster.trainers, found.cluster.nodes, found.run.launcher) == (2, 1, "command")
    assert (found.workload.target_loss, found.tune.pairs, found.name) == (0.2, 3, "mine")
    assert session.hosts == ("host0", "host1")


@pytest.mark.parametrize(
    ("base", "where"),
    [
        ({"strategy": {"nccl_comm_num": 2}}, "strategy"),
        ({"cluster": {"trainers_per_node": 2, "stragglers": [{"kind": "slow_rank", "ranks": [1], "factor": 2.0}]}}, "cluster.stragglers"),
    ],
)
def test_what_nobody_can_do_to_a_script_is_refused(base: dict[str, object], where: str) -> None:
    """Its strategy is its own, and its stragglers are its machines'."""
    with pytest.raises(ConfigError) as caught:
        refuse_what_is_the_scripts(Experiment.from_dict(base))
    assert caught.value.where == where
    assert caught.value.hint is not None


def test_legs_follow_each_other_in_one_launch(script: Open, notes: Path) -> None:
    """A B B A: one launch, and the step times that the script wrote."""
    with script() as session:
        runs = [session.run(leg(strategy)) for strategy in (DEFAULT, SMALL, SMALL, DEFAULT)]
    assert [run.summary.step_s["mean"] for run in runs] == pytest.approx([0.004, 0.003, 0.003, 0.004])
    assert [run.summary.steps for run in runs] == [10] * 4
    assert [run.experiment.strategy for run in runs] == [DEFAULT, SMALL, SMALL, DEFAULT]
    assert runs[0].peak_bytes == (1000, 1001)
    assert launches(notes) == ["legs record13 leg12 leg12 leg12 leg12 stop"]


@pytest.mark.slow
def test_what_a_process_can_have_only_once_is_a_launch_of_its_own(script: Open, notes: Path) -> None:
    """Mixed precision neither follows full precision in a process, nor the other way round."""
    with script() as session:
        for strategy in (MIXED, MIXED, SMALL, DEFAULT):
            session.run(leg(strategy))
    assert launches(notes) == ["legs record13 stop", "legs leg12 leg12 stop", "legs leg12 leg12 stop"]


@pytest.mark.slow
def test_a_script_whose_data_end_is_started_again(script: Open, notes: Path) -> None:
    """Of 40 steps, 13 and two legs of 12 are done; the third leg is run by a second launch, and from then on none is begun in vain."""
    with script("*:*:total=40") as session:
        for _ in range(7):
            assert session.run(leg()).summary.steps == 10
        assert session.capacity == 40
    assert launches(notes) == ["legs record13 leg12 leg12 leg12 end", "legs leg12 leg12 leg12 stop", "legs leg12 leg12 stop"]


def _run_pairs(session: ScriptSession, number: int) -> None:
    for _ in range(number):
        pair = [leg(DEFAULT), leg(SMALL)]
        session.together(pair)
        for one in pair:
            session.run(one)


@pytest.mark.slow
@pytest.mark.parametrize(("used", "found"), [(0.0, 3), (1e6, 1)], ids=["used", "as good as new"])
def test_pairs_are_of_several_launches(script: Open, notes: Path, monkeypatch: pytest.MonkeyPatch, used: float, found: int) -> None:
    """A launch that legs have used for a share of its start makes room for the next pair's; the two legs of a pair share theirs."""
    monkeypatch.setattr(script_session, "_USED", used)
    with script() as session:
        _run_pairs(session, 3)
    record, *legs = launches(notes)[0].split()[1:-1]
    assert record == "record13"
    assert len(launches(notes)) == found
    assert legs + [word for line in launches(notes)[1:] for word in line.split()[1:-1]] == ["leg12"] * 6
    assert {line.count("leg12") for line in launches(notes)[-found:]} == {6 // found}


def test_a_leg_is_cut_to_what_the_script_has(script: Open, notes: Path) -> None:
    """A leg longer than the whole script is as long as the script; one step of warm-up and two are no leg."""
    with script("*:*:total=40") as session:
        assert session.run(leg(steps=60)).summary.steps == 38
    assert launches(notes) == ["legs record13 leg62 end", "legs leg40 stop"]
    with pytest.raises(ConfigError, match="the script ends before a leg does") as caught, script("*:*:total=2"):
        pass
    assert "epochs" in (caught.value.hint or "")


def test_a_script_without_the_four_lines_is_named(tmp_path: Path) -> None:
    """A command that ends well without calling fleet is told what is missing, one that fails is quoted, one that is none is refused."""
    plain = tmp_path / "plain.py"
    plain.write_text("print('hello')\n")
    with pytest.raises(ConfigError, match="ends before a leg") as caught, ScriptSession([sys.executable, str(plain)], Experiment()):
        pass
    assert "fleet.init" in (caught.value.hint or "")
    assert "load none where FLEETBENCH_TUNING is" in (caught.value.hint or "")
    plain.write_text("import nothing_of_that_name\n")
    with pytest.raises(LegLost, match="exit code 1") as lost, ScriptSession([sys.executable, str(plain)], Experiment()):
        pass
    assert "nothing_of_that_name" in (lost.value.hint or "")
    with pytest.raises(EnvironmentLacks, match="no-such-program"), ScriptSession(["no-such-program"], Experiment()):
        pass


@pytest.mark.slow
def test_a_launch_that_breaks_is_replaced_once(script: Open, notes: Path) -> None:
    """A killed process need not be the strategy's doing: the leg is run again; a second time it is given up, by name."""
    with script("0:1:killed") as session:
        assert session.run(leg(SMALL)).summary.step_s["mean"] == pytest.approx(0.003)
    assert launches(notes) == ["legs record13 leg12 killed", "legs leg12 stop"]
    notes.unlink()
    with script("*:1:killed", "1:0:killed") as session:
        with pytest.raises(LegLost, match="SIGKILL"):
            session.run(leg(SMALL))
        assert session.run(leg(DEFAULT)).summary.steps == 10


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("behaviour", "says", "where"),
    [
        ("raises", "failed at step 14: ValueError: the third layer is odd", "rank 1"),
        ("memory", "out of memory", "rank 1"),
        ("config", "refused: is refused here", "strategy.amp"),
        ("nan", "not a number: the loss was nan at step 18", "rank 1"),
    ],
)
def test_a_leg_that_fails_names_the_rank_and_the_session_goes_on(script: Open, notes: Path, behaviour: str, says: str, where: str) -> None:
    """It is not tried again, and the next leg has a launch of its own. Steps are the process's: 13 were done before."""
    with script(f"0:1:{behaviour}") as session:
        with pytest.raises(LegFailed, match=says) as caught:
            session.run(leg(SMALL))
        assert caught.value.where == where
        assert not isinstance(caught.value, LegLost)
        assert session.run(leg(DEFAULT)).summary.steps == 10
    assert notes.read_text().count("legs") == 2


PROFILED = Leg(strategy=DEFAULT, steps=10, warmup_steps=2, profile=True)


def test_a_loss_that_is_no_number_is_named_among_layer_times(script: Open) -> None:
    """With its rank and step, and that nothing is averaged there; the next leg has a launch of its own."""
    with script("0:1:nan") as session:
        with pytest.raises(LegFailed, match="the loss was nan at step 18, in a leg of layer times") as caught:
            session.run_profile(PROFILED)
        assert (caught.value.where, isinstance(caught.value, LegLost)) == ("rank 1", False)
        assert caught.value.hint is not None
        assert "the workers' output: " in caught.value.hint
        assert session.run_profile(PROFILED) == [{"rank": 0}, {"rank": 1}]
        assert session._num_launches == 2
