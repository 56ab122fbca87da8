"""Seconds of an epoch, block or run of MLPerf's data-parallel benchmarks: ``python reports/foreign/mlperf.py --data FOLDER``.

Law of a step: t = r[b] s[gpu] s[b, gpu] (alpha[b] + (1 - alpha[b]) local batch / L[b] + nu[b] (1 + 0.2 log2(nodes / 2))), the last term on
two nodes and more: fixed work, work by local batch, exposed exchange and the wait for the slowest. All benchmarks are fitted at once, and
every factor is drawn to a prior that they share, so a benchmark with one size borrows from the others. What a vendor's own systems are
off by is added to its predictions. Priors of GPUs' speeds are the catalogue's FLOP/s, or data sheets' where it has none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pandas as pd
import rcp
from common import data_folder, header, score, write
from scipy.optimize import least_squares

from fleetbench.hardware import gpu_named

IMAGES = {"ssd": 1170301, "maskrcnn": 117266, "deepcam": 121266, "cosmoflow": 524288, "oc20": 2_000_000, "gnn": 94605581}
"""Samples of an epoch."""
LOCAL = {
    "ssd": 32, "bert": 96, "resnet": 400, "rnnt": 192, "gnn": 2048, "maskrcnn": 12, "stable_diffusion": 64, "deepcam": 2, "cosmoflow": 1,
    "oc20": 4,
}  # fmt: skip
"""L[b]: the local batch at which alpha is a share."""
FIXED = {"deepcam": (0.3, 0.12), "cosmoflow": (0.5, 0.2), "oc20": (0.25, 0.1)}
"""Prior mean and deviation of alpha where the local batch is a few samples; (0.12, 0.06) elsewhere."""
DATA_SHEETS = {"H100-PCIe": 1.6, "A100-PCIe": 3.0, "L40S": 3.2, "L40": 3.6, "A30": 6.0, "L4": 9.0, "A5000": 7.0, "A10G": 8.0}
DATA_SHEETS |= {"P100": 18.0, "Gaudi2": 1.6, "RTX6000": 2.0, "SPR": 16.0, "A64FX": 25.0, "RTX4090": 3.5, "RX7900": 5.0}
"""Time over an H100's, where the catalogue has no such GPU: from data sheets; of Intel's and Fujitsu's, one node."""
COLD = {"University-of-Florida"}
"""Its files are read from a slow store first: see ``cold``."""
WIDER = 1.6
"""Factor on deviations by which intervals of sizes left out hold as often as they say."""
HIGH_PERFORMANCE = {"h1.0": 0, "h2.0": 1, "h3.0": 1.2}
"""Age of the code by round; that of TensorFlow did not change."""


def main() -> None:
    """Scores, then predictions."""
    folder = data_folder("mlperf")
    systems, per_run = of_systems(folder)
    fit_on = systems[~systems.org.isin(COLD) | (systems.nodes == 1)].reset_index(drop=True)
    leave_out(fit_on, per_run)
    rows = pd.read_csv(folder / "to_predict.csv")
    model = Model.fitted(fit_on)
    epochs = Epochs(folder, model)
    out = []
    for row in described(rows).itertuples():
        log_step, deviation = model.predict(row)
        seconds, more = in_seconds(row, float(np.exp(log_step)), epochs)
        wide = 1.645 * np.hypot(deviation, more)
        out.append((seconds, seconds * np.exp(-wide), seconds * np.exp(wide)))
    write("mlperf", pd.concat([rows, pd.DataFrame(out, columns=["predicted", "low", "high"])], axis=1))


def kind(gpu: object, org: str) -> str:
    """The name of a GPU by which its speed is pooled; a CPU's node where there is none."""
    if not isinstance(gpu, str):
        return "A64FX" if org.startswith("Fujitsu") else "SPR"
    known = ("B200", "H200", "L40S", "L40", "A30", "P100", "V100", "Gaudi2", "A5000", "A10G", "RTX 4090", "RX 7900", "RTX Pro 6000")
    for name in known:
        if name in gpu:
            return {"RTX Pro 6000": "RTX6000"}.get(name, name.replace(" ", ""))  # GB200 counts as B200
    if re.search(r"\bL4\b", gpu):
        return "L4"
    if "H100" in gpu:
        return "H100-PCIe" if "PCIe" in gpu else "H100"
    return "A100-PCIe" if re.search(r"PCIe.*80|80.*PCIe", gpu) else "A100"


