"""The tuning directory: what driver and ranks tell each other by files, and who ends when the other is gone."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fleetbench.config import encode
from fleetbench.errors import ConfigError
from fleetbench.strategy import DistributedStrategy
from real.job import driver_watch
from real.job.driver_watch import Watch
from real.job.folder import NEVER, BeatReader, BeatWriter, DriverSide, RankSide
from real.leg import Leg
from real.processes.diagnosis import RankError
from real.processes.failures import rank_error
from real.processes.place import Place, process_state, start_ticks
from real.processes.roles import TUNING

ORDER = Leg(strategy=DistributedStrategy(localsgd=True, localsgd_configs={"k_steps": 4}), steps=7, warmup_steps=2)  # type: ignore[arg-type]  # tables are decoded

ERROR = RankError("broke", collective=True, time_ns=7, config=["is odd", None, None, None])


@pytest.fixture
def sides(tmp_path: Path) -> tuple[DriverSide, RankSide]:
    """A directory as both see it."""
    driver = DriverSide(tmp_path / "tuning")
    driver.make()
    return driver, RankSide(driver.path)


def joins(script: RankSide, rank: int, trainers: int) -> None:
    """A rank says that it is here."""
    script.join(rank, trainers, f"host{rank}")


def test_an_order_arrives_as_it_was_given(sides: tuple[DriverSide, RankSide]) -> None:
    """A rank that waits gets the order as soon as it is there, and nothing once the driver has said stop."""
    driver, script = sides
    later = threading.Timer(0.1, lambda: driver.order(0, ORDER))
    later.start()
    assert script.wait_for(0, Leg) == ORDER
    later.join()
    driver.stop()
    assert script.wait_for(0, Leg) == ORDER
    assert script.wait_for(1, Leg) is None


def test_a_launch_has_joined_when_all_ranks_have(sides: tuple[DriverSide, RankSide]) -> None:
    """One rank of two is nobody yet."""
    driver, script = sides
    joins(script, 1, 2)
    assert driver.joined() == {}
    joins(script, 0, 2)
    assert driver.joined() == {0: "host0", 1: "host1"}


def test_parts_and_errors_are_the_ranks_own(sides: tuple[DriverSide, RankSide]) -> None:
    """What ranks write of a leg and of their end is read back by rank."""
    driver, script = sides
    script.finish(3, 1, {"complete": True})
    script.fail(0, dataclasses.asdict(ERROR))
    assert driver.parts(3) == {1: {"complete": True}}
    assert driver.parts(2) == {}
    assert driver.failures() == {0: ERROR}


def test_a_variable_that_names_nothing_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Left over from another time, it is named with what to do."""
    monkeypatch.setenv(TUNING, str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match=TUNING) as caught:
        RankSide.of_environment()
    assert caught.value.hint is not None


def test_beats_are_timed_by_who_reads_them(tmp_path: Path) -> None:
    """A rank that has written nothing has never lived; a beat that stays the same stays as old as it is."""
    reader, writer = BeatReader(tmp_path), BeatWriter(tmp_path, 1)
    assert reader.read(2) == [NEVER, NEVER]
    before = time.monotonic_ns()
    writer.beat(4, -2)
    first = reader.read(2)[1]
    assert (first.pid, first.leg, first.step) == (os.getpid(), 4, -2)
    assert first.time_ns >= before
    time.sleep(0.01)
    assert reader.read(2)[1] == first
    writer.beat(4, -1)
    assert reader.read(2)[1].time_ns > first.time_ns


def test_what_was_taken_away_stays_away(sides: tuple[DriverSide, RankSide]) -> None:
    """A rank that fails a moment after the driver has taken the directory away does not bring it back."""
    _, script = sides
    shutil.rmtree(script.path)
    for write in (
        lambda: script.fail(0, dataclasses.asdict(ERROR)),
        lambda: script.finish(0, 0, {}),
        lambda: joins(script, 0, 1),
    ):
        with pytest.raises(OSError, match="No such file"):
            write()
    script.ended(0, 1)
    assert list(script.path.parent.iterdir()) == []


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


def test_errors_of_peers_are_told_from_a_ranks_own() -> None:
    """A connection that another rank's death has closed is nobody's first error; a configuration error keeps its parts."""
    assert rank_error(RuntimeError("[gloo/transport] Connection closed by peer [127.0.0.1]:123")).collective
    assert not rank_error(RuntimeError("mat1 and mat2 shapes cannot be multiplied")).collective
    assert rank_error(ConfigError("is odd", "here", "3", "make it even")).config == ["is odd", "here", "3", "make it even"]
