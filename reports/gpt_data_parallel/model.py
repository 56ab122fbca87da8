"""A GPT's iteration from its shape and five constants, in closed form, and as a workload of the simulator."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from fleetbench.cluster import Cluster, Link
from fleetbench.experiment import Experiment, Run
from fleetbench.measurements import CollectivePoint
from fleetbench.plan.layers import Gradient, Layer, LayerTable
from fleetbench.profile import Communication, Profile, compute_key
from fleetbench.quantities import BitsPerSecond, Bytes, Nanoseconds
from fleetbench.strategy import DistributedStrategy
from fleetbench.workload import Workload
from sim.network.measured import Times

DATA = Path(__file__).parent / "data.csv"
TABLES = Path(__file__).parents[1] / "nccl_model" / "data"
VOCABULARY = 51_200
"""GPT-2's 50,257 tokens, padded as Megatron-LM does."""
GRADIENT_BYTES = 2
PASSES = 3
"""A backward is two forwards of work. Recomputing would be a fourth, and its fitted rate beyond what the device can do."""
PEAK_FLOPS_S = 312e12
"""Of an A100's tensor cores, in FP16 (NVIDIA's data sheet); no fitted rate may exceed it."""
NVLINK = Link(bandwidth=BitsPerSecond(300 * 8 * 10**9), latency=Nanoseconds(0))
"""Needed by the simulator to know which ports an all-reduce uses; what it takes is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One measurement's model and batch."""

    hidden: int
    layers: int
    heads: int
    sequence: int
    gpus: int
    micro_batch: int
    """Samples."""
    num_micro_batches: int

    @property
    def model(self) -> str:
        """What is left out at once."""
        return f"hidden {self.hidden}, {self.layers} layers"

    @property
    def params(self) -> int:
        """Of the blocks, 12 h^2 each, and of both embeddings; the head is tied to one of them."""
        return 12 * self.hidden**2 * self.layers + (VOCABULARY + self.sequence) * self.hidden

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.micro_batch * self.sequence

    @property
    def block_flops(self) -> float:
        """Of one block and micro-batch: 24 h^2 a token for matrices and 4 s h for attention, forward (Narayanan et al., SC 2021)."""
        return PASSES * self.tokens * (24 * self.hidden**2 + 4 * self.sequence * self.hidden)

    @property
    def block_bytes(self) -> float:
        """Of one block's activations: s b h (34 + 5 a s / h) (Korthikanti et al., MLSys 2023, equation 1); traffic is a multiple of it."""
        return self.tokens * (34 * self.hidden + 5 * self.heads * self.sequence)

    @property
    def head_flops(self) -> float:
        """Of the logits of a micro-batch."""
        return PASSES * 2 * self.tokens * self.hidden * VOCABULARY


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What is fitted."""

    floor_s: float
    """A block takes at least this, forward and backward: launching its kernels."""
    block_flops_s: float
    block_bytes_s: float
    head_flops_s: float
    update_params_s: float
    """Parameters that the optimizer updates in a second."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement."""

    shape: Shape
    took_s: float


def rows() -> list[Row]:
    """All measurements."""
    with DATA.open(encoding="utf-8") as file:
        found = []
        for line in csv.DictReader(file):
            gpus, micro_batch = int(line["# GPUs"]), int(line["micro batch"])
            shape = Shape(
                hidden=int(line["hidden size"]),
                layers=int(line["# layers"]),
                heads=int(line["attention heads"]),
                sequence=int(line["sequence length"]),
                gpus=gpus,
                micro_batch=micro_batch,
                num_micro_batches=int(line["global batch"]) // (gpus * micro_batch),
            )
            found.append(Row(shape, float(line["iteration time (ms)"]) / 1_000))
        return found


def points(gpus: int) -> tuple[CollectivePoint, ...]:
    """All-reduces of 1 MiB to 1 GiB that were measured on so many A100."""
    with (TABLES / f"a100_{gpus}gpu.csv").open(encoding="utf-8") as file:
        lines = list(csv.reader(file))[1:]
    return tuple(CollectivePoint(nbytes=Bytes(int(line[0])), took=Nanoseconds(int(line[3]))) for line in lines)