def described(rows: pd.DataFrame) -> pd.DataFrame:
    """With benchmark, kind of GPU, number of devices, local batch and round."""
    rows = rows.copy()
    rows["kind"] = [kind(gpu, org) for gpu, org in zip(rows.gpu, rows.org, strict=True)]
    rows["benchmark_as_named"] = rows.benchmark
    rows["benchmark"] = rows.benchmark.replace({"retinanet": "ssd"})
    rows["org"] = rows.org.str.replace("^tacc$", "TACC", regex=True)
    rows["devices"] = rows.nodes * rows.gpus_per_node.clip(lower=1)
    rows["batch"] = pd.to_numeric(rows.global_batch, errors="coerce")
    unknown = rows.benchmark.map(LOCAL) * rows.devices / 2
    rows["local"] = rows.batch.fillna(unknown) / rows.devices / rows.accumulation.fillna(1).clip(lower=1)
    rows["age"] = rows.source.map(HIGH_PERFORMANCE).fillna(0) * ~rows.system.str.contains("tensorflow|-tf")
    rows["stem"] = rows.system.str.extract(r"^([A-Za-z]+)")[0].str.lower()
    return rows


def of_systems(folder: object) -> tuple[pd.DataFrame, dict[tuple[str, ...], np.ndarray]]:
    """A row a system and benchmark, with the median seconds of a step; and those of each run."""
    keys = ["source", "org", "system", "benchmark"]
    runs = pd.read_csv(folder / "runs.csv").query("status == 'success'")
    intervals = pd.read_csv(folder / "intervals.csv")
    epochs = intervals[intervals.kind == "epoch"].groupby([*keys, "run"]).seconds.median().rename("epoch_s")
    blocks = intervals[intervals.kind == "block"].groupby([*keys, "run"]).seconds.sum().rename("block_s")
    runs = runs.merge(epochs.reset_index(), on=[*keys, "run"], how="left").merge(blocks.reset_index(), on=[*keys, "run"], how="left")
    runs = described(runs)
    of_epoch = runs.epoch_s * runs.batch / runs.benchmark.map(IMAGES)
    of_block = runs.block_s * runs.batch / runs.train_samples
    by_rate = (runs.batch / runs.median_throughput).where(runs.benchmark.isin(["resnet", "rnnt", "gnn", "stable_diffusion"]))
    runs["step"] = of_epoch.where(of_epoch.notna(), of_block.where(runs.benchmark == "bert").fillna(by_rate))
    runs["step"] /= runs.accumulation.fillna(1).clip(lower=1)
    runs = runs[runs.step > 0]
    first = runs.groupby(["source", "org", "system", "benchmark"]).first()
    first["step"] = runs.groupby(["source", "org", "system", "benchmark"]).step.median()
    per_run = {key: part.step.to_numpy() for key, part in runs.groupby(["source", "org", "system", "benchmark"])}
    return first.reset_index(), per_run


def sheet(name: str) -> tuple[float, float]:
    """Prior mean and deviation of log(time over an H100's)."""
    if name in DATA_SHEETS:
        return float(np.log(DATA_SHEETS[name])), 0.35
    rate = {"A100": "A100", "H100": "H100", "H200": "H200", "B200": "B200", "V100": "V100"}[name]
    flops = {gpu: gpu_named(gpu, "mlperf.py").flops_s["fp16"] for gpu in (rate, "H100")}
    return 0.75 * float(np.log(flops["H100"] / flops[rate])) - (0.1 if name == "H200" else 0.0), 0.0001 if name == "H100" else 0.25


