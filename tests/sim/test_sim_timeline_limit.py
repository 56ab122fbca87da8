"""A timeline has a million events at most."""

from __future__ import annotations

from pathlib import Path

import pytest
from sim_cases import layered, link

from fleetbench.store import load_run, save_run
from sim import run


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
