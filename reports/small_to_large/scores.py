"""Forecasts of sizes that are left out: ``python reports/small_to_large/scores.py --data FOLDER``; some 3 minutes of a core.

Each case is a table of a few sizes and a size that is not in it, asked through ``tuner.calibrate.larger`` as the command does.
Rivals are the same fit with other terms: their priors are changed to constants. ``cases.csv`` has ratios to what was measured,
and no measurement.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).parents[1] / "foreign"))
import lambda_ddp
import mlperf
import rcp
from common import data_folder

from fleetbench.experiment import Experiment, ReferencePoint
from tuner.calibrate.cells import GLOBAL_BATCH, Cell
from tuner.calibrate.larger import NODES, PER_NODE, larger
from tuner.calibrate.scaling import PRIORS, Known, Prior, Scaling, Size
from tuner.samples_to_target import samples_to_target

HERE = Path(__file__).parent
Fold = Mapping[Size, Sequence[float]]
PARAMETERS = {"ssd": 37e6, "bert": 336e6, "resnet": 25.6e6, "rnnt": 49e6, "maskrcnn": 46e6, "stable_diffusion": 866e6, "deepcam": 56.5e6}
LINKS = {"H100": 450e9, "H200": 450e9, "B200": 900e9, "A100": 300e9, "A100-PCIe": 31.5e9, "H100-PCIe": 63e9}
"""Bytes per second of a GPU inside a node, by the data sheets of the catalogue; others have 25e9."""
LAMBDA_LINKS = {"H100 SXM": 450e9, "H200 SXM": 450e9, "B200 SXM": 900e9, "A100 SXM": 300e9, "V100": 150e9, "H100 PCIe": 63e9}
UNITS = {"gnmt": 55, "waveglow": 8000, "tacotron2": 600, "transformerxlbase": 192, "transformerxllarge": 384}
"""Units of a rate in one sample of the batch, where these are tokens or audio: by the models' public configurations, about."""
DDL = {"ResNet-50": (64, 25.6e6), "BERT-Base": (64, 110e6), "BERT-Large": (8, 336e6)}
"""Local batch and parameters."""

NONE, ONE = Prior(0.0, 0.0, "plain", ""), Prior(1.0, 0.0, "plain", "")
_NO_WORK = dict.fromkeys(("fixed", "rank_jitter", "node_jitter", "input"), NONE)
_NO_WIRE = dict.fromkeys(("bytes", "latency", "rank_jitter", "node_jitter", "input"), NONE)
FORMS: dict[str, dict[str, Prior]] = {
    "ours": {},
    "ring": _NO_WORK | {"growth": NONE},
    "tree": _NO_WORK | {"growth": ONE},
    "alpha-beta": _NO_WIRE,
    "perfect scaling": _NO_WIRE | {"fixed": NONE},
}
"""Priors that differ. The alpha-beta line has fixed work and work by local batch, and no exchange."""


def main() -> None:
    """All sets; prints tables, writes cases.csv, scores.csv and cases.png."""
    folder = data_folder("")
    sets = {"mlperf": of_mlperf, "lambda_ddp": of_lambda, "ddl_10gbe": of_ddl, "gpt_a100": of_gpt}
    rows = [{"set": name, "form": form, **case} for name, cases in sets.items() for form in FORMS for case in cases(folder, form)]
    table = pd.DataFrame(rows)
    points = pd.DataFrame(of_points(folder))
    both = pd.concat([table, points])
    whole = table[table.set == "mlperf"].assign(question="all systems")
    scores = pd.concat([whole, both]).groupby(["set", "question", "form"], sort=False).apply(scored, include_groups=False).reset_index()
    print(scores.to_string(index=False))
    scores.to_csv(HERE / "scores.csv", index=False, lineterminator="\n")
    ours = both[both.form.isin(["ours", "law"])].drop(columns="form")
    ours = ours.round({"predicted": 4, "low": 4, "high": 4})
    ours.to_csv(HERE / "cases.csv", index=False, lineterminator="\n")
    draw(ours)


