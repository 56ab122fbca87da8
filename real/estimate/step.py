"""Step: one step of a model, priced operation by operation, as a layer table and a profile.

Prices follow a roofline: the GPU's data sheet, and a few efficiencies fitted to published runs.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import nn

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.fields import named
from fleetbench.hardware import Gpu, Precision, gpu_name, gpu_named
from fleetbench.measurements import Memory, ModelFlops
from fleetbench.profile import Profile, compute_key
from fleetbench.quantities import Bytes
from fleetbench.strategy import DistributedStrategy
from fleetbench.support import changed_fields
from fleetbench.workloads.models.registry import MODELS, check_model, loss_of, placeholder_batch
from fleetbench.workloads.training import make_optimizer
from real.compute.mixed_precision import apply_mixed_precision
from real.compute.recompute import SavedForBackward, apply_recompute
from real.engine.buckets import ModelBuffers
from real.estimate.operations import Operation, Recorder, nothing_computed
from real.layer_times import LayerClock, Measured, memory_bytes, table_of

_PRECISIONS: Mapping[torch.dtype, Precision] = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}
_BALANCE = 312e12 / 2039e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiencies:
    """Shares of a data sheet's rates that kernels reach, and the time of a launch.

    ``reports/estimate/fit.py`` fits them.
    """

    matmul: float = 0.761
    convolution: float = 0.533
    attention: float = 0.402
    memory: float = 0.725
    """Share of the memory's bandwidth, for all bytes that operations move."""
    vector: float = 0.822
    """Share of the peak without tensor cores, for matrix products in fp32 and fp64."""
    vector_convolution: float = 1.13
    """Share of the peak without tensor cores, for convolutions, which may need fewer operations than are
    counted (Winograd's algorithm)."""
    vector_attention: float = 0.376
    """Share of the peak without tensor cores, for fused attention, which has no kernels for TF32."""
    launch_s: float = 25.9e-6
    """Shortest time of an operation in seconds."""
    balance: float = 0.234
    """Exponent of the fall of tensor cores' shares with the GPU's FLOP/s per byte/s, relative to an A100's in
    fp16. No share exceeds ``vector``."""


FITTED = Efficiencies()
HALF_WIDTH = 0.3
"""Half the relative width of a step's interval on GPUs with published runs. 60 of 65 runs are inside, each
predicted by a fit without its model and GPU. On an H200, 8 of 10 predictions that were sealed before the
measurement were within 25 %."""
HALF_WIDTHS = {"V100": 0.25, "A100": 0.25, "A100-40GB": 0.25, "H100": HALF_WIDTH, "H200": HALF_WIDTH, "B200": HALF_WIDTH}
"""Half-widths by GPU; 40 of 44 published runs on V100 and A100 are inside theirs."""
_UNSEEN = 0.5
"""Half-width for GPUs without any published run; it is chosen, not fitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Times of operations on one GPU: the sum of compute and memory traffic.

    They add up because kernels overlap the two only in part.
    """

    gpu: Gpu
    tf32: bool = False
    """Whether float32 products use tensor cores. Convolutions do so in any case if the GPU can and
    ``torch.backends.cudnn.allow_tf32`` is set."""
    efficiencies: Efficiencies = FITTED

    def seconds(self, operation: Operation) -> float:
        """Return the seconds of one operation."""
        own = self.efficiencies
        moving_s = operation.nbytes / (own.memory * self.gpu.memory_bandwidth)
        if operation.kind == "memory":
            return max(own.launch_s, moving_s)
        fused, convolution, precision = operation.kind == "fused_attention", operation.kind == "convolution", self.precision(operation)
        peak = self.gpu.flops_s[precision]
        if precision in ("fp32", "fp64"):
            share = own.vector_convolution if convolution else own.vector_attention if fused else own.vector
        else:
            tensor_cores = own.attention if fused else getattr(own, operation.kind)
            share = min(own.vector, tensor_cores * (peak / self.gpu.memory_bandwidth / _BALANCE) ** -own.balance)
        return max(own.launch_s, operation.flops / (share * peak) + moving_s)

    def precision(self, operation: Operation) -> Precision:
        """Return the type in which the GPU computes an operation."""
        fused, convolution = operation.kind == "fused_attention", operation.kind == "convolution"
        narrowed = "tf32" in self.gpu.flops_s and not fused and (self.tf32 or (convolution and torch.backends.cudnn.allow_tf32))
        return _PRECISIONS.get(operation.dtype, "tf32" if narrowed else "fp32")

    def update_s(self, nbytes: int) -> float:
        """Return the seconds of an optimizer's step that moves ``nbytes``."""
        return nbytes / (self.efficiencies.memory * self.gpu.memory_bandwidth)


