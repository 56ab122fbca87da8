"""How well does a GPT's shape predict iterations of models that were not measured? Leaves out one model after the other.

Run from the repository's root: ``python reports/gpt_data_parallel/predict.py``. Prints the tables of README.md, checks every closed form
against the simulator, and draws ``errors.png``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd
from model import GRADIENT_BYTES, PASSES, PEAK_FLOPS_S, Constants, Row, all_reduce_s, fit, iteration_s, rows, workload
from scipy.optimize import least_squares

from fleetbench.profile import name_profile
from fleetbench.report.figures import residuals, save_png
from sim.run import simulate

HEAD = "\n| left out | measurements | mean error | mean of absolute errors | largest |\n|---|---|---|---|---|"
FIGURE = Path(__file__).parent / "errors.png"


def main() -> None:
    """Everything."""
    measured = rows()
    models = sorted({row.shape.model for row in measured})
    errors: dict[str, list[tuple[Row, float]]] = {}
    largest_ns = 0.0
    print(HEAD)
    for model in models:
        constants = fit([row for row in measured if row.shape.model != model])
        errors[model] = []
        for row in measured:
            if row.shape.model == model:
                said_s = _said(row, constants)
                largest_ns = max(largest_ns, abs(simulated_s(row, constants) - said_s) * 1e9)
                errors[model].append((row, said_s / row.took_s - 1))
        _print(model, [error for _, error in errors[model]])
    every = [error for own in errors.values() for _, error in own]
    _print("all", every)
    fitted = fit(measured)
    own = [_said(row, fitted) / row.took_s - 1 for row in measured]
    print()
    _print("none: fitted to all", own)
    print(f"\nThe simulator and the closed form differ by {largest_ns:.0f} ns at most.\n")
    for field in dataclasses.fields(Constants):
        print(f"- {field.name}: {getattr(fitted, field.name):.4g}")
    print(HEAD)
    for hidden in sorted({row.shape.hidden for row in measured}):
        constants = fit([row for row in measured if row.shape.hidden != hidden])
        left_out = [row for row in measured if row.shape.hidden == hidden]
        _print(f"both models of hidden {hidden}", [_said(row, constants) / row.took_s - 1 for row in left_out])
    print(f"\nBare closed form:\n{HEAD}")
    for name, groups in (("a model", models), ("a width", sorted({str(row.shape.hidden) for row in measured}))):
        for group in groups:
            left_out = [row for row in measured if group in (row.shape.model, str(row.shape.hidden))]
            logs = fit_bare([row for row in measured if row not in left_out])
            _print(f"{name}: {group}", [bare_s(row, logs) / row.took_s - 1 for row in left_out])
    beyond = sum(GRADIENT_BYTES * row.shape.params > 2**30 for row in measured)
    print(f"- measurements whose gradients are larger than the largest measured all-reduce: {beyond} of {len(measured)}")
    _draw(errors)


def bare_s(row: Row, logs: Sequence[float]) -> float:
    """The bare closed form: a micro-batch takes a floor and 6 N tokens / F, a ring 2 (P - 1) / P S / B, of N parameters and S bytes."""
    shape, (floor_s, flops_s, bytes_s) = row.shape, np.exp(logs)
    compute_s = floor_s + 2 * PASSES * shape.params * shape.tokens / flops_s
    return float(shape.num_micro_batches * compute_s + 2 * (shape.gpus - 1) / shape.gpus * GRADIENT_BYTES * shape.params / bytes_s)


def fit_bare(measured: Sequence[Row]) -> Sequence[float]:
    """Its three constants, by the least squared relative errors; F is below the device's peak, as in the model."""

    def errors(logs: Sequence[float]) -> list[float]:
        return [bare_s(row, logs) / row.took_s - 1 for row in measured]

    bounds = (-np.inf, np.log([np.inf, PEAK_FLOPS_S, np.inf]))
    return list(least_squares(errors, np.log([1e-2, 100e12, 100e9]), bounds=bounds).x)


def _said(row: Row, constants: Constants) -> float:
    return iteration_s(row.shape, constants, all_reduce_s(row.shape))


def simulated_s(row: Row, constants: Constants) -> float:
    """What the simulator says of the same iteration."""
    experiment, profile = workload(row.shape, constants)
    with TemporaryDirectory() as folder:
        return simulate(name_profile(experiment, profile, Path(folder) / "profile.toml"), timeline=False).summary.wall_s


def _print(name: str, errors: list[float]) -> None:
    absolute = [abs(error) for error in errors]
    print(f"| {name} | {len(errors)} | {mean(errors):+.2%} | {mean(absolute):.2%} | {max(absolute):.2%} |")


def _draw(errors: dict[str, list[tuple[Row, float]]]) -> None:
    found = [(model, row.took_s, row.took_s * (1 + error)) for model, own in errors.items() for row, error in own]
    save_png(residuals(pd.DataFrame(found, columns=["group", "measured_s", "predicted_s"])), FIGURE)


if __name__ == "__main__":
    main()
