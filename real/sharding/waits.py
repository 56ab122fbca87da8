"""Waits: where a step of a sharded model waits for torch's gathers and scatters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from real.engine.stopwatch import Stopwatch


def time_waits(modules: Iterable[Any], stopwatch: Stopwatch) -> None:
    """Tell the stopwatch whenever one of the FSDP modules waits for its parameters, or for its gradients.

    That is: in the copy out of a gather, which waits for it; after a block's backward, whose scatter holds the host's thread where there
    are no streams; and as the backward ends, which waits for the last scatters.
    """
    for module in modules:
        for group in groups_of(module):
            group.wait_for_unshard = _waiting(group, "wait_for_unshard", stopwatch, "_all_gather_result")
            group.post_backward = _waiting(group, "post_backward", stopwatch, "reduce_grads")
            group.finalize_backward = _waiting(group, "finalize_backward", stopwatch)


def groups_of(unit: nn.Module) -> list[Any]:
    """A unit's groups of parameters, as torch has them: one, none where all its parameters are in other units, rarely several."""
    state: Any = unit._get_fsdp_state()  # type: ignore[operator]  # noqa: SLF001  # torch has no public name for it
    found = getattr(state, "_fsdp_param_groups", None)  # from torch 2.12 on
    return list(found) if found is not None else [each for each in [state._fsdp_param_group] if each is not None]  # noqa: SLF001  # as above


def _waiting(group: Any, name: str, stopwatch: Stopwatch, condition: str = "") -> Callable[..., Any]:
    """The group's method, timed where the attribute named by the condition says that there is something to wait for."""
    call = getattr(group, name)

    def timed(*arguments: Any, **named: Any) -> Any:
        if condition and not getattr(group, condition):
            return call(*arguments, **named)
        if name == "post_backward":
            stopwatch.arrives()
        with stopwatch.waits():
            return call(*arguments, **named)

    return timed
