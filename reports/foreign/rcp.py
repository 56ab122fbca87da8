"""Epochs or samples to the quality target by global batch size: ``python reports/foreign/rcp.py --data FOLDER``.

Law: T(B) = S (1 + (B / B_crit)^q), at q = 1 the line of McCandlish et al. (arXiv 1812.06162). S, B_crit and q have a
posterior over a grid for each benchmark, from the means of its given sizes and from submitted runs of MLPerf.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from common import data_folder, header, score, write

B_CRIT = np.exp(np.linspace(np.log(0.05), np.log(300), 60))
"""Critical batch sizes, in units of the geometric mean of a benchmark's given sizes."""
POWERS = np.array([0.5, 0.75, 1.0, 1.25, 1.5])
POWER_PRIOR = np.array([0.1, 0.2, 0.4, 0.2, 0.1])
MISFIT = 0.04
"""Standard deviation of log T about the law, between sizes whose learning rates were tuned one by one."""
SUBMITTED = 0.08
"""The same, of what a submission took over what the reference takes."""
GRID = {"ssd": 1.0, "retinanet": 1.0}
"""Distance between two evaluations, where all seeds end at the same one."""
SAME_AS = {"retinanet": "ssd", "rgat": "gnn"}
"""Benchmarks under a later name."""


def main() -> None:
    """Scores, then the predictions."""
    folder = data_folder("mlperf_rcp")
    given = pd.read_csv(folder / "given.csv")
    points = of_sizes(given)
    submitted = submissions(folder.parent / "mlperf")
    compare(points, submitted, dict(list(given.groupby(["benchmark", "batch_size"]).epochs_or_samples)))
    rows = pd.read_csv(folder / "to_predict.csv")
    spread = seeds(points)
    out = [
        predict(points[points.benchmark == row.benchmark], submitted, row.benchmark, row.batch_size, spread) for row in rows.itertuples()
    ]
    write("mlperf_rcp", pd.concat([rows, pd.DataFrame(out, columns=["predicted", "low", "high"])], axis=1))


def of_sizes(given: pd.DataFrame) -> pd.DataFrame:
    """Mean, deviation and number of the seeds of each benchmark and batch size."""
    found = given.groupby(["benchmark", "batch_size"]).epochs_or_samples.agg(["mean", "std", "count"]).reset_index()
    return found.rename(columns={"batch_size": "batch"})


def submissions(folder: Path) -> pd.DataFrame:
    """What submitted runs took at a batch size, in the reference's unit: the lower quartile of systems' means."""
    runs = pd.read_csv(folder / "runs.csv").query("status == 'success'")
    keys = ["source", "org", "system", "benchmark", "run"]
    intervals = pd.read_csv(folder / "intervals.csv").query("kind == 'epoch'").groupby(keys).size().rename("epochs").reset_index()
    runs = runs.merge(intervals, on=keys, how="left").astype({"global_batch": float, "evals": float})
    ahead = pd.read_csv(folder / "to_predict.csv").query("benchmark == 'bert' and train_samples > 0")
    runs = pd.concat([runs, ahead.loc[ahead.index.repeat(ahead.runs)]])
    units = {
        "bert": runs.train_samples,
        "ssd": runs.evals,
        "retinanet": runs.evals,
        "maskrcnn": runs.epochs,
        "deepcam": runs.epochs,
        "cosmoflow": runs.epochs.where(runs.source != "h1.0"),
        "oc20": runs.epochs,
        "rnnt": runs.evals,
        "gnn": runs.evals * 0.05,
        "resnet": runs.evals * 4 - 1,
    }
    runs["took"] = np.nan
    for name, took in units.items():
        runs["took"] = runs.took.where(runs.benchmark != name, took)
    systems = runs[runs.took > 0].groupby(["benchmark", "global_batch", "source", "org", "system"]).took.mean().reset_index()
    lower = systems.groupby(["benchmark", "global_batch"]).took.quantile(0.25).reset_index()
    return lower.rename(columns={"global_batch": "batch", "took": "mean"})


def seeds(points: pd.DataFrame) -> pd.Series:
    """Relative standard deviation of seeds by benchmark, half of it the pooled one of all."""
    relative = (points["std"] / points["mean"]).groupby(points.benchmark).median()
    return 0.5 * relative + 0.5 * relative.median()


def law(batch: np.ndarray, unit: float) -> np.ndarray:
    """log(1 + (B / B_crit)^q), of shape (sizes, B_crit, q)."""
    return np.log1p((np.asarray(batch, float)[:, None, None] / (unit * B_CRIT[None, :, None])) ** POWERS)


