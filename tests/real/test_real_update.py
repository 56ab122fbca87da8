"""The update under control: hidden, in parts, on flat buffers; the truth is the plain optimizer's own step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fleetbench.errors import ConfigError
from real.engine.optimizers import FusedOptimizer, hide, reset_state, state_slots, state_tensors, step_some

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


def test_autograd_notices_a_fused_update_between_forward_and_backward() -> None:
    """What autograd saved and the fused update changed is an error in the backward, as after a plain step."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    loss = (weight * weight).sum()
    _Fused(optimizer, [weight]).step([torch.ones(3)])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


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
        ("RAdam", {}, ("exp_avg", "exp_avg_sq")),
        ("AdamW", {}, ("exp_avg", "exp_avg_sq")),
    ],
)
def test_slots_are_the_states_of_the_parameters_shape(kind: str, options: dict[str, Any], slots: tuple[str, ...]) -> None:
    """They are known before any step, and are what a step makes."""
    weight = nn.Parameter(torch.ones(2, 3))
    optimizer = getattr(torch.optim, kind)([weight], **options)
    assert state_slots(optimizer) == slots
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    made = optimizer.state[weight].items()
    assert {name for name, value in made if isinstance(value, torch.Tensor) and value.shape == weight.shape} == {*slots}


def test_an_optimizer_whose_state_is_not_known_cannot_be_averaged() -> None:
    """A subclass may keep more than its base, and Adafactor keeps other shapes."""
    for kind in (type("Mine", (torch.optim.SGD,), {}), torch.optim.Adafactor):
        with pytest.raises(ConfigError, match="keeps state that trainers cannot average or reset"):
            state_slots(kind([nn.Parameter(torch.ones(2, 3))], lr=0.1))


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
