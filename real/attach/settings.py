"""Settings: a script's arguments of DDP as fields of a strategy, and arguments without a field."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fleetbench.errors import ConfigError
from fleetbench.quantities import MIB
from fleetbench.strategy import DistributedStrategy
from real.processes.attached import WAY_OUT

_WIRES = {"fp16_compress_hook": "fp16_allreduce", "bf16_compress_hook": "bf16_allreduce"}
_FIRST_MB = 1.0
"""Default cap of DDP's first bucket in MiB: torch's ``dist._DEFAULT_FIRST_BUCKET_BYTES``."""
_PLAIN = ("", "None", "allreduce_hook")
"""Communication hooks that do the same as DistributedDataParallel without one."""


def own_strategy(model: DistributedDataParallel) -> DistributedStrategy:
    """Return the strategy that is equivalent to this model's own settings."""
    wire, cap = _WIRES.get(_hook(model)), model.bucket_bytes_cap / MIB
    first = _FIRST_MB if getattr(model, "bucket_bytes_cap_default", False) else 0.0
    buckets = {"fusion": "ddp", "fuse_grad_size_in_MB": cap, "first_bucket_size_in_MB": first}
    return DistributedStrategy.from_dict(
        {
            **(buckets if cap else {"fuse_all_reduce_ops": False}),
            "sync_nccl_allreduce": False,  # its buckets do not wait for each other
            "find_unused_parameters": bool(model.find_unused_parameters and not model.static_graph),
            "static_graph": bool(model.static_graph),
            "broadcast_buffers": bool(model.broadcast_buffers),
            "thread_num": torch.get_num_threads(),
            **({} if wire is None else {wire: True}),
        }
    )


def combined(ordered: DistributedStrategy, own: DistributedStrategy) -> DistributedStrategy:
    """Return the strategy of a file, with the script's settings for unused parameters and buffers.

    Raises ``ConfigError`` if the script rounds its gradients to 16 bits and the file sends them as they are.
    """
    is_static = ordered.static_graph or own.static_graph
    finds_unused = not is_static and (ordered.find_unused_parameters or own.find_unused_parameters)
    wire = next((name for name in _WIRES.values() if getattr(own, name)), None)
    if wire is not None and not (ordered.is_local or ordered.fp16_allreduce or ordered.bf16_allreduce):
        hint = f"add {wire} = true to the file, or leave the hook out of the script"
        raise ConfigError("the script's communication hook sends 16 bits, and the strategy 32", "--strategy", wire, hint)
    sends = ordered.broadcast_buffers and own.broadcast_buffers
    return ordered.replace(find_unused_parameters=finds_unused, static_graph=is_static, broadcast_buffers=sends)


def not_expressed(model: DistributedDataParallel) -> Iterator[str]:
    """Yield a sentence that names settings without a strategy field, if any; they do not change the result."""
    found = []
    if getattr(model, "bucket_bytes_cap_list", None):
        found.append("bucket_cap_mb_list")
    if not model.gradient_as_bucket_view:
        found.append("gradient_as_bucket_view=False")
    if found:
        yield f"every leg has its own buckets; no strategy has these arguments of the script's DistributedDataParallel: {', '.join(found)}"


def refuse_settings(model: DistributedDataParallel) -> None:
    """Raise ``ConfigError`` for settings that change the training result and that no strategy expresses."""
    others = {
        "a process group of its own": model.process_group is not dist.group.WORLD,
        "mixed_precision": getattr(model, "mixed_precision", None) is not None,
        "parameters to ignore": bool(model.parameters_to_ignore),
        "delay_all_reduce_named_params": bool(getattr(model, "_delay_all_reduce_params", ())),
        "skip_all_reduce_unused_params": bool(getattr(model, "skip_all_reduce_unused_params", False)),
        "optimizers in the backward": any(hasattr(each, "_in_backward_optimizers") for each in model.parameters()),
        "the Python reducer of compiled autograd": bool(getattr(model, "_use_python_reducer", False)),
        "a buffer communication hook": hasattr(model, "buffer_hook"),
        f"the communication hook {_hook(model)}": _hook(model) not in (*_WIRES, *_PLAIN),
    }
    if found := [name for name, is_set in others.items() if is_set]:
        hint = f"leave it out while the script is profiled, tuned or launched with a strategy, or {WAY_OUT}"
        raise ConfigError(
            "has settings that no strategy keeps, and training would differ silently", "DistributedDataParallel", ", ".join(found), hint
        )


def _hook(model: DistributedDataParallel) -> str:
    """Return the name of the registered communication hook, Python's or torch's own."""
    told = str(model._get_ddp_logging_data().get("comm_hook", ""))  # noqa: SLF001  # torch has no other name for it
    return told.rpartition(".")[2]
