"""Run a training script as it is, and keep when each of its updates had which loss: ``python timed.py FILE SCRIPT [ARGUMENTS]``.

Rank ``r`` writes ``FILE.r.json``: ``[seconds, loss]`` of each ``fleet.report``. The script knows nothing of it.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from real.fleet import Fleet

told: list[tuple[float, float]] = []
report = Fleet.report


def timed(self: Fleet, *, loss: Any, **metrics: Any) -> None:
    """What ``fleet.report`` does, after its time and loss are kept."""
    told.append((time.perf_counter(), float(loss)))
    report(self, loss=loss, **metrics)


if __name__ == "__main__":
    file, script, *arguments = sys.argv[1:]
    Fleet.report = timed  # type: ignore[method-assign]  # for this process alone
    sys.argv, sys.path[0] = [script, *arguments], str(Path(script).parent)
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        Path(f"{file}.{os.environ.get('RANK', '0')}.json").write_text(json.dumps(told), encoding="utf-8")
