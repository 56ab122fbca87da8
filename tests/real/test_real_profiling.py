"""Profiling: what is measured is what was put there, and what runs is what the strategy says."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import profile_steps
import pytest
import torch
from processes import Arrays, run_ranks
from torch import nn

from fleetbench.plan.layers import LayerTable
from fleetbench.strategy import BuildStrategy, DistributedStrategy
from real.communication.communicators import Communicators, collective_errors
from real.compute.compiled import apply_compiled
from real.layer_times import LayerClock, LayerTimes, Measured, ProfileLeg, table_of
from real.leg import Leg

pytestmark = pytest.mark.alone

MS = 1_000_000


class Slow(torch.autograd.Function):
    """The identity, which takes so many seconds forward and so many backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        """Sleep, and copy."""
        time.sleep(forward_s)
        ctx.backward_s = backward_s
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Sleep."""
        time.sleep(ctx.backward_s)
        return gradient, None, None


class SlowLinear(nn.Linear):
    """A layer of 4 numbers that sleeps 5 ms in its forward and 10 ms in its backward."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.forward_s, self.backward_s = 0.005, 0.010

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of shape ``(batch, 4)``."""
        return super().forward(Slow.apply(super().forward(x), self.forward_s, self.backward_s))  # type: ignore[no-untyped-call]  # torch's


class Communication:
    """Stands in for ``Communicators`` of one trainer."""

    trainers = 1
    rank = 0
    device = torch.device("cpu")
    errors = staticmethod(collective_errors)


def clocked(model: nn.Module, steps: int = 6) -> tuple[dict[str, float], dict[str, float]]:
    """The quickest of some steps, in ms: every layer's forward, and when every gradient was final. A busy machine is late at times."""
    clock = LayerClock(model)
    clock.attach()
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        model.zero_grad()
        clock.keep()
    clock.detach()
    times = clock.times()
    assert len(times.forward) == len(times.ready) == steps
    forward = np.min(times.forward, axis=0) / MS
    ready = np.min(np.array(times.ready, dtype=float), axis=0) / MS
    return dict(zip(times.layers, forward, strict=True)), dict(zip([name for name, _, _ in times.gradients], ready, strict=True))


def profiled(
    model: nn.Module,
    strategy: DistributedStrategy = DistributedStrategy(),  # noqa: B008  # a frozen value
    *,
    steps: int = 6,
    max_s: float = 10.0,
    loss: Callable[[nn.Module], torch.Tensor] = lambda model: model(torch.ones(2, 4)).sum(),
    optimizer: torch.optim.Optimizer | None = None,
) -> Measured:
    """Measure a leg of one trainer in this process."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1e-3)
    measuring = ProfileLeg(model, optimizer, cast("Communicators", Communication()))
    leg = Leg(strategy=strategy, steps=steps, warmup_steps=5, profile=True, max_s=max_s)
    return profile_steps.run(measuring, optimizer, lambda: loss(model), leg)


def tabled(*parts: Measured) -> LayerTable:
    """The table of what ranks measured, through the file that they write."""
    return table_of("key", [dataclasses.asdict(part) for part in parts])


def test_the_clock_sees_where_the_time_goes() -> None:
    """A layer that sleeps 5 ms in its forward and 10 ms in its backward shows up there, and only there."""
    forward, ready = clocked(nn.Sequential(nn.Linear(4, 4), SlowLinear(), nn.Linear(4, 4)))
    assert 5 <= forward["1"] < 9
    assert max(forward["0"], forward["2"]) < 2
    assert ready["2.weight"] < 5
    assert 10 <= ready["1.weight"] < 20


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo looks at it itself
def test_a_compiled_block_is_timed_whole_and_stays_one_graph() -> None:
    """Hooks inside a compiled block do not break its graph; the 5 ms that the block takes go to its last layer."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., Any]:
        graphs.append(graph)

        def run(*arguments: Any) -> Any:
            time.sleep(0.005)
            return graph.forward(*arguments)

        return run

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return cast("torch.Tensor", self.second(torch.tanh(self.first(x))))

    model = nn.Sequential(nn.Linear(4, 4), Block(), nn.Linear(4, 4))
    undo = apply_compiled(model, BuildStrategy(fuse_elewise_add_act_ops=True), backend=backend)
    forward, ready = clocked(model)
    undo()
    torch.compiler.reset()
    assert len(graphs) <= 2  # one for training, one without gradients
    assert all(sum(node.op == "call_function" for node in graph.graph.nodes) == 3 for graph in graphs)
    assert 5 <= forward["1.second"] < 9
    assert max(forward[name] for name in ("0", "1.first", "2")) < 2
    assert ready.keys() == dict(model.named_parameters()).keys()


