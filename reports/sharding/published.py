"""Published throughputs of sharded trainings beside simulated ones: ``python reports/sharding/published.py``.

It takes 80 seconds on one core. ``published.csv`` says what was trained, where, and how fast. Layer times are
estimated for the GPU that a row names, from two blocks of its model, and the step is simulated on the preset of
its cluster. Closed forms are printed beside it, with shares of the GPU's peak that are fitted to the rows that are
not kept aside. Nothing else is fitted here. ``published.py given`` leaves out the rows that are kept aside, and
``published.py fp32`` lets all parameters be gathered and all gradients be reduced in FP32.
"""

from __future__ import annotations

import csv
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy, rms_norm, scaled_dot_product_attention, silu

from fleetbench import simulate
from fleetbench.experiment import Experiment
from fleetbench.hardware import gpu_named
from fleetbench.plan.layers import LayerTable
from fleetbench.strategy import DistributedStrategy
from fleetbench.workloads.models.registry import MODELS, loss_of
from real.estimate.operations import nothing_computed
from real.estimate.step import StepEstimate, half_width
from tuner.simulated.assumptions import changed

DATA = Path(__file__).with_suffix(".csv")
OPERATIONS = ("norm1", "key", "output", "norm2", "up")
"""Modules of a block that are computed again where every second matrix product is kept (torchtitan)."""
SHARES = {"none": 0.0, "full": 1.0, "operations": 1 / 3}
"""Of a forward's matrix products, what the backward computes again; of ``OPERATIONS`` about."""
RIVALS = (
    ("compute", 0.0, False),
    ("compute and bytes", 1.0, False),
    ("compute, by generation", 0.0, True),
    ("compute and bytes, by generation", 1.0, True),
)
"""Closed forms: a name, how much of the exchange is added, and whether each generation of GPUs has its share."""
BYTES = {"bf16": 2, "fp32": 4}
PARAM_DTYPES = {"bf16": "bfloat16", "fp32": "own"}


class Norm(nn.Module):
    """Root mean square normalisation over the last dimension."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Of the shape of ``inputs``."""
        return rms_norm(inputs, self.weight.shape, self.weight)