def draw(ours: pd.DataFrame) -> None:
    """``cases.png``: predicted over measured, a box from quartile to quartile for each question, whiskers over 90 % of its cases."""
    boxes = [
        (f"{kind}: {question} ({len(cases)})", cases.predicted) for (kind, question), cases in ours.groupby(["set", "question"], sort=False)
    ]
    names, ratios = zip(*reversed(boxes), strict=True)
    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    axes.boxplot(ratios, orientation="horizontal", tick_labels=names, whis=(5, 95), showfliers=False)
    axes.axvspan(0.9, 1.1, alpha=0.15)
    axes.set(xscale="log", xlabel="predicted / measured; shaded: within 10 %", xlim=(0.4, 2.5))
    axes.set_xticks([0.5, 0.7, 0.9, 1.1, 1.4, 2.0], ["0.5", "0.7", "0.9", "1.1", "1.4", "2"])
    axes.minorticks_off()
    figure.savefig(HERE / "cases.png", dpi=110, metadata={"Software": None})


def scored(cases: pd.DataFrame) -> pd.Series:
    """Absolute relative errors, and the share of measurements inside the interval; where there is an order, how often it is right."""
    errors = (cases.predicted - 1).abs()
    inside = (cases.low <= 1) & (cases.high >= 1)
    inside = cases.inside.fillna(inside.astype(float)).where(cases.low.notna())  # of several seeds a share is known
    found = {"n": len(cases), "median": errors.median(), "mean": errors.mean(), "p95": errors.quantile(0.95), "inside": inside.mean()}
    return pd.Series(found).round(4)


def ask(form: str, fold: Fold, size: Size, known: Known) -> tuple[float, ...]:
    """Low, median and high seconds of a step of one run at a size that the fold does not hold."""
    if form != "ours":
        priors = PRIORS | FORMS[form]
        known = dataclasses.replace(known, gradient_bytes=0.0) if "bytes" in FORMS[form] else known
        return Scaling.of(fold, known, priors).forecast(size).step_s
    settings = [
        ({NODES: one.nodes, PER_NODE: one.gpus_per_node, GLOBAL_BATCH: max(1, round(one.local_batch * one.gpus))}, seconds)
        for one, many in fold.items()
        for seconds in many
    ]
    cells = [Cell(where="", seconds=took, settings={key: str(value) for key, value in own.items()}) for own, took in settings]
    cluster = {"nodes": max(size.nodes, 2), "trainers_per_node": size.gpus_per_node}
    experiment, batch = Experiment.from_dict({"cluster": cluster}), max(1, round(size.local_batch * size.gpus))
    found = larger(experiment, cells, [size.gpus], known, global_batch=batch)
    return next(one for one in found.forecasts if one.size not in found.measured).step_s


def case(question: str, name: str, size: Size, found: Sequence[float], measured_s: float) -> dict[str, Any]:
    """A row: ratios to the measured seconds."""
    low, predicted, high = (value / measured_s for value in found)
    return {"question": question, "case": name, "gpus": size.gpus, "predicted": predicted, "low": low, "high": high}


def node_rate(network: object) -> float:
    """Bytes per second of a node by the widest interfaces that a system's description counts; Aries as it says; else 0."""
    text = str(network)
    if "9.7 GB/s" in text:
        return 4.85e9
    rates = [int(count) * float(rate) / 8 * 1e9 for count, rate in re.findall(r"(\d+)\s?x ?[^,;]*?(\d{2,3}) ?(?:Gb|GB)", text)]
    rates += [int(count) * 25e9 for count in re.findall(r"(\d+)x ?(?:Mellanox )?HDR", text)]
    return max(rates, default=0.0)


