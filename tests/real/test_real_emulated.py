"""Emulated compute on a clock of its own: when gradients come, what they hold, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from sim_cases import with_profile

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.plan.layers import Gradient, Layer, LayerTable
from fleetbench.profile import Profile, compute_key, table_for
from fleetbench.quantities import Bytes, Nanoseconds
from fleetbench.stragglers import ONE
from fleetbench.strategy import DistributedStrategy
from fleetbench.support import changed_fields
from real.emulated.model import EmulatedModel, EmulatedOptimizer, gradient_value
from real.emulated.pace import Pace, lateness_of, sharpen_sleep
from real.engine.optimizers import state_slots
from real.job.session import Session
from real.profile import measuring
from real.supported import executed_part, not_emulated, refuse_unsupported

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


def test_the_forward_ends_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer at the sum of the forwards up to it."""
    host = Host()
    model = EmulatedModel(INTERLEAVED, pace=host.pace())
    reach, ended = model.pace.reach, []

    def reached(mark_ns: int, **_: bool) -> None:
        reach(mark_ns)
        ended.append(host.now_ns)

    monkeypatch.setattr(model.pace, "reach", reached)
    begin = host.now_ns
    model()
    assert [at - begin for at in ended] == [1 * MS + OVERSHOOT, 3 * MS + OVERSHOOT, 6 * MS + OVERSHOOT, 7 * MS + OVERSHOOT]


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


def test_a_block_lies_in_one_place_of_the_model() -> None:
    """Its forward is one call."""
    layers = [layer(name, {f"{name}.weight": (3, 0)}, 0, 0) for name in ("a.0", "b", "a.1")]
    with pytest.raises(ConfigError, match="block a: has layers in 2 places of the model"):
        EmulatedModel(table_of(layers), blocks={"a": ["a.0.weight", "a.1.weight"], "b": ["b.weight"]})


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


def test_with_nothing_beside_it_compute_is_held_up_by_hooks() -> None:
    """Where collectives block the only stream, 10 hooks of 1.5 ms make the step 15 ms longer, and lateness still does not add up."""
    host = Host()
    model = EmulatedModel(equal_layers(10, 1 * MS, 2 * MS), pace=host.pace(holds_up=True))
    seen = arrivals(model, host, lambda _: host.pass_time(1_500_000))
    begin = host.now_ns
    model().backward()
    assert seen[-1][1] - begin == 30 * MS + 9 * 1_500_000 + OVERSHOOT
    assert host.now_ns - begin == 30 * MS + 10 * 1_500_000 + OVERSHOOT


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


@pytest.mark.parametrize(("waited_ns", "counts"), [(7 * MS, True), (OVERSHOOT, True), (50_000, False)])
def test_waits_for_other_trainers_are_not_hidden(waited_ns: int, *, counts: bool) -> None:
    """A step ends 12 ms after the wait's end, whatever the host does meanwhile; a wait for what was there already is work of the host's."""
    host = Host()
    pace = host.pace(lead_ns=4 * MS)
    pace.begin()
    pace.finish(12 * MS)
    before = host.now_ns
    host.pass_time(waited_ns)
    pace.stalled(before, host.now_ns)
    free = host.now_ns if counts else before - OVERSHOOT
    host.pass_time(2 * MS)
    pace.begin()
    pace.finish(12 * MS)
    assert host.now_ns == free + 12 * MS + OVERSHOOT


def test_what_takes_the_devices_time_between_steps_is_not_hidden() -> None:
    """An update of 3 ms, which the host starts 1 ms late: the next step begins 4 ms after the first, as the update does not overlap it."""
    host = Host()
    pace = host.pace(lead_ns=10 * MS)
    pace.begin()
    pace.finish(12 * MS)
    host.pass_time(1 * MS)
    pace.busy_until(pace.deadline(3 * MS))
    updated = host.now_ns - OVERSHOOT
    host.pass_time(2 * MS)
    pace.begin()
    pace.finish(12 * MS)
    assert host.now_ns == updated + 12 * MS + OVERSHOOT


def test_lateness_is_counted_by_layer_and_by_step() -> None:
    """Two counted steps of 4 forwards, 4 gradients and an end each, 0.2 ms late but for the end that the last gradient is; no warm-up."""
    host = Host()
    model = EmulatedModel(equal_layers(4, 1 * MS, 2 * MS), pace=host.pace())
    for step in (0, 1, 2):
        model.pace.begin(counted=step >= 1)
        model().backward()
    assert model.pace.layers == {200: 18}
    assert model.pace.steps == {200: 2}


def test_percentiles_are_those_of_all_ranks_together() -> None:
    """100 deadlines of two ranks, of which 50 are met at once, 45 late by 10 us and 5 by 3 ms: p50 0, p95 10 us, max 3 ms."""
    ranks: list[list[tuple[int, int]]] = [[(0, 50), (10, 20)], [(10, 25), (3000, 5)]]
    found = lateness_of([{"layer": part, "step": []} for part in ranks])
    assert found == {"layer_p50": 0.0, "layer_p95": pytest.approx(10e-6), "layer_max": pytest.approx(3e-3)}


