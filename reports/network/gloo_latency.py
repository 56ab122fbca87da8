"""gloo's all-reduce over slow links: the simulator as declared plus one constant, beside a bare ring with the same fit.

``python reports/network/gloo_latency.py FOUR_NODES.csv`` takes columns nodes, one_way_delay_s, rate_bit_s, size_bytes and
time_s. Each row is predicted by a constant that is fitted to the others.
"""

from __future__ import annotations

import csv
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path

from scipy import optimize

from fleetbench.cluster import Link
from fleetbench.quantities import BitsPerSecond, Nanoseconds
from sim.network.gloo import gloo
from sim.network.links import Links

Row = Mapping[str, float]
Model = Callable[[Row, float], float]
"""Seconds of a row, given nanoseconds of the host for each byte."""


def simulated_s(row: Row, host_ns_per_byte: float) -> float:
    """As ``cluster.collective = "gloo"`` takes it, over declared links."""
    declared = Link(bandwidth=BitsPerSecond(int(row["rate_bit_s"])), latency=Nanoseconds(round(row["one_way_delay_s"] * 1e9)))
    links = Links(
        trainers_per_node=1,
        intra=None,
        inter=declared.carried("gloo", between_nodes=True),
        host_ns_per_byte=Fraction(host_ns_per_byte).limit_denominator(10**6),
    )
    cost = gloo("all_reduce", range(int(row["nodes"])), links).route(int(row["size_bytes"])).cost
    return float(cost.latency_ns + cost.transfer_ns) * 1e-9


def ring_s(row: Row, host_ns_per_byte: float) -> float:
    """2 (P - 1) (alpha + S / (P B)), and the host's time for every byte that a rank sends."""
    ranks, nbytes = row["nodes"], row["size_bytes"]
    sent = 2 * (ranks - 1) * nbytes / ranks
    return 2 * (ranks - 1) * row["one_way_delay_s"] + sent * (8 / row["rate_bit_s"] + host_ns_per_byte * 1e-9)


def fitted(model: Model, rows: Sequence[Row]) -> float:
    """The constant with the least sum of squared logarithms of predicted over measured."""

    def loss(constant: float) -> float:
        return sum(math.log(model(row, constant) / row["time_s"]) ** 2 for row in rows)

    return float(optimize.minimize_scalar(loss, bounds=(0.0, 50.0), method="bounded").x)


def main(path: Path) -> None:
    """Print a table: errors of each row, left out of the fit, and with no constant at all."""
    with path.open(encoding="utf-8") as file:
        rows = [{key: float(value) for key, value in row.items() if key != "setting"} for row in csv.DictReader(file)]
    print(
        "| delay | rate | size | simulator, no constant | simulator | bare ring, no constant | bare ring |\n|---|---|---|---|---|---|---|"
    )
    errors: dict[str, list[float]] = {}
    for row in rows:
        others = [other for other in rows if other is not row]
        cells = []
        for name, model in (("simulator", simulated_s), ("bare ring", ring_s)):
            for constant, label in ((0.0, ", no constant"), (fitted(model, others), "")):
                error = model(row, constant) / row["time_s"] - 1
                errors.setdefault(name + label, []).append(abs(error))
                cells.append(f"{error:+.1%}")
        setting = f"{row['one_way_delay_s'] * 1e3:g} ms | {row['rate_bit_s'] * 1e-9:g} Gbit/s | {row['size_bytes'] / 2**20:g} MiB"
        print(f"| {setting} | {' | '.join(cells)} |")
    for name, found in errors.items():
        print(f"{name}: mean {statistics.mean(found):.1%}, largest {max(found):.1%}")
    print(f"constants of all rows, ns a byte: simulator {fitted(simulated_s, rows):.2f}, bare ring {fitted(ring_s, rows):.2f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
