"""Parameter servers over 10 Gbit/s Ethernet, measured by others: fitted on 4 and 8 GPUs, how far off are 16 and 32?

``python reports/calibrate/ddl_10gbe_servers.py THROUGHPUT.csv OUT.csv``: rows BSP-PS and WFBP-PS of the table that ``ddl_10gbe.py`` takes.
A server a node, to which one trainer of each node pushes what the node has reduced. Prints the table of README.md, writes the errors.
"""

from __future__ import annotations

import csv
import dataclasses
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from ddl_10gbe import BATCH, MODELS, Row, experiment, measured_s
from scipy import optimize

from fleetbench.cluster import Link
from fleetbench.experiment import Experiment
from fleetbench.quantities import BitsPerSecond, Nanoseconds
from fleetbench.strategy import DistributedStrategy
from fleetbench.workload import LayerSpec
from sim.run import simulate

METHODS = ("BSP-PS", "WFBP-PS")
NUM_BUCKETS = 10
"""About so many are pushed beside the backward. To push each tensor, as was measured, takes many minutes to simulate on 32 GPUs."""
PLACEMENTS = ("shared", "own")
"""The servers are on the trainers' nodes, as the authors' eight nodes must have it; or on as many others, beside several nodes."""
DECLARED = (1.0, 10e9, 96e9)
"""Compute as a multiple of a single GPU's; bit/s between and inside nodes."""
HOST = (1.0, 16e9, 96e9)
"""The same with bit/s that a server's host handles, between nodes as declared."""
KINDS = ("calibrated", "calibrated host", "closed form")
Key = tuple[str, str, str]
Said = Callable[[Row, Sequence[float]], float]
"""Seconds of a row's step, with three parameters: compute, and what is between and inside nodes."""


def strategy(row: Row) -> DistributedStrategy:
    """Of the row's method."""
    own: dict[str, Any] = {}
    if row["method"] == "WFBP-PS":
        nbytes = 4 * sum(numel for _, numel, _ in MODELS[row["model"]])
        own = {"overlap_push": True, "fuse_grad_size_in_MB": nbytes / NUM_BUCKETS / 2**20, "fuse_grad_count": 0}
    return DistributedStrategy.from_dict({"mode": "ps", "reduce_in_node": True, **own})


def _slowed(layer: LayerSpec, scale: float) -> LayerSpec:
    forward, backward = (Nanoseconds(round(scale * time)) for time in (layer.forward, layer.backward))
    return dataclasses.replace(layer, forward=forward, backward=backward)


def simulated_nodes(row: Row, placement: str) -> int:
    """Two for more, where servers have nodes of their own: S bytes pass every port each way, however many nodes there are."""
    nodes = int(row["gpus"]) // 4
    return min(nodes, 2) if placement == "own" else nodes


def simulated(placement: str, *, host: bool = False) -> Said:
    """Compute scale, bit/s between nodes, or, with ``host``, of a server's host, and bit/s inside nodes; all else stays as declared."""

    def said(row: Row, values: Sequence[float]) -> float:
        base, nodes = experiment(row["model"]), simulated_nodes(row, placement)
        workload, cluster, (scale, second, inside) = base.workload, base.cluster, values
        layers = tuple(_slowed(layer, scale) for layer in workload.layers)
        made = Experiment(
            workload=dataclasses.replace(workload, layers=layers, steps=1),
            cluster=dataclasses.replace(
                cluster,
                nodes=nodes,
                servers=nodes,
                server_placement="own" if placement == "own" and nodes > 1 else "shared",
                intra=_with_rate(cluster.intra, inside),
                inter=_with_rate(cluster.inter, DECLARED[1] if host else second),
                host_bandwidth=BitsPerSecond(round(second)) if host else None,
            ),
            strategy=strategy(row),
            run=dataclasses.replace(base.run, warmup_steps=0),
        )
        return simulate(made, timeline=False).summary.step_s["mean"]

    return said


def _with_rate(link: Link | None, bits_per_s: float) -> Link:
    assert link is not None
    return dataclasses.replace(link, bandwidth=BitsPerSecond(round(bits_per_s)))