def test_parameters_and_buffers_are_the_tables() -> None:
    """Names, sizes and types are the table's, in registration order; buffers are as large as the table's."""
    wide = dataclasses.replace(INTERLEAVED.layers[2].gradients[0], dtype="bfloat16")
    layers = (*INTERLEAVED.layers[:2], dataclasses.replace(INTERLEAVED.layers[2], gradients=(wide,)), INTERLEAVED.layers[3])
    model = EmulatedModel(dataclasses.replace(INTERLEAVED, layers=layers))
    found = {name: (parameter.numel(), parameter.dtype) for name, parameter in model.named_parameters()}
    assert found == {"stem.1.weight": (6, torch.float32), "b.weight": (3, torch.bfloat16), "top": (4, torch.float32)}
    assert sum(buffer.nbytes for buffer in model.buffers()) == 24


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


def test_a_gradient_that_was_written_to_comes_as_new() -> None:
    """DDP writes averages into ``.grad`` in place; the next step's gradient is the rank's own again."""
    model = EmulatedModel(equal_layers(2, 0, 0))
    for _ in range(3):
        model().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            assert parameter.grad.unique().numel() == 1
            assert parameter.grad[0] in (1.0, 2.0)
            parameter.grad.mul_(0.25)
        model.zero_grad()


@pytest.mark.parametrize(
    ("table", "match"),
    [
        (table_of([layer("a", {}, 1, 1)]), "no gradient"),
        (table_of([layer("a", {"a.w": (1, 1), "a.v": (0, 1)}, 1, 1), layer("b", {"a.w": (1, 1)}, 1, 1)]), "two gradients"),
        (table_of([layer("forward", {"forward.w": (1, 1)}, 1, 1)]), "another name"),
        (table_of([layer("a", {"a.w": (1, 1)}, 1, 1), layer("a.w", {"a.w.v": (1, 1)}, 1, 1)]), "another name"),
        (table_of([layer("a", {"a.": (1, 1)}, 1, 1)]), "another name"),
        (
            table_of(
                [Layer(name="e", gradients=(Gradient(name="e.w", numel=4, sparse=True, ready=Nanoseconds(1)),), forward=1, backward=1)]
            ),
            "sparse",
        ),  # type: ignore[arg-type]  # integers are decoded
    ],
)
def test_tables_that_no_model_can_be_are_refused(table: LayerTable, match: str) -> None:
    """Each with the reason and a hint."""
    with pytest.raises(ConfigError, match=match) as error:
        EmulatedModel(table)
    assert error.value.hint


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


def test_an_update_of_some_takes_their_share_and_of_none_nothing() -> None:
    """A step in which one of three equal parameters has a gradient takes a third; one without gradients takes no time."""
    host = Host()
    model = EmulatedModel(equal_layers(3, 0, 0))
    optimizer = _optimizer(model, host)
    begin = host.now_ns
    optimizer.step()
    assert host.now_ns == begin
    model.get_parameter("block1.weight").grad = torch.ones(10)
    optimizer.step()
    assert host.now_ns - begin == 3_333_333 + OVERSHOOT


@pytest.mark.parametrize("slots", [(), ("sum",), ("exp_avg", "exp_avg_sq")])
def test_the_engine_finds_the_state_that_trainers_average(slots: tuple[str, ...]) -> None:
    """As many tensors a parameter as the real optimizer keeps."""
    model = EmulatedModel(equal_layers(3, 0, 0))
    assert state_slots(_optimizer(model, Host(), slots=slots)) == slots


LAYERS = [{"name": "block", "params": 100, "forward": "1 ms", "backward": "2 ms", "repeat": 3}]
CURVE = {"start": 2.0, "floor": 0.1, "half_life": "10 steps"}


def emulated(**parts: dict[str, Any]) -> Experiment:
    """An experiment on an emulated device, of declared layers unless said otherwise."""
    return Experiment.from_dict(
        {
            "workload": {"model": "layers", "layers": LAYERS} | parts.pop("workload", {}),
            "run": {"device": "emulated"} | parts.pop("run", {}),
            **parts,
        }
    )


def test_a_table_of_layers_needs_the_emulated_device() -> None:
    """On a CPU it is refused, with the device that executes it as the hint."""
    with pytest.raises(ConfigError, match=r'HINT: set run\.device = "emulated"'):
        refuse_unsupported(emulated(run={"device": "cpu"}), DistributedStrategy())
    refuse_unsupported(emulated(), DistributedStrategy())


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


@pytest.mark.parametrize(
    "parts",
    [
        {"workload": {"loss_curve": CURVE, "target_loss": 0.3}, "strategy": {"adaptive_localsgd": True}},
        {"strategy": {"adaptive_localsgd": True, "adaptive_localsgd_configs": {"variant": "qsr"}}},
        {"strategy": {"amp": True, "amp_configs": {"dtype": "bf16"}, "recompute": True, "sync_batch_norm": True}},
    ],
)
def test_what_is_declared_or_in_the_table_is_executed(parts: dict[str, Any]) -> None:
    """A declared curve, adaptive steps that follow the learning rate, and what changes compute alone."""
    Session(emulated(**parts))


