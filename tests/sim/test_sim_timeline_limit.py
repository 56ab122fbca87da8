"""A timeline has a million events at most."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sim_cases import layered, link

from fleetbench.store import load_run, save_run
from fleetbench.timeline import MOST_EVENTS, Span
from sim import run
from sim.execution import Spans
from sim.run import Engine


def test_more_events_than_that_are_dropped_and_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As many as the limit are kept, one more and there are none; steps and summary are the same, and the stored run loads."""
    experiment = layered([(250, 100, 200)], inter=link(8, 10), steps=5)
    whole = run.simulate(experiment)
    assert whole.spans
    monkeypatch.setattr(run, "MOST_EVENTS", len(whole.spans))
    assert run.simulate(experiment).spans == whole.spans
    monkeypatch.setattr(run, "MOST_EVENTS", len(whole.spans) - 1)
    short = run.simulate(experiment)
    assert short.spans == ()
    assert short.steps.equals(whole.steps)
    assert [entry["what"] for entry in short.summary.skipped] == ["timeline.json.gz"]
    stored = save_run(short, tmp_path)
    assert stored.path is not None
    assert load_run(stored.path).summary == short.summary
    assert run.simulate(experiment, timeline=False).summary.skipped == ()


@pytest.mark.parametrize("engine", ["reference", "vector"])
def test_how_many_events_there_would_have_been_is_said(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two trainers, five steps, and in each forward, backward, a wait and an all-reduce: 40, by both engines."""
    experiment = layered([(250, 100, 200)], inter=link(8, 10), steps=5)
    monkeypatch.setattr(run, "MOST_EVENTS", 39)
    (entry,) = run.simulate(experiment, engine=engine).summary.skipped
    assert entry["why"] == "40 events, and no more than 39 are kept: fewer steps or trainers"


def test_a_bound_on_events_is_no_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where so many may be that nobody looks, the number is said to be a bound, and it is one."""
    monkeypatch.setattr("sim.arrays.engine.MOST_DRAWN", 39)
    (entry,) = run.simulate(layered([(250, 100, 200)], inter=link(8, 10), steps=5), engine="vector").summary.skipped
    found = re.fullmatch(r"up to (\d+) events, and no more than 1,000,000 are kept: fewer steps or trainers", entry["why"])
    assert found is not None
    assert int(found[1]) >= 40


def test_servers_keep_no_more_than_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table and a timeline that are too large are left out by name; the figures are those of the whole run."""
    strategy = {"mode": "ps", "fuse_all_reduce_ops": True}
    experiment = layered([(250, 100, 200)], inter=link(8, 10), steps=5, strategy=strategy, servers=1)
    whole = run.simulate(experiment)
    monkeypatch.setattr("sim.run.MOST_EVENTS", len(whole.spans) - 1)
    monkeypatch.setattr("sim.run.MOST_ROWS", len(whole.steps) - 1)
    short = run.simulate(experiment)
    assert (short.spans, len(short.steps)) == ((), 0)
    assert [entry["what"] for entry in short.summary.skipped] == ["timeline.json.gz", "steps.parquet"]
    assert short.summary.wall_s == whole.summary.wall_s
    assert len(run.simulate(experiment, table=True).steps) == len(whole.steps)
    assert [entry["what"] for entry in run.simulate(experiment, table=False).summary.skipped] == ["timeline.json.gz"]


def test_spans_that_nobody_wants_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one is made where there is to be no timeline, nor is more than the limit held where there is."""
    made: list[object] = []
    whole = Spans.add

    def add(self: Spans, *spans: Span) -> None:
        whole(self, *spans)
        made.extend(spans)
        assert len(self.kept) <= 10

    monkeypatch.setattr(Spans, "add", add)
    experiment = layered([(250, 100, 200)], inter=link(8, 10), steps=5)
    run.simulate(experiment, engine="reference", timeline=False)
    assert made == []
    monkeypatch.setattr(run, "MOST_EVENTS", 10)
    run.simulate(experiment, engine="reference")
    assert len(made) == 40


def test_the_limit_is_a_million() -> None:
    """What Perfetto opens, and a file of tens of megabytes."""
    assert MOST_EVENTS == 10**6
