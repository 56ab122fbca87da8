"""Study: the search's memory, in Optuna's storage.

A study belongs to one experiment, by its digest, and outlives the process. A trial is waiting,
then running under the process that asked for it, then complete; a process that is killed leaves
its trial running, and the next one to open the study marks it failed. Failed trials do not count.
"""

import fcntl
import hashlib
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial, Trial, TrialState

from fleetbench.config import decode, encode
from fleetbench.digests import reading
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from real.processes.place import Place

_ANEW = "remove the file, and the search begins again"
_DIGEST = "sha256"
OWNER = "owner"
"""Attribute of a trial: the ``Place`` of the process that runs it."""


@contextmanager
def open_study(experiment: Experiment, out: Path) -> Iterator[optuna.Study]:
    """The experiment's study, ``out/studies/<name>-<digest>.journal``. Raises ``ConfigError`` for a journal that is damaged."""
    name = f"{experiment.name}-{experiment.digest()}"
    path = out / "studies" / f"{name}.journal"
    with _quiet():
        with reading(path, _ANEW, RuntimeError, AssertionError):  # Optuna's, of another version or a damaged journal
            study = optuna.create_study(storage=_own_storage(path), study_name=name, direction="minimize", load_if_exists=True)
            _fail_leftovers(study)
            _verify(study)
        yield study


def trials(study: optuna.Study, *states: TrialState) -> list[FrozenTrial]:
    """The study's trials in these states, by number."""
    return study.get_trials(deepcopy=False, states=states)


def ask(study: optuna.Study, seed: int, num_before: int) -> Trial:
    """The next trial: one that waits, or else one that TPE proposes from what is complete.

    The sampler is made again from the seed and the number of trials before it, complete or running, so that a
    search that was killed goes on as if it had not been.
    """
    word = int(np.random.SeedSequence([seed, num_before]).generate_state(1)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # group is marked experimental
        study.sampler = optuna.samplers.TPESampler(seed=word, group=True)
    trial = study.ask()
    trial.set_user_attr(OWNER, encode(Place.here()))
    return trial


def complete(study: optuna.Study, trial: Trial, value: float | None) -> None:
    """The trial's outcome, and a digest of all that the search reads of it."""
    trial.set_user_attr(_DIGEST, _digest(trial.number, trial.params, value, trial.user_attrs))
    study.tell(trial, value, skip_if_finished=True)


def record(
    study: optuna.Study, point: Mapping[str, Any], choices: Mapping[str, tuple[Any, ...]], value: float, attributes: Mapping[str, Any]
) -> None:
    """Add a trial that is complete; ``point`` may be of none of the ``choices``."""
    distributions: dict[str, BaseDistribution] = {name: CategoricalDistribution(choices[name]) for name in point}
    kept = {**attributes, _DIGEST: _digest(len(study.get_trials(deepcopy=False)), point, value, attributes)}
    study.add_trial(optuna.create_trial(params=dict(point), distributions=distributions, value=value, user_attrs=kept))


def _digest(number: int, parameters: Mapping[str, Any], value: float | None, attributes: Mapping[str, Any]) -> str:
    kept = {key: item for key, item in attributes.items() if key != _DIGEST}
    return hashlib.sha256(json.dumps([number, parameters, value, kept], sort_keys=True).encode()).hexdigest()


def _verify(study: optuna.Study) -> None:
    """Raise ``ValueError`` for a damaged study; see ``complete``."""
    if study.direction != optuna.study.StudyDirection.MINIMIZE:
        raise ValueError("the study does not minimise")
    for trial in trials(study, TrialState.COMPLETE):
        if trial.user_attrs.get(_DIGEST) != _digest(trial.number, trial.params, trial.value, trial.user_attrs):
            raise ValueError(f"trial {trial.number} is not what was written: its digest differs")


def _own_storage(path: Path) -> JournalStorage:
    """A journal, to which a trial adds in a sixth of the time that SQLite takes. Raises ``ValueError`` where its last line was cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not f"\n{path.read_text(encoding='utf-8')}".endswith("\n"):
        raise ValueError("its last line is not whole")
    return JournalStorage(JournalFileBackend(str(path), lock_obj=_Lock(path)))


class _Lock(JournalFileOpenLock):
    """A lock that ends with its process: Optuna's own outlive one that is killed, and others wait for 30 s."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path

    def acquire(self) -> bool:
        self._handle = os.open(self._path, os.O_RDWR)
        fcntl.flock(self._handle, fcntl.LOCK_EX)
        return True

    def release(self) -> None:
        fcntl.flock(self._handle, fcntl.LOCK_UN)  # a fork may hold the handle, too
        os.close(self._handle)


def _fail_leftovers(study: optuna.Study) -> None:
    for trial in trials(study, TrialState.RUNNING):
        if not _alive(trial.user_attrs.get(OWNER)):
            study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)


def _alive(owner: dict[str, Any] | None) -> bool:
    """Whether the process that runs a trial lives; one on another host is taken to."""
    try:
        place = decode(owner, Place, OWNER)
    except ConfigError:  # of an older version
        return False
    return not place.shares_numbers(Place.here()) or place.lives()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Optuna's log off stderr."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