def of_mlperf(folder: Path, form: str) -> Iterator[dict[str, Any]]:
    """Every system of a benchmark and GPU in one number, from its vendor's in others, or else from other vendors'."""
    systems, per_run = mlperf.of_systems(folder / "mlperf")
    systems = systems[~systems.org.isin(mlperf.COLD) | (systems.nodes == 1)].reset_index(drop=True)
    found: dict[tuple[str, ...], float] = {}
    for (benchmark, kind, devices), asked in systems.groupby(["benchmark", "kind", "devices"]):
        rest = systems[(systems.benchmark == benchmark) & (systems.kind == kind) & (systems.devices != devices)]
        for row in asked.itertuples() if len(rest) else ():
            own = rest[rest.org == row.org]
            fold: dict[Size, list[float]] = {}
            for one in (own if len(own) else rest).itertuples():  # of other vendors a value a system: their spread is between systems
                fold.setdefault(_size(one), []).extend(per_run[_key(one)] if len(own) else [one.step])
            rates = [node_rate(one.network) for one in (*rest.itertuples(), row) if one.nodes > 1]
            nbytes = 2 * PARAMETERS[benchmark] if benchmark in PARAMETERS else None
            known = Known(gradient_bytes=nbytes, inside=LINKS.get(kind, 25e9), between=max(rates, default=0.0) or None)
            step_s = ask(form, fold, _size(row), known)
            found[_key(row)] = step_s[1]
            question = "a vendor's other sizes" if len(own) else "other vendors' sizes"
            if len(own) and row.nodes > 1:
                question = "a vendor's other sizes, several nodes"
            for seconds in per_run[_key(row)]:
                yield case(question, f"{benchmark} {kind} {row.org} {row.system}", _size(row), step_s, seconds)
    right = mlperf.pairs(systems, found)
    print(f"mlperf, {form}: larger is faster, right in {sum(right)} of {len(right)} pairs of a vendor's systems")


def _size(row: Any) -> Size:
    return Size(nodes=int(row.nodes), gpus_per_node=max(1, int(row.gpus_per_node)), local_batch=float(row.local))


def _key(row: Any) -> tuple[str, ...]:
    return row.source, row.org, row.system, row.benchmark


def of_lambda(folder: Path, form: str) -> Iterator[dict[str, Any]]:
    """Two and eight GPUs of a machine from one, and eight from one and two."""
    given = lambda_ddp.described(pd.read_csv(folder / "lambda_ddp" / "given.csv"))
    batches = given[given.gpus == 1].groupby(["precision", "model"]).batch.max()
    keys = ["suite", "precision", "model", "base", "kind"]
    groups = {key: part.groupby("gpus").samples_per_s.apply(list) for key, part in given.groupby(keys)}
    own = given[given.gpus == 1].groupby(keys).batch.median()
    for asked, measured in ((2, (1,)), (8, (1,)), (8, (1, 2))):
        for row in given[given.gpus == asked].itertuples():
            key = tuple(getattr(row, name) for name in keys)
            if not set(measured) <= set(groups[key].index):
                continue
            batch = own[key] if own[key] == own[key] else batches[row.precision, row.model]
            local = float(UNITS.get(row.model, 1) * batch)
            sizes = {gpus: Size(nodes=1, gpus_per_node=gpus, local_batch=local) for gpus in (*measured, asked)}
            fold = {sizes[gpus]: [gpus * local / rate for rate in groups[key][gpus]] for gpus in measured}
            nbytes = 4e6 * lambda_ddp.MODELS_MILLIONS[row.model]
            known = Known(gradient_bytes=nbytes, inside=LAMBDA_LINKS.get(row.kind, 16e9))
            step_s = ask(form, fold, sizes[asked], known)
            question = f"{asked} GPUs from {' and '.join(map(str, measured))}"
            yield case(question, f"{row.model} {row.precision} {row.kind}", sizes[asked], step_s, asked * local / row.samples_per_s)


