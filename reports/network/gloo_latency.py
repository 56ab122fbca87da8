"""gloo's all-reduce over slow links: the simulator as declared plus one constant, beside a bare ring with the same fit.

``python reports/network/gloo_latency.py FOUR_NODES.csv`` takes columns nodes, one_way_delay_s, rate_bit_s, size_bytes and
time_s. Each row is predicted by a constant that is fitted to the others: either the share of the declared rate that the link
has, or the host's nanoseconds for every byte.
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
Model = Callable[[Row, float, float], float]
"""Seconds of a row, given the share of its rate, and nanoseconds of the host for each byte."""


def simulated_s(row: Row, share: float, host_ns_per_byte: float) -> float:
    """As ``cluster.collective = "gloo"`` takes it, over declared links."""
    declared = Link(bandwidth=BitsPerSecond(int(share * row["rate_bit_s"])), latency=Nanoseconds(round(row["one_way_delay_s"] * 1e9)))
    links = Links(
        trainers_per_node=1,
        intra=None,
        inter=declared.carried("gloo", between_nodes=True),
        host_ns_per_byte=Fraction(host_ns_per_byte).limit_denominator(10**6),
    )
    cost = gloo("all_reduce", range(int(row["nodes"])), links).route(int(row["size_bytes"])).cost
    return float(cost.latency_ns + cost.transfer_ns) * 1e-9


def ring_s(row: Row, share: float, host_ns_per_byte: float) -> float:
    """2 (P - 1) (alpha + S / (P B)), and the host's time for every byte that a rank sends."""
    ranks, nbytes = row["nodes"], row["size_bytes"]
    sent = 2 * (ranks - 1) * nbytes / ranks
    return 2 * (ranks - 1) * row["one_way_delay_s"] + sent * (8 / (share * row["rate_bit_s"]) + host_ns_per_byte * 1e-9)


MODELS: Mapping[str, Model] = {"simulator": simulated_s, "bare ring": ring_s}
CONSTANTS: Mapping[str, tuple[Callable[[float], tuple[float, float]], tuple[float, float]]] = {
    "share of the rate": (lambda share: (share, 0.0), (0.3, 1.5)),
    "host": (lambda host: (1.0, host), (0.0, 50.0)),
}
"""By what is fitted: a model's arguments for a value of it, and between which values it is looked for."""


def fitted(model: Model, constant: str, rows: Sequence[Row]) -> float:
    """The value with the least sum of squared logarithms of predicted over measured."""
    arguments, bounds = CONSTANTS[constant]

    def loss(value: float) -> float:
        return sum(math.log(model(row, *arguments(value)) / row["time_s"]) ** 2 for row in rows)

    return float(optimize.minimize_scalar(loss, bounds=bounds, method="bounded").x)


def main(path: Path) -> None:
    """Print a table: errors of each row, left out of the fit, and with no constant at all."""
    with path.open(encoding="utf-8") as file:
        rows = [{key: float(value) for key, value in row.items() if key != "setting"} for row in csv.DictReader(file)]
    columns = [f"{name}, {constant}" for name in MODELS for constant in ("no constant", *CONSTANTS)]
    print(f"| delay | rate | size | {' | '.join(columns)} |\n|---|---|---|{'---|' * len(columns)}")
    errors: dict[str, list[float]] = {column: [] for column in columns}
    for row in rows:
        others = [other for other in rows if other is not row]
        found = []
        for model in MODELS.values():
            found.append(model(row, 1.0, 0.0))
            found += [model(row, *arguments(fitted(model, constant, others))) for constant, (arguments, _) in CONSTANTS.items()]
        found = [seconds / row["time_s"] - 1 for seconds in found]
        for column, error in zip(columns, found, strict=True):
            errors[column].append(abs(error))
        setting = f"{row['one_way_delay_s'] * 1e3:g} ms | {row['rate_bit_s'] * 1e-9:g} Gbit/s | {row['size_bytes'] / 2**20:g} MiB"
        print(f"| {setting} | {' | '.join(f'{error:+.1%}' for error in found)} |")
    for column, of_column in errors.items():
        print(f"{column}: mean {statistics.mean(of_column):.1%}, largest {max(of_column):.1%}")
    for name, model in MODELS.items():
        print(name, *(f"{constant} {fitted(model, constant, rows):.3f}" for constant in CONSTANTS))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
