"""GPUs by name: what their data sheets say of one.

Each way, NVLink carries half of the rate that data sheets give.
"""

from __future__ import annotations

from dataclasses import dataclass

from fleetbench.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU."""

    memory: int
    """Bytes."""
    nvlink: int
    """Bits per second, each way."""
    source: str


GPUS = {
    "V100": Gpu(
        memory=32 * 10**9,
        nvlink=1200 * 10**9,
        source="NVIDIA V100 data sheet (SXM2, 32 GB)",
    ),
    "A100-40GB": Gpu(
        memory=40 * 10**9,
        nvlink=2400 * 10**9,
        source="NVIDIA A100 data sheet (SXM, 40 GB)",
    ),
    "A100": Gpu(
        memory=80 * 10**9,
        nvlink=2400 * 10**9,
        source="NVIDIA A100 data sheet (SXM, 80 GB)",
    ),
    "H100": Gpu(
        memory=80 * 10**9,
        nvlink=3600 * 10**9,
        source="NVIDIA H100 data sheet (SXM)",
    ),
    "H200": Gpu(
        memory=141 * 10**9,
        nvlink=3600 * 10**9,
        source="NVIDIA H200 data sheet (SXM)",
    ),
    "B200": Gpu(
        memory=180 * 10**9,
        nvlink=7200 * 10**9,
        source="NVIDIA HGX B200 and DGX B200 data sheets, an eighth of a node",
    ),
}
"""By the name that ``cluster.gpu`` takes; all are SXM modules."""


def gpu_named(name: str, where: str) -> Gpu:
    """Raise ``ConfigError`` for a name that is not in ``GPUS``; ``where`` is what named it."""
    if name not in GPUS:
        raise ConfigError("no such GPU", where, repr(name), f"one of {', '.join(GPUS)}")
    return GPUS[name]
