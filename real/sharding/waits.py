"""Waits: the functions in which torch's ``fully_shard`` waits for gathers and scatters, and a way to wrap them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

GROUPS = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
"""Name of the module that gathers and scatters."""
Exchange = Literal["gathers", "regathers", "gradients"]
"""Exchange that compute waits for: gathered parameters, parameters gathered again for the backward, or scattered
gradients."""
Waiting = Callable[[Exchange, Any], AbstractContextManager[Any]]
"""Returns the context manager of a wait, given its exchange and torch's parameters (``FSDPParam``)."""


def places(waiting: Waiting) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Yield owner and name of each of torch's waiting functions, with a function that wraps it in ``waiting``.

    On CPUs, these functions wait for a gather where it is called or, if it began before, in the copy out of it, and for
    a scatter where it is called. On streams, they wait in the copy out, and for scatters at the end of the backward.
    """
    groups = sys.modules.get(GROUPS)
    if groups is None:
        return

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        is_scatter = function.__name__ == "foreach_reduce"

        def called(first: Any, *arguments: Any, **named: Any) -> Any:
            what: Exchange | None = "gradients" if is_scatter else _waited(function.__name__, first, *arguments, **named)
            if what is None:
                return function(first, *arguments, **named)
            with waiting(what, first if is_scatter else first.fsdp_params):
                return function(first, *arguments, **named)

        return called

    yield groups, "foreach_reduce", around
    for name in ("unshard", "wait_for_unshard", "finalize_backward"):
        yield groups.FSDPParamGroup, name, around


def _waited(name: str, group: Any, async_op: bool = False) -> Exchange | None:
    """Return the exchange that a call of a group's method waits for; None if it does not wait."""
    gathered, is_on_host = group._all_gather_result, group.device.type == "cpu"  # noqa: SLF001  # torch has no public name for it
    if name == "finalize_backward":
        return None if is_on_host else "gradients"
    if name == "unshard":
        waits = is_on_host and gathered is None and not group.is_unsharded and not async_op
    else:
        waits = gathered is not None and (gathered.all_gather_work is not None or not is_on_host)
    is_again = group._training_state.name == "PRE_BACKWARD"  # noqa: SLF001  # as above
    return None if not waits else "regathers" if is_again else "gathers"


@contextmanager
def replaced(owner: Any, name: str, around: Callable[[Any], Any]) -> Iterator[None]:
    """Wrap ``owner.name`` inside the context; a function that a library has put there since stays."""
    before = owner.__dict__.get(name)
    if before is None:
        yield
        return
    other = functools.wraps(before)(around(before))
    setattr(owner, name, other)
    try:
        yield
    finally:
        if owner.__dict__.get(name) is other:
            setattr(owner, name, before)
