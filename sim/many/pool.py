"""pool: several simulations at once, over this machine's cores.

``python -m sim.many.pool`` is one of its processes: it simulates what it is told on stdin, line by line, and answers on stdout, until stdin
ends. A line is JSON: an experiment as TOML, and the engine. The answer is JSON too: a summary, or an error as
its class and what ``FleetbenchError`` takes. A ``ProcessPoolExecutor`` would pickle, and could not name the job of a process that died.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np

from fleetbench import errors
from fleetbench.children import bound
from fleetbench.errors import EnvironmentLacks, FleetbenchError
from fleetbench.experiment import Experiment
from fleetbench.result import Summary
from sim.learning.trajectory import Trajectory
from sim.run import Engine, simulate

_WORTH_A_PROCESS = 3
"""Fewer simulations than this run here: a process takes a second to start."""

Progress = Callable[[int, int], None]
_Worker = subprocess.Popen[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One simulation of several."""

    label: str
    """What an error calls it."""
    experiment: Experiment
    learnt: Trajectory | None = None
    """What its virtual trainers have learnt."""


def summaries(
    jobs: Sequence[Job],
    *,
    engine: Engine = "auto",
    processes: int | None = None,
    progress: Progress | None = None,
) -> list[Summary]:
    """The summaries of all jobs, in their order.

    Args:
        jobs: what to simulate; the results do not depend on how many run at once.
        engine: see ``simulate``.
        processes: at most so many; default: one a core that this process may use.
        progress: told how many are done.

    Raises:
        EnvironmentLacks: a process was killed.
        FleetbenchError: a simulation failed; of its class, with the job's label in front of what it says.
    """
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    number = min(usable if processes is None else processes, len(jobs))
    if number > 1 and len(jobs) >= _WORTH_A_PROCESS:
        return _by_workers(jobs, engine, number, progress)
    found = []
    for done, job in enumerate(jobs, start=1):
        with naming(job.label):
            found.append(simulated(job.experiment, engine, job.learnt))
        if progress is not None:
            progress(done, len(jobs))
    return found


def _by_workers(jobs: Sequence[Job], engine: Engine, number: int, progress: Progress | None) -> list[Summary]:
    """A process and a thread that waits for it for each that may run at once."""
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(number))
        idle: SimpleQueue[_Worker] = SimpleQueue()
        for _ in range(number):
            idle.put(stack.enter_context(_worker()))
        # On the way out, also by a Ctrl-C: what has not begun does not begin, processes are killed, and then their threads end.
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)

        def run(job: Job) -> Summary:
            worker = idle.get()
            try:
                with naming(job.label):
                    return summary_of(_ask(worker, question(job.experiment, engine, job.learnt)))
            finally:
                idle.put(worker)

        futures = [pool.submit(run, job) for job in jobs]
        for done, future in enumerate(as_completed(futures), start=1):
            future.result()  # or the first failure
            if progress is not None:
                progress(done, len(jobs))
        return [future.result() for future in futures]


@contextmanager
def _worker() -> Iterator[_Worker]:
    """A process that simulates, and ends with the block."""
    command = [sys.executable, "-P", "-m", "sim.many.pool"]
    process = subprocess.Popen(bound(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):  # what was not read by the process that is gone
                pipe.close()  # type: ignore[union-attr]  # both are pipes


def _ask(worker: _Worker, asked: str) -> str:
    assert worker.stdin is not None
    assert worker.stdout is not None
    answer = ""
    try:
        worker.stdin.write(asked + "\n")
        worker.stdin.flush()
        answer = worker.stdout.readline()
    except OSError:  # it is gone, and the pipe with it
        pass
    if not answer and (code := worker.wait()) > 0:
        raise EnvironmentLacks(f"the process that simulates it ended with exit code {code}", "this machine", hint="what it said is above")
    if not answer:
        hint = "it may have run out of memory: fewer trainers or steps need less"
        raise EnvironmentLacks("the process that simulates it was killed", "this machine", hint=hint)
    return answer


@contextmanager
def naming(label: str) -> Iterator[None]:
    """Put a label in front of what an error says."""
    try:
        yield
    except FleetbenchError as error:
        raise type(error)(f"{label}: {error.what}", error.where, error.value, error.hint) from error


def question(experiment: Experiment, engine: Engine, learnt: Trajectory | None = None) -> str:
    """What to ask a worker."""
    told = None if learnt is None else {**learnt.to_dict(), "losses": learnt.losses.mean(1, keepdims=True).tolist()}
    return json.dumps({"experiment": experiment.to_toml(), "engine": engine, "learnt": told})


def summary_of(answer: str) -> Summary:
    """A worker's summary. Raises the error that it met."""
    data = json.loads(answer)
    if "error" in data:
        name, *details = data["error"]
        kind: type[FleetbenchError] = getattr(errors, name)
        raise kind(*details)
    return Summary(**{**data["summary"], "skipped": tuple(data["summary"]["skipped"])})


def simulated(experiment: Experiment, engine: Engine, learnt: Trajectory | None = None) -> Summary:
    """The summary of one simulation."""
    return simulate(experiment, timeline=False, table=False, engine=engine, learnt=learnt).summary


def _answer(line: str) -> dict[str, Any]:
    asked = json.loads(line)
    try:
        experiment = Experiment.from_dict(tomllib.loads(asked["experiment"]))
        told = asked["learnt"]
        learnt = None if told is None else Trajectory.from_dict(told, np.array(told["losses"]))
        return {"summary": dataclasses.asdict(simulated(experiment, asked["engine"], learnt))}
    except FleetbenchError as error:
        return {"error": [type(error).__name__, *error.args]}


def main() -> None:
    """Answer every line."""
    warnings.simplefilter("ignore")  # the process that asks has shown them
    for line in sys.stdin:
        sys.stdout.write(json.dumps(_answer(line)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