class Block(nn.Module):
    """A layer of Llama: grouped queries with rotary positions, and a gated perceptron."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, ffn: int) -> None:
        super().__init__()
        self.size, self.repeats = hidden // heads, heads // kv_heads
        self.norm1, self.norm2 = Norm(hidden), Norm(hidden)
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, kv_heads * self.size, bias=False)
        self.value = nn.Linear(hidden, kv_heads * self.size, bias=False)
        self.output = nn.Linear(hidden, hidden, bias=False)
        self.gate, self.up = nn.Linear(hidden, ffn, bias=False), nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """``(batch, length, hidden)`` to as much."""
        normed = self.norm1(inputs)
        query, key, value = (part(normed).unflatten(-1, (-1, self.size)).transpose(1, 2) for part in (self.query, self.key, self.value))
        query, key = _rotated(query), _rotated(key)
        key, value = (part.repeat_interleave(self.repeats, 1) if self.repeats > 1 else part for part in (key, value))
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        inputs = inputs + self.output(mixed.transpose(1, 2).flatten(2))
        normed = self.norm2(inputs)
        return inputs + self.down(silu(self.gate(normed)) * self.up(normed))


def _rotated(heads: torch.Tensor) -> torch.Tensor:
    turn = torch.ones(heads.shape[-2:], dtype=heads.dtype)
    left, right = heads.chunk(2, -1)
    return heads * turn + torch.cat((-right, left), -1) * turn


class Llama(nn.Module):
    """Tokens ``(batch, length)`` to the loss of each next one."""

    def __init__(self, vocab: int, hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, *, tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads, kv_heads, ffn) for _ in range(layers))
        self.norm, self.head = Norm(hidden), nn.Linear(hidden, vocab, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean of the losses."""
        hidden = self.tokens(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return cross_entropy(self.head(self.norm(hidden)).float().flatten(0, 1), tokens.flatten())


@dataclass(frozen=True, slots=True)
class Part:
    """Several layers of a table as one."""

    params: int
    forward: int
    backward: int
    update: int = 0
    """What the optimizer takes for its parameters; times are nanoseconds."""


class Shape(NamedTuple):
    """A model with two blocks, and what it is fed with."""

    kind: str
    length: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    tied: bool


@functools.cache
def parts_of(shape: Shape, gpu: str, batch: int, again: tuple[str, ...]) -> dict[str, Part]:
    """``before`` the blocks, a ``plain`` block, one that computes ``again`` these submodules, and ``after``.

    Parameters are in BF16, as they are gathered. Blocks are equal, so that two tell the times of all.
    """
    recompute: dict[str, Any] = {
        "recompute": True,
        "recompute_configs": {"checkpoints": [".".join(filter(None, ("blocks.1", name))) for name in again]},
    }
    strategy = DistributedStrategy.from_dict(recompute) if again else DistributedStrategy()
    default = torch.get_default_dtype()
    with nothing_computed():
        torch.set_default_dtype(torch.bfloat16)
        kind, length, hidden, heads, *more, vocab, tied = shape
        if kind == "gpt":
            model = MODELS["gpt"](vocab=vocab, hidden=hidden, layers=2, heads=heads, positions=length)
        else:
            model = Llama(vocab, hidden, 2, heads, *more, tied=tied)
        torch.set_default_dtype(default)
        step = StepEstimate(model, strategy, gpu, tf32=False)
        with step.recorder:
            with step.forward:
                out = model(torch.zeros(batch, length, dtype=torch.int64))
                loss = loss_of("gpt")(out, out) if kind == "gpt" else out
            loss.backward()
            step.backward_ends()
        step.update(torch.optim.AdamW(model.parameters()))
    table = step.profile("").tables[0]
    places = {
        "before": lambda name: name in ("tokens", "positions"),
        "plain": lambda name: name.startswith("blocks.0"),
        "again": lambda name: name.startswith("blocks.1"),
        "after": lambda name: name in ("norm", "head"),
    }
    return {place: _part(table, inside) for place, inside in places.items()}


def _part(table: LayerTable, inside: Callable[[str], bool]) -> Part:
    layers = [layer for layer in table.layers if inside(layer.name)]
    params = sum(gradient.numel for layer in layers for gradient in layer.gradients)
    whole = sum(gradient.numel for layer in table.layers for gradient in layer.gradients)
    # Shards and the optimizer's state are FP32 where BF16 is gathered: twice what was counted.
    update = round(2 * table.update * params / whole)
    return Part(params, sum(layer.forward for layer in layers), sum(layer.backward for layer in layers), update)


@dataclass(frozen=True)
class Run:
    """One row of ``published.csv``."""

    row: dict[str, str]

    def number(self, name: str) -> int:
        """A whole number of the row."""
        return int(self.row[name])

    @property
    def measured(self) -> float:
        """Tokens per second and GPU."""
        return float(self.row["tokens_s_gpu"])

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one GPU."""
        return self.number("micro_batch") * self.number("length")

    @property
    def generation(self) -> str:
        """``A100``, or ``H100`` for all of Hopper."""
        return "A100" if self.row["gpu"].startswith("A100") else "H100"

    @property
    def half_width(self) -> float:
        """Of the interval that the product states for compute estimated for this GPU, as a share."""
        return half_width(self.row["gpu"])

    @property
    def recomputed(self) -> float:
        """Share of the forward's products that the backward computes again."""
        word = self.row["recompute"]
        return SHARES[word] if word in SHARES else float(word)

    @functools.cached_property
    def parts(self) -> dict[str, Part]:
        """See ``parts_of``."""
        row, sizes = self.row, {name: self.number(name) for name in Shape._fields[1:-1]}
        shape = Shape(row["kind"], **sizes, tied=row["tied"] == "yes")
        again = () if row["recompute"] == "none" else OPERATIONS if row["recompute"] == "operations" else ("",)
        return parts_of(shape, row["gpu"], self.number("micro_batch"), again)

    @functools.cached_property
    def experiment(self) -> Experiment:
        """Blocks of which evenly spaced ones compute again, on the preset of the row's cluster."""
        row, parts, layers = self.row, self.parts, self.number("layers")
        whole = row["recompute"] == "operations"
        share = 1.0 if whole else self.recomputed
        kinds = ["again" if int((block + 1) * share + 1e-9) > int(block * share + 1e-9) else "plain" for block in range(layers)]
        table = [("before", "before"), *((f"block{place}", kind) for place, kind in enumerate(kinds)), ("after", "after")]
        update = parts["before"].update + layers * parts["plain"].update + parts["after"].update
        network = f", {row['network']}" if row["network"] else ""
        gpu = "H100" if "TFLOP" in row["gpu"] else row["gpu"]  # of figures its links are not known
        nodes = self.number("gpus") // self.number("per_node")
        accumulation = self.number("accumulation")
        merge = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": accumulation}} if accumulation > 1 else {}
        configs = {"stage": self.number("stage"), "sharding_degree": self.number("degree"), "param_dtype": PARAM_DTYPES[row["gather"]]}
        strategy = {"sharding": True, "sharding_configs": configs, "amp": True, "amp_configs": {"dtype": "bf16"}}
        return Experiment.from_dict(
            {
                "workload": {
                    "model": "layers",
                    "layers": [
                        {
                            "name": name,
                            "params": parts[kind].params,
                            "forward": f"{parts[kind].forward} ns",
                            "backward": f"{parts[kind].backward} ns",
                        }
                        for name, kind in table
                    ],
                    "host": {"update": f"{update} ns"},
                    "batch_size": self.number("micro_batch"),
                    "steps": accumulation,
                },
                "cluster": {"preset": f"{nodes} x {row['per_node']} {gpu}{network}"},
                "strategy": {**strategy, "bf16_allreduce": row["reduce"] == "bf16", **merge},
                "run": {"device": "cuda", "backend": "nccl"},
            }
        )

    def simulated(self, compute: float = 1.0) -> float:
        """Tokens per second and GPU, with compute so many times as long as estimated."""
        experiment = self.experiment if compute == 1.0 else changed(self.experiment, "compute", compute, Path())
        found = simulate(experiment, timeline=False).summary
        return found.samples_per_s * self.number("length") / found.trainers

    @property
    def params(self) -> int:
        """Of the whole model."""
        parts = self.parts
        return parts["before"].params + self.number("layers") * parts["plain"].params + parts["after"].params

    @property
    def peak_s(self) -> float:
        """Seconds of a micro-batch at the GPU's peak: six operations a parameter and token, and two for what is computed again."""
        flops = (6 + 2 * self.recomputed) * self.params * self.tokens
        return flops / gpu_named(self.row["gpu"], "gpu").flops_s["bf16"]

    @property
    def exchange_s(self) -> float:
        """Seconds in which the bytes that a micro-batch gathers and scatters pass the slowest declared link."""
        row, cluster, degree = self.row, self.experiment.cluster, self.number("degree")
        gathers = 2 if row["stage"] == "3" else 1
        nbytes = (gathers * BYTES[row["gather"]] + BYTES[row["reduce"]]) * self.params * (degree - 1) / degree
        node = cluster.trainers_per_node
        within, between = cluster.intra, cluster.node_bandwidth
        assert within is not None
        if degree <= node:
            replicas = cluster.trainers // degree
            again = 2 * BYTES[row["reduce"]] * self.params * (replicas - 1) / replicas
            return 8 * (nbytes / within.bandwidth + (again / between if between else 0.0))
        assert between is not None
        return 8 * nbytes / between


@dataclass(frozen=True, slots=True)
class Predicted:
    """A throughput with both ends of its interval, in tokens per second and GPU."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, throughput: Callable[[float], float], half: float) -> Predicted:
        """``throughput`` is a function of how many times as long compute takes as is believed."""
        return cls(throughput(1.0), throughput(1 + half), throughput(1 - half))


def predictions(runs: Sequence[Run]) -> dict[str, list[Predicted]]:
    """Of each run, in order: by the simulator, and by closed forms, fitted to the runs that are given."""
    given = [run for run in runs if run.row["kept_aside"] == "no"]
    found = {"simulated": [Predicted.of(run.simulated, run.half_width) for run in runs]}
    for name, exchange, by_generation in RIVALS:
        shares = {
            generation: median(
                run.peak_s / (run.tokens / run.measured - exchange * run.exchange_s)
                for run in given
                if run.generation == generation or not by_generation
            )
            for generation in ("A100", "H100")
        }
        print(name, "of the peak:", ", ".join(f"{generation} {share:.3f}" for generation, share in shares.items()))
        found[name] = [_closed(run, shares[run.generation], exchange) for run in runs]
    return found


def _closed(run: Run, share: float, exchange: float) -> Predicted:
    return Predicted.of(lambda compute: run.tokens / (compute * run.peak_s / share + exchange * run.exchange_s), run.half_width)


def summary(runs: Sequence[Run], found: Sequence[Predicted]) -> str:
    """How many are inside, and the errors of the throughputs."""
    errors = [one.value / run.measured - 1 for run, one in zip(runs, found, strict=True)]
    inside = sum(one.low <= run.measured <= one.high for run, one in zip(runs, found, strict=True))
    return f"{inside} of {len(runs)} | {fmean(errors):+.1%} | {fmean(map(abs, errors)):.1%} | {max(errors, key=abs):+.1%}"


def main() -> None:
    """All tables."""
    with DATA.open(encoding="utf-8") as file:
        runs = [Run(row) for row in csv.DictReader(file)]
    if "given" in sys.argv:
        runs = [run for run in runs if run.row["kept_aside"] == "no"]
    if "fp32" in sys.argv:
        runs = [Run({**run.row, "gather": "fp32", "reduce": "fp32"}) for run in runs]
    found = predictions(runs)
    print(
        "\n| run | computed again | compiled | measured | simulated | low | high | inside | "
        + " | ".join(name for name, *_ in RIVALS)
        + " |"
    )
    print("|---" * (8 + len(RIVALS)) + "|")
    for place, run in enumerate(runs):
        one, row = found["simulated"][place], run.row
        errors = " | ".join(f"{found[name][place].value / run.measured - 1:+.0%}" for name in list(found)[1:])
        inside = "yes" if one.low <= run.measured <= one.high else "**no**"
        numbers = f"{run.measured:,.0f} | {one.value:,.0f} | {one.low:,.0f} | {one.high:,.0f}"
        shape = f"{row['run']}, {row['micro_batch']} x {row['length']}"
        print(f"| {shape} | {row['recompute']} | {row['compiled']} | {numbers} | {inside} | {errors} |")
    print("\n| runs | predicted by | inside | mean error | mean of absolute | largest |\n|---|---|---|---|---|---|")
    groups: dict[str, list[int]] = {}
    for place, run in enumerate(runs):
        part = "kept aside" if run.row["kept_aside"] == "yes" else "given"
        compiled = "compiled" if run.row["compiled"] == "yes" else "not compiled"
        for group in (part, f"{part}, {compiled}", run.row["source"]):
            groups.setdefault(group, []).append(place)
    for group, places in sorted(groups.items()):
        for name, every in found.items():
            line = summary([runs[place] for place in places], [every[place] for place in places])
            print(f"| {group} | {name} | {line} |")


if __name__ == "__main__":
    main()
