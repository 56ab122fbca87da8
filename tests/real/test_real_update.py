"""The update under control: hidden, in parts, on flat buffers; the truth is the plain optimizer's own step."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.optimizer import register_optimizer_step_pre_hook
from zero_trainer import ZeroTrainer, six_layers, train

from fleetbench.errors import ConfigError
from fleetbench.plan.combination import Combination
from fleetbench.strategy import DistributedStrategy
from real.engine.engine import Engine
from real.engine.optimizers import FusedOptimizer, hide, refuse_whole, reset_state, state_slots, state_tensors, step_some

SHAPES = ((5, 7), (7,), (3, 2, 4), (), (0,), (1,), (13,))
ELEMENTWISE: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("SGD", {"momentum": 0.9, "dampening": 0.1, "maximize": True}),
    ("Adam", {}),
    ("Adam", {"amsgrad": True}),
    ("AdamW", {}),
    ("Adagrad", {"lr_decay": 0.01, "initial_accumulator_value": 0.1}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("Adamax", {}),
    ("NAdam", {}),
    ("RAdam", {}),
]
EVERY = [
    kind
    for kind in map(torch.optim.__dict__.get, torch.optim.__all__)
    if isinstance(kind, type) and kind not in (Optimizer, torch.optim.LBFGS)
]


def _parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, dtype=dtype, generator=generator)) for shape in SHAPES]


def _optimizer(kind: str, parameters: Sequence[nn.Parameter], **options: Any) -> Optimizer:
    """Two groups, as where biases have no weight decay."""
    groups = [{"params": parameters[0::2], "weight_decay": 0.1}, {"params": parameters[1::2], "weight_decay": 0.0}]
    built: Optimizer = getattr(torch.optim, kind)(groups, lr=0.05, **options)
    return built


def _gradients(step: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, dtype=dtype, generator=generator) for shape in SHAPES]


def _give(parameters: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def _snapshot(parameters: Sequence[nn.Parameter], optimizer: Optimizer) -> tuple[list[torch.Tensor], dict[str, Any]]:
    return [parameter.detach().clone() for parameter in parameters], copy.deepcopy(optimizer.state_dict())


def _assert_same(one: Any, other: Any, **tolerance: float) -> None:
    torch.testing.assert_close(one, other, check_dtype=True, **(tolerance or {"rtol": 0, "atol": 0}))


def _fused(optimizer: Optimizer) -> Callable[[], None]:
    """A fused step of ``optimizer``."""
    fused = FusedOptimizer(optimizer)

    def step() -> None:
        fused.begin()
        optimizer.step()
        fused.end()

    return step


class _Fused:
    """A fused optimizer, given gradients, which it does not change."""

    def __init__(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        self._step = _fused(optimizer)
        self._parameters = parameters

    def step(self, gradients: Sequence[torch.Tensor | None]) -> None:
        _give(self._parameters, [None if gradient is None else gradient.clone() for gradient in gradients])
        self._step()
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            assert gradient is None or torch.equal(parameter.grad, gradient), "the update changed a gradient"


def _plain(parameters: Sequence[nn.Parameter], optimizer: Optimizer) -> Callable[[Sequence[torch.Tensor | None]], None]:
    def step(gradients: Sequence[torch.Tensor | None]) -> None:
        _give(parameters, gradients)
        optimizer.step()

    return step


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("foreign", [False, True], ids=["torch's own", "a subclass of the user's"])
def test_a_hidden_step_changes_nothing(kind: type[Optimizer], steps_before: int, *, foreign: bool) -> None:
    """Neither parameters nor state of any optimizer move, before a first step or after it; given back, gradients move them."""
    kind = type(kind.__name__, (kind,), {"__module__": "theirs"}) if foreign else kind
    parameters = [nn.Parameter(torch.ones(2, 3)) for _ in range(3)]
    options = {"momentum": 0.9} if issubclass(kind, torch.optim.SGD | torch.optim.RMSprop) else {}
    optimizer = kind(parameters, lr=0.05, **options)  # type: ignore[call-arg]
    gradients = [torch.full((2, 3), 0.5), torch.full((2, 3), -2.0)]
    if issubclass(kind, torch.optim.SparseAdam):
        gradients = [gradient.to_sparse(1) for gradient in gradients]
    _give(parameters, [*gradients, None])
    for _ in range(steps_before):
        optimizer.step()
    before = _snapshot(parameters, optimizer)
    restore = hide(parameters)
    optimizer.step()
    restore()
    _assert_same(_snapshot(parameters, optimizer), before)
    assert parameters[0].grad is gradients[0]
    assert parameters[1].grad is gradients[1]
    assert parameters[2].grad is None
    optimizer.step()
    assert not torch.equal(parameters[0], before[0][0])
    assert torch.equal(parameters[2], before[0][2])


@pytest.mark.sample(3)
@pytest.mark.parametrize(("kind", "options"), ELEMENTWISE)
def test_a_step_in_parts_is_the_whole_step(kind: str, options: dict[str, Any]) -> None:
    """Stepped in three parts, by a schedule, with a state loaded and a group added on the way: the same bits, the same state."""
    runs = []
    for in_parts in (False, True):
        parameters, late = _parameters(), nn.Parameter(torch.ones(3))
        optimizer = _optimizer(kind, parameters, **options)
        scheduler = ExponentialLR(optimizer, 0.8)
        parts = [[*part, late] for part in (parameters[5:], parameters[2:5], parameters[:2])]
        for step in range(6):
            _give(parameters, _gradients(step))
            late.grad = torch.full_like(late, step)
            if in_parts:
                restore = hide([*parameters, late])
                optimizer.step()
                restore()
                late.grad = None
                for part in parts[:2]:
                    step_some(optimizer, part)
                late.grad = torch.full_like(late, step)
                step_some(optimizer, parts[2])
            else:
                optimizer.step()
            scheduler.step()
            if step == 2:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            if step == 3:
                optimizer.add_param_group({"params": [late], "lr": 0.01})
        runs.append(_snapshot([*parameters, late], optimizer))
    _assert_same(runs[1], runs[0])
    assert not torch.equal(runs[0][0][-1], torch.ones(3))


def test_a_part_moves_its_own_parameters_only_and_calls_no_hook_of_the_users_step() -> None:
    """Other parameters and their state stay; the optimizer's hooks and those of all optimizers are not called."""
    parameters = _parameters()
    optimizer = _optimizer("Adam", parameters)
    values = [parameter.detach().clone() for parameter in parameters]
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("own"))
    of_all = register_optimizer_step_pre_hook(lambda *_: calls.append("all"))
    _give(parameters, _gradients(0))
    step_some(optimizer, parameters[:2])
    of_all.remove()
    assert calls == []
    assert set(optimizer.state) == set(parameters[:2])
    assert [torch.equal(parameter, value) for parameter, value in zip(parameters, values, strict=True)] == [False] * 2 + [True] * 5


