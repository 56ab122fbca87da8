"""Again: whether a step's exchange can be done a second time, with what a second backward has added to ``.grad``, or instead of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from fleetbench.errors import ConfigError
from fleetbench.plan.steps import Combination


def refuse_again(what: Combination, *, is_attached: bool, dropped: bool) -> None:
    """Raise ``ConfigError`` where a second backward before ``optimizer.step()`` cannot give DistributedDataParallel's gradients.

    ``dropped``: the first one's gradients were thrown away. With gradients averaged over all trainers that is
    everybody's decision; a trainer that is alone with its own would count fewer updates than the others.
    """
    accumulate = (
        "put every backward of a step but the last into `with fleet.no_sync():`; "
        "a GradScaler of the script's own, which leaves out optimizer.step() at an overflow, needs amp = true in its place"
    )
    if not is_attached:
        why, hint = "fleet does not know the optimizer", "call fleet.distributed_optimizer before training"
    elif what.merges:
        why, hint = "gradient_merge has added the first one's gradients to its sum already", accumulate
    elif what.updates_by_bucket:
        why, hint = "enable_backward_optimizer_op_deps = false has updated the parameters in the first one already", accumulate
    elif what.scales:
        why, hint = "amp has unscaled the first one's gradients already", accumulate
    elif what.is_local and dropped:
        why = "the first one's gradients were thrown away, and this trainer would count fewer updates than the others"
        hint = "skip a batch before its backward, and on every trainer; amp = true skips overflows by itself, without a GradScaler"
    else:
        return
    raise ConfigError(f"a second backward comes before optimizer.step(), and {why}", "loss.backward()", hint=hint)


def is_dropped(what: Combination, gradients_of: Sequence[torch.nn.Parameter]) -> bool:
    """Whether the gradients of a backward are thrown away, and its step never was: cleared, or no numbers, which a GradScaler leaves out.

    Only where a second backward could take their place.
    """
    if not what.leaves_averages:
        return False
    return is_cleared(gradients_of) or not all(values.isfinite().all() for values in _values(gradients_of))


def is_cleared(gradients_of: Sequence[torch.nn.Parameter]) -> bool:
    """Whether there is no gradient, or nothing but zeros."""
    return not any(values.any() for values in _values(gradients_of))


def _values(gradients_of: Sequence[torch.nn.Parameter]) -> Iterator[torch.Tensor]:
    gradients = (parameter.grad for parameter in gradients_of if parameter.grad is not None)
    return (gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients)
