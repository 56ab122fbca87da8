"""NCCL's all-reduces on one node, measured by others: calibrated up to 64 MiB, how far off are 128 MiB to 1 GiB? Beside a bare line.

``python reports/calibrate/nccl_allreduce.py`` reads the tables of reports/nccl_model and prints the table of README.md.
"""

from __future__ import annotations

import csv
import statistics
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from fleetbench.experiment import Experiment
from tuner.calibrate.cells import Cell
from tuner.calibrate.fit import calibrate
from tuner.calibrate.model import Model

DATA = Path(__file__).parents[1] / "nccl_model" / "data"
MIB = 2**20
FITTED = ("cluster.intra.bandwidth", "cluster.intra.latency")
DECLARED = {"v100": "120 GB/s", "a100": "240 GB/s"}
"""20 GB/s for each of a GPU's 6 or 12 NVLinks."""


def table(generation: str, gpus: int) -> list[tuple[int, float]]:
    """Bytes, and seconds: the mean of out of place and in place."""
    with (DATA / f"{generation}_{gpus}gpu.csv").open(encoding="utf-8") as file:
        return [(int(row[0]), (float(row[3]) + float(row[5])) / 2e9) for row in list(csv.reader(file))[1:]]


def calibrated(generation: str, gpus: int, collective: str, rows: list[tuple[int, float]]) -> list[float]:
    """Errors of large ones by what small ones give."""
    intra = {"bandwidth": DECLARED[generation], "latency": "3 us"}
    cluster = {"trainers_per_node": gpus, "collective": collective, "intra": intra}
    run = {"device": "cuda", "backend": "nccl"}
    experiment = Experiment.from_dict({"cluster": cluster, "run": run})
    of = [Cell(where=str(nbytes), all_reduce_bytes=nbytes, seconds=took_s) for nbytes, took_s in rows]
    small, large = [cell for cell in of if _is_small(cell)], [cell for cell in of if not _is_small(cell)]
    large = [cell for cell in large if (cell.all_reduce_bytes or 0) >= 128 * MIB]
    found = calibrate(experiment, small, FITTED)
    model = Model(experiment, large, FITTED)
    return list(model.seconds([parameter.value for parameter in found.parameters]) / model.measured_s - 1)


def _is_small(cell: Cell) -> bool:
    return (cell.all_reduce_bytes or 0) <= 64 * MIB


def bare(rows: list[tuple[int, float]]) -> list[float]:
    """Errors of alpha + S / B, fitted by least squared relative errors."""
    small = np.array([row for row in rows if row[0] <= 64 * MIB])
    columns = np.column_stack([np.ones(len(small)), small[:, 0]]) / small[:, 1:]
    (alpha_s, slope), _ = nnls(columns * [1, 1e-9], np.ones(len(small)))
    return [(alpha_s + slope * 1e-9 * nbytes) / took_s - 1 for nbytes, took_s in rows if nbytes >= 128 * MIB]


def main() -> None:
    """Everything."""
    print("| mean of absolute errors, largest | calibrated ring | calibrated NCCL model | bare alpha + S / B |\n|---|---|---|---|")
    for generation, name in (("v100", "nccl-volta"), ("a100", "nccl-ampere")):
        for gpus in (2, 4, 8):
            rows = table(generation, gpus)
            found = (calibrated(generation, gpus, "ring", rows), calibrated(generation, gpus, name, rows), bare(rows))
            shown = [f"{statistics.mean(map(abs, errors)):.2%}, {max(map(abs, errors)):.2%}" for errors in found]
            print(f"| {gpus} {generation.upper()} | {' | '.join(shown)} |")


if __name__ == "__main__":
    main()