def test_a_leg_tells_forward_backward_update_and_the_loop_apart() -> None:
    """20 ms before a step's forward are the loop's own, a slow layer's 30 and 60 ms its compute, an optimizer's 40 ms its update."""

    class SlowOptimizer(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure here
            time.sleep(0.040)
            super().step(closure)

    def loss(model: nn.Module) -> torch.Tensor:
        time.sleep(0.020)
        return cast("torch.Tensor", model(torch.ones(2, 4)).sum())

    layer = SlowLinear()
    layer.forward_s, layer.backward_s = 0.030, 0.060
    model = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 4))
    table = tabled(profiled(model, loss=loss, optimizer=SlowOptimizer(model.parameters(), lr=1e-3)))
    assert [layer.name for layer in table.layers] == ["0", "1", "2"]
    took = [table.layers[1].forward, table.layers[1].backward, table.read, table.update]
    for time_ns, slept in zip(took, (30, 60, 20, 40), strict=True):
        assert slept * MS <= time_ns < (slept + 15) * MS
    assert table.forward_ns + table.backward_ns < 115 * MS


def test_activations_are_counted_by_layer_and_recompute_keeps_inputs_alone() -> None:
    """By hand, for a batch of 5: a layer keeps its input, a tanh its output; a checkpoint of both keeps the input alone."""

    def loss(model: nn.Module) -> torch.Tensor:
        return cast("torch.Tensor", model(torch.ones(5, 8)).sum())

    def tables(strategy: DistributedStrategy) -> dict[str, int]:
        model = nn.Sequential(nn.Linear(8, 16), nn.Sequential(nn.Linear(16, 32), nn.Tanh()), nn.Linear(32, 4))
        return {layer.name: layer.activation_bytes for layer in tabled(profiled(model, strategy, loss=loss)).layers}

    assert tables(DistributedStrategy()) == {"0": 5 * 8 * 4, "1.0": 5 * (16 + 32) * 4, "2": 0}
    recomputed = tables(DistributedStrategy.from_dict({"recompute": True, "recompute_configs": {"checkpoints": ["1"]}}))
    assert sum(recomputed.values()) == 5 * (8 + 16 + 32) * 4  # the tanh's output is now the last layer's input
    assert tables(DistributedStrategy.from_dict({"recompute": True, "recompute_configs": {"checkpoints": ["0", "1", "2"]}}))


def test_medians_come_with_their_spread() -> None:
    """By hand, three steps of a rank: forwards of 1, 2 and 6 have the median 2 and deviations 1, 0 and 4, whose median is 1."""
    part = Measured(
        layers=LayerTimes(
            layers=["a", "b"],
            gradients=[("a.w", 1, "float32"), ("b.w", 1, "float32")],
            forward=[[1, 10], [2, 10], [6, 10]],
            ready=[[30, 10], [31, 13], [40, 11]],
        ),
        backward=[35, 35, 45],
        update=[1, 2, 3],
        read=[4, 5, 6],
    )
    table = tabled(part)
    a, b = table.layers
    assert (a.forward, a.forward_mad) == (2, 1)
    assert (b.forward, b.forward_mad) == (10, 0)
    assert (b.gradients[0].ready, b.backward, b.backward_mad) == (11, 11, 1)  # 10, 13, 11
    assert (a.gradients[0].ready, a.backward, a.backward_mad) == (31, 35 - 11, 2)  # from b to a 20, 18 and 29; the rest belongs to the last
    assert (table.update, table.read) == (2, 5)


def test_sparse_gradients_and_buffers_are_in_the_table() -> None:
    """An embedding of 9 rows of 4, of which a step touches 3; batch statistics of 4 channels in float32 and one counter."""

    class Looked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Embedding(9, 4, sparse=True)
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return cast("torch.Tensor", self.norm(self.rows(x)))

    table = tabled(profiled(Looked(), loss=lambda model: model(torch.tensor([1, 5, 5, 8, 1])).square().sum()))
    gradients = {gradient.name: gradient for layer in table.layers for gradient in layer.gradients}
    assert (gradients["rows.weight"].sparse, gradients["rows.weight"].touched, gradients["rows.weight"].numel) == (True, 3 * 4, 36)
    assert (gradients["norm.weight"].sparse, gradients["norm.weight"].touched) == (False, 0)
    assert table.buffers_nbytes == (4 + 4) * 4 + 8
    assert table.averaged_nbytes == table.buffers_nbytes


class TestTwoRanks:
    """Real processes side by side."""

    @pytest.fixture(scope="class")
    @classmethod
    def ranks(cls) -> list[Arrays]:
        """What each of two ranks saved."""
        return run_ranks(Path(__file__).with_name("profile_rank.py"), 2)

    def test_ranks_of_unequal_speed_take_the_same_steps(self, ranks: list[Arrays]) -> None:
        """Step by step alike, fewer than were allowed."""
        first, second = ranks
        for name in ("plain", "synchronised"):
            assert first[f"{name}/begun"].tolist() == second[f"{name}/begun"].tolist()
            steps = {len(rank[f"{name}/backward"]) for rank in ranks}
            assert len(steps) == 1
            assert 3 <= steps.pop() <= 20

    def test_statistics_meet_and_gradients_do_not(self, ranks: list[Arrays]) -> None:
        """Ranks that see other data part, all but the statistics of a batch norm that is synchronised."""
        first, second = ranks
        np.testing.assert_allclose(first["synchronised/statistics"], second["synchronised/statistics"], rtol=1e-5)
        assert np.abs(first["plain/statistics"] - second["plain/statistics"]).max() > 1e-2
        for name in ("plain", "synchronised"):
            assert np.abs(first[f"{name}/weight"] - second[f"{name}/weight"]).max() > 1e-4
