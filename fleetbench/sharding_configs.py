"""``sharding_configs``: a table of the strategy, and what takes the place of Paddle's keys that it has not."""

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
"""Keys of Paddle's ``sharding_configs``, and what takes their place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingConfigs(Config):
    """``sharding_configs``: which part of the training's state each trainer of a shard group keeps (ZeRO, FSDP)."""

    stage: Literal[1, 2, 3] = 1
    """1 shards the optimizer's state, 2 also gradients, 3 also parameters."""
    sharding_degree: int = Knob("plan clock restarts", "sharding")(0)
    """Trainers of a shard group, which divide all trainers; with fewer than all, groups are replicas of each other (HSDP). 0: all."""
    reshard_after_forward: bool | int = True
    """Stage 3: a block's parameters are freed after its forward, and gathered again for its backward. A number: they stay spread over so
    many neighbours, who gather them again among themselves."""
    param_dtype: Literal["own", "bfloat16"] = "own"
    """Type in which parameters are gathered and computed with; shards, gradients' sums and updates keep the parameter's own. ``"bfloat16"``
    needs ``amp`` in BF16; what passes between blocks is then in BF16, too, as are the weights that normalisations read."""
    blocks: tuple[str, ...] = ()
    """Names of the submodules that are gathered as a whole, in the order of the forward; none: each module of the model's lists."""

    def _validate(self) -> None:
        at_least(self, 0, "sharding_degree")
        if type(self.reshard_after_forward) is int:
            at_least(self, 2, "reshard_after_forward")
        if self.reshard_after_forward is not True and self.stage < 3:
            what, hint = f"is of stage 3, and stage {self.stage} keeps parameters until the update", "set stage = 3, or drop it"
            raise ConfigError(what, "reshard_after_forward", json.dumps(self.reshard_after_forward), hint)

    @classmethod
    def translate(cls, data: Mapping[str, Any]) -> dict[str, Any]:
        """The table. Raises ``ConfigError`` for keys of Paddle's that are not here, with what to use instead."""
        for key in data.keys() & _PADDLES.keys():
            raise ConfigError("is Paddle's, and not here", key, repr(data[key]), _PADDLES[key])
        return dict(data)
