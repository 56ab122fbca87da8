"""GPUs by name: what their data sheets say of one, without sparsity.

Each way, NVLink carries half of the rate that data sheets give.
"""

from __future__ import annotations

from dataclasses import dataclass

from fleetbench.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU: peak rates, which no program reaches."""

    float32: float
    """FLOP/s outside of tensor cores."""
    tf32: float
    """FLOP/s of FP32 matrices on tensor cores; that of ``float32`` where they do not take them."""
    half: float
    """FLOP/s of FP16 or BF16 on tensor cores, sums in FP32."""
    memory: int
    """Bytes."""
    memory_bandwidth: float
    """Bytes per second."""
    nvlink: int
    """Bits per second, each way."""
    bf16: bool = True
    source: str


GPUS = {
    "V100": Gpu(
        float32=15.7e12,
        tf32=15.7e12,
        half=125e12,
        memory=32 * 10**9,
        memory_bandwidth=900e9,
        nvlink=1200 * 10**9,
        bf16=False,
        source="NVIDIA V100 data sheet (SXM2, 32 GB)",
    ),
    "A100-40GB": Gpu(
        float32=19.5e12,
        tf32=156e12,
        half=312e12,
        memory=40 * 10**9,
        memory_bandwidth=1555e9,
        nvlink=2400 * 10**9,
        source="NVIDIA A100 data sheet (SXM, 40 GB)",
    ),
    "A100": Gpu(
        float32=19.5e12,
        tf32=156e12,
        half=312e12,
        memory=80 * 10**9,
        memory_bandwidth=2039e9,
        nvlink=2400 * 10**9,
        source="NVIDIA A100 data sheet (SXM, 80 GB)",
    ),
    "H100": Gpu(
        float32=67e12,
        tf32=494.7e12,
        half=989.4e12,
        memory=80 * 10**9,
        memory_bandwidth=3.35e12,
        nvlink=3600 * 10**9,
        source="NVIDIA H100 data sheet (SXM)",
    ),
    "H200": Gpu(
        float32=67e12,
        tf32=494.7e12,
        half=989.4e12,
        memory=141 * 10**9,
        memory_bandwidth=4.8e12,
        nvlink=3600 * 10**9,
        source="NVIDIA H200 data sheet (SXM)",
    ),
    "B200": Gpu(
        float32=75e12,
        tf32=1.1e15,
        half=2.25e15,
        memory=180 * 10**9,
        memory_bandwidth=8e12,
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
