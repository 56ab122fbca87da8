"""Emulated compute on a clock of its own: when gradients come, what they hold, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.plan.layers import Gradient, Layer, LayerTable
from fleetbench.quantities import Bytes, Nanoseconds
from fleetbench.stragglers import ONE
from real.emulated.model import EmulatedModel, EmulatedOptimizer, gradient_value
from real.emulated.pace import Pace
from real.job.session import Session

MS = 1_000_000
OVERSHOOT = 200_000


class Host:
    """A host whose clock moves by what is slept, by ``OVERSHOOT`` more a sleep, and by ``pass_time``."""

    def __init__(self) -> None:
        self.now_ns = 7_000_000_000
        self.num_sleeps = 0

    def clock(self) -> int:
        """Nanoseconds."""
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        """Sleep too long, as hosts do."""
        self.num_sleeps += 1
        self.now_ns += round(seconds * 1e9) + OVERSHOOT

    def pass_time(self, took_ns: int) -> None:
        """Something else takes time."""
        self.now_ns += took_ns

    def pace(self, **options: int) -> Pace:
        """A pace on this clock."""
        return Pace(clock=self.clock, sleep=self.sleep, **options)  # type: ignore[arg-type]  # a flag among them


def layer(name: str, gradients: dict[str, tuple[int, int]], forward: int, backward: int) -> Layer:
    """A layer of gradients ``name: (numel, ready)``, times in ns."""
    return Layer(
        name=name,
        gradients=tuple(Gradient(name=key, numel=numel, ready=Nanoseconds(ready)) for key, (numel, ready) in gradients.items()),
        forward=Nanoseconds(forward),
        backward=Nanoseconds(backward),
    )


def table_of(layers: Sequence[Layer], **more: Any) -> LayerTable:
    """A table."""
    return LayerTable(key="by hand", layers=tuple(layers), **more)


def equal_layers(number: int, forward: int, backward: int) -> LayerTable:
    """Layers ``block0.weight`` to ``blockN.weight`` of 10 numbers."""
    return table_of(
        [layer(f"block{index}", {f"block{index}.weight": (10, (number - index) * backward)}, forward, backward) for index in range(number)]
    )


INTERLEAVED = table_of(  # readiness, in order: b.bias, stem.1.weight, b.weight, top; the first layer has none, and computes 4 ms at the end
    [
        layer("input", {}, 1 * MS, 4 * MS),
        layer("stem.1", {"stem.1.weight": (6, 5 * MS)}, 2 * MS, 2 * MS),
        layer("b", {"b.weight": (3, 6 * MS), "b.bias": (2, 2 * MS)}, 3 * MS, 3 * MS),
        layer("", {"top": (4, 9 * MS)}, 1 * MS, 4 * MS),
    ],
    buffers_nbytes=Bytes(24),
)


def arrivals(model: EmulatedModel, host: Host, behind: Callable[[str], None] = lambda _: None) -> list[tuple[str, int]]:
    """Names of the gradients in the order of their hooks, with the clock there; ``after`` is called in each hook."""
    seen: list[tuple[str, int]] = []

    def hook(name: str) -> Callable[[torch.Tensor], None]:
        def called(_: torch.Tensor) -> None:
            seen.append((name, host.now_ns))
            behind(name)

        return called

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(hook(name))
    return seen


def test_a_hundred_layers_are_late_by_one_sleep() -> None:
    """Each of 200 sleeps takes 0.2 ms too long, and 100 layers of 1 + 2 ms still end 0.2 ms late, in every step."""
    host = Host()
    model = EmulatedModel(equal_layers(100, 1 * MS, 2 * MS), pace=host.pace())
    for _ in range(3):
        begin = host.now_ns
        output = model()
        assert host.now_ns - begin == 100 * MS + OVERSHOOT
        output.backward()
        assert host.now_ns - begin == 300 * MS + OVERSHOOT
    assert host.num_sleeps == 3 * 200  # the last gradient is the backward's end


def test_gradients_come_when_the_table_says_and_in_its_order() -> None:
    """(1 + 1/2) of the whole forward and ``ready``, one sleep late; the backward ends with the layer that has no gradient."""
    host = Host()
    model = EmulatedModel(INTERLEAVED, pace=host.pace())
    seen = arrivals(model, host)
    begin = host.now_ns
    model.pace.begin(ONE // 2)
    model().backward()
    expected = [("b.bias", 9.0), ("stem.1.weight", 12.0), ("b.weight", 13.0), ("top", 16.0)]
    assert [(name, at - begin) for name, at in seen] == [(name, round(1.5 * at * MS) + OVERSHOOT) for name, at in expected]
    assert host.now_ns - begin == round(1.5 * 20 * MS) + OVERSHOOT


def test_what_passes_between_two_blocks_holds_compute_up_and_within_one_it_does_not() -> None:
    """Gathers of 5 ms before both forwards and scatters of 7 ms after both backwards; 1 ms in the middle of a block hides in its layers."""
    host = Host()
    gradients = {"a.0.weight": 8, "a.1.weight": 6, "b.weight": 4}
    layers = [layer(name[:-7], {name: (3, ready * MS)}, 1 * MS, {"b": 4}.get(name[0], 2) * MS) for name, ready in gradients.items()]
    blocks = {"a": ["a.0.weight", "a.1.weight"], "b": ["b.weight"]}
    model = EmulatedModel(table_of(layers), pace=host.pace(holds_up=True), blocks=blocks)
    for name in blocks:
        model.get_submodule(name).register_forward_pre_hook(lambda *_: host.sleep(0.005))
    work_ms = {"b.weight": 7, "a.1.weight": 1, "a.0.weight": 7}
    seen = arrivals(model, host, lambda name: host.sleep(1e-3 * work_ms[name]))
    begin = host.now_ns
    output = model()
    slept = 2 * (5 * MS + OVERSHOOT)
    assert host.now_ns - begin == 3 * MS + slept + OVERSHOOT
    output.backward()
    ends = [(name, at - begin - slept) for name, at in seen]
    scatter = 7 * MS + OVERSHOOT
    assert ends == [
        ("b.weight", 7 * MS + OVERSHOOT),
        ("a.1.weight", 9 * MS + scatter + OVERSHOOT),
        ("a.0.weight", 11 * MS + scatter + OVERSHOOT),
    ]
    assert host.now_ns - begin - slept == 11 * MS + 2 * scatter + OVERSHOOT


def test_what_hooks_do_hides_in_compute_and_lateness_is_only_what_does_not_fit() -> None:
    """Hooks of 1.5 ms after layers of 2 ms cost nothing; one of 5 ms makes the next layer late, and the others catch up."""
    host = Host()
    model = EmulatedModel(equal_layers(10, 1 * MS, 2 * MS), pace=host.pace())
    costs = {"block9.weight": 1_500_000, "block8.weight": 5 * MS}
    seen = arrivals(model, host, lambda name: host.pass_time(costs.get(name, 0)))
    begin = host.now_ns
    model().backward()
    late = [at - begin - (10 + 2 * number) * MS for number, (_, at) in enumerate(seen, start=1)]
    behind = 5 * MS + OVERSHOOT
    assert late == [OVERSHOOT, OVERSHOOT, behind - 2 * MS, behind - 4 * MS, *[OVERSHOOT] * 6]


@pytest.mark.parametrize("host_ms", [0, 3, 4, 6])
def test_a_host_that_runs_ahead_hides_its_work_between_steps(host_ms: int) -> None:
    """Steps of 12 ms follow each other every 12 ms; what the host takes in between, late sleep included, counts beyond a lead of 4 ms."""
    host = Host()
    pace = host.pace(lead_ns=4 * MS)
    ends = []
    for _ in range(4):
        pace.begin()
        pace.finish(12 * MS)
        ends.append(host.now_ns)
        host.pass_time(host_ms * MS)
    assert [after - before for before, after in itertools.pairwise(ends)] == [12 * MS + max(0, host_ms * MS + OVERSHOOT - 4 * MS)] * 3


def test_gradients_differ_by_rank_and_parameter_and_are_handed_over_without_a_copy() -> None:
    """Rank r's gradient at place i holds (r + 1) (i mod 7 + 1); ``.grad`` lies in memory that stays the same in every step."""
    model = EmulatedModel(equal_layers(9, 0, 0), rank=2)
    places = []
    for _ in range(2):
        model().backward()
        for position, name in enumerate(f"block{index}.weight" for index in reversed(range(9))):
            gradient = model.get_parameter(name).grad
            assert gradient is not None
            assert gradient.tolist() == [3.0 * (position % 7 + 1)] * 10
            assert gradient_value(2, position) == 3.0 * (position % 7 + 1)
        places.append([parameter.grad.data_ptr() for parameter in model.parameters() if parameter.grad is not None])
        model.zero_grad()
    assert places[0] == places[1]
    assert len(set(places[0])) == 9


