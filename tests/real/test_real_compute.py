"""What changes a trainer's own compute: mixed precision, recompute, compiled blocks and device settings, and the way back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

from fleetbench.errors import ConfigError
from fleetbench.strategy import BuildStrategy, DistributedStrategy
from real.compute.compiled import apply_compiled
from real.compute.compute import apply_compute
from real.compute.mixed_precision import apply_mixed_precision
from real.compute.recompute import SavedForBackward, apply_recompute

CPU = torch.device("cpu")
WIDTH = 16
DYNAMO = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo looks at it itself


class Block(nn.Module):
    """A residual block with batch norm and dropout, which counts its forwards."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH, momentum=momentum)
        self.drop = nn.Dropout(0.3)
        self.forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of shape ``(batch, WIDTH)``."""
        self.forwards += 1
        return x + self.drop(torch.relu(self.norm(self.inner(x))))


class Network(nn.Module):
    """A layer, six blocks in a list and a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList([Block(None), *(Block() for _ in range(5))])
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From ``(batch, 8)`` to ``(batch, 4)``."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]  # torch declares Any


@pytest.fixture
def network() -> Network:
    """A network that is always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Network()


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Let no test find another's graphs."""
    yield
    torch._dynamo.reset()


def trace(model: nn.Module) -> list[Any]:
    """All that a change to a living model could leave in it."""
    return [
        (
            name,
            type(module),
            id(module),
            sorted(module.__dict__),
            module.training,
            id(module.__dict__.get("forward")),
            [len(hooks) for hooks in (module._forward_hooks, module._forward_pre_hooks, module._forward_hooks_always_called)],
            [(key, id(item)) for key, item in (*module._parameters.items(), *module._buffers.items())],
        )
        for name, module in model.named_modules()
    ]


def step(model: nn.Module, seed: int = 5, batch: int = 32) -> dict[str, torch.Tensor]:
    """Gradients and buffers after one forward and backward."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.zero_grad()
        model(torch.randn(batch, 8)).square().sum().backward()
    gradients = {name: item.grad.clone() for name, item in model.named_parameters() if item.grad is not None}
    return gradients | {name: item.clone() for name, item in model.named_buffers()}


# --- recompute


def test_recompute_changes_nothing_but_the_number_of_forwards(network: Network) -> None:
    """Gradients and batch-norm statistics, cumulative ones too, are the same to the bit, with dropout, over several steps."""
    plain = copy.deepcopy(network)
    before = trace(network)
    undo = apply_recompute(network, ["blocks.0", "blocks.3.norm", "head", "blocks.5"])
    for number in range(3):
        expected = step(plain, number)
        assert {name: torch.equal(item, expected[name]) for name, item in step(network, number).items()} == dict.fromkeys(expected, True)
    assert [block.forwards for block in network.blocks] == [6, 3, 3, 3, 3, 6]
    undo()
    undo()
    assert trace(network) == before


def test_activations_fall_by_what_the_blocks_keep() -> None:
    """A block Linear Tanh Linear Tanh keeps two tanh outputs; recomputed, its input, which is the block's before."""
    batch, width, hidden, blocks = 8, 32, 48, 5
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, width), nn.Tanh()) for _ in range(blocks)))

    def activation_bytes() -> int:
        with SavedForBackward(model) as saved:
            loss = model(torch.ones(batch, width)).sum()
        del loss
        return saved.by_name.total()

    whole = (blocks + 1) * batch * width * 4 + blocks * batch * hidden * 4
    assert activation_bytes() == whole
    undo = apply_recompute(model, [str(number) for number in range(blocks)])
    assert activation_bytes() == whole - blocks * batch * hidden * 4 - batch * width * 4
    undo()
    assert activation_bytes() == whole


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], r"names no submodule.*\n.*for example stem, blocks\.0, blocks\.1"),
        (["blocks.11"], r"not a submodule of this model \(got 'blocks.11'\)\n.*Did you mean 'blocks.1'"),
        (["blocks.1", "blocks.1.norm"], r"lies within 'blocks.1'.*\(got 'blocks.1.norm'\)"),
    ],
)
def test_checkpoints_that_cannot_be_are_refused(network: Network, names: list[str], message: str) -> None:
    """An error names the checkpoint, the nearest name or some candidates, and leaves the model alone."""
    before = trace(network)
    with pytest.raises(ConfigError, match=message):
        apply_recompute(network, names)
    assert trace(network) == before


