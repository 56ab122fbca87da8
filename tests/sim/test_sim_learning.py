"""Virtual trainers learn what real ones do: the same losses, the same K, the same parameters."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from learning_cases import ROUNDED, STEPS, cases
from processes import Arrays, run_ranks, values_of
from torch import nn
from torch.nn.functional import cross_entropy

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.workloads.data.data import open_batches, prepare
from fleetbench.workloads.models.registry import build_model
from fleetbench.workloads.training import sampler_of
from sim.learning.gradients import Problem
from sim.learning.trajectory import CLOCK, LEARNT, key_of, learnt_from
from sim.learning.virtual_training import VirtualTraining

RANK = Path(__file__).parents[1] / "real" / "learning_rank.py"
EXACT = 1e-9
"""In float64, whichever order sums were taken in."""
FLOAT32, WIRE = 2e-5, 5e-3
"""In float32, where another order of sums grows over the steps; and where numbers are rounded to 16 bits."""

PARTS, SAMPLE = 9, (0, 4)
"""Launches of four processes; those of the sample have local steps of all kinds, amp, merged and sparse gradients, and a hierarchy."""
OF_FOUR = [
    pytest.param(name, way, marks=[] if number % PARTS in SAMPLE and way == best else pytest.mark.whole)
    for number, (name, best) in enumerate((name, "loop" if "sparse" in name else "graph") for name in cases(4))
    for way in sorted({"loop", best})  # embedding bags cannot be traced
    if "batch norm" not in name
]

Real = Callable[..., list[Arrays]]


@pytest.fixture(scope="module")
def real(request: pytest.FixtureRequest) -> Real:
    """What so many ranks of gloo have learnt in so many steps; one launch for all cases, or for each part of them."""
    chosen = {*values_of(request, "name")}

    @cache
    def launched(ranks: int, steps: int, part: int, parts: int) -> list[Arrays]:
        return run_ranks(RANK, ranks, str(steps), json.dumps([name for name in [*cases(ranks)][part::parts] if name in chosen]))

    def of(name: str, ranks: int, steps: int, parts: int = 1) -> list[Arrays]:
        return launched(ranks, steps, [*cases(ranks)].index(name) % parts, parts)

    return of


def _compare(
    name: str, experiment: Experiment, ranks: list[Arrays], folder: Path, way: str, exact: float = EXACT, wire: float = WIRE
) -> None:
    training = VirtualTraining(experiment, folder, way)
    found = training.run()
    tolerance = wire if name in ROUNDED else exact if experiment.workload.dtype == "float64" else FLOAT32
    near = {"rtol": tolerance, "atol": tolerance}
    assert [length or 0 for length in found.local_steps] == ranks[0][f"{name}/local_steps"].tolist()
    np.testing.assert_allclose(found.losses.T, [rank[f"{name}/losses"] for rank in ranks], **near)
    np.testing.assert_allclose(np.array(found.held_out), ranks[0][f"{name}/held_out"], **near)
    np.testing.assert_allclose(found.final_loss, ranks[0][f"{name}/final_loss"], **near)
    learnt = np.mean([rank[f"{name}/learnt"] for rank in ranks], axis=0)
    np.testing.assert_allclose(training.replicas.evaluated().numpy(), learnt, **near)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if number % 14 else []) for number, name in enumerate(cases(2))]
)
def test_two_trainers_learn_as_two_processes(name: str, real: Real, tmp_path: Path) -> None:
    """Every trainer's loss at every step, every round's length, the held-out losses and the last parameters are those of gloo."""
    _compare(name, cases(2)[name], real(name, 2, STEPS), tmp_path, "loop")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "name",
    [
        "synchronous",
        "local, adam averaged",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("merge, flush", "amp fp16", "fp16 wire", "pairs, local", "amp fp16, local")
        ),
    ],
)
def test_the_graph_learns_as_the_loop(name: str, real: Real, tmp_path: Path) -> None:
    """All trainers' gradients at once, traced, give the same training."""
    _compare(name, cases(2)[name], real(name, 2, STEPS), tmp_path, "graph")


