"""Ctrl-C or SIGTERM while processes train: exit code 130, nothing left running, nothing half-written taken for a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("command", "sent"),
    [
        ("real", signal.SIGINT),
        pytest.param("tune", signal.SIGINT, marks=pytest.mark.whole),
        pytest.param("real", signal.SIGTERM, marks=pytest.mark.whole),
        ("tune", signal.SIGTERM),
    ],
)
def test_an_interrupt_ends_the_workers(command: str, sent: signal.Signals, tmp_path: Path) -> None:
    """A signal after the profile, while workers run legs: 130, a message, no process of ours, no complete run, no verdict."""
    # Longer than the test waits, and short enough to be simulated in seconds.
    settings = [
        "workload.steps=10000",
        "tune.trials=3",
        "tune.search_seconds=0",
        "tune.leg_steps=10000",
        "tune.pairs=2",
        "tune.budget_minutes=600",  # room for legs as long
    ]
    arguments = [part for setting in settings for part in ("--set", setting)]
    driver = subprocess.Popen(
        [sys.executable, "-m", "fleetbench", command, "--out", str(tmp_path / "runs"), *arguments],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        _wait_for_training(driver, tmp_path)
        children = psutil.Process(driver.pid).children(recursive=True)
        assert len(children) >= 2
        driver.send_signal(sent)
        _, errors = driver.communicate(timeout=40)
    finally:
        driver.kill()
        driver.wait()
    assert driver.returncode == 130, errors
    assert "interrupted" in errors
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive
    assert not list((tmp_path / "runs").glob(f"*-{'real' if command == 'real' else 'tune'}-*/manifest.json"))
    assert not list((tmp_path / "runs").glob("*/recommended.toml"))
    assert not list(tmp_path.glob("fleetbench-*"))


def _wait_for_training(driver: subprocess.Popen[str], folder: Path) -> None:
    """Until a launch runs a leg with the profile already stored."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        assert driver.poll() is None, driver.communicate()
        if list((folder / "runs" / "profiles").glob("*.toml")) and list(folder.glob("fleetbench-*/legs/0.json")):
            time.sleep(1)
            return
        time.sleep(0.1)
    raise AssertionError("training never started")
