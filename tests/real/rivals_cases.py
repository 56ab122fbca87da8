"""The trainings that are compared with other libraries' Local SGD: what ours is told, and what theirs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SEVERAL = {"fuse_grad_size_in_MB": 0.0015}
"""MiB: several buckets."""


@dataclass(frozen=True)
class Rival:
    """One training twice. ``kind``: ``post_local`` (torch's, bare), ``post_local_ddp`` (as its documents wrap it), ``torchft``."""

    name: str
    kind: str
    k_steps: int
    optimizer: str
    configs: dict[str, Any] = field(default_factory=dict)
    """Ours: what ``localsgd_configs`` holds besides ``k_steps``."""
    warmup: int = 0
    """Theirs: updates before the averager starts, of those counted from 0."""
    model: str = "plain"
    same: bool = True
    """Whether both are one algorithm, and so end in the same parameters."""


def _pair(kind: str, k_steps: int, optimizer: str, configs: dict[str, Any], **more: Any) -> Rival:
    warmup = f" after {more['warmup']}" if "warmup" in more else ""
    schedule = configs["schedule"]
    return Rival(f"{kind}, K = {k_steps}{warmup}, {optimizer}, as {schedule}", kind, k_steps, optimizer, configs, **more)


OPTIMIZERS = ("sgd", "momentum")
POST_LOCAL = (
    *(_pair("post_local", k, name, {"schedule": "torch"}) for k in (1, 4) for name in OPTIMIZERS),
    *(_pair("post_local", 4, name, {"schedule": "torch", "begin_step": 7}, warmup=6) for name in OPTIMIZERS),
)
"""Around the bare model: trainers are alone until the averager starts."""
POST_LOCAL_IN_DDP = (
    _pair("post_local_ddp", 4, "sgd", {"schedule": "fleet", "begin_step": 7}, warmup=6),
    _pair("post_local_ddp", 4, "momentum", {"schedule": "fleet", "begin_step": 7}, warmup=6, same=False),
)
"""In DDP with its hook: gradients are averaged until the averager starts."""
TORCHFT = tuple(_pair("torchft", k, name, {"schedule": "torch", "begin_step": k}) for k in (1, 4) for name in OPTIMIZERS)
"""It averages after the K-th update first."""
RIVALS = (*POST_LOCAL, *POST_LOCAL_IN_DDP, *TORCHFT)
