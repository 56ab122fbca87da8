import contextlib
import dataclasses
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from tuner_fakes import FakeSimulate, layers_experiment, profiled_experiment, target_experiment

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.strategy import DistributedStrategy
from sim.many.objective import StepTime
from sim.many.pool import run_all
from tuner.search import PROBED, Search, search, shortened
from tuner.space import Equivalence, search_space
from tuner.study import Recorded

ADVICE = DistributedStrategy(fuse_grad_size_in_MB=0.3815)


def formula(strategy: DistributedStrategy) -> float:
    """Falls with K and with smaller buckets; one communicator is better than two."""
    return 0.1 / strategy.local_steps + 0.001 * strategy.fuse_grad_size_in_MB + 0.002 * strategy.nccl_comm_num


def searched(experiment: Experiment, out: Path, simulate: FakeSimulate) -> Search:
    """A search with a fixed advice."""
    return search(experiment, search_space(experiment), ADVICE, out=out, step_s=simulate.seconds)


def states(out: Path) -> list[TrialState]:
    """States of all trials in the one study below ``out``."""
    (journal,) = (out / "studies").iterdir()
    storage = JournalStorage(JournalFileBackend(str(journal)))
    (study,) = storage.get_all_studies()
    return [trial.state for trial in storage.get_all_trials(study._study_id)]


def test_the_default_is_first_and_the_advice_second(tmp_path: Path) -> None:
    """Whatever is searched, trial 0 is the experiment's strategy and trial 1 Fleet's advice."""
    fake = FakeSimulate(formula)
    found = searched(target_experiment(trials=12, search_seconds=0), tmp_path, fake)
    assert fake.asked[:2] == [DistributedStrategy(), ADVICE]
    assert found.default.strategy == DistributedStrategy()
    assert found.advice is not None
    assert found.advice.strategy == ADVICE


def test_a_small_space_is_searched_whole_and_once(tmp_path: Path) -> None:
    """Fewer different strategies than trials: each is simulated exactly once, and the search ends there."""
    experiment = layers_experiment(trials=100)
    fake = FakeSimulate(formula)
    found = searched(experiment, tmp_path, fake)
    same, space = Equivalence(experiment), search_space(experiment)
    possible = {same.key(space.strategy(point)) for point in space.points()} | {same.key(ADVICE)}
    asked = [same.key(strategy) for strategy in fake.asked]
    assert len(asked) == len(set(asked))
    assert set(asked) == possible
    assert len(found.tried) < 100


def slow(strategy: DistributedStrategy) -> float:
    """The formula, in as much time as a simulation takes; K = 7 cannot be simulated."""
    time.sleep(0.02)
    if strategy.local_steps == 7:
        raise ConfigError("has no such K")
    return formula(strategy)


def test_a_search_on_several_cores_is_that_on_one(tmp_path: Path) -> None:
    """More than a second of simulations: other processes take part, and times, their order, and notes are those of a plain loop."""
    experiment = target_experiment(trials=500, local_steps=tuple(range(1, 17)))
    space, told = search_space(experiment), list[tuple[int, int]]()
    found = search(experiment, space, ADVICE, out=tmp_path, step_s=slow, progress=lambda done, total: told.append((done, total)))
    plain = searched(experiment, tmp_path, FakeSimulate(formula))
    assert len(plain.tried) > PROBED + 50
    looped = [(one.strategy, formula(one.strategy), one.key, one.arm) for one in plain.tried if one.strategy.local_steps != 7]
    assert [(one.strategy, one.simulated_s, one.key, one.arm) for one in found.tried] == looped
    assert len(looped) < len(plain.tried)
    assert sum("has no such K" in str(note) for note in found.notes) == 1
    assert all(one.took_s >= 0.02 for one in found.tried)
    assert told[:-1] == sorted(told[:-1])


