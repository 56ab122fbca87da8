"""The tuning directory: what driver and ranks tell each other by files, and who ends when the other is gone."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fleetbench.config import encode
from fleetbench.errors import ConfigError
from real.job import driver_watch
from real.job.driver_watch import Watch
from real.job.folder import DriverSide, RankSide
from real.processes.place import Place, process_state, start_ticks
from real.processes.roles import TUNING


@pytest.fixture
def sides(tmp_path: Path) -> tuple[DriverSide, RankSide]:
    """A directory as both see it."""
    driver = DriverSide(tmp_path / "tuning")
    driver.make()
    return driver, RankSide(driver.path)


def test_a_variable_that_names_nothing_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Left over from another time, it is named with what to do."""
    monkeypatch.setenv(TUNING, str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match=TUNING) as caught:
        RankSide.of_environment()
    assert caught.value.hint is not None


def test_a_rank_ends_with_an_abort_or_without_its_directory(sides: tuple[DriverSide, RankSide]) -> None:
    """Until then it stays."""
    driver, script = sides
    watching = Watch(script)
    assert not watching.must_end()
    driver.abort()
    assert watching.must_end()
    (driver.path / "abort").unlink()
    assert not watching.must_end()
    driver.legs.rename(driver.path / "moved")
    assert watching.must_end()


def test_a_rank_ends_when_the_driver_is_dead(sides: tuple[DriverSide, RankSide]) -> None:
    """Also while nobody has reaped it."""
    driver, script = sides
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    place = dataclasses.replace(Place.here(), pid=process.pid, started=start_ticks(process.pid) or 0)
    (driver.path / "driver.json").write_text(json.dumps(encode(place)))
    watching = Watch(script)
    assert not watching.must_end()
    process.kill()
    while process_state(process.pid) != "Z":
        time.sleep(0.01)
    assert watching.must_end()
    process.wait()
    assert watching.must_end()


def test_a_driver_on_another_host_lives_while_its_beat_changes(sides: tuple[DriverSide, RankSide], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process number says nothing here; a beat that stays the same for too long does."""
    driver, script = sides
    (driver.path / "driver.json").write_text('{"host": "far", "boot": "another", "pid": 1}')
    monkeypatch.setattr(driver_watch, "SILENCE_S", 0.2)
    watching = Watch(script)
    assert not watching.must_end()
    time.sleep(0.3)
    (driver.path / "driver").write_text("1")
    assert not watching.must_end()
    time.sleep(0.3)
    assert watching.must_end()