class StepEstimate:
    """Estimate of one step of a model.

    Life cycle: inside ``recorder``, the forward (in the context ``forward``), the backward and
    ``backward_ends``; then ``update`` and ``profile``.
    """

    def __init__(self, model: nn.Module, strategy: DistributedStrategy, gpu: str, *, tf32: bool) -> None:
        """Prepare and hook the model. Raises ``ConfigError`` for a step that cannot be estimated."""
        self._gpu: Gpu = gpu_named(gpu, "--gpu")
        self._name, self._tf32, self._strategy, self._model = gpu_name(gpu, "--gpu"), tf32, strategy, model
        self._refuse()
        self._roofline = Roofline(gpu=self._gpu, tf32=tf32)
        self.recorder = Recorder(lambda operation: 1e9 * self._roofline.seconds(operation))
        if strategy.recompute:
            apply_recompute(model, strategy.recompute_configs.checkpoints)
        if strategy.amp:
            apply_mixed_precision(model, strategy.amp_configs, "cpu", lambda: 1.0)
        self._clock = LayerClock(model, self.recorder)
        self._clock.attach()
        self.forward = SavedForBackward(model, lambda: self._clock.current)
        """Context of the forward and the loss."""

    def _refuse(self) -> None:
        strategy = self._strategy
        for name, _ in changed_fields(strategy.build_strategy, "strategy.build_strategy"):
            if name in named("restarts"):
                raise ConfigError("the time of compiled code is not estimated", name, "true", "leave it at its default")
        if any(getattr(module, "sparse", False) for module in self._model.modules()):
            hint = "declare the layers in workload.layers, an embedding by its rows, width and touched"
            raise ConfigError("what sparse gradients take is not estimated", "the model", type(self._model).__name__, hint)
        if strategy.amp and strategy.amp_configs.dtype not in self._gpu.flops_s:
            known = ", ".join(self._gpu.flops_s)
            raise ConfigError(f"{self._name} has no {strategy.amp_configs.dtype}", "strategy.amp_configs.dtype", hint=f"it has {known}")

    def backward_ends(self) -> None:
        """Mark the end of the backward."""
        self._end = self.recorder.mark()
        self._clock.keep()
        self._clock.detach()

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the optimizer create its state, and compute the time of its step from the bytes that it moves."""
        optimizer.step()
        self._memory = memory_bytes(self._model, optimizer, sum(self.forward.by_name.values()))
        moved = (5 if self._strategy.scales_loss else 3) * self._memory["gradients"] + 2 * self._memory["optimizer_state"]
        self._update_ns = round(1e9 * self._roofline.update_s(moved))

    def _model_flops(self) -> ModelFlops | None:
        """Return the FLOPs of forward and backward without recompute; ``None`` for a model without products."""
        forward = [one for one in self.recorder.operations[: self._clock.forward_end] if one.model_flops]
        peaks = {self._gpu.flops_s[precision]: precision for precision in map(self._roofline.precision, forward)}
        if not peaks:
            return None
        return ModelFlops(per_step=3.0 * sum(one.model_flops for one in forward), peak_s=max(peaks), precision=peaks[max(peaks)])

    def profile(self, key: str) -> Profile:
        """Return the estimated profile, with the layer table under ``key`` and the memory."""
        last, end = self.recorder.resolve([self._clock.forward_end, self._end])
        buffers = ModelBuffers(self._model)
        part = Measured(
            layers=self._clock.times(),
            backward=[end - last],
            update=[self._update_ns],
            read=[0],
            activation_bytes=dict(self.forward.by_name),
            buffers_nbytes=buffers.nbytes,
            averaged_nbytes=buffers.averaged_nbytes,
        )
        held = {name: Bytes(size) for name, size in self._memory.items() if name != "peak"}
        precision = self._strategy.amp_configs.dtype if self._strategy.amp else "TF32" if self._tf32 else "float32"
        return Profile(
            machine=f"{self._name}, not measured: a roofline of {self._gpu.source}",
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            tables=(table_of(key, [dataclasses.asdict(part)]),),
            memory=Memory(**held, peak=Bytes(sum(held.values()))),
            flops=self._model_flops(),
            estimated=half_width(self._name),
            notes=(f"matrix products in {precision}; reading data and starting collectives take no time",),
        )


def half_width(gpu: str) -> float:
    """Return half the relative width of a step's interval on a GPU."""
    return HALF_WIDTHS.get(gpu, _UNSEEN)


def estimate(experiment: Experiment, gpu: str, *, tf32: bool = False) -> Profile:
    """Return the estimated profile of ``experiment``, a registry model's, on ``gpu``, under its key.

    Raises ``ConfigError`` if it cannot be estimated.
    """
    workload = experiment.workload
    check_model(workload)
    default, compare = torch.get_default_dtype(), loss_of(workload.model)
    with nothing_computed():
        torch.set_default_dtype(getattr(torch, workload.dtype))
        try:
            model = MODELS[workload.model](**workload.model_options)
        finally:
            torch.set_default_dtype(default)
        step = StepEstimate(model, experiment.strategy, gpu, tf32=tf32)
        inputs, labels = placeholder_batch(workload)
        with step.recorder:
            with step.forward:
                loss = compare(model(inputs), labels)
            loss.backward()
            step.backward_ends()
        step.update(make_optimizer(model, workload))
    is_text = inputs.ndim == 2 and not inputs.is_floating_point()
    return dataclasses.replace(step.profile(compute_key(experiment)), sample_tokens=inputs.shape[1] if is_text else None)


def estimated(experiment: Experiment, gpu: str, root: Path, *, tf32: bool = False) -> Experiment:
    """Return the experiment with its estimated profile, a file below ``root`` that is created if it is missing."""
    version = hashlib.sha256(repr((FITTED, half_width(gpu), gpu_named(gpu, "--gpu"), tf32)).encode()).hexdigest()[:8]
    path = (root / "estimates" / f"{experiment.workload.model}-{gpu}-{compute_key(experiment)}-{version}.toml").resolve()
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        estimate(experiment, gpu, tf32=tf32).save(path)
    return experiment.replace(workload=dataclasses.replace(experiment.workload, profile=str(path)))