def of_ddl(folder: Path, form: str) -> Iterator[dict[str, Any]]:
    """Up to 32 GPUs over 10 Gbit/s, four a node, from 4; 4 and 8; 4, 8 and 16."""
    given = pd.read_csv(folder / "ddl_10gbe" / "throughput.csv")
    given = given[given.method.str.contains("A2A|MG-WFBP")]
    for (model, method), part in given.groupby(["model", "method"]):
        batch, parameters = DDL[model]
        rates = part.set_index("gpus").samples_per_s
        sizes = {gpus: Size(nodes=gpus // 4, gpus_per_node=4, local_batch=batch) for gpus in rates.index}
        for measured in ((4,), (4, 8), (4, 8, 16)):
            fold = {sizes[gpus]: [gpus * batch / rates[gpus]] for gpus in measured}
            for gpus in (number for number in sizes if number > measured[-1]):
                known = Known(gradient_bytes=4 * parameters, inside=8e9, between=1.25e9)
                step_s = ask(form, fold, sizes[gpus], known)
                yield case(f"from {measured}", f"{model} {method}", sizes[gpus], step_s, gpus * batch / rates[gpus])


def of_gpt(folder: Path, form: str) -> Iterator[dict[str, Any]]:
    """GPTs on 4 and 8 A100 of a node from 2, and on 8 from 2 and 4."""
    given = pd.read_csv(folder / "gpt_data_parallel_a100.csv")
    given.columns = ["gpus", "batch", "micro", "hidden", "heads", "layers", "length", "tp", "dp", "pp", "ms"]
    given["local"] = given.batch / given.gpus
    for (hidden, layers, micro, local), part in given.groupby(["hidden", "layers", "micro", "local"]):
        steps, parameters = part.set_index("gpus").ms / 1e3, 12 * layers * hidden**2 + 51200 * hidden
        sizes = {gpus: Size(nodes=1, gpus_per_node=gpus, local_batch=local) for gpus in steps.index}
        for measured, asked in (((2,), 4), ((2,), 8), ((2, 4), 8)):
            if {*measured, asked} <= set(sizes):
                fold = {sizes[gpus]: [steps[gpus]] for gpus in measured}
                step_s = ask(form, fold, sizes[asked], Known(gradient_bytes=4 * parameters, inside=300e9))
                yield case(f"{asked} from {measured}", f"{hidden} x {layers}, micro {micro}", sizes[asked], step_s, steps[asked])


def of_points(folder: Path) -> Iterator[dict[str, Any]]:
    """MLPerf's reference points by the law of samples, beside closed forms; the share of single seeds inside the interval."""
    given = pd.read_csv(folder / "mlperf_rcp" / "given.csv")
    runs = dict(list(given.groupby(["benchmark", "batch_size"]).epochs_or_samples))
    for name, group in rcp.of_sizes(given).groupby("benchmark"):
        if len(group) < 3:
            continue
        folds = [("one size left out", row, group[group.batch != row.batch]) for row in group.itertuples()]
        for first in range(len(group) - 1):
            pair = group.iloc[first : first + 2]
            if pair.batch.iloc[1] >= 1.3 * pair.batch.iloc[0]:
                others = group[~group.batch.isin(pair.batch)].itertuples()
                folds += [("all but two neighbouring sizes", row, pair) for row in others]
        folds += [("all but the smallest", row, group.iloc[:1]) for row in group.iloc[1:].itertuples()]
        for question, row, fold in folds:
            points = [
                ReferencePoint(batch_size=int(one.batch), samples=one.mean, runs=int(one.count), sd=one.std) for one in fold.itertuples()
            ]
            low, median, high = samples_to_target(points, row.batch)
            base = {"set": "mlperf_rcp", "question": question, "case": f"{name} {row.batch}"}
            inside = runs[name, row.batch].between(low, high).mean()
            ends = {"low": low / row.mean, "high": high / row.mean, "inside": inside.mean()}
            yield base | {"form": "law", "predicted": median / row.mean} | ends
            rivals = {"line": rcp.line(fold, row.batch), "constant": fold["mean"].mean()}
            rivals |= {"power law": rcp.power(fold, row.batch)} if len(fold) > 1 else {}
            for form, value in rivals.items():
                yield base | {"form": form, "predicted": value / row.mean, "inside": np.nan}


if __name__ == "__main__":
    main()
