"""What a report is built from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fleetbench.errors import ConfigError
from fleetbench.report.model import read_report
from fleetbench.result import RunResult
from fleetbench.store import save_run


def test_a_run_folder_makes_a_report_of_its_own(tmp_path: Path, make_run: Callable[..., RunResult]) -> None:
    """A single run has a summary and no verdict."""
    saved = save_run(make_run(), tmp_path)
    assert saved.path is not None
    report = read_report(saved.path)
    assert report.tune is None
    assert report.headline.startswith("10.00 ms a step (real")
    assert "samples_per_s" in dict(report.summary)
    assert dict(report.environment)["device"] == "cpu"


@pytest.mark.parametrize("content", [None, "", "manifest.json"])
def test_what_is_no_run_is_refused(tmp_path: Path, content: str | None) -> None:
    """A missing folder, an empty one, and one whose files are missing are named, not traced back."""
    folder = tmp_path / "folder"
    if content is not None:
        folder.mkdir()
    if content:
        (folder / content).write_text("{}")
    with pytest.raises(ConfigError, match="folder"):
        read_report(folder)
