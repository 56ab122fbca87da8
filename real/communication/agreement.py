"""Agreement: what must be the same on every rank is compared with rank 0's before anybody relies on it."""

from __future__ import annotations

import hashlib
import json

import torch

from fleetbench.config import encode
from fleetbench.errors import ConfigError
from fleetbench.strategy import DistributedStrategy
from real.communication.communicators import Communicators
from real.communication.streams import host_reads


def strategy_digest(strategy: DistributedStrategy) -> str:
    """Hexadecimal digest of all of a strategy's fields."""
    return hashlib.sha256(json.dumps(encode(strategy), sort_keys=True).encode()).hexdigest()


def agree_on(digest: str, what: str, communicators: Communicators) -> None:
    """Raise ``ConfigError`` on a rank whose hexadecimal ``digest`` is not rank 0's: its collectives would not match."""
    if communicators.trainers == 1:
        return
    own = torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8, device=communicators.device)
    first = own.clone()
    communicators.broadcast(first)
    with host_reads():
        same = torch.equal(own, first)
    if not same:
        raise ConfigError(what, f"rank {communicators.rank}", digest, "give every rank the same model and strategy")
