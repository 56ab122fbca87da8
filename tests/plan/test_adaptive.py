from __future__ import annotations

import math
from typing import Any

import pytest

from fleetbench.plan.adaptive_k import AdaptiveK, AdaptiveStepsKept, Rounds
from fleetbench.plan.combination import Combination
from fleetbench.strategy import DistributedStrategy


def adaptive(**configs: Any) -> AdaptiveK:
    """What chooses K under such configs."""
    found = Combination.of(DistributedStrategy().replace(adaptive_localsgd=True, adaptive_localsgd_configs=configs)).adaptive
    assert found is not None
    return found


def begun(rule: AdaptiveK, loss0: float = 2.0, lr0: float = 0.1) -> Rounds:
    """After update 1."""
    return rule.on_loss(rule.on_lr(rule.start(), lr0), loss0, 1)


def k_after(variant: str, loss: float, lr: float, loss0: float = 2.0, lr0: float = 0.1) -> int:
    """K0 = 4, the first synchronisation, and another one."""
    rule = adaptive(variant=variant, init_k_steps=4)
    return rule.on_loss(rule.on_lr(begun(rule, loss0, lr0), lr), loss, 5).k


@pytest.mark.parametrize(("variant", "expected"), [("fleet", [2, 2, 5, 15, 16]), ("paper", [3, 4, 9, 29, 90])])
def test_the_published_tables(variant: str, expected: list[int]) -> None:
    """K0 = 4, the loss halved, the learning rate times 1, 0.5, 0.1, 0.01 and 0.001: Fleet's is clamped at 16, the paper's is not."""
    assert [k_after(variant, 1.0, 0.1 * ratio) for ratio in (1, 0.5, 0.1, 0.01, 0.001)] == expected


@pytest.mark.parametrize(
    ("loss", "lr", "expected"),
    [
        (1.3, 0.1, 2),  # 4 sqrt(0.7 / 1.4) = 2.83
        (0.6, 0.1, 1),  # the root is 0
        (1.3, 0.02, 6),  # 4 sqrt(5 x 0.5) = 6.32
        (1.3, 0.0025, 17),  # 4 sqrt(40 x 0.5) = 17.9
        (1.3, 0.0014, 23),  # 4 sqrt(71.4 x 0.5) = 23.9: 19 more
        (1.3, 0.00132, 24),  # 4 sqrt(75.8 x 0.5) = 24.6: 20 more
        (1.3, 0.0012, 4),  # 4 sqrt(83.3 x 0.5) = 25.8: 21 more, so K stays
    ],
)
def test_the_documents_formula(loss: float, lr: float, expected: int) -> None:
    """Both losses count from 0.6, the root is cut to a whole number, and a growth of more than 20 keeps K."""
    assert k_after("document", loss, lr) == expected


def test_a_thousandfold_drop_freezes_the_documents_k() -> None:
    """K = 1 and the learning rate falls a thousandfold: every later K would be 31 or so, and is not taken."""
    rule = adaptive(variant="document")
    rounds = begun(rule)
    for update in range(2, 6):
        rounds = rule.on_loss(rule.on_lr(rounds, 1e-4), 2.0, update)
    assert rounds.k == 1


@pytest.mark.parametrize(
    ("lr", "alpha", "expected"), [(0.01, 0.01, 4), (0.004, 0.01, 6), (0.001, 0.01, 100), (0.1, 0.3, 9), (0.00333, 0.01, 9), (1.0, 0.01, 4)]
)
def test_the_quadratic_synchronisation_rule(lr: float, alpha: float, expected: int) -> None:
    """K = max(K0, floor((alpha / lr)^2)), in decimals (0.3 / 0.1 is 3), from the learning rate alone."""
    rule = adaptive(variant="qsr", init_k_steps=4, alpha=alpha)
    assert rule.on_lr(rule.start(), lr).k == expected


FAULTS = [
    ("document", 0.59, 0.1, r"below 0\.6"),
    *((variant, loss, 0.1, "loss is") for variant in ("fleet", "paper", "document") for loss in (math.nan, math.inf)),
    *((variant, 1.0, lr, "learning rate is") for variant in ("fleet", "paper", "document") for lr in (0.0, -0.1, math.nan, math.inf)),
    *((variant, -0.1, 0.1, "below 0") for variant in ("fleet", "paper")),
    *((variant, 1.0, 5e-324, "overflows") for variant in ("fleet", "paper", "document")),
]


@pytest.mark.parametrize(("variant", "loss", "lr", "why"), FAULTS)
def test_where_the_formula_has_no_value_k_stays_and_a_warning_says_why(variant: str, loss: float, lr: float, why: str) -> None:
    """As published the rules fail, or return nonsense, for these; K stays what the round before had."""
    rule = adaptive(variant=variant, init_k_steps=4)
    before = rule.on_loss(rule.on_lr(begun(rule), 0.01), 1.3, 5)
    with pytest.warns(AdaptiveStepsKept, match=f"{why}.*K stays {before.k}"):
        rounds = rule.on_loss(rule.on_lr(before, lr), loss, 9)
    assert rounds.k == before.k != 4
    assert (rounds.loss0, rounds.lr0) == (before.loss0, before.lr0)
