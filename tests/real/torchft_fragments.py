"""torchft's golden numbers of DiLoCo with two fragments."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any, NamedTuple

H, GRADIENT, INNER_LR = 6, 2.0, 1.0
STEPS = 15


class Row(NamedTuple):
    """One replica after one step: each layer's weight, and what all replicas agree on where that was recorded."""

    replica: int
    step: int
    local: tuple[float, float]
    agreed: tuple[float, float] | None


def golden() -> dict[tuple[int, float], list[Row]]:
    """The recorded rows by overlap and mixing."""
    lines = [line for line in Path(__file__).with_suffix(".csv").read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    found: dict[tuple[int, float], list[Row]] = {}
    for row in csv.DictReader(lines):
        agreed = (float(row["global_0"]), float(row["global_1"])) if row["global_0"] else None
        told = Row(int(row["replica"]), int(row["step"]), (float(row["local_0"]), float(row["local_1"])), agreed)
        found.setdefault((int(row["overlap_steps"]), float(row["mixing"])), []).append(told)
    return found


def configs(overlap: int, mixing: float) -> dict[str, Any]:
    """``localsgd_configs`` of a recorded run."""
    return {"k_steps": H, "fragments": 2, "overlap_steps": overlap, "mixing": mixing, "outer_lr": 2.0}
