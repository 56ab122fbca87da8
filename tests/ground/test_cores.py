"""Compute on fewer cores than a profile was taken with."""

from __future__ import annotations

import dataclasses
import math

import pytest
from sim_cases import profiled

from fleetbench.cores import slowdown
from fleetbench.experiment import Experiment
from fleetbench.measurements import Threads
from fleetbench.profile import Profile
from fleetbench.quantities import Nanoseconds

LAYERS = [([250], [600], 101, 203), ([500], [401], 301, 401)]


def line(threads: int, compute_ns: int) -> Threads:
    """Compute at a thread count."""
    took = Nanoseconds(compute_ns)
    return Threads(thread_num=threads, step=took, compute=took, contention=0.0, collective_contention=0.0, unexplained=0.0)


def case(
    *, threads: int, trainers: int, cores: int, measured: tuple[Threads, ...] = (), machine: int | None = 16
) -> tuple[Experiment, Profile]:
    """Trainers of one node with so many threads each, on so many cores; ``machine`` is where the profile is from."""
    experiment, profile = profiled(LAYERS, {}, nodes=1, trainers_per_node=trainers, cores_per_node=cores, strategy={"thread_num": threads})
    return experiment, dataclasses.replace(profile, threads=measured, cores=machine)


FOUR = (line(1, 8000), line(2, 5000), line(4, 4000))


@pytest.mark.parametrize(
    ("threads", "trainers", "cores", "expected"),
    [
        (4, 2, 8, 1.0),  # four cores each
        (4, 2, 16, 1.0),  # more than they have threads for
        (4, 2, 4, 5000 / 4000),  # two cores each: as with two threads
        (4, 2, 2, 8000 / 4000),  # one each
        (4, 2, 1, 2 * 8000 / 4000),  # half of one each: they take turns
        (4, 1, 3, math.exp(math.log(5000) + math.log(1.5) / math.log(2) * math.log(4000 / 5000)) / 4000),  # between two lines
        (2, 4, 4, 8000 / 5000),
        (1, 4, 2, 2.0),
    ],
)
def test_fewer_cores_than_threads_compute_as_fewer_threads(threads: int, trainers: int, cores: int, expected: float) -> None:
    """By the profile's own lines of thread counts."""
    assert slowdown(*case(threads=threads, trainers=trainers, cores=cores, measured=FOUR)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("cores", "expected"), [(4, 1.0), (2, 2.0), (1, 4.0)])
def test_without_other_thread_counts_threads_take_turns(cores: int, expected: float) -> None:
    """Two trainers of two threads: half the cores, twice the time."""
    assert slowdown(*case(threads=2, trainers=2, cores=cores)) == pytest.approx(expected)


def test_more_threads_that_were_slower_never_make_fewer_cores_faster() -> None:
    """Four threads took longer than two when measured: cores for two slow nothing, and win nothing."""
    measured = (line(1, 8000), line(2, 4000), line(4, 5000))
    assert slowdown(*case(threads=4, trainers=1, cores=2, measured=measured)) == 1.0
