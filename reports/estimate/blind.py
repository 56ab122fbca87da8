"""Steps of a GPU, estimated first and measured afterwards.

    python reports/estimate/blind.py predict second    # any machine; writes second.json, which is committed before anything is measured
    python reports/estimate/blind.py measure second    # a machine with that GPU; appends rows to blind.jsonl
    python reports/estimate/blind.py table second

What is measured is a plain loop of torch: forward, loss, backward, optimizer, on one batch; fleetbench is no part of it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))

import torch  # noqa: E402  # the path first

from fleetbench.config import decode  # noqa: E402
from fleetbench.experiment import Experiment  # noqa: E402
from fleetbench.store import commit, versions  # noqa: E402
from fleetbench.workloads.models.registry import INPUTS, MODELS, loss_of, model_option  # noqa: E402
from fleetbench.workloads.training import make_optimizer  # noqa: E402
from real.estimate.step import HALF_WIDTH, estimate  # noqa: E402

RAW = HERE / "blind.jsonl"
GPUS = ("H100", "H200")
WARM_UP, ROUNDS, STEPS = 5, 5, 6
LARGE = {"hidden": 1024, "layers": 24, "heads": 16}
GPT_1B = {"hidden": 2048, "layers": 24, "heads": 16}


@dataclass(frozen=True)
class Cell:
    """One step: a registry model in a precision, so many samples of ``length`` tokens or of 224 x 224 pixels."""

    model: str
    precision: str
    samples: int
    length: int = 0
    options: dict[str, int] = field(default_factory=dict)
    optimizer: str = "adam"

    @property
    def name(self) -> str:
        """As the tables have it."""
        size = f" x {self.length}" if self.length else ""
        shape = f" {self.options['layers']}x{self.options['hidden']}" if self.options else ""
        shape += f" {self.options['vocab']} words" if "vocab" in self.options else ""
        return f"{self.model}{shape} {self.precision}, {self.samples}{size}"

    def experiment(self) -> Experiment:
        """As a user would ask for it."""
        data = {"data_options": {"length": self.length}} if self.length else {}
        strategy = {"amp": True, "amp_configs": {"dtype": self.precision}} if self.precision in ("bf16", "fp16") else {}
        workload = {"model": self.model, "data": "synthetic", "batch_size": self.samples, "optimizer": self.optimizer, "lr": 1e-4, **data}
        given = {"schema": 1, "name": "blind", "run": {"device": "cuda", "backend": "nccl"}, "strategy": strategy}
        return decode({**given, "workload": {**workload, "model_options": self.options}}, Experiment, "blind")


FIRST = (
    Cell("resnet50", "fp32", 64, optimizer="momentum"),
    Cell("resnet50", "tf32", 128, optimizer="momentum"),
    Cell("resnet50", "bf16", 256, optimizer="momentum"),
    Cell("bert_base", "bf16", 64, 128),
    Cell("bert_base", "fp32", 16, 256),
    Cell("bert_base", "tf32", 16, 512, {**LARGE, "ffn": 4096}),
    Cell("gpt", "tf32", 8, 1024),
    Cell("gpt", "bf16", 16, 1024),
    Cell("gpt", "bf16", 16, 1024, LARGE),
    Cell("gpt", "bf16", 4, 1024, GPT_1B),
)
SECOND = (
    Cell("resnet50", "fp32", 32, optimizer="momentum"),
    Cell("resnet50", "tf32", 256, optimizer="momentum"),
    Cell("resnet50", "bf16", 96, optimizer="momentum"),
    Cell("bert_base", "tf32", 32, 384),
    Cell("bert_base", "bf16", 8, 512),
    Cell("bert_base", "bf16", 32, 128, {**LARGE, "ffn": 4096}),
    Cell("gpt", "bf16", 4, 1024),
    Cell("gpt", "bf16", 16, 1024, {"layers": 12, "hidden": 768, "vocab": 50304}),
    Cell("gpt", "tf32", 8, 512, LARGE),
    Cell("gpt", "bf16", 8, 1024, {"layers": 24, "hidden": 1536, "heads": 16}),
)
"""Drawn up after the first were measured and the roofline was mended for them; fp32 is torch's default here, with convolutions in TF32."""
THIRD = (
    Cell("resnet50", "tf32", 64, optimizer="momentum"),
    Cell("resnet50", "tf32", 192, optimizer="adam"),
    Cell("resnet50", "bf16", 160, optimizer="momentum"),
    Cell("bert_base", "bf16", 32, 256),
    Cell("bert_base", "tf32", 8, 384, {**LARGE, "ffn": 4096}),
    Cell("bert_base", "bf16", 16, 384, {**LARGE, "ffn": 4096}),
    Cell("gpt", "bf16", 8, 1024, {"layers": 12, "hidden": 768, "vocab": 50304}),
    Cell("gpt", "tf32", 4, 1024, {**LARGE, "vocab": 50304}),
    Cell("gpt", "bf16", 8, 1024, {**LARGE, "vocab": 50304}),
    Cell("gpt", "bf16", 6, 1024, {"layers": 16, "hidden": 2048, "heads": 16, "vocab": 50304}),
)
"""Drawn up after an interval of 30 % was chosen, which the first and the second were seen for; no constant has changed since the second."""
ROUNDS_OF = {"first": FIRST, "second": SECOND, "third": THIRD}


