"""Optimizers with the names of the momentum that each keeps, and what becomes of state at an averaging."""

from __future__ import annotations

from typing import Any

import torch
from training_problem import CLASSES, FEATURES

K, STEPS = 4, 14
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], tuple[str, ...]]] = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "lr": 0.05}, ("momentum_buffer",)),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}, ("exp_avg",)),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01}, ()),
    "RMSprop with momentum": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}, ("momentum_buffer",)),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05}, ()),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.05}, ()),
    "Muon": (torch.optim.Muon, {"lr": 0.02}, ("momentum_buffer",)),
}
RULES: dict[str, dict[str, str]] = {
    "local": {},
    "reset": {"momentum": "reset"},
    "average": {"momentum": "average"},
    "all state": {"optimizer_state": "average"},
}


def cases() -> list[tuple[str, str]]:
    """An optimizer and a rule. Adafactor's state has other shapes than its parameters."""
    return [(name, rule) for name in OPTIMIZERS for rule in RULES if (name, rule) != ("Adafactor", "all state")]


def optimizer_of(name: str, network: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer of that name."""
    kind, options, _ = OPTIMIZERS[name]
    return kind(network.parameters(), **options)


def network_of() -> torch.nn.Module:
    """Two matrices, as Muon takes them."""
    torch.manual_seed(5)
    layers = [torch.nn.Linear(FEATURES, 9, bias=False), torch.nn.Tanh(), torch.nn.Linear(9, CLASSES, bias=False)]
    return torch.nn.Sequential(*layers).to(torch.float64)
