"""LayerTable: what a plan and a simulator must know of a model, measured or declared."""

from __future__ import annotations

from dataclasses import dataclass

from fleetbench.config import Config
from fleetbench.errors import ConfigError
from fleetbench.quantities import Bytes, Nanoseconds
from fleetbench.workload import Workload

DTYPE_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient(Config):
    """One parameter's gradient."""

    name: str
    """The parameter's name; its owning layer is what stands before the last dot."""
    numel: int
    dtype: str = "float32"
    sparse: bool = False
    touched: int = 0
    """Of a sparse gradient: numbers that a step touches, where that is known; 0: as good as all."""
    ready: Nanoseconds
    """From the start of the backward until the gradient is final, at X = 0 and without communication."""

    def _validate(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError("not a gradient's type", "dtype", repr(self.dtype), f"one of {', '.join(DTYPE_BYTES)}")
        if self.numel < 0 or self.ready < 0:
            raise ConfigError(
                "cannot be negative", self.name, f"numel {self.numel}, ready {self.ready} ns", "take the profile again, or mend its file"
            )

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * DTYPE_BYTES[self.dtype]

    @property
    def layer(self) -> str:
        """Name of the owning module."""
        return self.name.rpartition(".")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer(Config):
    """One layer in forward order."""

    name: str
    gradients: tuple[Gradient, ...] = ()
    forward: Nanoseconds
    backward: Nanoseconds
    activation_bytes: Bytes = Bytes(0)
    forward_mad: Nanoseconds = Nanoseconds(0)
    """Median absolute deviation over steps and ranks, where the time was measured."""
    backward_mad: Nanoseconds = Nanoseconds(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTable(Config):
    """A model's layers in forward order, and what a step costs besides them."""

    key: str
    """Names all that changes compute; see ``fleetbench.profile.compute_key``."""
    layers: tuple[Layer, ...]
    update: Nanoseconds = Nanoseconds(0)
    """One optimizer step over all parameters."""
    local_update: Nanoseconds | None = None
    """The same under Local SGD, where parameters lie otherwise; none: as ``update``."""
    read: Nanoseconds = Nanoseconds(0)
    """The loop's own work at the start of a step: fetching one batch, reading the loss back."""
    load: Nanoseconds = Nanoseconds(0)
    """Making one batch, where that is told apart from ``read``; see ``fleetbench.plan.host_work``."""
    loaders: int = 0
    """Processes of a trainer that make batches beside its compute; without any the loop makes them itself."""
    prefetch: int = 2
    """Batches that one of them may be ahead."""
    fetch: Nanoseconds = Nanoseconds(0)
    """Reading results back from the device, every ``fetch_every_n_steps`` steps, where that is told apart from ``read``."""
    buffers_nbytes: Bytes = Bytes(0)
    """Batch-norm statistics and such, all together."""
    merge: Nanoseconds = Nanoseconds(0)
    """Building the parameters' deltas and applying their average, at a Local SGD synchronisation."""
    host_per_collective: Nanoseconds = Nanoseconds(0)
    """Host time that starting one collective takes from compute."""
    pack: Nanoseconds = Nanoseconds(0)
    """Copying all gradients into their buckets; a bucket takes its share of the bytes, between its gradients' readiness and its start."""
    contention: float = 0.0
    """By which factor compute slows while a collective is in flight: it takes 1 + contention times as long."""
    collective_contention: float = 0.0
    """By which factor a collective slows while one of its ranks computes: on a CPU both need the same cores."""

    @property
    def forward_ns(self) -> int:
        """The whole forward."""
        return sum(layer.forward for layer in self.layers)

    @property
    def backward_ns(self) -> int:
        """The whole backward."""
        return sum(layer.backward for layer in self.layers)

    def by_readiness(self) -> tuple[Gradient, ...]:
        """All gradients, first ready first; ties keep the reverse of the forward order."""
        backward = [gradient for layer in reversed(self.layers) for gradient in reversed(layer.gradients)]
        return tuple(sorted(backward, key=lambda gradient: gradient.ready))


def declared_table(workload: Workload) -> LayerTable:
    """The table that ``workload.layers`` declares; a repeated layer gets its index after its name.

    A layer's gradients are ready when the layer's backward ends.
    """
    flat = [(spec, name) for spec in workload.layers for name in spec.names]
    layers: list[Layer] = []
    ready = 0
    for spec, name in reversed(flat):
        ready += spec.backward
        gradients = tuple(
            Gradient(name=f"{name}.{own}", numel=numel, dtype=workload.dtype, ready=Nanoseconds(ready))
            for own, numel in spec.gradients.items()
        )
        layers.append(Layer(name=name, gradients=gradients, forward=spec.forward, backward=spec.backward))
    names = ("read", "load", "loaders", "prefetch", "fetch", "update", "pack")
    host = {} if workload.host is None else {name: getattr(workload.host, name) for name in names}
    if workload.host is not None:
        host["host_per_collective"] = workload.host.per_collective
    buffers = sum(spec.buffers * spec.repeat for spec in workload.layers)
    return LayerTable(key="declared", layers=tuple(reversed(layers)), buffers_nbytes=Bytes(buffers), **host)