def closed_form(placement: str) -> Said:
    """Compute C; a node's port carries k S, with S pushed and S pulled: k = 2 (n - 1) / n where servers are on nodes, else 2.

    The exchange E = 2 S / B_inside + k S / B_between comes after C (BSP), or begins with the backward, a third into C (WFBP).
    """

    def said(row: Row, values: Sequence[float]) -> float:
        scale, between, inside = values
        batch, rate = BATCH[row["model"]]
        nodes, nbits = int(row["gpus"]) // 4, 32 * sum(numel for _, numel, _ in MODELS[row["model"]])
        times = 0.0 if nodes == 1 else 2.0 if placement == "own" else 2 * (nodes - 1) / nodes
        compute_s, exchange_s = scale * batch / rate, nbits * (2 / inside + times / between)
        return compute_s + exchange_s if row["method"] == "BSP-PS" else max(compute_s, compute_s / 3 + exchange_s)

    return said


def fitted(said: Said, rows: Sequence[Row], declared: Sequence[float] = DECLARED) -> list[float]:
    """The least squared logarithms over ``rows``, from what is declared, and within a factor of ten of it: some rows do not tell a rate."""

    def residuals(logs: Sequence[float]) -> list[float]:
        return [float(np.log(said(row, np.exp(logs)) / measured_s(row))) for row in rows]

    start = np.log(declared)
    found = optimize.least_squares(residuals, start, bounds=(start - np.log(10), start + np.log(10)), diff_step=1e-3, max_nfev=16)
    state = "converged" if found.status > 0 else "not converged"
    print(f"{rows[0]['model']}: {state} after {found.nfev} steps, cost {found.cost:.4f}", flush=True)
    return [float(value) for value in np.exp(found.x)]


def predicted(placement: str, own: Sequence[Row]) -> tuple[list[str], list[list[float]]]:
    """Of a model's rows, what was fitted, in words, and each row's errors, by ``KINDS``."""
    small = [row for row in own if int(row["gpus"]) <= 8]
    models = (simulated(placement), simulated(placement, host=True), closed_form(placement))
    found = [fitted(said, small, declared) for said, declared in zip(models, (DECLARED, HOST, DECLARED), strict=True)]
    notes = [
        f"- {own[0]['model']}, {placement}, {kind}: compute {scale:.3f}, {second / 1e9:.2f} and {inside / 1e9:.1f} Gbit/s"
        for kind, (scale, second, inside) in zip(KINDS, found, strict=True)
    ]
    return notes, [[said(row, values) / measured_s(row) - 1 for said, values in zip(models, found, strict=True)] for row in own]


def main(source: Path, target: Path) -> None:
    """Everything."""
    with source.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["method"] in METHODS]
    parts = [(placement, [row for row in rows if row["model"] == model]) for placement in PLACEMENTS for model in MODELS]
    errors: dict[Key, list[float]] = {(row["model"], row["method"], row["gpus"]): [] for row in rows}
    with ProcessPoolExecutor(2) as pool:
        for (_, own), (notes, found) in zip(parts, pool.map(predicted, *zip(*parts, strict=True)), strict=True):
            print(*notes, sep="\n", flush=True)
            for row, of_row in zip(own, found, strict=True):
                errors[row["model"], row["method"], row["gpus"]] += of_row
    names = [f"{kind}, {placement}" for placement in PLACEMENTS for kind in KINDS]
    print("\n| model | method | GPUs | " + " | ".join(names) + " |\n|---|---|---" + "|---" * len(names) + "|")
    for key, own in errors.items():
        print(f"| {' | '.join(key)} | " + " | ".join(f"{error:+.1%}" for error in own) + " |")
    print("\n| 16 and 32 GPUs | mean of absolute errors | largest |\n|---|---|---|")
    for index, name in enumerate(names):
        large = [abs(own[index]) for (_, _, gpus), own in errors.items() if int(gpus) > 8]
        print(f"| {name} | {statistics.mean(large):.1%} | {max(large):.1%} |")
    with target.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["model", "method", "gpus", *(f"error_{name.replace(', ', '_').replace(' ', '_')}" for name in names)])
        writer.writerows([*key, *(f"{error:.5f}" for error in own)] for key, own in errors.items())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
