"""Helpers of the scripts beside it: the data folder, scores of predictions, and the csv files."""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import numpy as np
import pandas as pd

HERE = Path(__file__).parent


def data_folder(name: str) -> Path:
    """The folder ``--data``/NAME of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True, help="the folder that holds the data sets")
    return parser.parse_args().data / name


def score(label: str, predicted: np.ndarray, measured: np.ndarray, interval: tuple[np.ndarray, np.ndarray] | None = None) -> None:
    """Print a row: absolute relative errors (median, mean, 95th percentile), and the share of measurements in the interval."""
    predicted, measured = np.asarray(predicted, float), np.asarray(measured, float)
    errors = np.abs(predicted / measured - 1) * 100
    row = f"| {label} | {len(errors)} | {np.median(errors):.1f} % | {errors.mean():.1f} % | {np.percentile(errors, 95):.1f} % |"
    if interval is not None:
        low, high = interval
        row += f" {np.mean((np.asarray(low) <= measured) & (measured <= np.asarray(high))) * 100:.0f} % |"
    print(row)


def header(title: str) -> None:
    """Print the head of a table of scores."""
    print(f"\n{title}\n\n| model | n | median | mean | p95 | in the interval |\n|---|---|---|---|---|---|")


def write(name: str, rows: pd.DataFrame) -> None:
    """Write NAME.csv, with six digits of what is predicted, and print its SHA-256."""
    rows = rows.copy()
    for column in ("predicted", "low", "high"):
        rows[column] = [f"{value:.6g}" for value in rows[column].to_numpy(float)]
    assert (rows[["low", "predicted", "high"]].astype(float).diff(axis=1).iloc[:, 1:] >= 0).all(axis=None), "low <= predicted <= high"
    path = HERE / f"{name}.csv"
    rows.to_csv(path, index=False, lineterminator="\n")
    print(f"\n{path.name}: {len(rows)} rows, sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}")
