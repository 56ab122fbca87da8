"""``lr_scale``: every update is that of an optimizer with so many times the rate, and the user's groups keep theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from alone import Training
from torch import nn
from torch.optim.lr_scheduler import StepLR

from fleetbench.errors import ConfigError
from fleetbench.strategy import DistributedStrategy

STEPS, SCALE, RATE = 7, 3.0, 0.01
CASES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "fused": {"build_strategy": {"fuse_all_optimizer_ops": True}},
    "by bucket": {"fuse_all_reduce_ops": False, "build_strategy": {"enable_backward_optimizer_op_deps": False}},
    "merged": {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}},
    "merged, flushed": {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2, "remainder": "flush"}},
    "local": {"localsgd": True, "localsgd_configs": {"k_steps": 3, "outer_lr": 0.7, "outer_momentum": 0.9}},
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "momentum": lambda groups, lr: torch.optim.SGD(groups, lr=lr, momentum=0.9),
    "adamw": lambda groups, lr: torch.optim.AdamW(groups, lr=lr),
    "tensor rate": lambda groups, lr: torch.optim.Adam(groups, lr=torch.tensor(lr, dtype=torch.float64), foreach=False),
}


def trained(optimizer: str, rate: float, **fields: Any) -> tuple[list[torch.Tensor], list[float]]:
    """Parameters after some steps of two groups, with a schedule; and the rates that the groups have after each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    groups = [{"params": [*model[0].parameters()]}, {"params": [*model[2].parameters()], "weight_decay": 0.1}]
    made, rates = OPTIMIZERS[optimizer](groups, rate), []
    schedule = StepLR(made, 3, 0.5)
    with Training(model, made, **fields) as training:
        for step in range(STEPS):
            training.step(torch.randn(5, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64))
            schedule.step()
            rates += [float(group["lr"]) for group in made.param_groups]
            if step == STEPS // 2 - 1:
                training.engine.end_epoch()  # after an odd number of steps, of which one is left
    return [parameter.detach().clone() for parameter in model.parameters()], rates


@pytest.mark.sample(5)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", CASES)
def test_it_is_an_optimizer_with_so_many_times_the_rate(case: str, optimizer: str) -> None:
    """To rounding; the schedule and the groups know nothing of it."""
    scaled, rates = trained(optimizer, RATE, lr_scale=SCALE, **CASES[case])
    plain, _ = trained(optimizer, RATE * SCALE, **CASES[case])
    own, own_rates = trained(optimizer, RATE, **CASES[case])
    torch.testing.assert_close(scaled, plain, rtol=1e-12, atol=0)
    assert not torch.allclose(scaled[0], own[0])
    assert rates == own_rates


def test_a_step_that_raises_leaves_the_users_rate_and_the_next_steps_theirs() -> None:
    """Out of memory in the third step, which the loop survives: groups have their own rate, and later updates so many times of it."""

    class Raises(torch.optim.SGD):
        fails = False

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                raise torch.OutOfMemoryError("once")
            return super().step(closure)

    ends = []
    for rate, scale in ((RATE, SCALE), (RATE * SCALE, 1.0)):
        torch.manual_seed(0)
        model = nn.Linear(4, 2).double()
        optimizer = Raises(model.parameters(), lr=rate)
        with Training(model, optimizer, lr_scale=scale) as training:
            for step in range(STEPS):
                optimizer.fails = step == 2
                with pytest.raises(torch.OutOfMemoryError) if step == 2 else nullcontext():
                    training.step(torch.full((3, 4), 1.0 + step, dtype=torch.float64))
                if step == 2:
                    optimizer.zero_grad()
                else:
                    assert optimizer.param_groups[0]["lr"] == rate
        ends.append(model.weight.detach().clone())
    torch.testing.assert_close(*ends, rtol=1e-12, atol=0)


def test_a_schedule_within_the_step_is_refused() -> None:
    """A hook of the optimizer's, from before, would have its rate taken back."""
    model = nn.Linear(4, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    schedule = StepLR(optimizer, 1, 0.5)
    optimizer.register_step_post_hook(lambda *_: schedule.step())
    with Training(model, optimizer, lr_scale=SCALE) as training, pytest.raises(ConfigError, match=r"within optimizer\.step"):
        training.step(torch.ones(3, 4, dtype=torch.float64))


class Rateless(torch.optim.Optimizer):
    """Signs of gradients times 0.01, whatever anybody sets."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # without a closure
        """Every parameter's."""
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(0.01 * parameter.grad.sign())


def test_an_optimizer_without_a_rate_is_refused() -> None:
    """It trains where nothing is to be scaled."""
    for scale in (1.0, SCALE):
        model = nn.Linear(4, 2).double()
        refused = pytest.raises(ConfigError, match="has no learning rate to scale") if scale != 1 else nullcontext()
        with refused, Training(model, Rateless(model.parameters()), lr_scale=scale) as training:
            training.step(torch.ones(3, 4, dtype=torch.float64))


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_what_scales_nothing_is_refused(value: float) -> None:
    """A rate of zero or below trains nothing."""
    with pytest.raises(ConfigError, match="lr_scale"):
        DistributedStrategy(lr_scale=value)
