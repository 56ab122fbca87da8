"""pool: runs several simulations at once on this machine's cores, in forks of this process."""

import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass

from fleetbench.children import end_with_parent
from fleetbench.errors import EnvironmentLacks, FleetbenchError
from fleetbench.experiment import Experiment
from fleetbench.result import Summary
from sim.learning.trajectory import Trajectory
from sim.run import Engine, simulate

_WORTH_A_PROCESS = 3
"""Smallest number of simulations for which other processes are started."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One of the simulations that ``summaries`` runs."""

    label: str
    """Name of the simulation in error messages."""
    experiment: Experiment
    learnt: Trajectory | None = None
    """Results of the experiment's virtual trainers; ``None`` if nothing was trained."""


def summaries(
    jobs: Sequence[Job],
    *,
    engine: Engine = "auto",
    processes: int | None = None,
    progress: Progress | None = None,
) -> list[Summary]:
    """Return the summaries of all jobs, in their order; they do not depend on how many run at once.

    At most ``processes`` run at once, by default one per core that this process may use. ``progress`` is
    called with the number of jobs done and their total.

    Raises ``EnvironmentLacks`` if a process was killed. Errors of a simulation are prefixed by its job's label.
    """
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    number, tell = min(usable if processes is None else processes, len(jobs)), progress or (lambda *_: None)
    if number > 1 and len(jobs) >= _WORTH_A_PROCESS:
        return _by_workers(jobs, engine, number, tell)
    found = []
    for done, job in enumerate(jobs, start=1):
        with naming(job.label):
            found.append(simulated(job, engine))
        tell(done, len(jobs))
    return found


def _by_workers(jobs: Sequence[Job], engine: Engine, number: int, tell: Progress) -> list[Summary]:
    """Run jobs in ``number`` processes.

    All processes are killed at the end, also after Ctrl-C, because they hold nothing worth keeping.
    """
    others = multiprocessing.active_children()
    pool = ProcessPoolExecutor(number, multiprocessing.get_context("fork"), _begin, (os.getpid(),))
    try:
        with warnings.catch_warnings(), _later(signal.SIGINT, signal.SIGTERM):
            warnings.simplefilter("ignore", DeprecationWarning)  # about forks with threads: the forks use no thread
            futures = {pool.submit(simulated, job, engine): job for job in jobs}
        for done, future in enumerate(as_completed(futures), start=1):
            with naming(futures[future].label):
                future.result()  # raises the first failure
            tell(done, len(jobs))
        return [future.result() for future in futures]
    except BrokenProcessPool:
        hint = "it may have run out of memory: fewer trainers or steps need less"
        raise EnvironmentLacks("a process that simulates was killed", "this machine", hint=hint) from None
    finally:
        for worker in multiprocessing.active_children():
            if worker not in others:
                worker.kill()
        pool.shutdown(cancel_futures=True)


@contextmanager
def _later(*signals: signal.Signals) -> Iterator[None]:
    """Block ``signals`` here and in forks made here: a fork's hooks would lose an exception of their handlers."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(parent: int) -> None:
    """Set up a worker: it ends with its parent, and stays quiet because the parent has shown all warnings."""
    end_with_parent(parent)
    warnings.simplefilter("ignore")


@contextmanager
def naming(label: str) -> Iterator[None]:
    """Prefix the message of an error by a label."""
    try:
        yield
    except FleetbenchError as error:
        raise type(error)(f"{label}: {error.what}", error.where, error.value, error.hint) from error


def simulated(job: Job, engine: Engine) -> Summary:
    """Run one simulation and return its summary."""
    return simulate(job.experiment, timeline=False, table=False, engine=engine, learnt=job.learnt).summary