def test_a_copy_of_the_model_is_plain(network: Network) -> None:
    """A deep copy does not run the original's modules: it computes with its own parameters, and nothing is recomputed."""
    apply_recompute(network, ["blocks.0"])
    other = copy.deepcopy(network)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert not step(other)["blocks.0.norm.bias"].any()
    assert (other.blocks[0].forwards, network.blocks[0].forwards) == (1, 0)


# --- compiled blocks


class Graphs:
    """A compiler that compiles nothing; knows its graphs and how often they ran."""

    def __init__(self) -> None:
        self.made = 0
        self.runs = 0

    def __call__(self, graph: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        """Make a graph runnable."""
        self.made += 1

        def run(*args: Any) -> Any:
            self.runs += 1
            return graph.forward(*args)

        return run


ALL_BLOCKS = BuildStrategy(fuse_elewise_add_act_ops=True)
NORM_BLOCKS = BuildStrategy(fuse_bn_act_ops=True)


class Uncounted(Block):
    """A block that is one graph: it does not count, and its norm reads no number on the host."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As ``Block``."""
        return x + self.drop(torch.relu(self.norm(self.inner(x))))


@pytest.fixture
def traceable(network: Network) -> Network:
    """The network with blocks that are one graph each."""
    for block in network.blocks:
        block.__class__ = Uncounted
        block.norm.momentum = 0.1
    return network


@DYNAMO
@pytest.mark.parametrize("build", [ALL_BLOCKS, NORM_BLOCKS])
def test_blocks_run_compiled_until_that_is_undone(traceable: Network, build: BuildStrategy) -> None:
    """The graphs run once for each block, equal blocks share one graph, results stay, and nothing is left."""
    plain, graphs, before = copy.deepcopy(traceable), Graphs(), trace(traceable)
    undo = apply_compiled(traceable, build, backend=graphs)
    expected = step(plain)
    assert {name: torch.equal(item, expected[name]) for name, item in step(traceable).items()} == dict.fromkeys(expected, True)
    sequences = 1 if build == ALL_BLOCKS else 0  # the head
    assert (graphs.made, graphs.runs) == (1 + sequences, 6 + sequences)
    undo()
    undo()
    step(traceable)
    assert graphs.runs == 6 + sequences
    assert trace(traceable) == before


@pytest.mark.slow
@DYNAMO
def test_hooks_fire_between_the_blocks(traceable: Network) -> None:
    """After each block's backward come its own gradients; after a whole model's come all of them at once."""
    log: list[str] = []

    def logged(graph: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            log.append("backward")
            return graph.forward(*args)

        return make_boxed_func(run)

    backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=logged)
    for name, parameter in traceable.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: log.append(name.rpartition(".")[0].removesuffix(".norm")))
    undo = apply_compiled(traceable, ALL_BLOCKS, backend=backend)
    step(traceable)
    inner = [["backward", *sorted([f"blocks.{number}"] * 2 + [f"blocks.{number}.inner"] * 2)] for number in range(5, -1, -1)]
    assert _by_block(log) == [
        [],
        ["backward", *sorted(["head.0", "head.2", "head.4"] * 2)],
        *inner[:5],
        [*inner[5], *["stem"] * 2],
    ]
    undo()
    log.clear()
    step(torch.compile(traceable, backend=backend))
    assert (log[0], log.count("backward"), len(log)) == ("backward", 1, 1 + len(list(traceable.parameters())))


def _by_block(log: list[str]) -> list[list[str]]:
    """The log cut in front of every compiled backward, the hooks of each part sorted."""
    parts: list[list[str]] = [[]]
    for name in log:
        if name == "backward":
            parts.append([])
        parts[-1].append(name)
    return [part[:1] * (part[:1] == ["backward"]) + sorted(part[part[:1] == ["backward"] :]) for part in parts]


