"""Sweeps and seeds: many simulations, each the one that it would be alone."""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import os
import signal
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest
from sim_cases import layered

import fleetbench
from fleetbench.errors import ConfigError, EnvironmentLacks
from fleetbench.experiment import Experiment
from fleetbench.stragglers import Jitter
from sim.many import pool
from sim.many.pool import Job, run_all, summaries
from sim.many.seeds import Interval, over_seeds
from sim.many.sweep import COLUMNS, PER_TRAINER, Axis, sweep
from sim.run import simulate

FILE = """\
name = "swept"
[workload]
model = "layers"
steps = 4
layers = [{ name = "block", params = 250_000, forward = "1 ms", backward = "2 ms", repeat = 4 }]
[cluster]
nodes = 2
inter = { bandwidth = "8 Gbit/s", latency = "10 us" }
[[cluster.stragglers]]
kind = "jitter"
mean = 0.3
[run]
warmup_steps = 1
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An experiment file."""
    (tmp_path / "e.toml").write_text(FILE, encoding="utf-8")
    return tmp_path / "e.toml"


def swept(path: Path, *texts: str, processes: int = 1) -> pd.DataFrame:
    """The table of a sweep, as the command line writes its axes."""

    def load(more: Sequence[str]) -> Experiment:
        return Experiment.load(path, more)

    return sweep(load, [Axis.parse(text) for text in texts], processes=processes).table


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("cluster.nodes=1,2, 4", ("1", "2", "4")),
        ("cluster.nodes=1..4,8", ("1", "2", "3", "4", "8")),
        ("a.b=25 Gbit/s,100 Gbit/s", ("25 Gbit/s", "100 Gbit/s")),
        ("a.b=-2..0", ("-2", "-1", "0")),
    ],
)
def test_axes_are_lists_and_ranges(text: str, values: tuple[str, ...]) -> None:
    """Between commas, or from a number to another."""
    assert Axis.parse(text).values == values  # noqa: PD011  # no pandas


@pytest.mark.parametrize("text", ["cluster.nodes", "=1,2", "a=", "a=1,,2", "a=1,2,...,8", "a=4..1", "a=1,1", "a=1..9999999"])
def test_axes_that_are_none_are_refused(text: str) -> None:
    """With how one is written."""
    with pytest.raises(ConfigError, match="HINT"):
        Axis.parse(text)


def test_a_point_is_the_run_that_it_would_be_alone(path: Path) -> None:
    """Three numbers of nodes: every column is that of its own simulation, and trainers share their draws."""
    table = swept(path, "cluster.nodes=1,2,4")
    assert list(table.columns) == ["cluster.nodes", *COLUMNS, *PER_TRAINER]
    assert list(table["cluster.nodes"]) == list(table["trainers"]) == [1, 2, 4]
    for row in table.to_dict(orient="records"):
        alone = simulate(Experiment.load(path, [f"cluster.nodes={row['cluster.nodes']}"])).summary
        assert row["step_s"] == pytest.approx(alone.step_s["mean"], rel=1e-12)
        for name in ("wall_s", "wait_s", "exposed_comm_s", "bytes_sent_per_trainer"):
            assert row[name] == pytest.approx(getattr(alone, name), rel=1e-9, abs=1e-12)
    assert table["step_s"].is_monotonic_increasing


def test_a_failed_point_is_named(path: Path) -> None:
    """Whether its values are wrong or its run is: the point, and what is wrong."""
    with pytest.raises(ConfigError, match=r"cluster\.nodes: the point cluster\.nodes=0: must be at least 1(.|\n)*HINT"):
        swept(path, "cluster.nodes=2,0")
    with pytest.raises(ConfigError, match=r"cluster\.intra: the point cluster\.trainers_per_node=2: trainers use this link"):
        swept(path, "cluster.trainers_per_node=1,2")


def _from_100(number: int) -> int:
    if number == 1_000:
        raise ConfigError("is too large")
    return 100 - number


