"""Substitutes for names and functions that torch 2.6 does not have, and later versions do."""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

_SHARED_AT = "fleetbench/second connection"
ALL_GATHER, REDUCE_SCATTER = (
    ("all_gather_single", "reduce_scatter_single")
    if hasattr(dist, "all_gather_single")
    else ("all_gather_into_tensor", "reduce_scatter_tensor")  # before torch 2.13
)
"""Names of torch's functions that gather and scatter single tensors."""
_GLOO_AVERAGES = hasattr(dist.Store, "clone")  # type: ignore[attr-defined]  # missing from __all__ only
"""Whether gloo has ``ReduceOp.AVG``: it came with torch 2.8, as did ``Store.clone``, which can be checked."""


def average(tensor: torch.Tensor, ranks: int, *, group: dist.ProcessGroup | None, async_op: bool = False) -> dist.Work | None:
    """All-reduce ``tensor`` to its mean over the group's ranks.

    If gloo has no mean, ``tensor`` is divided first, and summed.
    """
    op = dist.ReduceOp.AVG
    if not _GLOO_AVERAGES and "gloo" in dist.get_backend_config(group):
        tensor.div_(ranks)
        op = dist.ReduceOp.SUM
    work: dist.Work | None = dist.all_reduce(tensor, op=op, group=group, async_op=async_op)
    return work


def known(function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """Return those of ``arguments`` that the function takes."""
    taken = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in taken}


_TO_IGNORE = "_ddp_params_and_buffers_to_ignore"


@contextmanager
def without_first_sync(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield arguments for a DistributedDataParallel that must not synchronise buffers when it is created.

    Before torch 2.8 it has no such argument. Buffers are then marked to be ignored, and it sends rank 0's
    parameters: all ranks create it at the same place, and their parameters are equal already.
    """
    from torch.nn.parallel import DistributedDataParallel  # it may be only half imported when this module is

    if arguments := known(DistributedDataParallel.__init__, init_sync=False):
        yield arguments
        return
    before = getattr(module, _TO_IGNORE, None)
    setattr(module, _TO_IGNORE, [*(before or ()), *(name for name, _ in module.named_buffers())])
    try:
        yield {}
    finally:
        if before is None:
            delattr(module, _TO_IGNORE)
        else:
            setattr(module, _TO_IGNORE, before)


def second_connection(store: Any, rank: int) -> Any:
    """Return a separate connection to a store for another thread; every rank calls it at the same place.

    Before torch 2.8 a store has no ``clone``, and a prefix cannot be read. The keys then differ from those of
    ``store``, but are the same on all ranks.
    """
    if hasattr(store, "clone"):
        return store.clone()
    key = f"{_SHARED_AT}/{store.add(f'{_SHARED_AT}/calls/{rank}', 1)}"
    if rank == 0:
        store.set(key, secrets.token_hex(8))
    prefix = store.get(key).decode()
    stores: Any = dist  # its stores are missing from __all__
    base = store._underlying_non_prefix_store if isinstance(store, stores.PrefixStore) else store  # noqa: SLF001  # torch has no public name for it
    if isinstance(base, stores.TCPStore):
        base = stores.TCPStore(base.host, base.port, is_master=False, timeout=base.timeout, wait_for_workers=False)
    elif isinstance(base, stores.FileStore):
        base = stores.FileStore(base.path, -1)
    return stores.PrefixStore(prefix, base)
