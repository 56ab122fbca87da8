"""Fleet's dynamic loss scaling: the scale as a value, and how overflows change it.

It follows Paddle's ``update_loss_scaling`` operator. Every trainer must decide from the same ``found_inf``,
the maximum over all trainers, or their scales would diverge.
"""

import dataclasses
from dataclasses import dataclass

from fleetbench.strategy import AmpConfigs

LARGEST_FLOAT32 = 2.0**128 - 2.0**104
"""Largest scale. It multiplies a loss in FP32, so anything larger is not finite."""
SMALLEST_SCALE = 1.0


@dataclass(frozen=True, slots=True)
class Scale:
    """Loss scale, and the numbers of consecutive good and of consecutive overflowed updates since its last change."""

    value: float
    good_steps: int = 0
    bad_steps: int = 0


@dataclass(frozen=True, slots=True)
class LossScaler:
    """Decides the loss scale of each update. Life cycle: ``start``, then ``after`` every update."""

    configs: AmpConfigs

    def start(self) -> Scale:
        """Return the scale of the first update."""
        return Scale(self.configs.init_loss_scaling)

    def after(self, scale: Scale, found_inf: bool) -> Scale:
        """Return the scale after an update; ``found_inf`` says whether any trainer's gradients overflowed.

        Without ``use_dynamic_loss_scaling`` the scale never changes; an overflow still skips the update.
        """
        configs = self.configs
        if not configs.use_dynamic_loss_scaling:
            return scale
        if found_inf:
            bad_steps = scale.bad_steps + 1
            if bad_steps < configs.decr_every_n_nan_or_inf:
                return dataclasses.replace(scale, good_steps=0, bad_steps=bad_steps)
            return Scale(max(scale.value * configs.decr_ratio, SMALLEST_SCALE))
        good_steps = scale.good_steps + 1
        if good_steps < configs.incr_every_n_steps:
            return dataclasses.replace(scale, good_steps=good_steps, bad_steps=0)
        grown = scale.value * configs.incr_ratio
        return Scale(grown if grown <= LARGEST_FLOAT32 else scale.value)
