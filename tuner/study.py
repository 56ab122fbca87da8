"""Study: stores the trials of a search, and the record of a tuning, in Optuna's format.

A study belongs to one experiment, by its digest, and outlives the process: a restarted search continues after
the complete trials. A trial that was running when its process was killed is marked failed and does not count.
A study has one process at a time, unless ``tune.storage`` names it: then any number, on any machines, add trials.
"""

import datetime as dt
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from fleetbench.config import encode, flat
from fleetbench.digests import reading
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.strategy import DistributedStrategy

_ANEW = "remove the file, and the search begins again"
_HEARTBEAT_S = 60
"""Seconds between the heartbeats of a trial in a database."""
_PLAIN = (bool, int, float, str)


@contextmanager
def open_study(experiment: Experiment, out: Path) -> Iterator[optuna.Study]:
    """Open the experiment's study in ``tune.storage``, by default ``out/studies/<name>-<digest>.journal``.

    Raises ``ConfigError`` for a journal that is damaged, and a database that cannot be opened.
    """
    name, shared = f"{experiment.name}-{experiment.digest()}", experiment.tune.storage
    with _quiet():
        if shared is not None and "://" in shared:
            study = _in_database(shared, name)
        else:
            path = Path(shared or out / "studies" / f"{name}.journal")
            with reading(path, _ANEW, RuntimeError, AssertionError):  # Optuna's errors, for another version or a damaged journal
                path.parent.mkdir(parents=True, exist_ok=True)
                if shared is None and path.exists() and not f"\n{path.read_text(encoding='utf-8')}".endswith("\n"):
                    raise ValueError("its last line is not whole")
                # adding a trial to a journal is six times as fast as to SQLite; its lock is a link to it
                storage: BaseStorage = JournalStorage(JournalFileBackend(str(path.resolve())))
                study = optuna.create_study(storage=storage, study_name=name, direction="minimize", load_if_exists=True)
                for trial in trials(study, TrialState.RUNNING) if shared is None else ():
                    study.tell(trial.number, state=TrialState.FAIL)
        yield study


def _in_database(url: str, name: str) -> optuna.Study:
    """Return a study in a database, in which a trial of a lost machine fails after two minutes."""
    from sqlalchemy.exc import SQLAlchemyError

    for is_last in (False, True):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # heartbeats are marked experimental
                storage = RDBStorage(url, heartbeat_interval=_HEARTBEAT_S)
            return optuna.create_study(storage=storage, study_name=name, direction="minimize", load_if_exists=True)
        except (ImportError, SQLAlchemyError, StorageInternalError, RuntimeError) as error:  # the last: another version's tables
            if is_last:
                said, hint = str(error).partition("\n")[0], "see the URL, the server, the driver's package and Optuna's version"
                raise ConfigError(f"cannot be opened: {said}", "tune.storage", url, hint) from error
            time.sleep(1.0)  # another process may be making the same tables
    raise AssertionError


def trials(study: optuna.Study, *states: TrialState) -> list[FrozenTrial]:
    """Return the study's trials in these states, by number."""
    return study.get_trials(deepcopy=False, states=states)


def run_trial(study: optuna.Study, seed: int, objective: Callable[[Trial], float]) -> None:
    """Run the next trial: a waiting one, or else one that TPE proposes.

    The sampler is recreated from the seed and the number of earlier trials, so a search that was killed
    continues as if it had not been interrupted. Raises the errors of ``objective``.
    """
    num_before = len(trials(study, TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING))  # of another process
    word = int(np.random.SeedSequence([seed, num_before]).generate_state(1)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # group is marked experimental
        study.sampler = optuna.samplers.TPESampler(seed=word, group=True)
    study.optimize(objective, n_trials=1)


def save_study(path: Path, name: str, simulated: Mapping[DistributedStrategy, tuple[float, float, Mapping[str, Any]]]) -> None:
    """Write a study with one trial per strategy: the fields that differ, seconds per step, duration and attributes."""
    points = [{key: value if isinstance(value, _PLAIN) else str(value) for key, value in flat(encode(one))} for one in simulated]
    choices = {key: list(dict.fromkeys(point.get(key) for point in points)) for point in points for key in point}
    varied: dict[str, BaseDistribution] = {key: CategoricalDistribution(values) for key, values in choices.items() if len(values) > 1}
    with _quiet():
        study = optuna.create_study(storage=JournalStorage(JournalFileBackend(str(path))), study_name=name)
        for (value, took_s, attrs), point in zip(simulated.values(), points, strict=True):
            params = {key: point.get(key) for key in varied}
            trial = optuna.create_trial(params=params, distributions=varied, value=value, user_attrs=dict(attrs))
            assert trial.datetime_complete is not None, "a trial with a value is complete"
            trial.datetime_start = trial.datetime_complete - dt.timedelta(seconds=took_s)
            study.add_trial(trial)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Optuna's log on stderr."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
