"""What fusion is worth in ``examples/sixty_four_gpus.toml``, simulated: fixed sizes, MG-WFBP's rule, and the optimal partition.

``python reports/network/fusion.py`` writes ``fusion.csv`` beside it and prints the table of ``docs/exchange.md``.
"""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

from fleetbench.experiment import Experiment
from sim.many.objective import StepTime

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples" / "sixty_four_gpus.toml"
SIZES_MB = (1, 2, 4, 8, 12, 16, 20, 24, 32, 48, 64, 100, 200, 400)


def main() -> None:
    """Simulate every rule with and without the example's stragglers."""
    jittery = Experiment.load(EXAMPLE)
    rows = []
    for name, given in (
        ("without stragglers", jittery.replace(cluster=dataclasses.replace(jittery.cluster, stragglers=()))),
        ("with the example's jitter", jittery),
    ):
        step_s = StepTime(given)
        plain = given.strategy
        fixed = {f"{size} MB": plain.replace(fuse_grad_size_in_MB=float(size), fuse_grad_count=0) for size in SIZES_MB}
        rules = {rule: plain.replace(fusion=rule) for rule in ("merged_gradient", "optimal")}
        found = {rule: 1e3 * step_s(strategy) for rule, strategy in {**fixed, **rules}.items()}
        rows += [{"case": name, "fusion": rule, "step_ms": f"{took:.2f}"} for rule, took in found.items()]
        best = min(fixed, key=lambda rule: found[rule])
        print(f"| {name} | {found[best]:.0f} ms ({best}) | {found['merged_gradient']:.0f} ms | {found['optimal']:.0f} ms |")
    with (HERE / "fusion.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["case", "fusion", "step_ms"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