def predict(cells: Sequence[Cell], sealed: Path) -> None:
    """Every cell on every GPU: seconds a step, and bytes."""
    rows = {}
    for cell in cells:
        for gpu in GPUS:
            profile = estimate(cell.experiment(), gpu, tf32=cell.precision == "tf32")
            table = profile.tables[0]
            seconds = (table.forward_ns + table.backward_ns + table.update) / 1e9
            assert profile.memory is not None
            assert profile.estimated == HALF_WIDTH
            rows[f"{cell.name}, {gpu}"] = {"step_s": seconds, "peak_bytes": profile.memory.peak}
            print(f"{cell.name}, {gpu}: {seconds * 1e3:.1f} ms, {profile.memory.peak / 1e9:.1f} GB")
    sealed.write_text(json.dumps({"half_width": HALF_WIDTH, "steps": rows}, indent=1) + "\n", encoding="utf-8")


def step_of(cell: Cell, device: torch.device) -> Any:
    """A step of the usual loop."""
    torch.backends.cuda.matmul.allow_tf32 = cell.precision != "fp32"
    torch.backends.cudnn.allow_tf32 = cell not in FIRST or cell.precision != "fp32"
    workload = cell.experiment().workload
    with device:
        torch.manual_seed(0)
        model = MODELS[cell.model](**cell.options)
        if INPUTS[cell.model] == "images":
            inputs, labels = torch.randn(cell.samples, 3, 224, 224), torch.randint(1000, (cell.samples,))
        else:
            inputs, labels = torch.randint(model_option(workload, "vocab"), (cell.samples, cell.length)), torch.randint(2, (cell.samples,))
    optimizer, loss = make_optimizer(model, workload), loss_of(cell.model)

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16) if cell.precision == "bf16" else nullcontext():
            output = model(inputs)
        loss(output, labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measured(cell: Cell, device: torch.device) -> dict[str, Any]:
    """Medians of several rounds of steps, between CUDA events."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    step = step_of(cell, device)
    for _ in range(WARM_UP):
        step()
    times = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(STEPS):
            step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / STEPS / 1e3)
    return {"step_s": median(times), "rounds_s": times, "peak_bytes": torch.cuda.max_memory_allocated(device)}


def measure(cells: Sequence[Cell]) -> None:
    """Append a row a cell; one that fails says why."""
    device = torch.device("cuda", 0)
    card = torch.cuda.get_device_name(device)
    origin = {"gpu": next((name for name in GPUS if name in card), card), "card": card, "commit": commit(), "versions": versions()}
    for cell in cells:
        try:
            row = measured(cell, device)
        except (RuntimeError, ValueError) as error:
            row = {"error": f"{type(error).__name__}: {error}"}
        with RAW.open("a", encoding="utf-8") as raw:
            raw.write(json.dumps({"cell": cell.name, **row, "date": datetime.now(UTC).isoformat(timespec="seconds"), **origin}) + "\n")


def rows(sealed: dict[str, Any]) -> Iterator[tuple[str, float, float, float, float]]:
    """Cell and GPU, measured and estimated seconds, measured and estimated bytes."""
    for row in map(json.loads, RAW.read_text(encoding="utf-8").splitlines()):
        name = f"{row['cell']}, {row['gpu']}"
        if "step_s" in row and name in sealed:
            yield name, row["step_s"], sealed[name]["step_s"], row["peak_bytes"], sealed[name]["peak_bytes"]


def table(path: Path) -> None:
    """As Markdown."""
    sealed = json.loads(path.read_text(encoding="utf-8"))
    half = sealed["half_width"]
    print("| step | measured | estimated | error | in the interval | memory, measured | estimated |\n|---|---|---|---|---|---|---|")
    for name, real_s, own_s, real_bytes, own_bytes in rows(sealed["steps"]):
        inside = "yes" if abs(real_s / own_s - 1) <= half else "**no**"
        times = f"{real_s * 1e3:.1f} ms | {own_s * 1e3:.1f} ms | {own_s / real_s - 1:+.1%}"
        print(f"| {name} | {times} | {inside} | {real_bytes / 1e9:.1f} GB | {own_bytes / 1e9:.1f} GB |")


if __name__ == "__main__":
    command, chosen = sys.argv[1:]
    if command == "measure":
        measure(ROUNDS_OF[chosen])
    elif command == "predict":
        predict(ROUNDS_OF[chosen], HERE / f"{chosen}.json")
    else:
        table(HERE / f"{chosen}.json")