@pytest.mark.sample(5)
@pytest.mark.parametrize(("kind", "options"), ELEMENTWISE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_fused_update_is_the_plain_one(kind: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    """Twenty steps by a schedule, in two groups: parameters and state are the plain optimizer's, to the last bits."""
    plain, flat = _parameters(dtype), _parameters(dtype)
    one, other = _optimizer(kind, plain, **options), _optimizer(kind, flat, **options)
    step_plain, fused = _plain(plain, one), _Fused(other, flat)
    for step in range(20):
        step_plain(_gradients(step, dtype))
        fused.step(_gradients(step, dtype))
        for optimizer in (one, other):
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
    tolerance = {"rtol": 1e-15, "atol": 1e-15} if dtype == torch.float64 else {"rtol": 5e-7, "atol": 5e-7}
    _assert_same([parameter.detach() for parameter in flat], [parameter.detach() for parameter in plain], **tolerance)
    _assert_same(other.state_dict(), one.state_dict(), **tolerance)


@pytest.mark.sample(4)
@pytest.mark.parametrize(("kind", "options"), ELEMENTWISE)
def test_the_update_is_one_kernel_where_torch_has_it(kind: str, options: dict[str, Any]) -> None:
    """Else it takes lists; so does a group of which some parameters have begun and others have not."""
    kernels: list[tuple[bool, bool]] = []

    plain, listed = _parameters(), _parameters()
    one, other = _optimizer(kind, plain, **options), _optimizer(kind, listed, **options)
    step_plain, fused = _plain(plain, one), _fused(other)
    other.register_step_pre_hook(
        lambda *_: kernels.extend((bool(group.get("fused")), bool(group.get("foreach"))) for group in other.param_groups)
    )
    for number in range(6):
        gradients: list[torch.Tensor | None] = [*_gradients(number)]
        gradients[2] = None if number == 0 else gradients[2]
        step_plain(gradients)
        _give(listed, gradients)
        fused()
    _assert_same([p.detach() for p in listed], [p.detach() for p in plain], rtol=5e-7, atol=5e-7)
    _assert_same(other.state_dict(), one.state_dict(), rtol=5e-7, atol=5e-7)
    assert any(fused for fused, _ in kernels) == (kind in ("SGD", "Adam", "AdamW", "Adagrad"))
    assert all(fused != foreach for fused, foreach in kernels)
    assert not any(group.get("fused") or group["foreach"] for group in other.param_groups)


def test_rows_are_never_given_to_the_kernel() -> None:
    """A group with a sparse gradient is stepped the plain way, which knows rows."""
    results = []
    for fused in (False, True):
        parameters = [nn.Parameter(torch.ones(4, 2)), nn.Parameter(torch.ones(3))]
        optimizer = torch.optim.SGD(parameters, lr=0.5)
        _give(parameters, [torch.sparse_coo_tensor([[1, 3]], torch.full((2, 2), 3.0), (4, 2), check_invariants=True), torch.ones(3)])
        _fused(optimizer)() if fused else optimizer.step()
        results.append([parameter.detach() for parameter in parameters])
    _assert_same(results[1], results[0])
    assert results[1][0].tolist() == [[1, 1], [-0.5, -0.5], [1, 1], [-0.5, -0.5]]


@pytest.mark.sample(4)
@pytest.mark.parametrize(("kind", "options"), ELEMENTWISE)
def test_without_torchs_kernel_the_fused_update_has_the_same_bits(kind: str, options: dict[str, Any]) -> None:
    """The user's choice of implementation is kept: ``foreach=False`` gives the plain update's bits."""
    plain, flat = _parameters(), _parameters()
    one, other = _optimizer(kind, plain, foreach=False, **options), _optimizer(kind, flat, foreach=False, **options)
    step_plain, fused = _plain(plain, one), _Fused(other, flat)
    for step in range(5):
        step_plain(_gradients(step))
        fused.step(_gradients(step))
    _assert_same(_snapshot(flat, other), _snapshot(plain, one))


@pytest.mark.sample(5)
@pytest.mark.parametrize(("kind", "options"), ELEMENTWISE)
@pytest.mark.parametrize(("foreach", "tolerance"), [(False, {}), (None, {"rtol": 5e-7, "atol": 5e-7})])
def test_a_checkpoint_goes_from_plain_to_fused_to_plain(
    kind: str, options: dict[str, Any], foreach: bool | None, tolerance: dict[str, float]
) -> None:
    """Three plain steps, three fused ones from their file, three plain ones from that file: the same as nine plain steps.

    A file made while fused would count a plain Adam's step up once a parameter if the parameters shared it.
    """

    def through_a_file(source: Optimizer, target: Optimizer) -> None:
        file = io.BytesIO()
        torch.save(source.state_dict(), file)
        file.seek(0)
        target.load_state_dict(torch.load(file, weights_only=True))

    options = {**options, "foreach": foreach}
    nine, parameters = _parameters(), _parameters()
    whole, first, second, third = (_optimizer(kind, held, **options) for held in (nine, parameters, parameters, parameters))
    for step in range(9):
        _plain(nine, whole)(_gradients(step))
        if step == 2:
            through_a_file(whole, whole)  # a file casts NAdam's product to the parameters' type: so here too
        if step == 5:
            through_a_file(whole, whole)
    for step in range(3):
        _plain(parameters, first)(_gradients(step))
    fused = _Fused(second, parameters)
    through_a_file(first, second)
    for step in range(3, 6):
        fused.step(_gradients(step))
    through_a_file(second, third)
    for step in range(6, 9):
        _plain(parameters, third)(_gradients(step))
    _assert_same(_snapshot(parameters, third), _snapshot(nine, whole), **tolerance)


@pytest.mark.parametrize(("kind", "options"), [("SGD", {"momentum": 0.9}), ("Adam", {}), ("Adagrad", {})])
@pytest.mark.parametrize(("foreach", "tolerance"), [(False, {}), (None, {"rtol": 5e-7, "atol": 5e-7})])
def test_a_state_loaded_between_steps_is_taken(
    kind: str, options: dict[str, Any], foreach: bool | None, tolerance: dict[str, float]
) -> None:
    """Back to the state of step 2 after step 5: plain and fused steps go on alike."""
    results = []
    for fuse in (False, True):
        parameters = _parameters()
        optimizer = _optimizer(kind, parameters, foreach=foreach, **options)
        step = _Fused(optimizer, parameters).step if fuse else _plain(parameters, optimizer)
        for number in range(6):
            step(_gradients(number))
            if number == 1:
                kept = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(kept)
        step(_gradients(6))
        optimizer.state.clear()
        step(_gradients(7))
        results.append(_snapshot(parameters, optimizer))
    _assert_same(results[1], results[0], **tolerance)


@pytest.mark.parametrize(("kind", "options"), ELEMENTWISE)
def test_plain_steps_in_between_are_seen(kind: str, options: dict[str, Any]) -> None:
    """Fused steps, one of the optimizer's own, one of some parameters: together what the plain optimizer does with those gradients."""
    plain, flat = _parameters(), _parameters()
    one, other = _optimizer(kind, plain, foreach=False, **options), _optimizer(kind, flat, foreach=False, **options)
    step_plain, fused = _plain(plain, one), _Fused(other, flat)
    for step in range(7):
        gradients: list[torch.Tensor | None] = list(_gradients(step))
        if step == 4:
            gradients[3:] = [None] * 4
        step_plain(gradients)
        if step == 2:
            _plain(flat, other)(gradients)
        elif step == 4:
            _give(flat, gradients)
            step_some(other, flat[:3])
        else:
            fused.step(_gradients(step))
    _assert_same(_snapshot(flat, other), _snapshot(plain, one))


def test_a_loaded_state_that_only_some_parameters_have_is_taken() -> None:
    """Steps without momentum leave no state; a file then brings one parameter's momentum, which the next step uses."""
    parameters = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    fused = _Fused(optimizer, parameters)
    ones = [torch.ones(1), torch.ones(1)]

    def values() -> list[float]:
        return [parameter.item() for parameter in parameters]

    fused.step(ones)
    assert values() == [-1, -1]
    groups = copy.deepcopy(optimizer.state_dict()["param_groups"])
    groups[0]["momentum"] = 0.5
    optimizer.load_state_dict({"state": {1: {"momentum_buffer": torch.tensor([4.0])}}, "param_groups": groups})
    fused.step(ones)
    assert values() == [-2, -4]  # momenta 1, as in a first step, and 0.5 * 4 + 1
    fused.step(ones)
    assert values() == [-3.5, -6.5]  # momenta 1.5 and 2.5
    assert optimizer.state[parameters[1]]["momentum_buffer"].tolist() == [2.5]


def test_a_group_that_is_added_later_is_updated_too() -> None:
    """It follows the plain update, as does a parameter that no bucket has."""
    results = []
    for fuse in (False, True):
        parameters, outside, late = _parameters(), nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(3))
        optimizer = torch.optim.Adam([{"params": parameters}, {"params": [outside], "lr": 0.2}], lr=0.05, foreach=False)
        fused = _Fused(optimizer, parameters)
        for number in range(4):
            outside.grad, late.grad = torch.full((4,), number + 1.0), torch.full((3,), number + 2.0)
            if fuse:
                fused.step(_gradients(number))
            else:
                _plain(parameters, optimizer)(_gradients(number))
            if number == 1:
                optimizer.add_param_group({"params": [late], "lr": 0.3})
        results.append(_snapshot([*parameters, outside, late], optimizer))
    _assert_same(results[1], results[0])


def test_autograd_notices_a_fused_update_between_forward_and_backward() -> None:
    """What autograd saved and the fused update changed is an error in the backward, as after a plain step."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    loss = (weight * weight).sum()
    _Fused(optimizer, [weight]).step([torch.ones(3)])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_optimizers_that_cannot_be_taken_apart_are_refused_by_name() -> None:
    """LBFGS has no parts; an optimizer of unknown arithmetic, and a differentiable one, cannot be fused."""

    class Own(torch.optim.SGD):
        """A user's variation."""

    parameters = [nn.Parameter(torch.ones(2, 2))]
    with pytest.raises(ConfigError, match=r"LBFGS[\s\S]*HINT"):
        refuse_whole(torch.optim.LBFGS(parameters), Combination.of(DistributedStrategy(localsgd=True)))
    for optimizer, name in [
        (Own(parameters), "Own"),
        (torch.optim.Muon(parameters), "Muon"),
        (torch.optim.SGD(parameters, differentiable=True), "differentiable"),
    ]:
        with pytest.raises(ConfigError, match=rf"fuse_all_optimizer_ops[\s\S]*{name}[\s\S]*HINT"):
            FusedOptimizer(optimizer)


@pytest.mark.parametrize(
    ("kind", "options", "slots"),
    [
        ("SGD", {}, ()),
        ("SGD", {"momentum": 0.9}, ("momentum_buffer",)),
        ("Adam", {}, ("exp_avg", "exp_avg_sq")),
        ("Adam", {"amsgrad": True}, ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")),
        ("Adagrad", {}, ("sum",)),
        ("RMSprop", {"momentum": 0.9, "centered": True}, ("grad_avg", "momentum_buffer", "square_avg")),
        ("Adamax", {}, ("exp_avg", "exp_inf")),
        ("NAdam", {}, ("exp_avg", "exp_avg_sq")),
    ],
)
def test_slots_are_the_states_of_the_parameters_shape(kind: str, options: dict[str, Any], slots: tuple[str, ...]) -> None:
    """They are found before any step, and asking changes neither the parameters nor the optimizer."""
    parameters = _parameters()
    optimizer = _optimizer(kind, parameters, **options)
    before = _snapshot(parameters, optimizer)
    assert state_slots(optimizer) == slots
    _assert_same(_snapshot(parameters, optimizer), before)


class Nested(torch.optim.Optimizer):
    """Keeps what ``make`` makes of a gradient, from its second step on."""

    def __init__(self, parameters: list[nn.Parameter], make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.make = make

    def step(self, closure: object = None) -> None:  # type: ignore[override]  # noqa: ARG002  # as torch's own have it
        """Keep it."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if state:
                    state["kept"] = self.make(parameter.grad)
                state["step"] = state.get("step", 0) + 1


def _averaging(model: nn.Module, others: ZeroTrainer, **configs: Any) -> Engine:
    strategy = DistributedStrategy.from_dict({"localsgd": True, "localsgd_configs": configs})
    return Engine(model, strategy, others)  # type: ignore[arg-type]  # the fake has the methods that the engine calls


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "make",
    [
        lambda gradient: [gradient, gradient],
        lambda gradient: {"low": gradient.clone()},
        lambda gradient: gradient.sum(dim=0, keepdim=True),
        lambda gradient: gradient.to(torch.uint8),
        lambda gradient: gradient.double(),
        torch.clone,
    ],
    ids=["list", "dict", "shape", "bits", "type", "late"],
)
def test_state_that_nobody_averages_is_named(others: ZeroTrainer, make: Callable[..., Any]) -> None:
    """With ``optimizer_state = "average"`` it is an error at the first averaging; with momentum alone it stays."""
    for averaged in ("optimizer_state", "momentum"):
        model = six_layers()
        engine = _averaging(model, others, k_steps=2, **{averaged: "average"})
        optimizer = Nested(list(model.parameters()), make)
        engine.attach_optimizer(optimizer)
        refused = averaged == "optimizer_state"
        with pytest.raises(ConfigError, match=r"Nested.*kept: ") if refused else nullcontext():
            train(engine, optimizer, 4)
        engine.close()


def test_factored_state_is_refused_at_once(others: ZeroTrainer) -> None:
    """Adafactor keeps sums over rows and columns, which no bucket of parameters can carry."""
    model = six_layers()
    engine = _averaging(model, others, optimizer_state="average")
    with pytest.raises(ConfigError, match=r"Adafactor: keeps state.*row_var"):
        engine.attach_optimizer(torch.optim.Adafactor(model.parameters()))
    engine.close()


@pytest.mark.parametrize(("kind", "options"), [pair for pair in ELEMENTWISE if not pair[1].get("dampening")])
def test_state_made_before_the_first_step_is_what_the_optimizer_begins_with(kind: str, options: dict[str, Any]) -> None:
    """Steps after ``state_tensors`` made the state give the same bits as steps of an optimizer that made its own."""
    results = []
    for made in (False, True):
        parameters = _parameters()
        optimizer = _optimizer(kind, parameters, **options)
        if made:
            slots = state_slots(optimizer)
            for parameter in parameters:
                tensors = state_tensors(optimizer, parameter, slots)
                assert [tensor.shape for tensor in tensors] == [parameter.shape] * len(slots)
                assert all(tensor is optimizer.state[parameter][slot] for tensor, slot in zip(tensors, slots, strict=True))
        for step in range(3):
            _plain(parameters, optimizer)(_gradients(step))
        results.append(_snapshot(parameters, optimizer))
    _assert_same(results[1], results[0])


def test_state_is_averaged_in_place_and_reset_to_zero() -> None:
    """What is written into the tensors, fused or not, is what the next step reads; after a reset momentum is zero again."""
    for fuse in (False, True):
        weight = nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.5)
        weight.grad = torch.ones(2)
        step: Callable[[], Any] = optimizer.step
        if fuse:
            step = _fused(optimizer)
        step()
        assert weight.tolist() == [-1, -1]
        (momentum,) = state_tensors(optimizer, weight, state_slots(optimizer))
        momentum.fill_(4)
        step()
        assert weight.tolist() == [-4, -4]  # the momentum is 0.5 * 4 + 1
        reset_state(optimizer, ("momentum_buffer",))
        step()
        assert weight.tolist() == [-5, -5]
