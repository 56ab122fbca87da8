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
from sim_cases import with_profile
from torch import nn

from fleetbench.experiment import Experiment
from fleetbench.plan.layers import LayerTable, scaled
from fleetbench.profile import compute_key, table_for
from fleetbench.strategy import BuildStrategy, DistributedStrategy, RecomputeConfigs
from real.communication.communicators import Communicators, collective_errors
from real.compute.compiled import apply_compiled
from real.compute.recompute import apply_recompute
from real.engine.optimizers import FusedOptimizer
from real.layer_times import LayerClock, LayerTimes, Measured, ProfileLeg, memory_of, table_of
from real.leg import Leg
from real.profile import measuring as profile_legs
from real.profile.measuring import measured_part, searched_threads, take_profile

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


def test_what_a_loop_accumulates_before_the_last_batch_is_its_own_work() -> None:
    """A step of two batches, 15 ms each: the table's layers are those of one, and the other is in the time of the loop."""

    def loss(model: nn.Module) -> torch.Tensor:
        model(torch.ones(2, 4)).sum().backward()
        total: torch.Tensor = model(torch.ones(2, 4)).sum()
        return total

    measured = profiled(nn.Sequential(nn.Linear(4, 4), SlowLinear()), loss=loss)
    forward = [sum(step) / MS for step in measured.layers.forward]
    assert 5 <= min(forward) < 9
    assert 10 <= min(measured.backward) / MS < 14
    assert 15 <= min(measured.read) / MS < 25  # two batches take 30


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


def test_what_is_recomputed_belongs_to_the_backward() -> None:
    """A checkpointed layer's second forward delays gradients by its 5 ms, and no layer's forward."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(SlowLinear(), nn.Linear(4, 4)), nn.Linear(4, 4))
    undo = apply_recompute(model, ("1",))
    forward, ready = clocked(model)
    undo()
    assert list(forward) == ["0", "1.0", "1.1", "2"]
    assert 5 <= forward["1.0"] < 9
    assert max(forward[name] for name in ("0", "1.1", "2")) < 2
    assert ready["2.weight"] < 5
    assert 5 <= ready["1.1.weight"] < 10  # after the second forward
    assert 15 <= ready["1.0.weight"] < 25


def test_a_forward_without_gradients_is_nobodys() -> None:
    """An evaluation of 40 ms between a step's forward and its backward delays gradients, and no layer's forward."""
    layer = SlowLinear()
    model = nn.Sequential(layer, nn.Linear(4, 4))
    clock = LayerClock(model)
    clock.attach()
    loss = model(torch.ones(2, 4)).sum()
    layer.forward_s = 0.040
    with torch.no_grad():
        model(torch.ones(2, 4))
    loss.backward()
    clock.keep()
    clock.detach()
    times = clock.times()
    assert 5 * MS <= times.forward[0][0] < 30 * MS
    assert min(time_ns for time_ns in times.ready[0] if time_ns is not None) >= 40 * MS


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


@pytest.mark.parametrize(("step_s", "max_s", "least", "most"), [(0.0, 30.0, 12, 12), (0.05, 0.01, 3, 3), (0.02, 0.5, 4, 20)])
def test_slow_steps_are_fewer(step_s: float, max_s: float, least: int, most: int) -> None:
    """All steps where they are quick, three where even those take too long, and between what the time allows."""
    model = SlowLinear()
    model.forward_s, model.backward_s = 0.0, step_s
    measured = profiled(model, steps=12 if step_s == 0 else 40, max_s=max_s)
    assert least <= len(measured.backward) <= most
    assert all(
        len(values) == len(measured.backward) for values in (measured.backward, measured.update, measured.read, measured.layers.ready)
    )


def test_the_fused_update_is_the_one_that_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the fused update every step is one, without it none is; both move parameters alike."""
    steps: list[FusedOptimizer] = []
    original = FusedOptimizer.begin

    def counting(self: FusedOptimizer) -> None:
        steps.append(self)
        original(self)

    monkeypatch.setattr(FusedOptimizer, "begin", counting)
    ends = []
    for fuses in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
        strategy = DistributedStrategy(build_strategy=BuildStrategy(fuse_all_optimizer_ops=fuses))
        measured = profiled(model, strategy, steps=4, max_s=1e-6)
        assert len(measured.update) == 3
        assert bool(steps) == fuses
        ends.append(torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]))
    torch.testing.assert_close(ends[0], ends[1])
    plain = Experiment.load()
    fused = Experiment.load(overrides=["strategy.build_strategy.fuse_all_optimizer_ops=true"])
    assert compute_key(plain) != compute_key(fused)


def test_mixed_precision_is_on_while_it_is_measured() -> None:
    """The layers see their inputs in the lower precision, and the model has its own types and hooks again after the leg."""
    seen: set[torch.dtype] = set()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    strategy = DistributedStrategy.from_dict({"amp": True, "amp_configs": {"dtype": "bf16"}})
    handle = model[1].register_forward_pre_hook(lambda _module, inputs: seen.add(inputs[0].dtype))
    profiled(model, strategy)
    assert seen == {torch.bfloat16}
    handle.remove()
    assert model(torch.ones(1, 4)).dtype == torch.float32
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


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


