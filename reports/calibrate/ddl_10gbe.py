"""Training over 10 Gbit/s Ethernet, measured by others: calibrated on 4 and 8 GPUs, how far off are 16 and 32?

``python reports/calibrate/ddl_10gbe.py THROUGHPUT.csv OUT.csv`` takes columns model, method, gpus, samples_per_s and std, fits each model's
rows of 4 and 8 GPUs, prints the tables of README.md and writes the errors. Only all-reduces: BSP-A2A, WFBP-A2A and MG-WFBP.
"""

from __future__ import annotations

import csv
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from scipy import optimize

from fleetbench.experiment import Experiment
from tuner.calibrate.cells import Cell
from tuner.calibrate.fit import Calibration, calibrate
from tuner.calibrate.model import Model

BATCH = {"ResNet-50": (64, 253.1), "BERT-Base": (64, 212.8), "BERT-Large": (8, 49.0)}
"""Samples of a trainer's step, and samples/s of a single GPU (the authors' README)."""
METHODS = {
    "BSP-A2A": {"strategy.fuse_grad_size_in_MB": "0"},
    "WFBP-A2A": {"strategy.fuse_all_reduce_ops": "false"},
    "MG-WFBP": {"strategy.fusion": "merged_gradient"},
}
FITTED = ("compute", "cluster.inter.bandwidth", "cluster.inter.latency", "cluster.intra.bandwidth")
STAGES = ((3, 64, 56), (4, 128, 28), (6, 256, 14), (3, 512, 7))
"""Blocks of a stage of ResNet-50, the width of its 3x3 convolutions, and its pixels each way (He et al. 2015, table 1)."""

Tensors = list[tuple[str, int, float]]
"""Name, elements, and floating-point operations of a forward, of each parameter in forward order."""
Row = dict[str, str]


def resnet50() -> Tensors:
    """161 parameters."""

    def convolution(name: str, inputs: int, outputs: int, kernel: int, pixels: int) -> Tensors:
        numel = inputs * outputs * kernel**2
        return [(name, numel, 2.0 * numel * pixels**2), (f"{name}_scale", outputs, 0.0), (f"{name}_shift", outputs, 0.0)]

    found, inputs = convolution("conv1", 3, 64, 7, 112), 64
    for stage, (blocks, width, pixels) in enumerate(STAGES, 1):
        for block in range(blocks):
            name, before = f"s{stage}b{block}", pixels * (2 if block == 0 and stage > 1 else 1)
            found += convolution(f"{name}c1", inputs, width, 1, before)
            found += convolution(f"{name}c2", width, width, 3, pixels)
            found += convolution(f"{name}c3", width, 4 * width, 1, pixels)
            if block == 0:
                found += convolution(f"{name}down", inputs, 4 * width, 1, pixels)
            inputs = 4 * width
    return [*found, ("fc", 2048 * 1000, 2.0 * 2048 * 1000), ("fc_bias", 1000, 0.0)]


def bert(layers: int, hidden: int, vocabulary: int = 30_522) -> Tensors:
    """BERT with the heads of its pre-training; the decoder's matrix is the word embedding's."""

    def linear(name: str, inputs: int, outputs: int) -> Tensors:
        return [(name, inputs * outputs, 2.0 * inputs * outputs), (f"{name}_bias", outputs, 0.0)]

    def norm(name: str) -> Tensors:
        return [(f"{name}_scale", hidden, 0.0), (f"{name}_shift", hidden, 0.0)]

    found: Tensors = [(f"{what}_embedding", rows * hidden, 0.0) for what, rows in (("word", vocabulary), ("place", 512), ("type", 2))]
    found += norm("embedding")
    for layer in range(layers):
        for name in ("query", "key", "value", "out"):
            found += linear(f"l{layer}{name}", hidden, hidden)
        found += [*norm(f"l{layer}a"), *linear(f"l{layer}up", hidden, 4 * hidden), *linear(f"l{layer}down", 4 * hidden, hidden)]
        found += norm(f"l{layer}b")
    found += [*linear("pooler", hidden, hidden), *linear("transform", hidden, hidden), *norm("transform")]
    return [*found, ("decoder_bias", vocabulary, 2.0 * vocabulary * hidden), *linear("next", hidden, 2)]


MODELS = {"ResNet-50": resnet50(), "BERT-Base": bert(12, 768), "BERT-Large": bert(24, 1024)}


def experiment(model: str) -> Experiment:
    """As one would declare it before any run: the single GPU's time by each layer's operations, PCIe 3.0, 10 Gbit/s Ethernet."""
    batch, rate = BATCH[model]
    step_ns, total = batch / rate * 1e9, sum(flops for _, _, flops in MODELS[model])
    layers = [
        {
            "name": name,
            "params": numel,
            "forward": f"{step_ns * flops / total / 3:.0f} ns",
            "backward": f"{step_ns * flops / total * 2 / 3:.0f} ns",
        }
        for name, numel, flops in MODELS[model]
    ]
    return Experiment.from_dict(
        {
            "name": model,
            "workload": {"model": "layers", "batch_size": batch, "layers": layers},
            "cluster": {
                "trainers_per_node": 4,
                "intra": {"bandwidth": "12 GB/s", "latency": "5 us"},
                "inter": {"bandwidth": "10 Gbit/s", "latency": "25 us", "framing": "tcp"},
            },
            "run": {"device": "cuda", "backend": "nccl"},
        }
    )


