"""LayerTable: the facts about a model, measured or declared, that a plan and a simulator need.

``StepHead`` is the host's work before a forward.
"""

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any

from fleetbench.config import Config
from fleetbench.errors import ConfigError
from fleetbench.quantities import Bytes, Nanoseconds
from fleetbench.workload import Workload

INDEX_BYTES = 8
"""Bytes per row index of a sparse gradient; torch's indices are int64."""
DTYPE_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "complex64": 8, "complex128": 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient(Config):
    """One parameter's gradient."""

    name: str
    """Name of the parameter; its owning layer is the part before the last dot."""
    numel: int
    """Number of elements."""
    dtype: str = "float32"
    """Type of the elements."""
    sparse: bool = False
    """Whether the gradient is sparse."""
    touched: int = 0
    """Number of elements of a sparse gradient that a step touches; 0 if unknown, which counts as all."""
    width: int = 0
    """Number of elements per row of a sparse gradient. 0 if unknown; row indices are then not counted."""
    ready: Nanoseconds
    """Time from the start of the backward until the gradient is final, without straggling or communication."""

    def _validate(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError("is not a gradient's type", f"dtype of {self.name}", repr(self.dtype), f"one of {', '.join(DTYPE_BYTES)}")
        if self.numel < 0 or self.ready < 0:
            raise ConfigError(
                "cannot be negative", self.name, f"numel {self.numel}, ready {self.ready} ns", "take the profile again, or correct its file"
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
    """Name of the layer."""
    gradients: tuple[Gradient, ...] = ()
    """Gradients of the layer's parameters."""
    forward: Nanoseconds
    """Time of the forward in ns."""
    backward: Nanoseconds
    """Time of the backward."""
    activation_bytes: Bytes = Bytes(0)
    """Bytes that the forward saves for the backward."""
    forward_mad: Nanoseconds = Nanoseconds(0)
    """Median absolute deviation of the forward over steps and ranks, if measured."""
    backward_mad: Nanoseconds = Nanoseconds(0)
    """Median absolute deviation of the backward over steps and ranks, if measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTable(Config):
    """A model's layers in forward order, and the other costs of a step, such as the optimizer and fetching a batch."""

    key: str
    """Key that identifies everything that affects compute; see ``fleetbench.profile.compute_key``."""
    layers: tuple[Layer, ...]
    """Layers in forward order."""
    update: Nanoseconds = Nanoseconds(0)
    """Time of one optimizer step over all parameters."""
    local_update: Nanoseconds | None = None
    """Time of one optimizer step under Local SGD, which lays out parameters differently. None if equal to
    ``update``."""
    local_compute: float = 1.0
    """Ratio of the time of forward and backward in consecutive local steps to that in a synchronous step,
    which follows an idle wait."""
    resume: Nanoseconds = Nanoseconds(0)
    """Total extra time of the first steps after an averaging."""
    read: Nanoseconds = Nanoseconds(0)
    """Time of the training loop's own work at the start of a step: fetching one batch, reading the loss back."""
    load: Nanoseconds = Nanoseconds(0)
    """Time to make one batch, if measured separately from ``read``; see ``StepHead``."""
    loaders: int = 0
    """Number of processes per trainer that make batches in parallel with compute. 0 if the training loop
    makes them itself."""
    prefetch: int = 2
    """Number of batches that each loader process may make ahead."""
    fetch: Nanoseconds = Nanoseconds(0)
    """Time to read results back from the device, every ``fetch_every_n_steps`` steps, if measured separately
    from ``read``."""
    buffers_nbytes: Bytes = Bytes(0)
    """Bytes of all buffers, such as batch-norm statistics."""
    averaged_nbytes: Bytes | None = None
    """Bytes sent to average the buffers, as in ``Setting``. None (older profiles, declared layers): all bytes
    of the buffers."""
    merge: Nanoseconds = Nanoseconds(0)
    """Time to compute the parameters' deltas and apply their average, at a Local SGD synchronisation."""
    host_per_collective: Nanoseconds = Nanoseconds(0)
    """Host time to start one collective, during which compute waits."""
    pack: Nanoseconds = Nanoseconds(0)
    """Time to copy all gradients into their buckets. A bucket's share is proportional to its bytes, and
    delays its start after its gradients are ready."""
    contention: float = 0.0
    """Slowdown of compute while a collective is in flight: compute takes 1 + contention times as long."""
    collective_contention: float = 0.0
    """Slowdown of a collective while one of its ranks computes, because on a CPU both need the same cores."""

    def _validate(self) -> None:
        if not 0.0 < self.local_compute < math.inf:
            raise ConfigError("a share of compute is above 0", "local_compute", repr(self.local_compute), "take the profile again")
        for name in ("contention", "collective_contention"):
            if not 0.0 <= (value := getattr(self, name)) < math.inf:
                raise ConfigError("slows compute or a collective, so it is at least 0", name, repr(value), "take the profile again")

    @property
    def forward_ns(self) -> int:
        """Time of the whole forward, in ns."""
        return sum(layer.forward for layer in self.layers)

    @property
    def backward_ns(self) -> int:
        """Time of the whole backward, in ns."""
        return sum(layer.backward for layer in self.layers)

    def by_readiness(self) -> tuple[Gradient, ...]:
        """Return all gradients in order of readiness; ties keep the reverse of the forward order."""
        backward = [gradient for layer in reversed(self.layers) for gradient in reversed(layer.gradients)]
        return tuple(sorted(backward, key=lambda gradient: gradient.ready))


def declared_table(workload: Workload) -> LayerTable:
    """Return the table that ``workload.layers`` declares; the names of repeated layers end with an index.

    A layer's gradients are ready when the layer's backward ends.
    """
    flat = [(spec, name) for spec in workload.layers for name in spec.names]
    layers: list[Layer] = []
    ready = 0
    for spec, name in reversed(flat):
        ready += spec.backward
        gradients = tuple(
            Gradient(
                name=f"{name}.{own}",
                numel=numel,
                dtype=workload.dtype,
                sparse=spec.rows > 0,
                touched=spec.touched * spec.width,
                width=spec.width if spec.rows else 0,
                ready=Nanoseconds(ready),
            )
            for own, numel in spec.gradients.items()
        )
        layers.append(Layer(name=name, gradients=gradients, forward=spec.forward, backward=spec.backward))
    names = ("read", "load", "loaders", "prefetch", "fetch", "update", "merge", "pack")
    host = {} if workload.host is None else {name: getattr(workload.host, name) for name in names}
    if workload.host is not None:
        host["host_per_collective"] = workload.host.per_collective
    buffers = sum(spec.buffers * spec.repeat for spec in workload.layers)
    return LayerTable(key="declared", layers=tuple(reversed(layers)), buffers_nbytes=Bytes(buffers), **host)


def times(moment_ns: int, factor: float) -> Nanoseconds:
    """Return ``moment_ns`` times ``factor``, rounded once, half up."""
    return Nanoseconds(math.floor(moment_ns * Fraction(repr(float(factor))) + Fraction(1, 2)))


def scaled(table: LayerTable, forward: float, backward: float) -> LayerTable:
    """Return the table with all forward times multiplied by ``forward``, and backward times by ``backward``.

    Running sums are rounded, so that rounding errors do not add up.
    """

    def durations(undisturbed: Iterable[int], factor: float) -> list[Nanoseconds]:
        return [Nanoseconds(times(end, factor) - times(begin, factor)) for begin, end in pairwise((0, *accumulate(undisturbed)))]

    forward_ns = durations((layer.forward for layer in table.layers), forward)
    backward_ns = durations((layer.backward for layer in reversed(table.layers)), backward)[::-1]
    layers = tuple(
        dataclasses.replace(
            layer,
            gradients=tuple(dataclasses.replace(gradient, ready=times(gradient.ready, backward)) for gradient in layer.gradients),
            forward=own_forward_ns,
            backward=own_backward_ns,
            forward_mad=times(layer.forward_mad, forward),
            backward_mad=times(layer.backward_mad, backward),
        )
        for layer, own_forward_ns, own_backward_ns in zip(table.layers, forward_ns, backward_ns, strict=True)
    )
    return dataclasses.replace(table, layers=layers)


class StepHead:
    """Start of a step: read results back if due, take a batch, do the loop's other work.

    All executors use this rule.

    The i-th step of a trainer, i = 0 for the first, starts at S_i. Results of earlier steps are read back
    every n-th step: F_i = S_i + ``fetch`` if i > 0 and i is a multiple of ``fetch_every`` n, else S_i. Then
    the batch is taken at T_i, and the forward begins at T_i + ``read``. Results that are due after the last
    step are read at its end.

    ``loaders`` w processes make batches in parallel with compute, in turn, each in ``load``. Each loader may
    be ``prefetch`` q batches ahead, d = w q in all, and another batch is requested whenever one is taken
    (torch's ``DataLoader``, ``torch/utils/data/dataloader.py``, ``_try_put_index``). Batch i is ready at P_i
    = max(P_{i - w}, T_{i - d}) + ``load``, with the start of training for negative indices, and T_i =
    max(F_i, P_i). So a trainer whose step is longer than ``load`` / w never waits for a batch, and one whose
    step is shorter takes one step every ``load`` / w. Without loaders the loop makes the batch itself: T_i =
    F_i + ``load``.

    Times are integer nanoseconds of one clock; ``forward_begins`` is called once per step, in order.
    """

    def __init__(self, table: LayerTable, fetch_every: int, begin_ns: int, latest: Callable[[Any, Any], Any] = max) -> None:
        """Create the rule for a trainer whose loaders start at ``begin_ns``.

        ``latest`` returns the later of two times; with ``numpy.maximum``, times may be arrays over ranks.
        """
        self._table = table
        self._latest = latest
        self._fetch_every = fetch_every
        self._num_steps = 0
        outstanding = table.loaders * table.prefetch
        self._ready = deque([begin_ns] * table.loaders, maxlen=table.loaders)
        self._taken = deque([begin_ns] * outstanding, maxlen=outstanding)

    def read_ns(self) -> int:
        """Return the time in ns to read results back after the steps so far; 0 if that is not due."""
        return self._table.fetch if self._num_steps > 0 and self._num_steps % self._fetch_every == 0 else 0

    def forward_begins(self, start_ns: int) -> int:
        """Return the time in ns at which the forward of the step that starts at ``start_ns`` begins."""
        asked_ns = start_ns + self.read_ns()
        self._num_steps += 1
        if not self._table.loaders:
            return asked_ns + self._table.load + self._table.read
        self._ready.append(self._latest(self._ready[0], self._taken[0]) + self._table.load)
        self._taken.append(self._latest(asked_ns, self._ready[-1]))
        return self._taken[-1] + self._table.read
