"""Mixed precision: gradients of parameters come out scaled, once, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from fleetbench.errors import ConfigError
from fleetbench.strategy import AmpConfigs
from real.compute.mixed_precision import apply_mixed_precision

FP16, BF16 = AmpConfigs(), AmpConfigs(dtype="bf16")


@dataclass
class Output:
    """Not registered with torch's pytree."""

    logits: torch.Tensor
    name: str = "output"


class Shaped(nn.Module):
    """Returns a hidden tensor and what is computed from it, in a nest of the test's choice."""

    def __init__(self, nest: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second, self.nest = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), nest
        with torch.no_grad():
            self.first.weight.copy_(torch.arange(9.0).view(3, 3))
            self.second.weight.copy_(torch.eye(3))

    def forward(self, x: torch.Tensor) -> Any:
        """From ``(batch, 3)`` to a nest."""
        hidden = self.first(x)
        return self.nest(hidden, self.second(hidden))


NESTS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], tuple[torch.Tensor, torch.Tensor]]]] = {
    "tuple": (lambda h, y: (h, y), lambda o: o),
    "nested": (lambda h, y: {"a": [h, None], "b": (7, {"y": y})}, lambda o: (o["a"][0], o["b"][1]["y"])),
    "dataclass": (lambda h, y: {"a": Output(h), "b": Output(y)}, lambda o: (o["a"].logits, o["b"].logits)),
}


@pytest.mark.parametrize("kind", NESTS)
def test_gradients_of_parameters_come_out_scaled_once(kind: str) -> None:
    """Whole numbers are exact in half precision: the gradient is the scale times its closed form, on every way to the loss."""
    nest, unpack = NESTS[kind]
    model = Shaped(nest)
    undo = apply_mixed_precision(model, FP16, "cpu", lambda: torch.tensor(64.0))
    x = torch.tensor([[1.0, 2.0, 3.0]], requires_grad=True)
    hidden, y = unpack(model(x))
    assert hidden.dtype == y.dtype == torch.float32
    (hidden.sum() + 2 * y.sum()).backward()
    weight = torch.arange(9.0).view(3, 3)
    assert torch.equal(_gradient(model.first.weight), 64.0 * 3 * torch.tensor([[1.0, 2.0, 3.0]] * 3))
    assert torch.equal(_gradient(model.second.weight), 64.0 * 2 * (weight @ torch.tensor([1.0, 2.0, 3.0])).expand(3, 3))
    assert torch.equal(_gradient(x), 3 * weight.sum(0, keepdim=True))  # what leaves through the input is not scaled
    undo()


def test_a_model_that_feeds_itself_is_scaled_once() -> None:
    """The second call's gradient reaches the first through an input, and is not scaled again."""
    model = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
    x = torch.tensor([[1.0, 1.0]])
    model(model(x)).sum().backward()
    plain = _gradient(model.weight).clone()
    model.zero_grad()
    apply_mixed_precision(model, FP16, "cpu", lambda: 1024.0)
    model(model(x)).sum().backward()
    assert torch.equal(_gradient(model.weight), 1024.0 * plain)


def test_the_scale_saves_gradients_that_half_precision_would_lose() -> None:
    """A gradient of 1e-9 at the output is zero in half precision, and comes through with Fleet's first scale."""
    model = nn.Linear(3, 2)
    x = torch.ones(1, 3)
    for scale, lost in ((1.0, True), (32768.0, False)):
        undo = apply_mixed_precision(model, FP16, "cpu", lambda scale=scale: scale)
        model.zero_grad()
        (model(x) * 1e-9).sum().backward()
        expected = torch.zeros(2, 3) if lost else torch.full((2, 3), 1e-9)
        torch.testing.assert_close(_gradient(model.weight) / scale, expected, rtol=1e-3, atol=0)
        undo()


def test_bf16_has_no_scale() -> None:
    """The gradient is the plain one in bf16's resolution, and the output is float32."""
    model = nn.Linear(3, 2)
    apply_mixed_precision(model, BF16, "cpu", lambda: pytest.fail("was asked for the scale"))
    output = model(torch.full((1, 3), 2.0))
    assert output.dtype == torch.float32
    assert torch.equal(output, output.bfloat16().float())
    output.sum().backward()
    assert torch.equal(_gradient(model.weight), torch.full((2, 3), 2.0))


@pytest.mark.parametrize("of_input", [True, False])
def test_a_penalty_on_gradients_has_no_scale_or_is_refused(of_input: bool) -> None:
    """With d(y^2)/dx = 2w^2x of y = wx, bf16 gives the closed form of the penalty's gradient; under a scale parts of it would have none."""
    for configs, number in ((BF16, 1.0), (FP16, 1.0), (FP16, 64.0)):
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, 3.0)
        apply_mixed_precision(model, configs, "cpu", lambda number=number: number)
        x = torch.tensor([[2.0]], requires_grad=True)
        y = model(x)
        of = x if of_input else model.weight
        if number != 1.0:
            with pytest.raises(ConfigError, match="keeps the graph of gradients"):
                torch.autograd.grad(y.square().sum(), of, create_graph=True)
            continue
        (slope,) = torch.autograd.grad(y.square().sum(), of, create_graph=True)
        slope.sum().backward()
        assert _gradient(model.weight).item() == (4 * 3.0 * 2.0 if of_input else 2 * 2.0**2)


def _gradient(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None
    return tensor.grad