@pytest.mark.parametrize("storage", ["journal", pytest.param("sqlite", marks=pytest.mark.slow)])
def test_a_study_is_shared_by_its_storage(storage: str, tmp_path: Path) -> None:
    """A search elsewhere, with another ``--out``, simulates nothing that this one has; where the storage lies changes no study."""
    at = str(tmp_path / "shared" / "s.journal") if storage == "journal" else f"sqlite:///{tmp_path}/s.db"
    experiment = target_experiment(trials=8, search_seconds=0, storage=at)
    first = searched(experiment, tmp_path / "one", FakeSimulate(formula))
    other = FakeSimulate(formula)
    assert searched(experiment, tmp_path / "two", other) == first
    assert other.asked == []
    assert experiment.digest() == target_experiment(trials=8, search_seconds=0).digest()
    assert not (tmp_path / "one").exists()


def test_a_storage_is_used_however_small_the_space(tmp_path: Path) -> None:
    """All strategies could be simulated in no time: with ``tune.storage``, Optuna proposes, and the study has all trials."""
    at = tmp_path / "s.journal"
    found = searched(layers_experiment(trials=100, storage=str(at)), tmp_path, FakeSimulate(formula))
    (study,) = optuna.get_all_study_summaries(JournalStorage(JournalFileBackend(str(at))))
    assert study.n_trials == len(found.tried) == 100
    assert len(found.different) < 100
    assert any("because tune.storage is set" in str(note) for note in found.notes)


def _shared(out: Path, storage: str) -> Search:
    experiment = target_experiment(trials=24, search_seconds=0, storage=storage, local_steps=tuple(range(1, 17)))
    return search(experiment, search_space(experiment), ADVICE, out=out, step_s=slow)


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["journal", "sqlite"])
def test_searches_at_once_share_a_study(storage: str, tmp_path: Path) -> None:
    """Three processes: as many trials as one would make, and at most one more of each; each knows default and advice."""
    at = str(tmp_path / "s.journal") if storage == "journal" else f"sqlite:///{tmp_path}/s.db"
    found = run_all(partial(_shared, storage=at), [tmp_path / name for name in "abc"], processes=3)
    for one in found:
        assert 24 <= len(one.tried) <= 26
        assert one.default.strategy == DistributedStrategy()
        assert one.advice is not None
    values = {(tried.key, tried.simulated_s) for one in found for tried in one.tried}
    assert len(values) == len(dict(values))


URLS = ["postgresql://me:se/cret@host/s", "postgresql://host/s?user=me&password=secret", "mysql://host/s?passwd=secret", "evil://host/s"]


@pytest.mark.parametrize("url", URLS)
def test_a_url_that_shows_a_password_or_is_no_database_is_refused(url: str) -> None:
    """With what to write."""
    with pytest.raises(ConfigError, match=r"tune\.storage(.|\n)*HINT") as caught:
        target_experiment(storage=url)
    assert "cret" not in str(caught.value)


def test_a_database_of_another_version_of_optuna_is_an_error(tmp_path: Path) -> None:
    """Its tables are not touched."""
    experiment = target_experiment(trials=2, search_seconds=0, storage=f"sqlite:///{tmp_path}/s.db")
    searched(experiment, tmp_path, FakeSimulate(formula))
    with contextlib.closing(sqlite3.connect(tmp_path / "s.db")) as tables, tables:
        tables.execute("UPDATE version_info SET schema_version = 1")
        tables.execute("UPDATE alembic_version SET version_num = 'v0.9.0.a'")
    with pytest.raises(ConfigError, match=r"tune\.storage: cannot be opened(.|\n)*HINT"):
        searched(experiment, tmp_path, FakeSimulate(formula))


def test_a_database_that_does_not_answer_is_an_error(tmp_path: Path) -> None:
    """Its URL is named."""
    with pytest.raises(ConfigError, match=r"tune\.storage: cannot be opened"):
        searched(target_experiment(trials=8, search_seconds=0, storage=f"sqlite:///{tmp_path}/none/s.db"), tmp_path, FakeSimulate(formula))


