"""``sharding_configs``: a table of the strategy, and replacements for keys of Paddle's that do not exist here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fleetbench.config import Config, at_least
from fleetbench.errors import ConfigError
from fleetbench.knobs import Knob

_PARALLEL = "fleetbench is about data parallelism: split the model's layers by torch's own tensor or pipeline parallelism"
_PADDLES = {
    "segment_broadcast_MB": "name what is gathered together in blocks",
    "segment_anchors": "name what is gathered together in blocks",
    "hybrid_dp": "set sharding_degree below the number of trainers: the groups are replicas of each other",
    "hybrid_dp_ring_num": "set sharding_degree: there are trainers / sharding_degree replicas",
    "dp_degree": "set sharding_degree: there are trainers / sharding_degree replicas",
    "mp_degree": _PARALLEL,
    "pp_degree": _PARALLEL,
    "optimize_offload": "the optimizer's state stays on the device: shard it among more trainers",
    "gradient_merge_acc_step": "set gradient_merge and gradient_merge_configs.k_steps",
}
"""Replacements for the keys of Paddle's ``sharding_configs`` that do not exist here, by key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingConfigs(Config):
    """``sharding_configs``: the part of the training state that each trainer keeps (ZeRO, FSDP)."""

    stage: Literal[1, 2, 3] = 1
    """Stage: 1 shards the optimizer's state, 2 also gradients, 3 also parameters."""
    sharding_degree: int = Knob("plan clock restarts", "sharding")(0)
    """Number of trainers per shard group, a divisor of the number of trainers. If there are several groups, they are
    replicas of each other (HSDP). 0: all trainers in one group."""
    reshard_after_forward: bool | int = True
    """Stage 3: free a block's parameters after its forward, and gather them again for its backward. With a
    number n, they stay sharded over n neighbouring trainers, which gather them among themselves."""
    param_dtype: Literal["own", "bfloat16"] = "own"
    """Type in which parameters are gathered and used in compute. Shards, sums of gradients and updates keep
    the parameter's own type. ``"bfloat16"`` needs ``amp`` in BF16; activations between blocks and the weights
    of normalisations are then in BF16, too."""
    blocks: tuple[str, ...] = ()
    """Names of the submodules that are gathered as units, in forward order. Default: each module in a list of
    modules."""

    def _validate(self) -> None:
        at_least(self, 0, "sharding_degree")
        if type(self.reshard_after_forward) is int:
            at_least(self, 2, "reshard_after_forward")
        if self.reshard_after_forward is not True and self.stage < 3:
            what, hint = f"is of stage 3, and stage {self.stage} keeps parameters until the update", "set stage = 3, or drop it"
            raise ConfigError(what, "reshard_after_forward", json.dumps(self.reshard_after_forward), hint)

    @classmethod
    def translate(cls, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of the table.

        Raises ``ConfigError`` for a key of Paddle's that does not exist here, with its replacement.
        """
        for key in data.keys() & _PADDLES.keys():
            raise ConfigError("is Paddle's, and not here", key, repr(data[key]), _PADDLES[key])
        return dict(data)
