from __future__ import annotations

import random

import pytest

from fleetbench.plan.loss_scaling import LossScaler, Scale
from fleetbench.strategy import AmpConfigs


def written_out(configs: AmpConfigs, overflows: list[bool]) -> list[tuple[float, int, int]]:
    """Paddle's update_loss_scaling as its kernel is written: (scale, good steps, bad steps) after each update."""
    scale, good, bad = configs.init_loss_scaling, 0, 0
    found = []
    for found_inf in overflows:
        if found_inf:
            good = 0
            bad += 1
            if bad == configs.decr_every_n_nan_or_inf:
                smaller = scale * configs.decr_ratio
                scale = max(smaller, 1.0)
                bad = 0
        else:
            bad = 0
            good += 1
            if good == configs.incr_every_n_steps:
                larger = scale * configs.incr_ratio
                scale = larger if larger < 3.4028236e38 else scale  # what FP32 holds
                good = 0
        found.append((scale, good, bad))
    return found


def driven(configs: AmpConfigs, overflows: list[bool]) -> list[Scale]:
    """The scales after each update."""
    scaler = LossScaler(configs)
    scale, found = scaler.start(), []
    for found_inf in overflows:
        scale = scaler.after(scale, found_inf)
        found.append(scale)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_every_update_is_as_paddles_kernel_has_it(seed: int) -> None:
    """Random knobs and overflows, bursts of them among long good stretches, give the kernel's scale and both its counts."""
    random_ = random.Random(seed)  # noqa: S311  # a test case, no secret
    configs = AmpConfigs(
        init_loss_scaling=random_.choice([32768.0, 2.0, 0.5, 128.0, 2.0**125]),
        incr_every_n_steps=random_.choice([1, 3, 7]),
        decr_every_n_nan_or_inf=random_.choice([1, 2, 3]),
        incr_ratio=random_.choice([2.0, 1.5]),
        decr_ratio=random_.choice([0.8, 0.5, 0.1]),
    )
    share = random_.choice([0.05, 0.3, 0.7])
    overflows = [random_.random() < share for _ in range(300)]
    assert [(scale.value, scale.good_steps, scale.bad_steps) for scale in driven(configs, overflows)] == written_out(configs, overflows)


@pytest.mark.parametrize("seed", range(5))
def test_with_one_overflow_a_decrease_the_scale_is_torchs(seed: int) -> None:
    """Where the knobs coincide, torch's own kernel after GradScaler gives the same scales and counts."""
    import torch

    configs = AmpConfigs(incr_every_n_steps=4, decr_every_n_nan_or_inf=1, incr_ratio=2.0, decr_ratio=0.5)
    random_ = random.Random(seed)  # noqa: S311  # a test case, no secret
    overflows = [random_.random() < 0.15 for _ in range(200)]
    scale, growth_tracker = torch.full((), configs.init_loss_scaling), torch.zeros((), dtype=torch.int32)
    for found_inf, ours in zip(overflows, driven(configs, overflows), strict=True):
        torch._amp_update_scale_(scale, growth_tracker, torch.full((), float(found_inf)), 2.0, 0.5, 4)
        assert (ours.value, ours.good_steps) == (float(scale), int(growth_tracker))
