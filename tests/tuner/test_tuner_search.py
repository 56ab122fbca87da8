import dataclasses
import signal
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
from tuner_fakes import FakeSimulate, layers_experiment, target_experiment

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.strategy import DistributedStrategy
from sim.many.pool import run_all
from tuner.search import PROBED, Search, search, shortened
from tuner.space import Equivalence, search_space
from tuner.study import save_study

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


def test_the_same_seed_gives_the_same_trials(tmp_path: Path) -> None:
    """Two searches of one experiment propose the same points; another seed proposes others."""
    experiment = target_experiment(trials=12, search_seconds=0)
    one, two = (searched(experiment, tmp_path / name, FakeSimulate(formula)) for name in ("one", "two"))
    assert one.tried == two.tried
    other = searched(experiment.replace(run=dataclasses.replace(experiment.run, seed=1)), tmp_path / "three", FakeSimulate(formula))
    assert one.tried != other.tried


@pytest.mark.parametrize("killed_at", [1, 5, 9])
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
    values, path = [0.13, 0.12, 0.05], tmp_path / "study.journal"
    verdicts = ["did not run", "did not run", "recommended"]
    trials = zip((DistributedStrategy(), ADVICE, local), values, verdicts, strict=True)
    save_study(path, "record", {one: (value, 2.0, {"verdict": verdict}) for one, value, verdict in trials})
    kept = optuna.load_study(study_name="record", storage=JournalStorage(JournalFileBackend(str(path)))).trials
    assert [trial.value for trial in kept] == values
    assert [trial.params["lr_scale"] for trial in kept] == [1.0, 1.0, 2.0]
    assert [trial.params["localsgd_configs.k_steps"] for trial in kept] == [1, 1, 4]
    assert [trial.params["localsgd_configs.outer_lr"] for trial in kept] == [1.0, 1.0, 0.7]
    assert "nccl_comm_num" not in kept[0].params
    assert [trial.user_attrs["verdict"] for trial in kept] == verdicts
    assert all(trial.duration is not None and trial.duration.total_seconds() == 2 for trial in kept)