def test_equal_trials_are_simulated_once(tmp_path: Path) -> None:
    """Trials that the simulator cannot tell apart share one simulation."""
    experiment = target_experiment(trials=40, search_seconds=0, fuse_grad_size_in_MB=(0.25, 0.3, 16.0, 32.0, 64.0))
    fake = FakeSimulate(lambda strategy: 0.1 / strategy.local_steps)
    found = searched(experiment, tmp_path, fake)
    keys = [tried.key for tried in found.tried]
    firsts = [keys.index(key) for key in keys]
    assert len(fake.asked) == len(set(keys))
    assert all(tried.simulated_s == found.tried[first].simulated_s for tried, first in zip(found.tried, firsts, strict=True))


def test_proposals_that_repeat_are_not_simulated(tmp_path: Path) -> None:
    """More strategies than trials, most of them equal in pairs: TPE's repeats cost nothing."""
    experiment = target_experiment(
        trials=25, search_seconds=0, local_steps=tuple(range(1, 15)), fuse_grad_size_in_MB=(16.0, 32.0, 64.0, 128.0)
    )
    experiment = experiment.replace(strategy=DistributedStrategy(fuse_grad_size_in_MB=1.0))
    fake = FakeSimulate(formula)
    found = search(experiment, search_space(experiment), experiment.strategy, out=tmp_path, step_s=fake.seconds)
    assert found.tried[1].key == found.default.key, "the advice is the default here"
    assert len(fake.asked) == len({tried.key for tried in found.tried})


@pytest.mark.slow
def test_the_planted_best_is_found_among_many(tmp_path: Path) -> None:
    """Of 900 strategies, 80 proposals find one within 3 % of the formula's best."""
    sizes = tuple(0.25 * (1 + index) for index in range(15))
    experiment = target_experiment(
        trials=80,
        search_seconds=0,
        fusion=(),
        update_by_bucket=(False,),
        wire=("fp32",),
        local_steps=tuple(range(1, 31)),
        fuse_grad_size_in_MB=sizes,
    )
    fake = FakeSimulate(
        lambda s: 0.1 + 0.001 * abs(s.local_steps - 21) + 0.02 * abs(s.fuse_grad_size_in_MB - 0.75) + 0.002 * s.nccl_comm_num
    )
    found = searched(experiment, tmp_path, fake)
    assert min(tried.simulated_s for tried in found.tried) <= 0.102 * 1.03


def test_the_same_seed_gives_the_same_trials(tmp_path: Path) -> None:
    """Two searches of one experiment propose the same points; another seed proposes others."""
    experiment = target_experiment(trials=12, search_seconds=0)
    one, two = (searched(experiment, tmp_path / name, FakeSimulate(formula)) for name in ("one", "two"))
    assert one.tried == two.tried
    other = searched(experiment.replace(run=dataclasses.replace(experiment.run, seed=1)), tmp_path / "three", FakeSimulate(formula))
    assert one.tried != other.tried