def all_reduce_s(shape: Shape) -> float:
    """What the gradients' all-reduce takes by the measured table, on the line of its last two points beyond it."""
    table = Times((point.nbytes, point.took) for point in points(shape.gpus))
    return float(table.ns(GRADIENT_BYTES * shape.params)) / 1e9


def compute_s(shape: Shape, constants: Constants) -> tuple[float, float, float]:
    """One block and the head for one micro-batch, and the update."""
    block_s = max(constants.floor_s, shape.block_flops / constants.block_flops_s + shape.block_bytes / constants.block_bytes_s)
    return block_s, shape.head_flops / constants.head_flops_s, shape.params / constants.update_params_s


def iteration_s(shape: Shape, constants: Constants, exchange_s: float) -> float:
    """Micro-batches one behind the other, then the all-reduce of the sum, then the update."""
    block_s, head_s, update_s = compute_s(shape, constants)
    return shape.num_micro_batches * (shape.layers * block_s + head_s) + exchange_s + update_s


def fit(measured: Sequence[Row]) -> Constants:
    """The constants of the least squared relative errors, the best of a few starts."""
    exchanges = [all_reduce_s(row.shape) for row in measured]

    def residuals(logs: np.ndarray) -> list[float]:
        constants = _constants(logs)
        return [iteration_s(row.shape, constants, exchange) / row.took_s - 1 for row, exchange in zip(measured, exchanges, strict=True)]

    starts = [np.log([floor_s, 200e12, 400e9, 90e12, 50e9]) for floor_s in (1e-3, 2e-3, 4e-3)]
    most = np.log([np.inf, PEAK_FLOPS_S, np.inf, PEAK_FLOPS_S, np.inf])
    best = min((least_squares(residuals, start, bounds=(-np.inf, most)) for start in starts), key=lambda found: float(found.cost))
    return _constants(best.x)


def _constants(logs: np.ndarray) -> Constants:
    names = [field.name for field in dataclasses.fields(Constants)]
    return Constants(**dict(zip(names, np.exp(logs).tolist(), strict=True)))


def workload(shape: Shape, constants: Constants) -> tuple[Experiment, Profile]:
    """The same iteration for the simulator: a layer table, micro-batches under gradient merge, one bucket, measured all-reduces."""
    block_s, head_s, update_s = compute_s(shape, constants)
    experiment = Experiment(
        name="gpt",
        workload=Workload(model="mlp", steps=shape.num_micro_batches, batch_size=shape.micro_batch),
        cluster=Cluster(nodes=1, trainers_per_node=shape.gpus, intra=NVLINK, collective="measured"),
        strategy=DistributedStrategy.from_dict(
            {
                "fuse_grad_size_in_MB": 0,
                "gradient_merge": shape.num_micro_batches > 1,
                "gradient_merge_configs": {"k_steps": shape.num_micro_batches},
            }
        ),
        run=Run(device="cuda", backend="nccl", warmup_steps=0),
    )
    embeddings = (VOCABULARY + shape.sequence) * shape.hidden
    sizes = [
        ("embedding", embeddings, 0.0),
        *[(f"block{index}", 12 * shape.hidden**2, block_s) for index in range(shape.layers)],
        ("head", 0, head_s),
    ]
    layers: list[Layer] = []
    ready_ns = 0
    for name, numel, took_s in reversed(sizes):
        took_ns = round(took_s * 1e9)
        forward_ns = took_ns // PASSES
        ready_ns += took_ns - forward_ns
        gradients = (Gradient(name=f"{name}.weight", numel=numel, dtype="float16", ready=Nanoseconds(ready_ns)),) if numel else ()
        layers.append(Layer(name=name, gradients=gradients, forward=Nanoseconds(forward_ns), backward=Nanoseconds(took_ns - forward_ns)))
    table = LayerTable(key=compute_key(experiment), layers=tuple(reversed(layers)), update=Nanoseconds(round(update_s * 1e9)))
    communication = Communication(backend="nccl", trainers=shape.gpus, link=NVLINK, points=points(shape.gpus))
    return experiment, Profile(machine="A100", created="fitted", tables=(table,), communication=communication)
