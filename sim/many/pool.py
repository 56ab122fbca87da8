"""pool: calls a function on many items at once, in forks of this process or as tasks of Ray.

Where the calls run, and how many at once, changes no result: simulations are deterministic.
"""

import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar, get_args

from fleetbench.children import end_with_parent
from fleetbench.errors import ConfigError, EnvironmentLacks, FleetbenchError
from fleetbench.experiment import Experiment
from fleetbench.result import Summary
from sim.learning.trajectory import Trajectory
from sim.many import on_ray
from sim.run import Engine, simulate

Where = Literal["local", "ray"]
WHERE: tuple[str, ...] = get_args(Where)
_WORTH_A_PROCESS = 3
"""Smallest number of calls for which other processes are started."""
_PARTS = 32
"""Number of parts for each core. If all calls take more than two seconds of a core, a part takes more than
50 ms, beside which sending it costs little; the last part to end is at most a 32nd of the whole."""

Progress = Callable[[int, int], None]
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One of the simulations that ``summaries`` runs."""

    label: str
    """Name of the simulation in error messages; empty for none."""
    experiment: Experiment
    learnt: Trajectory | None = None
    """Results of the experiment's virtual trainers; ``None`` if nothing was trained."""
    spared: tuple[int, ...] = ()
    """Ranks that no straggler delays."""


def summaries(
    jobs: Sequence[Job],
    *,
    engine: Engine = "auto",
    processes: int | None = None,
    progress: Progress | None = None,
    on: Where = "local",
) -> list[Summary]:
    """Return the summaries of all jobs, in their order; see ``run_all``."""
    labels = [job.label for job in jobs]
    return run_all(partial(simulated, engine=engine), jobs, labels=labels, on=on, processes=processes, progress=progress)


def run_all(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    labels: Sequence[str] = (),
    on: Where = "local",
    processes: int | None = None,
    progress: Progress | None = None,
) -> list[Result]:
    """Return ``function`` of every item, in their order; results do not depend on ``on`` and ``processes``.

    Args:
        function: can be pickled, like items and results, unless all calls run in this process.
        items: what it is called with.
        labels: a name for each item, which begins the messages of its errors; empty for none.
        on: ``local``, or ``ray`` (``sim.many.on_ray``).
        processes: largest number of calls at once with ``local``; by default one per core that this process
            may use. With ``ray``, Ray decides.
        progress: called with the numbers of finished and of all items.

    Raises:
        EnvironmentLacks: a process was killed, or there is no Ray. Otherwise what ``function`` raises, and of
            our own errors that of the first failing item, as in a loop.
    """
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    number, tell = usable if processes is None else processes, progress or (lambda *_: None)
    with started(on):
        number = on_ray.num_cpus() if on == "ray" else number
        size = max(1, len(items) // (_PARTS * number))
        calls = [*zip(items, labels or [""] * len(items), strict=True)]
        parts = [calls[first : first + size] for first in range(0, len(calls), size)]
        if on == "ray":
            results: Generator[list[Result]] = on_ray.results(_called, function, parts)
        elif number > 1 and len(items) >= _WORTH_A_PROCESS:
            results = _by_forks(min(number, len(parts)), function, parts)
        else:
            results = (_called(function, part) for part in parts)
        found = list[Result]()
        with closing(results):
            for own in results:
                found += own
                tell(len(found), len(items))
    return found


def started(on: Where) -> AbstractContextManager[None]:
    """Return a context in which the cores of ``on`` are at hand, so that several ``run_all`` start Ray once.

    Raises ``ConfigError`` for an unknown place, and ``EnvironmentLacks`` if there is no Ray.
    """
    if on not in WHERE:
        raise ConfigError("is no place where simulations run", "on", repr(on), f"one of {', '.join(WHERE)}")
    return on_ray.connected() if on == "ray" else nullcontext()


def _called(function: Callable[[Item], Result], part: Sequence[tuple[Item, str]]) -> list[Result]:
    """Call the function with the items of one part."""
    found = list[Result]()
    for item, label in part:
        with naming(label):
            found.append(function(item))
    return found


def _by_forks(number: int, function: Callable[[Item], Result], parts: Sequence[Sequence[tuple[Item, str]]]) -> Generator[list[Result]]:
    """Call in ``number`` processes.

    All processes are killed at the end, also after Ctrl-C, because they hold nothing worth keeping.
    """
    others = multiprocessing.active_children()
    pool = ProcessPoolExecutor(number, multiprocessing.get_context("fork"), _begin, (os.getpid(),))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about forks with threads: the forks use no thread
            futures = [pool.submit(_called, function, part) for part in parts]
        for future in futures:
            yield future.result()
    except BrokenProcessPool:
        hint = "it may have run out of memory: fewer trainers or steps need less"
        raise EnvironmentLacks("a process that simulates was killed", "this machine", hint=hint) from None
    finally:
        for worker in multiprocessing.active_children():
            if worker not in others:
                worker.kill()
        pool.shutdown(cancel_futures=True)


def _begin(parent: int) -> None:
    """Set up a worker: it ends with its parent, which also handles Ctrl-C, and stays quiet as to warnings."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(parent)
    warnings.simplefilter("ignore")


@contextmanager
def naming(label: str) -> Iterator[None]:
    """Prefix the message of an error by a label, unless that is empty."""
    try:
        yield
    except FleetbenchError as error:
        if not label:
            raise
        raise type(error)(f"{label}: {error.what}", error.where, error.value, error.hint) from error


def simulated(job: Job, engine: Engine) -> Summary:
    """Run one simulation and return its summary."""
    spared = job.spared
    return simulate(job.experiment, timeline=False, table=False, spared=spared, engine=engine, learnt=job.learnt).summary
