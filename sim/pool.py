"""pool: several simulations at once, over this machine's cores."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

from fleetbench.errors import EnvironmentLacks, FleetbenchError
from fleetbench.experiment import Experiment
from fleetbench.profile import Profile
from fleetbench.result import Summary
from sim.run import simulate

_WORTH_A_PROCESS = 3
"""Fewer simulations than this run here: a process takes a second to start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One simulation of several."""

    label: str
    """What an error calls it."""
    experiment: Experiment


def summaries(
    jobs: Sequence[Job],
    *,
    profile: Profile | None = None,
    processes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Summary]:
    """The summaries of all jobs, in their order.

    Args:
        jobs: what to simulate; the results do not depend on how many run at once.
        profile: see ``simulate``.
        processes: at most so many; default: one a core that this process may use.
        progress: told how many are done.

    A script that calls this with several jobs needs the usual ``if __name__ == "__main__":``, because processes import it.

    Raises:
        EnvironmentLacks: a process was killed.
        FleetbenchError: a simulation failed; of its class, with the job's label in front of what it says.
    """
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    number = min(usable if processes is None else processes, len(jobs))
    if number < 2 or len(jobs) < _WORTH_A_PROCESS:
        found = []
        for done, job in enumerate(jobs, start=1):
            found.append(_summary(job, profile))
            if progress is not None:
                progress(done, len(jobs))
        return found
    context = multiprocessing.get_context("spawn")  # a fork would copy locks that the progress bar's thread holds
    with ProcessPoolExecutor(number, mp_context=context) as pool:
        futures = [pool.submit(_summary, job, profile) for job in jobs]
        try:
            _watch(futures, progress)
        except BrokenProcessPool as error:
            hint = "it may have run out of memory: fewer trainers or steps need less"
            raise EnvironmentLacks("a process that simulates was killed", "this machine", hint=hint) from error
        except BaseException:  # a Ctrl-C too: what has not begun does not begin
            pool.shutdown(wait=True, cancel_futures=True)
            raise
        return [future.result() for future in futures]


def _watch(futures: Sequence[Future[Summary]], progress: Callable[[int, int], None] | None) -> None:
    """Wait for all, and raise the first failure in the jobs' order among those that are known."""
    pending: set[Future[Summary]] = set(futures)
    while pending:
        _, pending = wait(pending, timeout=0.2, return_when=FIRST_EXCEPTION)
        for future in futures:
            if future.done() and future.exception() is not None:
                future.result()
        if progress is not None:
            progress(len(futures) - len(pending), len(futures))


def _summary(job: Job, profile: Profile | None) -> Summary:
    try:
        return simulate(job.experiment, profile=profile, timeline=False).summary
    except FleetbenchError as error:
        what = f"{job.label}: {error.what}"
        raise type(error)(what, error.where, error.value, error.hint) from error
