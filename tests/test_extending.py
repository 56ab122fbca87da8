"""What docs/extending.md adds, a schedule of Local SGD, a parameter of the search and a model, works as the page says."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
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


def block(file: str) -> str:
    """The page's block of code for ``file``."""
    blocks = re.findall(r"^```python\n# (\S+): .*?\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return dict(blocks)[file]


def code(file: str) -> dict[str, Any]:
    """The names that the page's block of code for ``file`` defines, as if it stood there."""
    names: dict[str, Any] = {"__name__": file.removesuffix(".py").replace("/", ".")}
    exec(block(file), names)  # noqa: S102  # our own page
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


SEARCHED = """
import runpy
from fleetbench.experiment import Experiment
from fleetbench.fields import CALLED
from sim.run import simulate
from tuner.search import different
from tuner.space import Equivalence, parameters_of, search_space

layer = {"name": "block", "params": 1000, "forward": "1 ms", "backward": "2 ms"}
workload = {"model": "layers", "layers": [layer], "host": {"fetch": "1 ms"}, "steps": 40}
link = {"bandwidth": "1 Gbit/s", "latency": "50 us"}
few = {"fuse_grad_size_in_MB": [32], "fusion": [], "nccl_comm_num": [1], "sync_nccl_allreduce": [True], "update_by_bucket": [False]}
data = {"workload": workload, "cluster": {"nodes": 2, "inter": link}, "run": {"device": "emulated"}}

def found(**tune):
    experiment = Experiment.from_dict(data | {"tune": few | tune})
    strategies = different(search_space(experiment), Equivalence(experiment), [])
    values = {parameters_of(one)["fetch_every_n_steps"]: one for one in strategies.values()}
    return {value: simulate(experiment.replace(strategy=one)).summary.step_s["mean"] for value, one in values.items()}

times = found()
assert times.keys() == {1, 10}, times
assert times[10] < times[1], times
assert found(fetch_every_n_steps=[5, 20]).keys() == {5, 20}
assert CALLED["fetching"] == ("fetch_every_n_steps",)
page = runpy.run_path("docs/generate.py")["experiment_page"]()
assert "| `fetch_every_n_steps` | list of integer | `[1, 10]` | Values of `strategy.fetch_every_n_steps` that are searched. |" in page
"""
"""What docs/extending.md says of the parameter, asked of packages that have it."""


@pytest.mark.slow
def test_a_search_parameter_is_a_line(tmp_path: Path) -> None:
    """In copies of the packages, with the page's line in the place of the field's own and nothing else changed."""
    for folder in ("fleetbench", "sim", "real", "tuner", "docs"):
        shutil.copytree(PAGE.parent.parent / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    path, line = tmp_path / "fleetbench" / "strategy.py", f"    {block('fleetbench/strategy.py')}"
    source, replaced = re.subn(r"^    fetch_every_n_steps: .*\n", line, path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert replaced == 1
    path.write_text(source, encoding="utf-8")
    command = [sys.executable, "-c", SEARCHED]
    done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


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
