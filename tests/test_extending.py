"""What docs/extending.md adds, a schedule of Local SGD and a model, works as the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from sim_cases import layered, link

from fleetbench.plan.build import Setting, build_plan
from fleetbench.plan.combination import Combination
from fleetbench.plan.layers import Gradient
from fleetbench.plan.training import CollectiveTraining
from fleetbench.quantities import Nanoseconds
from fleetbench.strategy import DistributedStrategy
from fleetbench.workload import Workload
from fleetbench.workloads.data.data import num_training_samples, open_batches, prepare
from fleetbench.workloads.data.reader import Sampler
from fleetbench.workloads.models import registry
from plan.contract import StrategyContract
from sim.run import simulate

PAGE = Path(__file__).resolve().parent.parent / "docs" / "extending.md"


def code(file: str) -> dict[str, Any]:
    """The names that the page's block of code for ``file`` defines, as if it stood there."""
    blocks = re.findall(r"^```python\n# (\S+): .*?\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {"__name__": file.removesuffix(".py").replace("/", ".")}
    exec(dict(blocks)[file], names)  # noqa: S102  # our own page
    return names


@pytest.fixture(scope="module")
def schedule() -> Any:
    """The page's schedule, with at most 8 updates a round."""
    return code("fleetbench/plan/doubling.py")["Doubling"](k_steps=8)


class TestTheContract(StrategyContract):
    """A strategy with the page's schedule keeps the contract of every strategy."""

    @pytest.fixture(scope="class")
    @classmethod
    def strategy(cls, schedule: Any) -> CollectiveTraining:
        """Local SGD on four trainers, with three gradients in as many buckets."""
        gradients = [Gradient(name=f"layer{index}", numel=2**18, ready=Nanoseconds(index)) for index in range(3)]
        configured = DistributedStrategy().replace(localsgd=True, fuse_grad_size_in_MB=1)
        return CollectiveTraining(
            build_plan(configured, gradients, Setting(trainers=4, trainers_per_node=2)), Combination(cadence=schedule)
        )


@pytest.mark.parametrize("engine", ["reference", "vector"])
def test_a_simulation_averages_after_doubling_rounds(monkeypatch: pytest.MonkeyPatch, schedule: Any, engine: Any) -> None:
    """30 updates average after 1, 2, 4, 8 and 16, then every 8, and at the end; no other step sends a byte."""
    monkeypatch.setattr("fleetbench.plan.combination.Cadence.of", lambda _: schedule)
    experiment = layered([(1000, 10, 20)], nodes=4, inter=link(8), steps=30, strategy={"localsgd": True})
    steps = simulate(experiment, engine=engine).steps
    assert sorted(steps[steps["bytes_sent"] > 0]["step"].unique()) == [1, 2, 4, 8, 16, 24, 30]


def test_a_new_model_learns_the_registrys_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With its two entries the page's model is checked, built, fed, and its loss falls below that of guessing."""
    logistic = code("fleetbench/workloads/models/registry.py")["logistic"]
    for table, entry in ((registry.MODELS, logistic), (registry.INPUTS, "features")):
        monkeypatch.setitem(table, "logistic", entry)
    workload = Workload(model="logistic", model_options={"features": 64}, data="digits", batch_size=64)
    prepare(workload, 0, tmp_path)
    model = registry.build_model("logistic", workload.model_options, "float32", 0)
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=1.0), registry.loss_of("logistic")
    sampler = Sampler(num_training_samples(tmp_path), batch_size=64, trainers=1, rank=0, seed=0, uneven="cut")
    batches = open_batches(workload, tmp_path, sampler)
    losses = []
    for position in range(60):
        inputs, labels = batches.batch(position)
        optimizer.zero_grad()
        found = loss(model(inputs), labels)
        found.backward()
        optimizer.step()
        losses.append(float(found.detach()))
    batches.close()
    assert losses[0] > 2.2  # ln(10) = 2.3 by guessing
    assert sum(losses[-10:]) / 10 < 1