def _optimizer(model: EmulatedModel, host: Host, **options: Any) -> EmulatedOptimizer:
    return EmulatedOptimizer(model.parameters(), lr=0.5, update_ns=10 * MS, pace=host.pace(), **options)


def test_an_update_takes_its_time_and_moves_first_elements() -> None:
    """10 ms, late by one sleep; first elements move by lr times the gradient, the others stay; the state counts gradients up."""
    host = Host()
    model = EmulatedModel(equal_layers(3, 0, 0), rank=1)
    optimizer = _optimizer(model, host, slots=("momentum_buffer",))
    for _ in range(2):
        model().backward()
        begin = host.now_ns
        optimizer.step()
        assert host.now_ns - begin == 10 * MS + OVERSHOOT
        optimizer.zero_grad()
    for index, parameter in enumerate(model.parameters()):
        gradient = 2.0 * (3 - index)
        assert parameter.tolist() == [-2 * 0.5 * gradient, *[0.0] * 9]
        assert optimizer.state[parameter]["momentum_buffer"][0] == 2 * gradient


LAYERS = [{"name": "block", "params": 100, "forward": "1 ms", "backward": "2 ms", "repeat": 3}]


def emulated(**parts: dict[str, Any]) -> Experiment:
    """An experiment on an emulated device, of declared layers unless said otherwise."""
    return Experiment.from_dict(
        {
            "workload": {"model": "layers", "layers": LAYERS} | parts.pop("workload", {}),
            "run": {"device": "emulated"} | parts.pop("run", {}),
            **parts,
        }
    )


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        ({"workload": {"model": "digits_mlp", "layers": [], "target_loss": 0.3}}, "target_loss: an emulated device trains nothing"),
        ({"workload": {"model": "mlp", "layers": []}, "strategy": {"adaptive_localsgd": True}}, "an emulated device computes none"),
        (
            {"strategy": {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2, "remainder": "drop"}}},
            "set workload.steps_per_epoch",
        ),
        ({"strategy": {"amp": True}}, "scales losses"),
        ({"workload": {"layers": [{"name": "train", "params": 1, "forward": "1 ms", "backward": "1 ms"}]}}, "another name"),
        ({"workload": {"layers": [{"name": "a", "params": 0, "forward": "1 ms", "backward": "1 ms"}]}}, "params above 0"),
        ({"run": {"backend": "nccl"}}, "CUDA tensors only"),
    ],
)
def test_what_needs_real_numbers_is_refused_before_anything_starts(parts: dict[str, Any], match: str) -> None:
    """Losses that nobody declares, epochs without a length, loss scaling, names that torch takes for its own."""
    with pytest.raises(ConfigError, match=match) as error:
        Session(emulated(**parts))
    assert error.value.hint
