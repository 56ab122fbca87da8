"""Again: whether a step's exchange can be done a second time, with what a second backward has added to ``.grad``, or instead of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fleetbench.errors import ConfigError
from fleetbench.strategy import DistributedStrategy


def refuse_again(strategy: DistributedStrategy, *, is_attached: bool, dropped: bool) -> None:
    """Raise ``ConfigError`` where a second backward before ``optimizer.step()`` cannot give DistributedDataParallel's gradients.

    ``dropped``: the first one's gradients were thrown away. With gradients averaged over all trainers that is
    everybody's decision; a trainer that is alone with its own would count fewer updates than the others.
    """
    accumulate = "put every backward of a step but the last into `with fleet.no_sync():`"
    if not is_attached:
        what, hint = "nobody has followed optimizer.step()", "call fleet.distributed_optimizer before training"
    elif strategy.gradient_merge and strategy.gradient_merge_configs.k_steps > 1:
        what, hint = "gradient_merge has added the first one's gradients to its sum already", accumulate
    elif not strategy.build_strategy.enable_backward_optimizer_op_deps:
        what = "enable_backward_optimizer_op_deps = false has updated the parameters in the first one already"
        hint = accumulate
    elif strategy.scales_loss:
        what, hint = "amp has unscaled the first one's gradients already", accumulate
    elif strategy.is_local and dropped:
        what = "the first one's gradients were thrown away, and this trainer would count fewer updates than the others"
        hint = "skip a batch before its backward, and on every trainer; amp skips overflows by itself"
    else:
        return
    raise ConfigError(f"a second backward comes before optimizer.step(), and {what}", "loss.backward()", hint=hint)


def is_dropped(strategy: DistributedStrategy, gradients_of: Sequence[torch.nn.Parameter]) -> bool:
    """Whether the gradients of a backward are thrown away, and its step never was: cleared, or no numbers, which a GradScaler leaves out.

    Only where a second backward could take their place.
    """
    if (
        strategy.gradient_merge
        or strategy.is_local
        or strategy.scales_loss
        or not strategy.build_strategy.enable_backward_optimizer_op_deps
    ):
        return False
    gradients = [parameter.grad for parameter in gradients_of if parameter.grad is not None]
    if not any(gradient._nnz() if gradient.is_sparse else gradient.any() for gradient in gradients):  # noqa: SLF001  # torch has no other name for it
        return True
    values = (gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients)
    return not all(value.isfinite().all() for value in values)