def posterior(
    points: pd.DataFrame, others: pd.DataFrame, batch: float, prior: np.ndarray = POWER_PRIOR
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean and deviation of log T at a batch size for each (B_crit, q), and their weights."""
    unit = float(np.exp(np.log(points.batch).mean()))
    batches = np.concatenate([points.batch, others.batch])
    logs = np.log(np.concatenate([points["mean"], others["mean"]]))
    noise = np.concatenate([MISFIT**2 + (points["std"] / points["mean"]) ** 2 / points["count"], np.full(len(others), SUBMITTED**2)])
    weights = (1 / noise)[:, None, None]
    curve = law(batches, unit)
    scale = ((logs[:, None, None] - curve) * weights).sum(0) / weights.sum(0)
    residual = logs[:, None, None] - curve - scale
    log_weight = -0.5 * (residual**2 * weights).sum(0) + np.log(prior)
    chosen = np.exp(log_weight - log_weight.max())
    at = scale + law(np.array([batch]), unit)[0]
    return at, np.sqrt(1 / weights.sum(0) + MISFIT**2) + np.zeros_like(at), chosen / chosen.sum()


def predict(points: pd.DataFrame, submitted: pd.DataFrame, benchmark: str, batch: float, spread: pd.Series) -> tuple[float, float, float]:
    """Median, 5 % and 95 % of one run at a batch size."""
    others = submitted[submitted.benchmark.isin([benchmark, SAME_AS.get(benchmark, benchmark)])]
    at, deviation, weight = posterior(points, others, batch)
    median = quantile(at, deviation, weight, 0.5)
    wide = np.hypot(deviation, spread[benchmark])
    low, high = quantile(at, wide, weight, 0.05), quantile(at, wide, weight, 0.95)
    if grid := GRID.get(benchmark):
        median, low, high = round(median / grid) * grid, np.floor(low / grid) * grid, np.ceil(high / grid) * grid
    return median, low, high


def quantile(at: np.ndarray, deviation: np.ndarray, weight: np.ndarray, level: float) -> float:
    """Of a mixture of log-normal distributions."""
    draws = np.random.default_rng(0)
    chosen = draws.choice(at.size, 20000, p=weight.ravel())
    return float(np.exp(np.quantile(at.ravel()[chosen] + deviation.ravel()[chosen] * draws.standard_normal(20000), level)))


def line(points: pd.DataFrame, batch: float) -> float:
    """The closed form S (1 + B / B_crit) by least relative squares; constant where there is one size."""
    batches, means = points.batch.to_numpy(float), points["mean"].to_numpy(float)
    if len(points) == 1:
        return float(means[0])
    form = np.stack([1 / means, batches / means], 1)
    scale, slope = np.linalg.lstsq(form, np.ones(len(means)), rcond=None)[0]
    return float(scale + slope * batch)


def power(points: pd.DataFrame, batch: float) -> float:
    """A power law in the batch size."""
    slope, scale = np.polyfit(np.log(points.batch), np.log(points["mean"]), 1)
    return float(np.exp(scale + slope * np.log(batch)))


def compare(points: pd.DataFrame, submitted: pd.DataFrame, runs: dict[tuple[str, int], pd.Series]) -> None:
    """Leave one size out, and every two neighbouring sizes against all others, beside the closed forms."""
    spread = seeds(points)
    nothing = submitted.iloc[:0]
    alone, pairs = [], []
    for name, group in points.groupby("benchmark"):
        if len(group) < 3:
            continue
        alone += [(name, row, group[group.batch != row.batch]) for row in group.itertuples()]
        for first in range(len(group) - 1):
            pair = group.iloc[first : first + 2]
            alike = pair.batch.iloc[1] < 1.3 * pair.batch.iloc[0]
            pairs += [(name, row, pair) for row in group.itertuples() if row.batch not in set(pair.batch) and not alike]
    for title, cases in (("One size left out", alone), ("Two neighbouring sizes predict the others", pairs)):
        header(title)
        truth = np.array([row.mean for _, row, _ in cases])
        for label, evidence in (("ours, without submissions", nothing), ("ours", submitted)):
            found = np.array([predict(fit, evidence[evidence.batch != row.batch], name, row.batch, spread) for name, row, fit in cases])
            score(label, found[:, 0], truth, (found[:, 1], found[:, 2]))
            held = [runs[name, row.batch].between(low, high).mean() for (name, row, _), (_, low, high) in zip(cases, found, strict=True)]
            print(f"| ... of single runs, each size the same weight | | | | | {np.mean(held) * 100:.0f} % |")
        score("line S (1 + B / B_crit)", np.array([line(fit, row.batch) for _, row, fit in cases]), truth)
        score("power law", np.array([power(fit, row.batch) for _, row, fit in cases]), truth)
        score("constant", np.array([fit["mean"].mean() for _, _, fit in cases]), truth)


if __name__ == "__main__":
    main()
