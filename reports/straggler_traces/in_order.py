"""Does the law fitted to a trace's first half predict its second half? The split in time, beside ``analyse.py``'s alternating one.

Run from the repository's root: ``python reports/straggler_traces/in_order.py`` (some minutes of one core). Writes ``in_order.json`` and
prints its table.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from analyse import DRAWS, HERE, JOBS, law_cell, read, told

from fleetbench.store import machine, versions
from held_out import hold_out


def main() -> None:
    """Every group of both jobs."""
    rows: list[dict[str, Any]] = []
    print("| job | stage | own jitter | shared jitter | D second half | 95 % of draws | p | predicts |\n|---|---|---|---|---|---|---|---|")
    for group in (group for job in JOBS for group in read(job)):
        half = group.times_s.shape[1] // 2
        found = told(hold_out(group.times_s[:, :half], group.times_s[:, half:], 0, draws=DRAWS))
        rows.append({"job": group.job, "stage": group.stage, "fitted_steps": half, "prediction": found})
        cells = [group.job, group.stage, law_cell(found["own"]), law_cell(found["shared"]), f"{found['distance']:.3f}"]
        cells += [f"{found['threshold']:.3f}", f"{found['p']:.2f}", "yes" if found["predicts"] else "NO"]
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    data = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "machine": machine(), "versions": versions(), "draws": DRAWS, "groups": rows}
    (HERE / "in_order.json").write_text(json.dumps(data, indent=1), encoding="utf-8")
    print(f"\npredicted: {sum(row['prediction']['predicts'] for row in rows)} of {len(rows)} groups")


if __name__ == "__main__":
    main()