@dataclass
class Model:
    """Fitted parameters, their covariance, and the systems that they were fitted to, with residuals."""

    names: list[str]
    values: np.ndarray
    covariance: np.ndarray
    fitted_to: pd.DataFrame
    form: str

    @classmethod
    def fitted(cls, systems: pd.DataFrame, form: str = "ours") -> Model:
        """By least squares with the priors as observations; ``form`` names a rival with other terms."""
        names = _names(systems)
        prior = np.array([_prior(name, form) for name in names])
        terms = _terms(systems, names)
        logs = np.log(systems.step.to_numpy())

        def residuals(values: np.ndarray) -> np.ndarray:
            return np.concatenate([(_log_step(values, terms, form)[0] - logs) / 0.03, (values - prior[:, 0]) / prior[:, 1]])

        def jacobian(values: np.ndarray) -> np.ndarray:
            return np.concatenate([_log_step(values, terms, form)[1] / 0.03, np.diag(1 / prior[:, 1])])

        found = least_squares(residuals, prior[:, 0], jac=jacobian, loss="soft_l1", f_scale=2.0, max_nfev=60, x_scale="jac")
        covariance = np.linalg.inv(found.jac.T @ found.jac)
        fitted_to = systems.assign(residual=logs - _log_step(found.x, terms, form)[0])
        return cls(names, found.x, covariance, fitted_to, form)

    def predict(self, row: object) -> tuple[float, float]:
        """Seconds of a step, as a log, and the log's deviation."""
        table = pd.DataFrame([{name: getattr(row, name) for name in ("benchmark", "kind", "nodes", "devices", "local", "age", "source")}])
        table["system"], table["org"] = row.system, row.org
        names = self.names + [name for name in _names(table) if name not in self.names]
        prior = np.array([_prior(name, self.form) for name in names])
        num_own = len(self.names)
        values = np.concatenate([self.values, prior[num_own:, 0]])
        terms = _terms(table, names)
        found, slopes = _log_step(values, terms, self.form)
        at, gradient = float(found[0]), slopes[0]
        variance = gradient[:num_own] @ self.covariance @ gradient[:num_own] + np.sum((gradient * prior[:, 1])[num_own:] ** 2)
        known = self.fitted_to[(self.fitted_to.benchmark == row.benchmark) & (self.fitted_to.kind == row.kind)]
        own = known[(known.org == row.org) | (known.stem == row.stem)]
        share = len(own) / (len(own) + 0.5)
        at += share * own.residual.mean() if len(own) else 0.0
        of_others = 0.03 if len(own) else max(0.045, known.residual.std() if len(known) > 1 else 0.1)
        near = own if len(own) else known if len(known) else self.fitted_to[self.fitted_to.benchmark == row.benchmark]
        doublings = np.abs(np.log2(near.nodes / row.nodes)).min() if len(near) else 10
        return at, WIDER * float(np.sqrt(variance + of_others**2 + (0.045 * doublings) ** 2))


def _names(systems: pd.DataFrame) -> list[str]:
    names = []
    for benchmark in sorted(set(systems.benchmark)):
        names += [f"rate {benchmark}", f"fixed {benchmark}", f"between {benchmark}"]
        names += [f"newer {benchmark}"] if benchmark in ("deepcam", "cosmoflow", "oc20") else []
    names += [f"gpu {name}" for name in sorted(set(systems.kind))]
    return names + sorted({f"both {benchmark} {name}" for benchmark, name in zip(systems.benchmark, systems.kind, strict=True)})


def _prior(name: str, form: str) -> tuple[float, float]:
    what, _, of = name.partition(" ")
    if what == "rate":
        return -2.5, 2.0
    if what == "fixed":
        mean, deviation = FIXED.get(of, (0.12, 0.06))
        return (mean, deviation) if form in ("ours", "alpha-beta") else (0.0, 1e-6)
    if what == "between":
        return (np.log(0.03), 0.7) if form in ("ours", "ring", "tree") else (-20.0, 1e-6)
    if what == "newer":
        return -0.15, 0.15
    if what == "gpu":
        return sheet(of)
    return 0.0, 0.12