@pytest.mark.slow
def test_a_graph_moves_statistics_as_the_loop() -> None:
    """Batch norm's statistics are each trainer's own: gradients, losses and buffers are the same in both ways."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).double()
    own = {shares: [_repeated(value, 1 if shares else 5) for value in model.parameters()] for shares in (True, False)}
    buffers = [_repeated(value, 5) for value in model.buffers()]
    batch = torch.randn(5, 6, 4, dtype=torch.float64), torch.randint(0, 2, (5, 6))
    for shares, averages in ((True, True), (True, False), (False, False)):
        problem = Problem(model=model, compare=cross_entropy, trainers=5, shares=shares, averages=averages)
        arguments = (own[shares], buffers, torch.tensor(4.0, dtype=torch.float64), *batch)
        loop, graph = problem.loop(*arguments), problem.graph(*arguments)(*arguments)
        assert loop.buffers[0].std(0).min() > 0
        torch.testing.assert_close(list(graph.buffers), loop.buffers)
        torch.testing.assert_close(list(graph.gradients), loop.gradients)
        torch.testing.assert_close(graph.losses, loop.losses)
    assert torch.equal(buffers[0], _repeated(model[1].running_mean, 5)), "a way changes nothing that it is given"


def _repeated(value: torch.Tensor, members: int) -> torch.Tensor:
    return value.detach().expand(members, *value.shape).clone()


def _alone(experiment: Experiment, folder: Path, every: int = 0) -> torch.Tensor:
    """One model's parameters after SGD with momentum on the whole joint batch, warm-up included; ``every``: updates between outer steps."""
    workload, cluster, run = experiment.workload, experiment.cluster, experiment.run
    prepare(workload, run.seed, folder)
    sampler = sampler_of(experiment, folder, cluster.trainers, 0)
    batches = open_batches(workload, folder, replace(sampler, trainers=1, batch_size=workload.batch_size * cluster.trainers))
    model = build_model(workload.model, workload.model_options, workload.dtype, run.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=workload.lr, momentum=workload.momentum)
    agreed = [value.detach().clone() for value in model.parameters()]
    outer = torch.optim.SGD(agreed, lr=0.7, momentum=0.9, nesterov=True)
    for position in range(run.warmup_steps + workload.steps):
        inputs, labels = batches.batch(position)
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        if every and (position + 1) % every == 0:
            for theta, own in zip(agreed, model.parameters(), strict=True):
                theta.grad = theta - own.detach()
            outer.step()
            for theta, own in zip(agreed, model.parameters(), strict=True):
                own.data.copy_(theta)
    return torch.cat([value.detach().reshape(-1) for value in model.parameters()])


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("trainers", "strategy"),
    [
        (6, {}),
        (6, {"use_hierarchical_allreduce": True, "hierarchical_inner_ranks": 3}),
        (1, {"localsgd": True, "localsgd_configs": {"k_steps": 4}}),
        (6, {"localsgd": True, "localsgd_configs": {"k_steps": 1, "momentum": "average"}}),
    ],
)
def test_trainers_together_are_one_process(trainers: int, strategy: dict[str, object], tmp_path: Path) -> None:
    """Synchronous training, and averaging after every step, is one process with the joint batch; Local SGD alone the plain loop."""
    workload = {"model_options": {"hidden": 12}, "batch_size": 5, "steps": 30, "optimizer": "momentum", "dtype": "float64"}
    cluster = {"nodes": trainers, "trainers_per_node": 1, "inter": {"bandwidth": "1 Gbit/s", "latency": "1 us"}}
    experiment = Experiment.from_dict({"workload": workload, "cluster": cluster, "strategy": strategy})
    for way in ("loop", "graph"):
        training = VirtualTraining(experiment, tmp_path / way, way)
        training.run()
        torch.testing.assert_close(training.replicas.evaluated(), _alone(experiment, tmp_path / "alone"), rtol=1e-9, atol=1e-10)


def test_every_field_is_learnt_or_the_clocks_or_refused() -> None:
    """A field that is added to the strategy is refused by name until it is said what virtual trainers make of it."""
    assert not LEARNT & CLOCK
    base = {"model_options": {"hidden": 8}, "steps": 2}
    for strategy, name in (
        ({"sync_batch_norm": True}, "strategy.sync_batch_norm"),
        ({"auto": True}, "strategy.auto"),
        ({"localsgd": True, "localsgd_configs": {"outer_lr": 0.7, "outer_wire": "int8"}}, "strategy.localsgd_configs.outer_wire"),
        ({"mode": "ps", "fp16_allreduce": True}, "strategy.fp16_allreduce"),
    ):
        cluster = {"nodes": 2, "servers": 1 if "mode" in strategy else 0, "inter": {"bandwidth": "1 Gbit/s", "latency": "1 us"}}
        experiment = Experiment.from_dict({"workload": base, "cluster": cluster, "strategy": strategy})
        with pytest.raises(ConfigError, match=f"{name}.*virtual trainers|virtual trainers.*{name}"):
            learnt_from(experiment)


