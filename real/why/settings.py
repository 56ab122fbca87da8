"""Settings: arguments of a running DistributedDataParallel, and how to change them between two steps."""

from __future__ import annotations

import sys
import traceback
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fleetbench.quantities import MIB
from fleetbench.why.change import DdpChange
from fleetbench.why.observed import Library, Model
from real.fully_shard import is_unit
from real.older_torch import known, without_first_sync

_PLAIN = ("", "None", "N/A")


def library_of(model: nn.Module) -> Library:
    """Return the library that has wrapped a model; called when its forward begins."""
    if not isinstance(model, DistributedDataParallel) and not is_unit(model):
        return "fleet"
    calls = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_stack(None)]
    if any(name.startswith("transformers.trainer") for name in calls):
        return "Trainer"
    if any(name.startswith(("lightning.", "pytorch_lightning.", "lightning_fabric.")) for name in calls):
        return "Lightning"
    state = sys.modules.get("accelerate.state")
    return "Accelerate" if state is not None and state.AcceleratorState._shared_state else ""  # noqa: SLF001  # how it says that it is set up


def hook_of(ddp: DistributedDataParallel) -> str:
    """Return the name of the communication hook; empty if there is none."""
    name = str(ddp._get_ddp_logging_data().get("comm_hook", ""))  # noqa: SLF001  # as above
    return "" if name in _PLAIN else name.rpartition(".")[2]


_OF_REDUCER = (
    "reducer", "logger", "_bucket_config", "bucket_bytes_cap", "bucket_bytes_cap_list", "bucket_bytes_cap_default",
    "find_unused_parameters", "gradient_as_bucket_view", "static_graph", "_static_graph_delay_allreduce_enqueued",
    "_has_rebuilt_buckets", "_comm_hooks",
)  # fmt: skip
"""Attributes of a DDP that belong to its Reducer; all others stay the script's."""


class LivingDdp:
    """A script's DDP: ``change`` gives it a Reducer with other arguments, between two steps of all ranks.

    A model is not changed (``can_change``) if its communication hook, or anything else that only the Reducer
    knows, cannot be read from outside.
    """

    def __init__(self, ddp: nn.Module) -> None:
        assert isinstance(ddp, DistributedDataParallel)
        self._ddp = ddp
        self.module: nn.Module = ddp.module
        self.group, self.device_type = ddp.process_group, ddp.device_type
        self._own = {name: ddp.__dict__[name] for name in _OF_REDUCER if name in ddp.__dict__}
        self._broadcasts = bool(ddp.broadcast_buffers)
        self._threads = torch.get_num_threads()
        self._is_own = True
        self.can_change = not (
            hook_of(ddp)
            or ddp.mixed_precision is not None
            or ddp.parameters_to_ignore
            or cast("Any", ddp)._join_config.enable  # noqa: SLF001  # torch has no public name for it
            or ddp._delay_all_reduce_params  # noqa: SLF001  # as above
            or any(hasattr(each, "_in_backward_optimizers") for each in ddp.parameters())
        )

    def described(self, *, buffers_change: bool) -> Model:
        """Return the model's sizes and settings, and the buckets that its Reducer has after some steps."""
        ddp = self._ddp
        logged = ddp._get_ddp_logging_data()  # noqa: SLF001  # torch has no public name for it
        trained = [parameter for parameter in ddp.module.parameters() if parameter.requires_grad]
        sizes = str(logged.get("rebuilt_bucket_sizes") or logged.get("bucket_sizes") or "")
        return Model(
            nbytes=sum(parameter.numel() * parameter.element_size() for parameter in trained),
            bucket_nbytes=tuple(int(size) for size in sizes.replace(" ", "").split(",") if size.isdecimal()),
            bucket_cap_mb=None if ddp.bucket_bytes_cap_default else ddp.bucket_bytes_cap / MIB,
            find_unused_parameters=bool(ddp.find_unused_parameters and not ddp.static_graph),
            buffers_nbytes=sum(buffer.numel() * buffer.element_size() for buffer in ddp.modules_buffers),
            buffers_change=buffers_change,
        )

    def change(self, change: DdpChange) -> None:
        """Apply the arguments that ``change`` names, and the script's own for all others."""
        torch.set_num_threads(change.threads or self._threads)
        is_own = change == DdpChange(threads=change.threads)
        if not self.can_change or (is_own and self._is_own):
            return
        own, self._is_own = self._own, is_own
        cap = None if own["bucket_bytes_cap_default"] else own["bucket_bytes_cap"] / MIB
        for parameter in self._ddp.module.parameters():
            if parameter.grad is not None:  # it must not be a view of a bucket that is freed
                parameter.grad = parameter.grad.detach().clone()
        newer = known(
            DistributedDataParallel.__init__,
            bucket_cap_mb_list=own.get("bucket_bytes_cap_list") or None if change.bucket_cap_mb is None else None,
            batched_grad_copy=getattr(self._ddp, "batched_grad_copy", False),
            skip_all_reduce_unused_params=getattr(self._ddp, "skip_all_reduce_unused_params", False),
        )
        self._ddp.reducer._remove_autograd_hooks()  # noqa: SLF001  # torch has no public name for it
        with without_first_sync(self._ddp.module) as given:
            other = DistributedDataParallel(
                self._ddp.module,
                device_ids=self._ddp.device_ids,
                output_device=self._ddp.output_device,
                dim=self._ddp.dim,
                process_group=self._ddp.process_group,
                bucket_cap_mb=cap if change.bucket_cap_mb is None else change.bucket_cap_mb,
                find_unused_parameters=_or(change.find_unused_parameters, own["find_unused_parameters"]),
                gradient_as_bucket_view=own["gradient_as_bucket_view"],
                static_graph=own["static_graph"],
                **newer,
                **given,
            )
        self._ddp.__dict__.update({name: other.__dict__[name] for name in _OF_REDUCER if name in other.__dict__})
        self._ddp.broadcast_buffers = _or(change.broadcast_buffers, self._broadcasts)


def _or(changed: bool | None, own: Any) -> bool:
    return bool(own) if changed is None else changed
