"""GPUs by name: what their data sheets say of one.

Each way, NVLink carries half of the rate that data sheets give.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fleetbench.errors import ConfigError

Precision = Literal["fp64", "fp32", "tf32", "fp16", "bf16"]

_VOLTA: Mapping[Precision, float] = {"fp64": 7.8e12, "fp32": 15.7e12, "fp16": 125e12}
_AMPERE: Mapping[Precision, float] = {"fp64": 19.5e12, "fp32": 19.5e12, "tf32": 156e12, "fp16": 312e12, "bf16": 312e12}
_HOPPER: Mapping[Precision, float] = {"fp64": 67e12, "fp32": 67e12, "tf32": 494.5e12, "fp16": 989.5e12, "bf16": 989.5e12}
_BLACKWELL: Mapping[Precision, float] = {"fp64": 37e12, "fp32": 75e12, "tf32": 1125e12, "fp16": 2250e12, "bf16": 2250e12}
"""FLOP/s of dense matrix products: half of what data sheets give with sparsity; fp32 is that of the vector units."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU. Numbers are of the data sheet that ``source`` names, where no other source stands beside them."""

    memory: int
    """Bytes."""
    nvlink: int
    """Bits per second, each way."""
    memory_bandwidth: float
    """Bytes per second."""
    flops_s: Mapping[Precision, float]
    """What it computes a second at most; a precision that it does not have is missing."""
    source: str


GPUS = {
    name: Gpu(memory=gigabytes * 10**9, nvlink=gbits_s * 10**9, memory_bandwidth=gigabytes_s * 1e9, flops_s=flops_s, source=source)
    for name, gigabytes, gbits_s, gigabytes_s, flops_s, source in (
        ("V100", 32, 1200, 900, _VOLTA, "NVIDIA V100 data sheet (SXM2, 32 GB)"),
        ("A100-40GB", 40, 2400, 1555, _AMPERE, "NVIDIA A100 data sheet (SXM, 40 GB)"),
        ("A100", 80, 2400, 2039, _AMPERE, "NVIDIA A100 data sheet (SXM, 80 GB)"),
        ("H100", 80, 3600, 3350, _HOPPER, "NVIDIA H100 data sheet (SXM)"),
        ("H200", 141, 3600, 4800, _HOPPER, "NVIDIA H200 data sheet (SXM)"),
        ("B200", 180, 7200, 8000, _BLACKWELL, "NVIDIA HGX B200 and DGX B200 data sheets, an eighth of a node"),
    )
}
"""By the name that ``cluster.gpu`` takes; all are SXM modules."""


def gpu_named(name: str, where: str) -> Gpu:
    """Raise ``ConfigError`` for a name that is not in ``GPUS``; ``where`` is what named it."""
    if name not in GPUS:
        raise ConfigError("no such GPU", where, repr(name), f"one of {', '.join(GPUS)}")
    return GPUS[name]