def _terms(systems: pd.DataFrame, names: list[str]) -> dict[str, np.ndarray]:
    at = {name: index for index, name in enumerate(names)}
    benchmarks = systems.benchmark.tolist()
    return {
        "rate": np.array([at[f"rate {name}"] for name in benchmarks]),
        "fixed": np.array([at[f"fixed {name}"] for name in benchmarks]),
        "between": np.array([at[f"between {name}"] for name in benchmarks]),
        "newer": np.array([at.get(f"newer {name}", 0) for name in benchmarks]),
        "age": systems.age.to_numpy(float) * np.array([f"newer {name}" in at for name in benchmarks]),
        "gpu": np.array([at[f"gpu {name}"] for name in systems.kind]),
        "both": np.array([at[f"both {one} {two}"] for one, two in zip(benchmarks, systems.kind, strict=True)]),
        "share": systems.local.to_numpy(float) / systems.benchmark.map(LOCAL).to_numpy(float),
        "nodes": systems.nodes.to_numpy(float),
        "devices": systems.devices.to_numpy(float),
    }


def _log_step(values: np.ndarray, terms: dict[str, np.ndarray], form: str) -> tuple[np.ndarray, np.ndarray]:
    """Of every system, and the derivatives by every parameter."""
    fixed = np.clip(values[terms["fixed"]], 0.0, 0.9)
    doublings = np.log2(np.maximum(terms["nodes"], 2) / 2)
    growth = {"ours": 1 + 0.2 * doublings, "ring": 2 * (terms["devices"] - 1) / terms["devices"], "tree": 1 + doublings}
    exposed = np.exp(values[terms["between"]]) * growth.get(form, 0.0) * (terms["nodes"] > 1)
    level = values[terms["rate"]] + values[terms["gpu"]] + values[terms["both"]] + values[terms["newer"]] * terms["age"]
    total = fixed + (1 - fixed) * terms["share"] + exposed
    slopes = np.zeros((len(total), len(values)))
    rows = np.arange(len(total))
    for name in ("rate", "gpu", "both"):
        slopes[rows, terms[name]] = 1.0
    slopes[rows, terms["newer"]] += terms["age"]
    slopes[rows, terms["fixed"]] = (1 - terms["share"]) / total * ((values[terms["fixed"]] > 0) & (values[terms["fixed"]] < 0.9))
    slopes[rows, terms["between"]] = exposed / total
    return level + np.log(total), slopes


def leave_out(systems: pd.DataFrame, per_run: dict[tuple[str, ...], np.ndarray]) -> None:
    """Leave out every system with a benchmark's kind of GPU in one number, where that benchmark has that kind in another number, too."""
    numbers = systems.groupby(["benchmark", "kind"]).devices.nunique()
    cases = [key for key in systems.groupby(["benchmark", "kind", "devices"]).groups if numbers[key[0], key[1]] > 1]
    forms = {
        "ours": "ours",
        "ring": "ring",
        "tree": "tree",
        "alpha-beta": "alpha-beta line: fixed + by local batch",
        "perfect": "perfect scaling",
    }
    header("One size left out: all systems of that GPU and number; runs")
    kept, in_interval = {}, {}
    for form, label in forms.items():
        found, low, high, truth = [], [], [], []
        for benchmark, name, devices in cases:
            out = (systems.benchmark == benchmark) & (systems.kind == name) & (systems.devices == devices)
            model = Model.fitted(systems[~out], form)
            for row in systems[out].itertuples():
                at, deviation = model.predict(row)
                times = per_run[row.source, row.org, row.system, row.benchmark]
                truth += list(times)
                found += [np.exp(at)] * len(times)
                low += [np.exp(at - 1.645 * deviation)] * len(times)
                high += [np.exp(at + 1.645 * deviation)] * len(times)
                kept[form, row.source, row.org, row.system, row.benchmark] = float(np.exp(at))
                in_interval[form, row.Index] = (
                    row.benchmark,
                    row.nodes,
                    np.exp(at),
                    row.step,
                    np.exp(at - 1.645 * deviation),
                    np.exp(at + 1.645 * deviation),
                )
        score(label, np.array(found), np.array(truth), (np.array(low), np.array(high)))
    table = pd.DataFrame(
        [value for key, value in in_interval.items() if key[0] == "ours"], columns=["benchmark", "nodes", "p", "t", "low", "high"]
    )
    for benchmark, part in table.groupby("benchmark"):
        score(f"ours, {benchmark}, systems", part.p.to_numpy(), part.t.to_numpy(), (part.low.to_numpy(), part.high.to_numpy()))
    for several in (False, True):
        part = table[(table.nodes > 1) == several]
        score(
            f"ours, {'several nodes' if several else 'one node'}, systems",
            part.p.to_numpy(),
            part.t.to_numpy(),
            (part.low.to_numpy(), part.high.to_numpy()),
        )
    for form, label in forms.items():
        right = pairs(systems, {key[1:]: value for key, value in kept.items() if key[0] == form})
        print(f"larger is faster, {label}: right in {sum(right)} of {len(right)} pairs of a vendor's systems")


