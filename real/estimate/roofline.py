"""Roofline: what an operation takes on a GPU, from its data sheet and a few efficiencies fitted to published runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fleetbench.hardware.gpus import Gpu, Precision
from real.estimate.operations import Operation

_PRECISIONS: Mapping[torch.dtype, Precision] = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}
_BALANCE = 312e12 / 2039e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiencies:
    """Shares of a data sheet's rates that kernels reach, and what starting one takes."""

    matmul: float
    convolution: float
    attention: float
    memory: float
    """Of the memory's bandwidth, for all bytes that operations move."""
    vector: float
    """Of the peak without tensor cores: matrix products in fp32 and fp64."""
    vector_convolution: float
    """The same of convolutions, which may need fewer operations than are counted (Winograd's algorithm)."""
    launch_s: float
    """The least that an operation takes."""
    balance: float
    """By which power tensor cores' shares fall with FLOP/s for each byte/s, from those of an A100's fp16 on."""


FITTED = Efficiencies(
    matmul=0.785, convolution=0.563, attention=0.409, memory=0.743, vector=0.826, vector_convolution=1.12, launch_s=27.3e-6, balance=0.239
)
"""``reports/estimate/fit.py`` fits them, to all runs of its table."""
HALF_WIDTH = 0.25
"""Of the interval of a step's time: of runs of a model and GPU that were left out of the fit, 90 % lie within it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """One GPU. The times of computing and of moving add up: kernels overlap the two in part only."""

    gpu: Gpu
    tf32: bool = False
    """Whether float32 products and convolutions use tensor cores."""
    efficiencies: Efficiencies = FITTED

    def seconds(self, operation: Operation) -> float:
        """What one operation takes."""
        own = self.efficiencies
        moving_s = operation.nbytes / (own.memory * self.gpu.memory_bandwidth)
        if operation.kind == "memory":
            return max(own.launch_s, moving_s)
        precision = _PRECISIONS.get(operation.dtype, "tf32" if self.tf32 and "tf32" in self.gpu.flops_s else "fp32")
        peak = self.gpu.flops_s[precision]
        if precision in ("fp32", "fp64"):
            share = own.vector_convolution if operation.kind == "convolution" else own.vector
        else:
            share = getattr(own, operation.kind) * (peak / self.gpu.memory_bandwidth / _BALANCE) ** -own.balance
        return max(own.launch_s, operation.flops / (share * peak) + moving_s)

    def update_s(self, nbytes: int) -> float:
        """What an optimizer's step takes that moves so many bytes."""
        return nbytes / (self.efficiencies.memory * self.gpu.memory_bandwidth)
