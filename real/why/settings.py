"""Settings: the arguments of a living DistributedDataParallel, and the same model under others between two steps."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from fleetbench.quantities import MIB
from fleetbench.why.change import DdpChange
from fleetbench.why.observed import Model

_PLAIN = ("", "None", "N/A")


def model_of(ddp: DistributedDataParallel, *, buffers_change: bool) -> Model:
    """What a DDP is, and what its Reducer says of itself after some steps."""
    logged = ddp._get_ddp_logging_data()  # noqa: SLF001  # torch has no public name for it
    trained = [parameter for parameter in ddp.module.parameters() if parameter.requires_grad]
    sizes = str(logged.get("rebuilt_bucket_sizes") or logged.get("bucket_sizes") or "")
    return Model(
        nbytes=sum(parameter.numel() * parameter.element_size() for parameter in trained),
        num_gradients=len(trained),
        bucket_nbytes=tuple(int(size) for size in sizes.replace(" ", "").split(",") if size.isdecimal()),
        bucket_cap_mb=None if getattr(ddp, "bucket_bytes_cap_default", False) else ddp.bucket_bytes_cap / MIB,
        find_unused_parameters=bool(ddp.find_unused_parameters),
        static_graph=bool(ddp.static_graph),
        gradient_as_bucket_view=bool(ddp.gradient_as_bucket_view),
        broadcast_buffers=bool(ddp.broadcast_buffers),
        comm_hook=hook_of(ddp),
        buffers_nbytes=sum(buffer.numel() * buffer.element_size() for buffer in ddp.modules_buffers),
        buffers_change=buffers_change,
        dtype=str(trained[0].dtype).removeprefix("torch."),
    )


def hook_of(ddp: DistributedDataParallel) -> str:
    """Name of the communication hook; empty: none."""
    name = str(ddp._get_ddp_logging_data().get("comm_hook", ""))  # noqa: SLF001  # as above
    return "" if name in _PLAIN else name.rpartition(".")[2]


class LivingDdp:
    """A script's DDP: ``change`` makes it anew with other arguments, between two steps of all ranks.

    A communication hook of the script's own cannot be told from outside: such a model is left alone (``can_change``).
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        self._own = ddp.__dict__.copy()
        self._threads = torch.get_num_threads()
        self._is_own = True
        self.can_change = not hook_of(ddp) and getattr(ddp, "mixed_precision", None) is None and not ddp.parameters_to_ignore

    def change(self, change: DdpChange) -> None:
        """Arguments that ``change`` does not name are the script's."""
        torch.set_num_threads(change.threads or self._threads)
        is_own = change == DdpChange(threads=change.threads)
        if is_own and self._is_own:
            return
        own, self._is_own = self._own, is_own
        cap = None if own.get("bucket_bytes_cap_default", False) else own["bucket_bytes_cap"] / MIB
        arguments: dict[str, Any] = {
            "device_ids": own["device_ids"],
            "output_device": own["output_device"],
            "dim": own["dim"],
            "process_group": own["process_group"],
            "bucket_cap_mb": cap if change.bucket_cap_mb is None else change.bucket_cap_mb,
            "bucket_cap_mb_list": own.get("bucket_bytes_cap_list") or None if change.bucket_cap_mb is None else None,
            "find_unused_parameters": _or(change.find_unused_parameters, own["find_unused_parameters"]),
            "gradient_as_bucket_view": _or(change.gradient_as_bucket_view, own["gradient_as_bucket_view"]),
            "static_graph": own["static_graph"],
            "init_sync": False,
        }
        for parameter in self._ddp.module.parameters():
            if parameter.grad is not None:  # no view of a bucket that goes
                parameter.grad = parameter.grad.detach().clone()
        self._ddp.reducer._remove_autograd_hooks()  # noqa: SLF001  # torch has no public name for it
        known = {name: value for name, value in arguments.items() if value is not None or name in ("device_ids", "output_device")}
        other = DistributedDataParallel(self._ddp.module, **known)
        kept = {name: own[name] for name in ("training", "_forward_hooks", "_forward_pre_hooks") if name in own}
        self._ddp.__dict__.update(other.__dict__ | kept)
        self._ddp.broadcast_buffers = _or(change.broadcast_buffers, self._broadcasts)
        if change.bf16_hook:
            self._ddp.register_comm_hook(None, bf16_compress_hook)

    @property
    def _broadcasts(self) -> bool:
        return bool(self._own.get("forward_sync_buffers", self._own.get("broadcast_buffers", True)))


def _or(changed: bool | None, own: Any) -> bool:
    return bool(own) if changed is None else changed
