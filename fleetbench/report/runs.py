"""Runs read for a report: whatever is wrong with a folder becomes one clear error."""

from __future__ import annotations

from pathlib import Path

from fleetbench.errors import ConfigError
from fleetbench.result import RunResult
from fleetbench.store import load_run


def read_run(folder: str | Path) -> RunResult:
    """A stored run. Raises ``ConfigError`` for a folder that is none, is incomplete, or is damaged."""
    try:
        return load_run(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"not a run that this version can read: {error}", str(folder), hint="name a folder below runs/") from error
