"""Utilisation: throughput of one trainer, which is one GPU, and the share of its GPU that it uses.

Model FLOPs utilisation (MFU; Chowdhery et al. 2022, PaLM, arXiv 2204.02311, appendix B) is the FLOPs of a
model's forward and backward, per second, as a share of the GPU's peak. Recomputation (``strategy.recompute``)
does not count, and a causal mask saves nothing.
"""

from dataclasses import dataclass

from fleetbench import units
from fleetbench.config import Config
from fleetbench.experiment import Experiment
from fleetbench.profile import profile_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Utilisation(Config):
    """Throughput and memory of one trainer."""

    samples_per_s: float
    """Samples per second."""
    tokens_per_s: float | None = None
    """Tokens per second; None if neither ``workload.data_options.length`` nor an estimate gives the number of
    tokens in a sample."""
    mfu: float | None = None
    """Model FLOPs utilisation. Like the next two fields, None if no estimate has counted FLOPs."""
    peak_flops_s: float | None = None
    """Peak FLOP/s of dense products in ``precision``, from the GPU's data sheet."""
    precision: str | None = None
    """Precision of ``peak_flops_s``."""
    memory_bytes: int | None = None
    """Peak memory of a trainer in bytes; None if unknown."""

    @property
    def line(self) -> str:
        """Line with throughput, MFU and memory."""
        parts = [f"{self.samples_per_s:,.4g} samples/s"]
        parts += [f"{self.tokens_per_s:,.0f} tokens/s"] if self.tokens_per_s is not None else []
        parts += [f"MFU {units.percent(self.mfu)} of {self.peak}"] if self.mfu is not None else []
        parts += [f"{units.size(self.memory_bytes)} of memory"] if self.memory_bytes is not None else []
        return f"per {'trainer' if self.mfu is None else 'GPU'}: {', '.join(parts)}"

    @property
    def peak(self) -> str:
        """Peak rate that ``mfu`` refers to, in words."""
        return f"{(self.peak_flops_s or 0) / 1e12:,.4g} TFLOP/s (dense {self.precision})"


def utilisation(experiment: Experiment, step_s: float, memory_bytes: int | None = None) -> Utilisation:
    """Return the utilisation for a step time in seconds.

    A step is one forward and backward of ``workload.batch_size`` samples.
    """
    profile = profile_of(experiment)
    length = experiment.workload.data_options.get("length", None if profile is None else profile.sample_tokens)
    samples_per_s = experiment.workload.batch_size / step_s
    flops = None if profile is None else profile.flops
    return Utilisation(
        samples_per_s=samples_per_s,
        tokens_per_s=samples_per_s * length if isinstance(length, int) else None,
        mfu=None if flops is None else flops.per_step / step_s / flops.peak_s,
        peak_flops_s=None if flops is None else flops.peak_s,
        precision=None if flops is None else flops.precision,
        memory_bytes=memory_bytes,
    )