def test_calls_anywhere_are_a_loop(path: Path) -> None:
    """Of 333 items, whatever the parts that they are sent in: results in order, progress to the end, the failed item named."""
    told: list[tuple[int, int]] = []
    found = run_all(_from_100, range(333), processes=2, progress=lambda done, total: told.append((done, total)))
    assert found == [100 - number for number in range(333)]
    assert told == sorted(told)
    assert told[-1] == (333, 333)
    assert run_all(_from_100, []) == []
    for processes in (1, 2):
        with pytest.raises(ConfigError, match=r"^item 3: is too large$"):
            run_all(_from_100, [1, 2, 3, 1_000, 5], labels=[f"item {number}" for number in range(5)], processes=processes)
    cases = [fleetbench.what_if(Experiment.load(path), processes=processes) for processes in (1, 2)]
    assert [(case.name, case.gain) for case in cases[0]] == [(case.name, case.gain) for case in cases[1]]


def _below_1000(number: int) -> int:
    if number >= 1_000:
        raise ConfigError("is too large")
    return number


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("failing", [(70, 129, 200), (0, 1), (332, 64)])
def test_the_error_is_that_of_the_first_failing_item(processes: int, failing: tuple[int, ...]) -> None:
    """As in a loop, whatever the parts: 70 and 129 are in the sixth and the first of 64, and elsewhere among 96."""
    items, labels = [1_000 if place in failing else place for place in range(333)], [f"item {place}" for place in range(333)]
    with pytest.raises(ConfigError, match=rf"^item {min(failing)}: is too large$"):
        run_all(_below_1000, items, labels=labels, processes=processes)


def test_without_ray_there_is_a_command_to_install_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a place that is none is refused."""
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EnvironmentLacks, match=r"Ray is not installed\nHINT: python -m pip install 'fleetbench\[ray\]'"):
        over_seeds(Experiment.load(path), 2, on="ray")
    with pytest.raises(ConfigError, match=r"one of local, ray"):
        over_seeds(Experiment.load(path), 2, on="moon")  # type: ignore[arg-type]  # wrong on purpose


def test_the_interval_is_students(path: Path) -> None:
    """Three seeds: t(0.975, 2) = 4.303 (any table), the standard deviation with n - 1, and each seed's own run."""
    experiment = Experiment.load(path, ["run.seed=5"])
    found = over_seeds(experiment, 3, processes=1)
    assert found.seeds == (5, 6, 7)
    walls = [simulate(experiment.replace(run=dataclasses.replace(experiment.run, seed=seed))).summary.wall_s for seed in found.seeds]
    assert [summary.wall_s for summary in found.summaries] == pytest.approx(walls, rel=1e-12)
    interval = found.intervals["wall_s"]
    half = 4.302653 * statistics.stdev(walls) / math.sqrt(3)
    assert interval.mean == pytest.approx(statistics.mean(walls))
    assert interval.high - interval.mean == pytest.approx(half, rel=1e-6)
    assert interval.mean - interval.low == pytest.approx(half, rel=1e-6)
    assert "time_to_target_s" not in found.intervals


@pytest.mark.slow
def test_intervals_cover_what_they_should() -> None:
    """Of 50 intervals from 5 seeds each, 95 % hold the expected step: base x (1 + mean), one trainer, exponential; within 4 errors."""
    experiment = layered([(1, 250_000, 750_000)], nodes=1, stragglers=(Jitter(distribution="exponential", mean=0.5),), steps=20)
    values = [
        simulate(experiment.replace(run=dataclasses.replace(experiment.run, seed=seed)), timeline=False).summary.step_s["mean"]
        for seed in range(250)
    ]
    intervals = [Interval.of(values[start : start + 5]) for start in range(0, 250, 5)]
    covered = statistics.mean(interval.low <= 0.0015 <= interval.high for interval in intervals)
    assert abs(covered - 0.95) < 4 * math.sqrt(0.95 * 0.05 / len(intervals))


def test_a_process_that_is_killed_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where memory is short: it is no hang, no traceback of a pipe, and no other process stays."""
    jobs = [Job(label=f"number {number}", experiment=Experiment.load(path)) for number in range(4)]
    monkeypatch.setattr(pool, "simulate", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(EnvironmentLacks, match=r"a process that simulates was killed(.|\n)*memory"):
        summaries(jobs, processes=2)
    assert not [process for process in multiprocessing.active_children() if process.exitcode is None]