def test_too_many_trainers_are_refused_before_they_take_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a training takes is compared with what is free: parameters, gradients and momentum of every trainer, in bytes."""
    workload = {"model_options": {"hidden": 100}, "data": "synthetic", "batch_size": 1, "steps": 2, "optimizer": "momentum"}
    strategy = {"localsgd": True, "localsgd_configs": {"k_steps": 2}}
    experiment = Experiment.from_dict({"workload": workload, "cluster": {"trainers_per_node": 300}, "strategy": strategy})
    parameters = 64 * 100 + 100 + 100 * 100 + 100 + 100 * 10 + 10
    least = 300 * parameters * 4 * 4  # parameters, gradients, momentum, deltas
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=least))
    with pytest.raises(ConfigError, match=r"300 trainers take about 0\.08\d* GB, and 0\.0845 GB are free"):
        VirtualTraining(experiment, tmp_path)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=2 * least))
    assert least < VirtualTraining(experiment, tmp_path).num_bytes < 1.2 * least


def test_only_what_is_learnt_from_is_in_the_key() -> None:
    """Bandwidth, stragglers, fusion and the target share a trajectory; trainers, hierarchy, seed and learning rate do not."""
    inter = "cluster.inter={ bandwidth = '1 Gbit/s', latency = '1 us' }"
    nodes = [inter, "cluster.nodes=4", "cluster.trainers_per_node=1"]

    def key(*overrides: str) -> str:
        return key_of(Experiment.load(None, [*nodes, *overrides]))

    same = {
        key(),
        key("cluster.inter.bandwidth=10 Gbit/s"),
        key("cluster.stragglers=[]"),
        key("strategy.fuse_grad_size_in_MB=1"),
        key("strategy.build_strategy.fuse_all_optimizer_ops=true"),
        key("workload.target_loss=0.1"),
        key("cluster.nodes=2", "cluster.trainers_per_node=2"),
        key("run.timeout=50 s"),
        key("name=other"),
    }
    assert len(same) == 1
    hierarchy = "strategy.use_hierarchical_allreduce=true"
    others = [
        key("cluster.nodes=5"),
        key("run.seed=1"),
        key("run.warmup_steps=0"),
        key("workload.lr=0.2"),
        key("workload.eval_every=7"),
        key("strategy.fp16_allreduce=true"),
        key("cluster.nodes=2", "cluster.trainers_per_node=2", hierarchy),
        key("cluster.nodes=8", "cluster.trainers_per_node=2", hierarchy),
        key("cluster.nodes=4", "cluster.trainers_per_node=4", hierarchy),
    ]
    assert len({*same, *others}) == 1 + len(others)
    by_ranks = key("cluster.nodes=4", "cluster.trainers_per_node=4", hierarchy, "strategy.hierarchical_inner_ranks=2")
    assert by_ranks == key("cluster.nodes=8", "cluster.trainers_per_node=2", hierarchy)


WORKERS = [name for name in cases(4) if name.startswith("workers")]


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if "beside" in name else pytest.mark.slow) for name in WORKERS])
def test_workers_of_two_trainers_learn_as_four_processes(name: str, real: Real, tmp_path: Path) -> None:
    """Two workers of two: the losses, rounds and parameters of processes."""
    _compare(name, cases(4)[name], real(name, 4, STEPS, parts=len(cases(4))), tmp_path, "loop")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::fleetbench.plan.adaptive_k.AdaptiveStepsKept")
@pytest.mark.parametrize(("name", "way"), OF_FOUR)
def test_four_trainers_learn_as_four_processes(name: str, way: str, real: Real, tmp_path: Path) -> None:
    """Four virtual trainers on two nodes, hierarchies among them, learn what four processes do in 300 steps.

    In float64 within 1e-5. Rounding to 16 bits moves losses by up to 0.03, because four numbers have several sums; later the training
    is near its end, and such a change grows. Without batch norm over four samples: there 1e-15 grows fiftyfold with every step.
    """
    _compare(name, cases(4, 300)[name], real(name, 4, 300, parts=PARTS), tmp_path, way, exact=1e-5, wire=0.1)
