"""Runs read for a report."""

from __future__ import annotations

from pathlib import Path

from fleetbench.errors import ConfigError
from fleetbench.result import STEPS_FILE, RunResult
from fleetbench.store import load_run


def read_run(folder: str | Path) -> RunResult:
    """A stored run. Raises ``ConfigError`` for a folder that is none, is incomplete or damaged, or keeps no table of steps."""
    run = load_run(folder)
    if run.steps.empty:
        raise ConfigError(
            f"a run without {STEPS_FILE}, which reports and comparisons read",
            str(folder),
            hint="simulate it again with --table, and with engine auto or vector where it was folded",
        )
    return run