def test_memory_is_counted_by_what_it_holds() -> None:
    """By hand: 8 x 4 + 4 numbers of 4 bytes, as many again with momentum; the most of two ranks."""
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    measured = profiled(model, loss=lambda model: model(torch.ones(5, 8)).sum(), optimizer=optimizer)
    assert {name: measured.memory[name] for name in ("parameters", "gradients", "optimizer_state", "activations")} == {
        "parameters": 36 * 4,
        "gradients": 36 * 4,
        "optimizer_state": 36 * 4,
        "activations": 5 * 8 * 4,
    }
    assert 10**7 < measured.memory["peak"] < 10**11
    other = dataclasses.replace(measured, memory=measured.memory | {"activations": 999})
    assert memory_of([dataclasses.asdict(measured), dataclasses.asdict(other)]).activations == 999


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


def test_a_gradient_that_comes_later_than_its_backward_ends_with_it() -> None:
    """Per step: one that did not come, and one of 50 ns in a backward of 40, are ready at 40."""
    times = LayerTimes(layers=["a"], gradients=[("a.w", 1, "float32")], forward=[[1], [1], [1]], ready=[[None], [50], [20]])
    table = tabled(Measured(layers=times, backward=[40, 40, 40], update=[0, 0, 0], read=[0, 0, 0]))
    assert table.layers[0].gradients[0].ready == 40


def test_a_scaled_table_keeps_its_shape_and_its_sums() -> None:
    """Every time by its factor, each partial sum rounded once: 7 thirds of 3 layers of 1 ns are 2 + 3 + 2."""
    times = LayerTimes(
        layers=["a", "b", "c"],
        gradients=[(f"{name}.w", 1, "float32") for name in "abc"],
        forward=[[1, 1, 1]],
        ready=[[3, 2, 1]],
    )
    table = scaled(tabled(Measured(layers=times, backward=[3], update=[9], read=[9])), 7 / 3, 2.0)
    assert [layer.forward for layer in table.layers] == [2, 3, 2]
    assert [layer.backward for layer in table.layers] == [2, 2, 2]
    assert [layer.gradients[0].ready for layer in table.layers] == [6, 4, 2]
    assert (table.forward_ns, table.backward_ns, table.update) == (7, 6, 9)


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


def test_a_bucketwise_update_is_measured_whole() -> None:
    """Updates beside the backward could not be told from it, so the leg makes one, of the same compute."""
    strategy = DistributedStrategy.from_dict(
        {"build_strategy": {"enable_backward_optimizer_op_deps": False}, "nccl_comm_num": 2, "thread_num": 2}
    )
    assert measured_part(strategy) == DistributedStrategy(thread_num=2)


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


@pytest.mark.slow
def test_a_profile_with_recompute_says_what_it_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small BERT of two trainers: its first block keeps nothing, and without recompute more than its two wide layers."""
    monkeypatch.setattr(profile_legs, "STEPS", 6)
    block = "bert.encoder.layers.0"
    options = {"vocab": 60, "hidden": 16, "layers": 2, "heads": 2, "ffn": 256, "positions": 8, "classes": 5}
    experiment = Experiment.from_dict(
        {
            "name": "recompute",
            "workload": {
                "model": "bert_base",
                "model_options": options,
                "data": "synthetic",
                "data_options": {"length": 8, "samples": 100},
                "steps": 4,
                "batch_size": 4,
            },
            "cluster": {"trainers_per_node": 2},
            "strategy": {
                "recompute": True,
                "recompute_configs": {"checkpoints": [block]},
                "build_strategy": {"fuse_all_optimizer_ops": True},
            },
            "tune": {"thread_num": [1]},
        }
    )
    table = table_for(with_profile(experiment, take_profile(experiment)))
    assert sum(layer.activation_bytes for layer in table.layers if layer.name.startswith(block)) == 0  # its input was there before it
    plain = experiment.replace(strategy=experiment.strategy.replace(recompute=False, recompute_configs=RecomputeConfigs()))
    kept = table_for(with_profile(plain, take_profile(plain)))
    ffn = 2 * 4 * 8 * 256 * 4  # before and after the activation function
    assert sum(layer.activation_bytes for layer in kept.layers) - sum(layer.activation_bytes for layer in table.layers) > ffn


@pytest.mark.parametrize(("own", "cores", "counts"), [(1, 1, (1,)), (3, 4, (1, 2, 3)), (1, 7, (1, 2, 4)), (2, 0, (2,))])
def test_threads_are_those_of_a_tuning_for_which_there_are_cores(
    monkeypatch: pytest.MonkeyPatch, own: int, cores: int, counts: tuple[int, ...]
) -> None:
    """With the strategy's own among them, of two trainers of a node; synchronised batch norm goes with one alone."""
    monkeypatch.setattr("os.cpu_count", lambda: 2 * cores)
    file = {"cluster": {"trainers_per_node": 2}, "strategy": {"thread_num": own}, "tune": {"thread_num": [1, 2, 4] if own == 1 else [1, 2]}}
    experiment = Experiment.from_dict(file)
    assert searched_threads(experiment) == counts
    assert searched_threads(experiment.replace(strategy=DistributedStrategy(sync_batch_norm=True))) == (1,)