@pytest.mark.parametrize("killed_at", [1, 7, 12])
@pytest.mark.slow
def test_a_killed_search_goes_on_as_if_it_had_not_been(tmp_path: Path, killed_at: int) -> None:
    """SIGKILL in the middle of a trial: that trial fails, the others stand, the rest follow as they would have."""
    experiment = target_experiment(trials=20, search_seconds=0)
    script = f"""
        import sys, time
        from pathlib import Path
        sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parent.parent)]!r}
        from tuner_fakes import FakeSimulate, target_experiment
        from tuner.search import search
        from tuner.space import search_space
        from fleetbench.strategy import DistributedStrategy

        def formula(s):
            if len(fake.asked) == {killed_at}:
                print("running", flush=True)
                time.sleep(600)
            return 0.1 / s.local_steps + 0.001 * s.fuse_grad_size_in_MB + 0.002 * s.nccl_comm_num

        fake = FakeSimulate(formula)
        experiment, out = target_experiment(trials=20, search_seconds=0), Path({str(tmp_path / "killed")!r})
        search(experiment, search_space(experiment), DistributedStrategy(fuse_grad_size_in_MB=0.3815), out=out, step_s=fake.seconds)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"running\n"
        finally:
            process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert states(tmp_path / "killed")[-1] == TrialState.RUNNING

    fake = FakeSimulate(formula)
    resumed = searched(experiment, tmp_path / "killed", fake)
    whole_fake = FakeSimulate(formula)
    whole = searched(experiment, tmp_path / "whole", whole_fake)
    assert resumed.tried == whole.tried
    assert fake.asked == whole_fake.asked[killed_at - 1 :]
    assert sorted(states(tmp_path / "killed")).count(TrialState.FAIL) == 1


def test_a_finished_study_simulates_nothing(tmp_path: Path) -> None:
    """The same experiment again is answered from its study; another experiment has another."""
    experiment = target_experiment(trials=12, search_seconds=0)
    first = searched(experiment, tmp_path, FakeSimulate(formula))
    fake = FakeSimulate(formula)
    assert searched(experiment, tmp_path, fake) == first
    assert fake.asked == []
    searched(layers_experiment(trials=3, search_seconds=0), tmp_path, fake)
    assert len(list((tmp_path / "studies").glob("*.journal"))) == 2


def test_a_trial_that_raises_fails_and_is_tried_again(tmp_path: Path) -> None:
    """An error in the simulator reaches the caller; the trial does not count and does not stay running."""
    experiment = layers_experiment(trials=3, search_seconds=0)

    def broken(_: DistributedStrategy) -> float:
        raise ConfigError("broken")

    with pytest.raises(ConfigError, match="broken"):
        searched(experiment, tmp_path, FakeSimulate(broken))
    assert states(tmp_path) == [TrialState.FAIL]
    assert len(searched(experiment, tmp_path, FakeSimulate(formula)).tried) == 3


def test_a_proposal_that_cannot_be_simulated_ends_no_search(tmp_path: Path) -> None:
    """Two communicators are refused by the simulator: Optuna goes on to other proposals, as many as were asked for."""
    experiment = target_experiment(trials=20, search_seconds=0)

    def one_alone(strategy: DistributedStrategy) -> float:
        if strategy.nccl_comm_num > 1:
            raise ConfigError("has no second communicator")
        return formula(strategy)

    found = searched(experiment, tmp_path, FakeSimulate(one_alone))
    assert len(found.tried) == 20
    assert TrialState.PRUNED in states(tmp_path)
    assert any("cannot be simulated" in str(note) for note in found.notes)


def test_a_search_ends_if_no_proposal_can_be_simulated(tmp_path: Path) -> None:
    """All but the default and the advice are refused: the search gives up, and says why."""
    experiment = target_experiment(trials=12, search_seconds=0)

    def two_alone(strategy: DistributedStrategy) -> float:
        if strategy not in (DistributedStrategy(), ADVICE):
            raise ConfigError("has no such strategy")
        return formula(strategy)

    found = searched(experiment, tmp_path, FakeSimulate(two_alone))
    assert {tried.key for tried in found.tried} == {Equivalence(experiment).key(one) for one in (DistributedStrategy(), ADVICE)}
    assert any("has no such strategy" in str(note) for note in found.notes)


def test_a_journal_that_was_cut_is_an_error(tmp_path: Path) -> None:
    """A line that is not whole would swallow the next one: the file is named, with what to do."""
    searched(layers_experiment(trials=2, search_seconds=0), tmp_path, FakeSimulate(formula))
    (journal,) = (tmp_path / "studies").iterdir()
    journal.write_bytes(journal.read_bytes()[:-3])
    with pytest.raises(ConfigError, match="last line is not whole"):
        searched(layers_experiment(trials=2, search_seconds=0), tmp_path, FakeSimulate(formula))


def test_finalists_differ_in_local_steps_first(tmp_path: Path) -> None:
    """The fastest K has more than three strategies; the finalists are of three values of K, the default's among them."""
    experiment = target_experiment(trials=500, local_steps=(1, 4, 8, 16))
    best = searched(experiment, tmp_path, FakeSimulate(formula)).best(3)
    assert [tried.strategy.local_steps for tried in best] == [16, 8, 1]
    assert [tried.simulated_s for tried in best] == sorted(tried.simulated_s for tried in best)


