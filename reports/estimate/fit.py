"""How far are estimated steps from published ones? ``python reports/estimate/fit.py``, from the repository's root; no device needed.

Leaves out one pair of model and GPU in turns: the efficiencies are fitted to the other pairs, each of which counts as much as another, and
the pair left out is estimated. The interval of each pair is that of the errors of the others. Prints the tables of README.md.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import torch
from count import COUNTED, FOLDER, name_of
from scipy.optimize import least_squares

from fleetbench.hardware import catalogue
from real.estimate.operations import Operation
from real.estimate.step import FITTED, Efficiencies, Roofline, half_width

UPDATE_FLOATS = {"momentum": 5, "adam": 7, "lamb": 10}
"""Numbers moved for each parameter: the parameter, its gradient and its state read, parameter and state written; LAMB's norms read more."""
OTHERS = "(other framework)"
"""Runs of TensorFlow, looked at once, after all else here was fixed."""
LEFT_OUT = "(left out)"
"""Runs that do not say what they computed: their loader (LDDL) pads a batch to its own longest sample, and not to the length named."""
FIELDS = [field.name for field in dataclasses.fields(Efficiencies)]
BELIEVED = {
    "matmul": (0.75, 0.15),  # cuBLAS, large matrices
    "convolution": (0.6, 0.3),
    "attention": (0.4, 0.4),
    "memory": (0.8, 0.12),  # what copies reach
    "vector": (0.85, 0.1),  # cuBLAS, large matrices
    "vector_convolution": (1.1, 0.3),
    "vector_attention": (0.4, 0.3),
    "launch_s": (12e-6, 1.0),
    "balance": (0.3, 0.6),
}
"""What is believed before a run is seen, and the standard deviation of its logarithm: 65 runs alone do not tell nine numbers apart."""
RUN_SD = 0.12
"""Of the logarithm of a run's error, where a pair had one run."""


@dataclass(frozen=True, slots=True)
class Run:
    """One published run."""

    row: dict[str, str]
    operations: list[tuple[Operation, int]]
    parameters: int

    @property
    def measured_s(self) -> float:
        """An optimizer's step."""
        return int(self.row["batch"]) * int(self.row["accumulation"]) / float(self.row["samples_per_s"])

    def estimated_s(self, efficiencies: Efficiencies) -> float:
        """The same by the roofline."""
        roofline = Roofline(gpu=catalogue().gpus[self.row["gpu"]], tf32=self.row["precision"] == "tf32", efficiencies=efficiencies)
        batch_s = sum(roofline.seconds(operation) * number for operation, number in self.operations)
        unscaled = 2 if self.row["precision"] == "fp16" else 0
        return int(self.row["accumulation"]) * batch_s + roofline.update_s(
            4 * (UPDATE_FLOATS[self.row["optimizer"]] + unscaled) * self.parameters
        )


def runs() -> list[Run]:
    """All."""
    counted = json.loads(COUNTED.read_text(encoding="utf-8"))
    with (FOLDER / "data.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    found = []
    for row in rows:
        if row["pair"] == LEFT_OUT:
            continue
        own = counted[name_of(row)]
        half = torch.bfloat16 if row["precision"] == "bf16" else torch.float16
        operations = [
            (Operation(kind, flops, nbytes, half if dtype.endswith("float16") else torch.float32), number)
            for kind, dtype, flops, nbytes, number in own["operations"]
        ]
        found.append(Run(row, operations, own["parameters"]))
    return found


def fit(given: Sequence[Run]) -> Efficiencies:
    """The efficiencies of the least squared log errors, each pair weighing as much, beside ``BELIEVED``."""
    pairs = [run.row["pair"] for run in given]
    weights = [1 / math.sqrt(pairs.count(pair)) for pair in pairs]

    middle = np.log([BELIEVED[name][0] for name in FIELDS])
    spread = np.array([BELIEVED[name][1] for name in FIELDS])

    def residuals(logs: np.ndarray) -> np.ndarray:
        own = Efficiencies(**dict(zip(FIELDS, np.exp(logs).tolist(), strict=True)))
        errors = [weight * math.log(run.estimated_s(own) / run.measured_s) / RUN_SD for run, weight in zip(given, weights, strict=True)]
        return np.concatenate([errors, (logs - middle) / spread])

    found = least_squares(residuals, middle)
    return Efficiencies(**dict(zip(FIELDS, np.exp(found.x).tolist(), strict=True)))


def main() -> None:
    """Everything."""
    every = [run for run in runs() if run.row["pair"] != OTHERS]
    pairs = list(dict.fromkeys(run.row["pair"] for run in every))
    errors = {}
    for pair in pairs:
        own = fit([run for run in every if run.row["pair"] != pair])
        errors[pair] = [(run, run.estimated_s(own) / run.measured_s - 1) for run in every if run.row["pair"] == pair]
    print("| run left out with its pair | measured | estimated | error |\n|---|---|---|---|")
    shown = {**errors, OTHERS: [(run, run.estimated_s(FITTED) / run.measured_s - 1) for run in runs() if run.row["pair"] == OTHERS]}
    for pair, own_errors in shown.items():
        for run, error in own_errors:
            row, measured_ms = run.row, 1e3 * run.measured_s / int(run.row["accumulation"])
            shape = row["batch"] if row["length"] == "0" else f"{row['batch']} x {row['length']}"
            name = f"{pair}: {row['model']} {row['variant']} {row['precision']}, {shape} ({row['source'].split()[0].strip(':')})"
            print(f"| {name} | {measured_ms:.1f} ms | {measured_ms * (1 + error):.1f} ms | {error:+.1%} |")
    print("\n| pair | runs | mean | mean of absolute | largest | in the interval |\n|---|---|---|---|---|---|")
    for pair in [*pairs, None]:
        found = [(run.row["gpu"], error) for name in pairs if pair in (name, None) for run, error in errors[name]]
        mine = [error for _, error in found]
        inside = sum(abs(1 / (1 + error) - 1) <= half_width(gpu) for gpu, error in found)
        mean, size, largest = fmean(mine), fmean(map(abs, mine)), max(map(abs, mine))
        print(f"| {pair or '**all**'} | {len(mine)} | {mean:+.1%} | {size:.1%} | {largest:.1%} | {inside} |")
    away = [abs(1 / (1 + error) - 1) for own in errors.values() for _, error in own]
    print(f"\n90 % of the measured times are within {np.quantile(away, 0.9):.1%} of the estimate\n")
    for name, value in dataclasses.asdict(fit(every)).items():
        print(f"- {name}: {value:.3g}")


if __name__ == "__main__":
    main()