@pytest.mark.parametrize(
    ("build", "where"),
    [
        (BuildStrategy(fuse_relu_depthwise_conv=True), "build_strategy.fuse_relu_depthwise_conv"),
        (NORM_BLOCKS, "build_strategy.fuse_bn_act_ops"),
    ],
)
def test_fusion_without_an_equivalent_is_refused_by_name(build: BuildStrategy, where: str) -> None:
    """The error names the field: torch lacks it, or the model has nothing for it."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    before = trace(model)
    with pytest.raises(ConfigError) as caught:
        apply_compiled(model, build)
    assert caught.value.where == where
    assert caught.value.hint
    assert trace(model) == before


@pytest.mark.slow
@DYNAMO
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # inductor's imports
def test_inductor_compiles_blocks_for_real(traceable: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default compiler's kernels agree with eager within float32, with recompute too."""
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "")  # inductor sets it for good
    for block in traceable.blocks:
        block.drop.p = 0.0  # inductor draws other numbers
    plain = copy.deepcopy(traceable)
    with torch._inductor.config.patch(compile_threads=1):
        apply_compiled(traceable, ALL_BLOCKS, alone=["blocks.1"])
        apply_recompute(traceable, ["blocks.1"])
        found, expected = step(traceable), step(plain)
    for name, item in found.items():
        torch.testing.assert_close(item, expected[name], rtol=1e-4, atol=1e-5, msg=name)


# --- all of it together


STRATEGIES: dict[str, dict[str, Any]] = {
    "amp and recompute": {"amp": True, "recompute": True, "recompute_configs": {"checkpoints": ["blocks.0", "head"]}},
    "compiled and recompute": {
        "build_strategy": {"fuse_elewise_add_act_ops": True},
        "recompute": True,
        "recompute_configs": {"checkpoints": ["blocks.0", "blocks.3", "blocks.4.norm", "head"]},
    },
    "compiled, recompute in a sequence, and amp": {
        "build_strategy": {"fuse_bn_act_ops": True, "fuse_elewise_add_act_ops": True},
        "recompute": True,
        "recompute_configs": {"checkpoints": ["blocks.1", "head.2"]},
        "amp": True,
        "amp_configs": {"dtype": "bf16"},
    },
}


@pytest.mark.sample(3)
@DYNAMO
@pytest.mark.parametrize("name", STRATEGIES)
def test_parts_work_with_one_another_and_go_away(traceable: Network, name: str) -> None:
    """Gradients and statistics are those of the eager model in the same precision, and the way back is whole."""
    strategy = DistributedStrategy.from_dict(STRATEGIES[name])
    plain, before = copy.deepcopy(traceable), trace(traceable)
    threads = torch.get_num_threads()
    if strategy.amp:
        apply_mixed_precision(plain, strategy.amp_configs, "cpu", lambda: 128.0)
    undo = apply_compute(traceable, strategy, device=CPU, group=None, scale=lambda: 128.0, backend="aot_eager")
    tolerance = 0.1 if strategy.amp else 1e-5  # a graph rounds to 8 bits in other places than eager
    if "compiled" not in name:
        tolerance = 0.0
    for number in range(2):
        found, expected = step(traceable, number), step(plain, number)
        assert torch.get_num_threads() == 1
        largest = max(item.abs().max() for item in expected.values())
        for key, item in expected.items():
            assert (found[key] - item).abs().max() <= tolerance * largest, key
            assert "tracked" not in key or found[key] == number + 1
    undo()
    undo()
    assert trace(traceable) == before
    assert torch.get_num_threads() == threads
    assert all(torch.isfinite(item).all() for item in step(traceable).values())


def test_the_default_strategy_changes_nothing_but_the_threads(network: Network) -> None:
    """No hook, no forward, no class."""
    before = trace(network)
    undo = apply_compute(network, DistributedStrategy(), device=CPU, group=None, scale=lambda: 1.0)
    assert trace(network) == before
    undo()
