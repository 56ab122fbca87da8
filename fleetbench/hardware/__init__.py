"""GPUs, nodes and networks by name, as ``catalogue.toml`` has them with the source of every figure."""

import functools
import tomllib
from dataclasses import dataclass, field
from importlib import resources
from typing import Literal

from fleetbench.config import Config, decode
from fleetbench.errors import ConfigError
from fleetbench.quantities import BitsPerSecond, Bytes

Precision = Literal["fp64", "fp32", "tf32", "fp16", "bf16"]
Fabric = Literal["infiniband", "roce", "efa", "ethernet"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu(Config):
    """One GPU."""

    memory: Bytes
    nvlink: BitsPerSecond
    """Each way."""
    memory_bandwidth: float
    """Bytes per second."""
    flops_s: dict[Precision, float]
    """What it computes a second at most; a precision that it does not have is missing."""
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Node(Config):
    """One node."""

    gpu: str
    gpus: int = 8
    nics: int = 0
    rate: str = ""
    """Of one of ``nics``."""
    fabric: Fabric | None = None
    tcp: dict[str, str | int] = field(default_factory=dict)
    """Fields of a link by TCP that differ from those of ``nics``."""
    efa_us: float = 0.0
    """Microseconds that the EFA plugin tells NCCL that its network adds to a message."""
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue(Config):
    """All that has a name; the comments of ``catalogue.toml`` describe the tables."""

    infiniband: dict[str, BitsPerSecond]
    interface_gbps: tuple[int, ...]
    nccl: dict[str, str]
    latency_us: dict[str, float]
    loopback: dict[str, str | bool]
    gpus: dict[str, Gpu]
    nodes: dict[str, Node]


@functools.cache
def catalogue() -> Catalogue:
    """The catalogue, read once."""
    text = resources.files("fleetbench.hardware").joinpath("catalogue.toml").read_text(encoding="utf-8")
    return decode(tomllib.loads(text), Catalogue, "")


def gpu_named(name: str, where: str) -> Gpu:
    """Raise ``ConfigError`` for a name that no GPU has; ``where`` is what named it."""
    gpus = catalogue().gpus
    if name not in gpus:
        raise ConfigError("no such GPU", where, repr(name), f"one of {', '.join(gpus)}")
    return gpus[name]