def test_what_changes_compute_alone_is_left_to_the_table() -> None:
    """Nothing of it reaches the engine, a declared table does not know it, and what is communication stays."""
    strategy = DistributedStrategy.from_dict(
        {
            "thread_num": 2,
            "recompute": True,
            "build_strategy": {"fuse_all_optimizer_ops": True, "enable_sequential_execution": True},
            "nccl_comm_num": 2,
            "bf16_allreduce": True,
        }
    )
    left = dict(changed_fields(executed_part(strategy), "strategy"))
    assert left == {
        "strategy.build_strategy.enable_sequential_execution": True,
        "strategy.nccl_comm_num": 2,
        "strategy.bf16_allreduce": True,
    }
    skipped = [entry["what"] for entry in not_emulated(emulated(), strategy)]
    assert sorted(skipped) == ["strategy.build_strategy.fuse_all_optimizer_ops", "strategy.recompute", "strategy.thread_num"]


def test_every_compute_field_is_left_to_the_table() -> None:
    """Strategies that differ in one field alone: what remains different decides what is communicated, or when."""
    changes: list[dict[str, Any]] = [
        {"sync_batch_norm": True},
        {"cudnn_exhaustive_search": False},
        {"conv_workspace_size_limit": 1},
        {"fraction_of_gpu_memory_to_use": 0.5},
        {"fetch_every_n_steps": 5},
        {"amp": True, "amp_configs": {"dtype": "bf16"}},
        {"build_strategy": {"fuse_elewise_add_act_ops": True, "fuse_bn_act_ops": True, "compile_split": "bucket"}},
        {"build_strategy": {"fuse_relu_depthwise_conv": True}},
    ]
    assert {executed_part(DistributedStrategy.from_dict(change)) for change in changes} == {DistributedStrategy()}
    stays: list[dict[str, Any]] = [
        {"find_unused_parameters": True},
        {"localsgd": True},
        {"build_strategy": {"enable_backward_optimizer_op_deps": False}},
    ]
    for one, other in itertools.combinations(stays, 2):
        assert executed_part(DistributedStrategy.from_dict(one)) != executed_part(DistributedStrategy.from_dict(other))


def test_a_registry_model_is_profiled_on_the_cpu(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The profile is taken with real compute and without what only the emulation reads, and its key is the one that is looked for."""
    asked: list[Experiment] = []

    def take(experiment: Experiment, **_: Any) -> Profile:
        asked.append(experiment)
        refuse_unsupported(experiment, experiment.strategy)
        tables = (dataclasses.replace(INTERLEAVED, key=compute_key(experiment), contention=0.3),)
        return Profile(machine="by hand", created="2026-01-01", tables=tables)

    monkeypatch.setattr(measuring, "take_profile", take)
    experiment = emulated(workload={"model": "digits_mlp", "layers": [], "loss_curve": CURVE, "target_loss": 0.3})
    found = measuring.ensure_profile(experiment, tmp_path)
    assert [one.run.device for one in asked] == ["cpu"]
    assert (found.run.device, found.workload.loss_curve, found.workload.target_loss) == ("emulated", experiment.workload.loss_curve, 0.3)
    assert measuring.ensure_profile(experiment, tmp_path) == found
    assert len(asked) == 1
    Session(found)


def test_a_sharp_sleep_is_taken_back() -> None:
    """The kernel's slack for this thread is what it was, once it is given back."""
    before = sharpen_sleep()
    if before is None:
        pytest.skip("SKIPPED: no Linux")
    assert sharpen_sleep(before) == 1
    assert sharpen_sleep(before) == before


def test_an_emulated_device_sleeps_by_what_either_device_was_measured_to_take() -> None:
    """The CPU's table goes before a CUDA device's; neither holds what communication takes from real compute; others are refused."""
    experiment = Experiment.from_dict({"run": {"device": "emulated"}})
    tables = {
        device: dataclasses.replace(INTERLEAVED, key=compute_key(experiment, device=device), update=Nanoseconds(took), contention=0.3)
        for device, took in (("cpu", 1), ("cuda", 2))
    }

    def found(*devices: str) -> LayerTable:
        return table_for(with_profile(experiment, Profile(machine="m", created="d", tables=tuple(tables[device] for device in devices))))

    assert [found("cuda", "cpu").update, found("cuda").update] == [1, 2]
    assert found("cuda") == dataclasses.replace(tables["cuda"], contention=0.0)
    real = Experiment.from_dict({"run": {"device": "cpu"}})
    assert compute_key(real) == compute_key(experiment)
    both = Profile(machine="m", created="d", tables=tuple(tables.values()))
    assert table_for(with_profile(real, both)).contention == 0.3
    with pytest.raises(ConfigError, match="holds no layer table"):
        table_for(with_profile(Experiment.from_dict({"workload": {"batch_size": 7}, "run": {"device": "emulated"}}), both))
