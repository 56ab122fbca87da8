"""Adaptive Local SGD in the simulator: losses from a curve or a recording, learning rates from the file."""

from __future__ import annotations

from typing import Any

import pytest
from sim_cases import layered, link

from fleetbench.errors import ConfigError
from fleetbench.plan.events import Observed
from fleetbench.result import RunResult
from fleetbench.workload import LossCurve, LrDecay
from sim.run import simulate

HALVING = LossCurve(start=2.0, floor=0.0, half_life=4.5)


def adaptive(variant: str, init_k_steps: int = 4, **configs: Any) -> dict[str, Any]:
    """A strategy whose K adapts."""
    return {"adaptive_localsgd": True, "adaptive_localsgd_configs": {"variant": variant, "init_k_steps": init_k_steps, **configs}}


def run(strategy: dict[str, Any], steps: int, *, warmup_steps: int = 0, **also: Any) -> RunResult:
    """Compute 300 and one bucket of 1000 bytes, T = 20 + 1000; more of the workload by name."""
    return simulate(
        layered([(250, 100, 200)], inter=link(8, 10), strategy=strategy, steps=steps, warmup_steps=warmup_steps, also=also), record=True
    )


def rounds(result: RunResult) -> dict[int, int]:
    """Lengths of the rounds by the step that closed them, the same on all ranks."""
    of_rank = []
    for _, own in result.steps.groupby("rank"):
        closed = own[own["local_steps"].notna()]
        of_rank.append(dict(zip(closed["step"], closed["local_steps"], strict=True)))
    assert all(found == of_rank[0] for found in of_rank)
    return of_rank[0]


def observed(result: RunResult) -> list[tuple[str, float]]:
    """What rank 1 was told."""
    return [(event.name, event.value) for _, event, _ in result.recordings[1].log if isinstance(event, Observed)]


def test_fleets_rule_follows_a_declared_curve() -> None:
    """K0 = 4 and a loss of 2^(1 - step / 4.5): K = ceil(sqrt(4 loss / loss0)).

    After step 5 loss / loss0 is 2^(-4/4.5) = 0.54, so K = ceil(1.47) = 2; after 7 0.40, so 2;
    after 9 0.29, so 2; after 11 0.21, so 1.
    """
    result = run(adaptive("fleet"), 13, loss_curve=HALVING)
    assert rounds(result) == {1: 1, 5: 4, 7: 2, 9: 2, 11: 2, 12: 1, 13: 1}
    told = observed(result)
    assert told[0] == ("lr", 0.1)
    assert [value for name, value in told if name == "loss"] == pytest.approx([2 ** (1 - step / 4.5) for step in rounds(result)])
    assert [name for name, _ in told] == ["lr"] + ["loss"] * 7


@pytest.mark.parametrize(("lr_per", "expected"), [("micro_batch", {2: 1, 10: 4, 42: 16}), ("update", {2: 1, 10: 4, 18: 4, 50: 16})])
def test_a_merged_learning_rate_counts_steps_or_updates(lr_per: str, expected: dict[int, int]) -> None:
    """Two steps an update and a decay at 6: the synchronisation after update 5 is step 10, past step 6 but not past update 6."""
    merge = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2, "lr_per": lr_per}}
    result = run(adaptive("qsr", 2, alpha=0.2) | merge, 50, lr_decay=(LrDecay(step=6, factor=0.5),))
    assert {step: length for step, length in rounds(result).items() if step in expected} == expected
    assert set(rounds(result)) - set(expected) <= {50}


@pytest.mark.parametrize(
    ("strategy", "field"),
    [
        (adaptive("document"), "adaptive_localsgd_configs.variant"),
        ({"localsgd": True, "localsgd_configs": {"schedule": "document", "k_steps": 4}}, "localsgd_configs.schedule"),
    ],
)
def test_what_counts_epochs_needs_their_length(strategy: dict[str, Any], field: str) -> None:
    """Without ``steps_per_epoch`` the simulator does not guess; a constant K needs none."""
    with pytest.raises(ConfigError, match=field) as caught:
        run(strategy, 4, loss_curve=HALVING)
    assert "steps_per_epoch" in (caught.value.hint or "")
    run({"localsgd": True, "localsgd_configs": {"schedule": "document", "k_steps": 4, "warmup": "const"}}, 4)


@pytest.mark.parametrize("workload", [{"model": "mlp", "profile": "profile.toml"}])
def test_adaptive_steps_without_a_loss_are_refused(workload: dict[str, Any]) -> None:
    """A registry model has losses, but not here: the error names where to declare them."""
    from sim_cases import assemble

    with pytest.raises(ConfigError, match="adaptive_localsgd") as caught:
        simulate(assemble(workload, inter=link(8), strategy=adaptive("paper")))
    assert "loss_curve" in (caught.value.hint or "")


def test_a_declared_loss_reaches_its_target() -> None:
    """Halved by every step from 2: 0.5, 0.125, ... at steps 2, 4, ...; 0.3 is reached at 4 when 6 and 8 are evaluated too."""
    workload: dict[str, Any] = {"loss_curve": LossCurve(start=2.0, floor=0.0, half_life=1.0), "target_loss": 0.3, "eval_every": 2}
    result = run({}, 8, warmup_steps=1, **workload)
    assert result.summary.time_to_target_s == pytest.approx(4 * 1_320e-9)
    assert result.summary.final_loss == pytest.approx(2 / 2**8)
    assert result.summary.skipped == ()
    own = result.steps[result.steps["rank"] == 1]
    assert own["loss"].tolist() == pytest.approx([2 / 2**step for step in range(9)])
    assert run({}, 7, **workload).summary.time_to_target_s is None
