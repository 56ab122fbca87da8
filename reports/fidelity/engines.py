"""Engines: whether both of them predict the same, and what was sealed."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from files import Entry, Files
from grid import Environment
from predict import predict

from sim.run import Engine

BOTH: tuple[Engine, ...] = ("reference", "vector")
"""Event by event, and over arrays."""
SEALED_WITHIN = 1e-9
"""Seconds of a step that may differ from the sealed prediction: what a float holds of a run's time."""


def check_engines(files: Files, environments: tuple[Environment, ...], leg_s: float) -> None:
    """Predict every cell with both engines, and print how many are equal, and how many are as sealed.

    Equal means every figure and every step's phases, bit for bit. Raises ``SystemExit`` where a cell is not.
    """
    reference, vector = (_cells(predict(files, environments, leg_s, engine)) for engine in BOTH)
    by = Counter(cell.pop("by").partition(",")[0] for cells in (reference, vector) for cell in cells.values())
    unequal = [name for name in reference if reference[name] != vector[name]]
    print(f"{len(reference)} cells: {len(reference) - len(unequal)} are equal by {' and '.join(BOTH)}", flush=True)
    print(f"who simulated: {', '.join(f'{engine} {number} times' for engine, number in by.items())}", flush=True)
    sealed = _cells(json.loads(files.predictions.read_text(encoding="utf-8"))) if files.predictions.exists() else {}
    moved = {name: change for name, cell in sealed.items() if name in reference and (change := _change(cell, reference[name]))}
    print(f"{len(sealed)} cells are sealed: {len(sealed) - len(moved)} are predicted as they were then", flush=True)
    for name, change in moved.items():
        print(f"  {name}: {change}", flush=True)
    if unequal:
        raise SystemExit(f"the engines differ in {', '.join(unequal)}")


def _cells(predicted: Entry) -> dict[str, Any]:
    return {
        f"{environment}: {strategy}": cell
        for environment, entry in predicted["environments"].items()
        for strategy, cell in entry["cells"].items()
    }


def _change(before: Entry, now: Entry) -> str | None:
    """What has become of a cell's mean step; none where nothing has."""
    then_s, now_s = (cell["sim"]["wall_s"] / cell["steps"] for cell in (before, now))
    if before["steps"] == now["steps"] and abs(now_s - then_s) <= SEALED_WITHIN:
        return None
    return f"{before['steps']} steps of {1e3 * then_s:.3f} ms then, {now['steps']} of {1e3 * now_s:.3f} ms now ({now_s / then_s - 1:+.2%})"