def cells(rows: Sequence[Row]) -> list[Cell]:
    """Rows as calibration takes them."""
    return [
        Cell(
            where=f"{row['method']} on {row['gpus']}",
            settings={"cluster.nodes": str(int(row["gpus"]) // 4), **METHODS[row["method"]]},
            samples_per_s=float(row["samples_per_s"]),
            sd=float(row["std"]) or None,
        )
        for row in rows
    ]


def closed_form_s(row: Row, logs: Sequence[float]) -> float:
    """Four parameters: compute C, alpha, B inside and between nodes; n messages take 2 (P - 1) (n alpha + S / (P B)).

    They begin with the backward where they overlap it, a third into C, and after it else.
    """
    compute_s, alpha_s, inside, between = np.exp(logs)
    gpus, tensors = int(row["gpus"]), MODELS[row["model"]]
    messages = len(tensors) if row["method"] == "WFBP-A2A" else 1
    nbytes = 4 * sum(numel for _, numel, _ in tensors)
    comm_s = 2 * (gpus - 1) * (messages * alpha_s + nbytes / gpus / (inside if gpus == 4 else between))
    return float(compute_s + comm_s if row["method"] == "BSP-A2A" else max(compute_s, compute_s / 3 + comm_s))


def closed_form(rows: Sequence[Row]) -> Sequence[float]:
    """The least squared logarithms, of several starts."""

    def residuals(logs: Sequence[float]) -> list[float]:
        return [float(np.log(closed_form_s(row, logs) / measured_s(row))) for row in rows]

    batch, rate = BATCH[rows[0]["model"]]
    starts = [np.log([batch / rate, alpha_s, 10e9, 1.2e9]) for alpha_s in (1e-6, 1e-5, 1e-4)]
    return list(min((optimize.least_squares(residuals, start) for start in starts), key=lambda found: float(found.cost)).x)


def measured_s(row: Row) -> float:
    """Seconds of a step."""
    return int(row["gpus"]) * BATCH[row["model"]][0] / float(row["samples_per_s"])


def predicted(rows: Sequence[Row]) -> Iterator[tuple[Row, float, float, float]]:
    """Rows of a model, with what the calibrated and the declared simulator and the closed form say, in seconds."""
    small = [row for row in rows if int(row["gpus"]) <= 8]
    declared = experiment(rows[0]["model"])
    found = calibrate(declared, cells(small), FITTED)
    show(rows[0]["model"], found)
    all_cells, logs = cells(rows), closed_form(small)
    simulated_s = Model(declared, all_cells, FITTED).seconds([parameter.value for parameter in found.parameters])
    declared_s = Model(declared, all_cells, FITTED).seconds([parameter.declared for parameter in found.parameters])
    for index, row in enumerate(rows):
        yield row, float(simulated_s[index]), float(declared_s[index]), closed_form_s(row, logs)


def show(model: str, found: Calibration) -> None:
    """Print what was fitted."""
    for parameter in found.parameters:
        ends = " to ".join("open" if end is None else f"{end:.4g}" for end in (parameter.low, parameter.high))
        print(f"- {model}, {parameter.key}: {parameter.value:.4g} {parameter.unit} ({'held; ' if parameter.held else ''}{ends})")


def sign(rows: Sequence[Row], seconds: Sequence[float]) -> tuple[int, int]:
    """Of pairs of WFBP and MG-WFBP that differ by three standard deviations, how many have the right sign, and how many there are."""
    of = {(row["model"], row["method"], row["gpus"]): (row, second) for row, second in zip(rows, seconds, strict=True)}
    right = total = 0
    for (model, method, gpus), (row, own_s) in of.items():
        if method == "MG-WFBP":
            other, other_s = of[model, "WFBP-A2A", gpus]
            gain = float(row["samples_per_s"]) - float(other["samples_per_s"])
            if abs(gain) > 3 * float(np.hypot(float(row["std"]), float(other["std"]))):
                total += 1
                right += (own_s < other_s) == (gain > 0)
    return right, total


def main(source: Path, target: Path) -> None:
    """Everything."""
    with source.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["method"] in METHODS]
    said = [one for model in MODELS for one in predicted([row for row in rows if row["model"] == model])]
    names = ("calibrated", "declared", "closed form")
    errors = [(row, *(second / measured_s(row) - 1 for second in seconds)) for row, *seconds in said]
    print("\n| model | method | GPUs | " + " | ".join(names) + " |\n|---|---|---|---|---|---|")
    for row, *own in errors:
        print(f"| {row['model']} | {row['method']} | {row['gpus']} | " + " | ".join(f"{error:+.1%}" for error in own) + " |")
    print("\n| 16 and 32 GPUs | mean of absolute errors | largest | sign of MG-WFBP's gain, all sizes |\n|---|---|---|---|")
    for index, name in enumerate(names, 1):
        large = [abs(own[index]) for own in errors if int(own[0]["gpus"]) > 8]
        right, total = sign([row for row, *_ in said], [one[index] for one in said])
        print(f"| {name} | {statistics.mean(large):.1%} | {max(large):.1%} | {right} of {total} |")
    with target.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["model", "method", "gpus", *(f"error_{name.replace(' ', '_')}" for name in names)])
        writer.writerows([row["model"], row["method"], row["gpus"], *(f"{error:.5f}" for error in own)] for row, *own in errors)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