def pairs(systems: pd.DataFrame, found: dict[tuple[str, ...], float]) -> list[bool]:
    """Whether the order of two sizes of one vendor, benchmark, GPU and round is as measured, by seconds a sample."""
    right = []
    for _, group in systems.groupby(["source", "org", "benchmark", "kind"]):
        rows = [row for row in group.itertuples() if (row.source, row.org, row.system, row.benchmark) in found]
        for index, one in enumerate(rows):
            for two in rows[index + 1 :]:
                if one.devices != two.devices:
                    ours = [found[row.source, row.org, row.system, row.benchmark] / row.batch for row in (one, two)]
                    right.append((ours[0] < ours[1]) == (one.step / one.batch < two.step / two.batch))
    return right


class Epochs:
    """How many samples a run takes, by the laws of ``rcp.py``, and what evaluations add to it."""

    def __init__(self, folder: object, model: Model) -> None:
        self.points = rcp.of_sizes(pd.read_csv(folder.parent / "mlperf_rcp" / "given.csv"))
        self.submitted = rcp.submissions(folder)
        self.spread = rcp.seeds(self.points)
        runs = described(pd.read_csv(folder / "runs.csv").query("status == 'success'"))
        runs = runs[runs.kind == "H100"]
        firsts = runs.groupby(["source", "org", "system", "benchmark"]).agg("first").reset_index()
        firsts["run_s"] = runs.groupby(["source", "org", "system", "benchmark"]).run_s.median().to_numpy()
        self.over = {}
        for benchmark in ("resnet", "bert", "stable_diffusion"):
            part = firsts[firsts.benchmark == benchmark].itertuples()
            took = [row.run_s * row.batch / np.exp(model.predict(row)[0]) / self.samples(benchmark, row.batch)[0] for row in part]
            self.over[benchmark] = float(np.median(took))

    def samples(self, benchmark: str, batch: float) -> tuple[float, float]:
        """Median, and deviation of its log."""
        median, low, high = rcp.predict(self.points[self.points.benchmark == benchmark], self.submitted, benchmark, batch, self.spread)
        return median * (1281167 if benchmark == "resnet" else 1), float(np.log(high / low) / 3.29)


def in_seconds(row: object, step: float, epochs: Epochs) -> tuple[float, float]:
    """Seconds of what a row asks for, and what that adds to the deviation of the step's log."""
    if row.org in COLD and row.nodes > 2:
        return cold(int(row.nodes), step * IMAGES["ssd"] / row.batch), 0.15
    if row.interval == "epoch":
        return step * IMAGES[row.benchmark] / row.batch, 0.02
    if row.interval == "block" and row.benchmark == "bert":
        return step * row.train_samples / row.batch, 0.02
    if row.interval == "block":
        return step * 512_000 / row.batch, 0.5  # a checkpoint of stable diffusion
    batch = row.batch if row.batch == row.batch else row.local * row.devices
    samples, deviation = epochs.samples(row.benchmark, batch)
    return step * samples / batch * epochs.over[row.benchmark], np.hypot(deviation, 0.1 if row.batch == row.batch else 0.25)


def cold(nodes: int, computing: float, first: float = 2293.5) -> float:
    """The third epoch where each node reads the files of its share that it has not read yet from a slow store.

    One node reads everything in the first epoch (2,293 s, given); of n nodes, each reads an n-th, and (1 - 1 / n)^k of it is new in epoch
    k. Two nodes: 1,147, 573, 287 s where 1,168, 577, 297 were measured; the power joins it with computing as in their fourth epoch.
    """
    reading = 1.02 * first / nodes * (1 - 1 / nodes) ** 2
    return float((reading**4 + computing**4) ** 0.25)


if __name__ == "__main__":
    main()