def test_finalists_differ_from_the_arms_and_from_one_another(tmp_path: Path) -> None:
    """No finalist is the default's or the advice's equal; without K they have the three least times, one of each."""
    found = searched(layers_experiment(trials=500), tmp_path, FakeSimulate(formula))
    keys = [tried.key for tried in found.best(3)]
    assert len({*keys, found.default.key, found.tried[1].key}) == 5
    times = [tried.simulated_s for tried in found.tried[2:]]
    assert len(set(times)) < len(times)
    assert [tried.simulated_s for tried in found.best(3)] == sorted(set(times))[:3]


def test_nothing_is_written_to_stderr(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Optuna's log and its warnings of experimental options stay silent."""
    searched(target_experiment(trials=14, search_seconds=0), tmp_path, FakeSimulate(formula))
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_the_simulator_finds_that_overlap_pays(tmp_path: Path) -> None:
    """Ten buckets hide behind the backward, one bucket cannot: the real simulator's best is not the default."""
    experiment = profiled_experiment(tmp_path, local_steps=(1,), thread_num=(1,), wire=("fp32",))
    found = search(experiment, search_space(experiment), ADVICE, out=tmp_path, step_s=StepTime(shortened(experiment)))
    best = min(found.tried, key=lambda tried: tried.simulated_s)
    # By hand: 10 + 20 ms of compute, then 4 MB at 1 Gbit/s and 2 * 50 us: 32.1 ms, all of it exposed.
    assert found.default.simulated_s == pytest.approx(0.0621, rel=0.01)
    # Nothing beats the first gradient's 2 ms of backward, then 32 ms of wire.
    assert 0.010 + 0.002 + 0.032 <= best.simulated_s < 0.9 * found.default.simulated_s


def test_a_trial_takes_whole_rounds_of_the_default_too() -> None:
    """Of all K that may be searched, and of the default's own, or of the largest where that takes more than the workload's 40 steps.

    And a step before and one after, which count for none of them.
    """
    for own, steps in ((1, 16), (12, 24), (32, 32), (7, 8)):
        experiment = target_experiment(local_steps=(1, 8) if own > 1 else (1, 16))
        local = {"localsgd": own > 1, "localsgd_configs": {"k_steps": own} if own > 1 else {}}
        assert shortened(experiment.replace(strategy=DistributedStrategy().replace(**local))).workload.steps == steps + 2, own


def test_every_simulated_strategy_is_a_trial_of_the_record(tmp_path: Path) -> None:
    """With the fields in which strategies differ, seconds of a step, how long simulating took, and what came of it."""
    local = DistributedStrategy().replace(localsgd=True, lr_scale=2.0, localsgd_configs={"k_steps": 4, "outer_lr": 0.7})
    recorded = Recorded(formula)
    values = [recorded(strategy) for strategy in (DistributedStrategy(), ADVICE, local)]
    recorded.save(path := tmp_path / "study.journal", "record", lambda one: {"verdict": "recommended" if one == local else "did not run"})
    kept = optuna.load_study(study_name="record", storage=JournalStorage(JournalFileBackend(str(path)))).trials
    assert [trial.value for trial in kept] == values
    assert [trial.params["lr_scale"] for trial in kept] == [1.0, 1.0, 2.0]
    assert [trial.params["localsgd_configs.k_steps"] for trial in kept] == [1, 1, 4]
    assert [trial.params["localsgd_configs.outer_lr"] for trial in kept] == [1.0, 1.0, 0.7]
    assert "nccl_comm_num" not in kept[0].params
    assert [trial.user_attrs["verdict"] for trial in kept] == ["did not run", "did not run", "recommended"]
    assert all(trial.duration is not None and trial.duration.total_seconds() >= 0 for trial in kept)
