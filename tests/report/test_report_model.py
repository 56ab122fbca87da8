"""What a report is built from."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fleetbench.errors import ConfigError
from fleetbench.report.model import read_report
from fleetbench.result import RunResult
from fleetbench.store import save_run


def test_legs_of_one_arm_are_one_row(tuned: Path) -> None:
    """The default's two real legs are one row, beside the simulated run."""
    assert list(read_report(tuned).splits.index) == ["default, simulated", "default, real", "candidate 2, real"]


def test_the_parts_of_a_step_add_up_to_it(tuned: Path) -> None:
    """Compute, wait, exposed communication, update and other are the mean step: 10 ms for the default."""
    split = read_report(tuned).splits.loc["default, real"]
    assert split.sum() == pytest.approx(0.010)
    compute, wait, exposed, update, other = split
    assert compute == pytest.approx(0.00725)  # forward 1 and 1.5 ms, backward 4, 6, 6 and 8 ms
    assert wait == pytest.approx(0.00025)  # rank 0 waits half a millisecond for rank 1
    assert exposed == pytest.approx(0.0015)
    assert update == pytest.approx(0.001)
    assert other == pytest.approx(0.0, abs=1e-12)


def test_an_arm_knows_its_simulated_figures_error(tuned: Path) -> None:
    """9 ms simulated against legs of 10, 12 and 8 ms (mean 10) is 10 % short."""
    tune = read_report(tuned).tune
    assert tune is not None
    assert tune.recommendation.arms[0].error == pytest.approx(-0.1)
    assert [arm.name == tune.chosen for arm in tune.recommendation.arms] == [False, False, True]
    assert str(tune.recommendation.arms[1].target) == "not reached (loss 0.75)"


def test_a_run_that_is_gone_is_noted_and_not_fatal(tuned: Path) -> None:
    """A deleted run leaves a report without its bar and with a note."""
    shutil.rmtree(tuned / "runs" / "fused")
    report = read_report(tuned)
    assert list(report.splits.index) == ["default, simulated", "default, real"]
    assert str(report.notes[-1]).startswith("1 of 4 stored runs are not drawn: ")


def test_skipped_lines_appear_once(tuned: Path) -> None:
    """Three real runs skipped the same line."""
    assert read_report(tuned).skipped == (("cluster.inter", "launcher local"),)


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
