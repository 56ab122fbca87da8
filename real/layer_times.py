"""Layer times: one rank's compute time by layer and its memory, and the layer table of all ranks.

The engine runs as it will in training, with mixed precision, recompute, compiled blocks and the fused update,
but as if there were one trainer: no gradient is exchanged. All ranks of the launch do it at once, because
they share a host.

A layer is a module that owns parameters. The time of modules without any, and of the loss, belongs to the
layer before. A layer's backward lasts until its last gradient is final. Inside a compiled block no hook runs,
so the whole block counts as the last of its layers.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from fleetbench.measurements import Memory
from fleetbench.plan.groups import Parts
from fleetbench.plan.layers import Gradient, Layer, LayerTable
from fleetbench.quantities import Bytes, Nanoseconds
from fleetbench.workloads.data.reader import BatchTime, ReadsAhead
from fleetbench.workloads.training import sparse_weights
from real.communication.clocks import Clock, Mark, clock_of
from real.communication.communicators import Communicators
from real.communication.lanes import InlineLane
from real.compute.recompute import SavedForBackward
from real.engine.buckets import ModelBuffers
from real.engine.engine import Engine
from real.gradient_noise import GradientNoise
from real.leg import Leg

Floats = npt.NDArray[np.float64]
LEAST_STEPS = 3
"""Smallest number of counted steps, however long they take."""
_WARMUP_SHARE = 0.2


@dataclass(slots=True)
class LayerTimes:
    """Times in ns of every profiled step of one rank, one inner list per step."""

    layers: list[str]
    """Modules that own parameters, in registration order."""
    gradients: list[tuple[str, int, str]]
    """Name, number of elements and type of every gradient, in registration order."""
    forward: list[list[int]] = field(default_factory=list)
    """Duration of every layer's forward."""
    ready: list[list[int | None]] = field(default_factory=list)
    """Time from the end of the forward until each gradient is final; ``None`` for a missing gradient."""


@dataclass(slots=True)
class _Step:
    """Marks of one step."""

    begin: Mark
    forward_end: Mark = None
    entered: dict[str, Mark] = field(default_factory=dict)
    ready: dict[str, Mark] = field(default_factory=dict)


class LayerClock:
    """Times a model's layers by hooks between ``attach`` and ``detach``; ``keep`` stores the last step.

    A step is the whole model's forward, with a mark at each layer's entry, and the backward, with a mark at
    each gradient. A recomputed forward does not count. Forwards in evaluation mode or without gradients are
    ignored.
    """

    def __init__(self, model: torch.nn.Module, clock: Clock | None = None) -> None:
        self._model = model
        self._clock = clock or Clock()
        with_parameters = {name: module for name, module in model.named_modules() if any(True for _ in module.parameters())}
        self._modules = {name: module for name, module in with_parameters.items() if name}
        self._layers = [name for name, module in with_parameters.items() if any(True for _ in module.parameters(recurse=False))]
        self._parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._handles: list[RemovableHandle] = []
        self._step: _Step | None = None
        self._in_forward = False
        self._kept: list[_Step] = []
        self.current = self._layers[0]
        """Name of the layer that was entered last."""

    def attach(self) -> None:
        """Hook the model, its modules and its parameters."""
        self._handles += [
            self._model.register_forward_pre_hook(lambda *_: self._forward_begins()),
            self._model.register_forward_hook(lambda *_: self._forward_ends()),
            *(module.register_forward_pre_hook(self._enters(name)) for name, module in self._modules.items()),
            *(item.register_post_accumulate_grad_hook(partial(self._on_gradient, name)) for name, item in self._parameters.items()),
        ]

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def keep(self) -> None:
        """Store the last step for ``times``."""
        assert self._step is not None
        self._kept.append(self._step)
        self._step = None

    @property
    def forward_end(self) -> Mark:
        """Mark of the end of the forward of the last stored step."""
        return self._kept[-1].forward_end

    def times(self) -> LayerTimes:
        """Return the times of the stored steps; waits for the device."""
        dtype = {name: str(parameter.dtype).removeprefix("torch.") for name, parameter in self._parameters.items()}
        times = LayerTimes(list(self._layers), [(name, item.numel(), dtype[name]) for name, item in self._parameters.items()])
        for step in self._kept:
            times.forward.append(self._forward_of(step))
            forward_end, *ends = self._clock.resolve([step.forward_end, *step.ready.values()])
            ready = dict(zip(step.ready, (end - forward_end for end in ends), strict=True))
            times.ready.append([ready.get(name) for name in self._parameters])
        return times

    def _forward_of(self, step: _Step) -> list[int]:
        """Return the ns of each layer's forward, from its entry to the next layer's.

        The first layer begins with the step, the last ends with the forward.
        """
        names = list(step.entered)
        begin, *entered, end = self._clock.resolve([step.begin, *step.entered.values(), step.forward_end])
        at = dict(zip(names, entered, strict=True))
        entry = {name: at.get(_nearest(name, at), begin) for name in self._layers}
        order = sorted(
            self._layers, key=lambda name: (entry[name], name in at)
        )  # among layers entered together, the module itself gets the time
        bounds = [begin, *(entry[name] for name in order[1:]), end]
        spans = {name: bounds[index + 1] - bounds[index] for index, name in enumerate(order)}
        return [spans[name] for name in self._layers]

    def _forward_begins(self) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not self._model.training:
            return
        self._step = _Step(self._clock.mark())
        self._in_forward = True

    def _forward_ends(self) -> None:
        if self._in_forward and self._step is not None:
            self._step.forward_end = self._clock.mark()
            self._in_forward = False

    def _enters(self, name: str) -> Callable[..., None]:
        is_layer = name in self._layers

        def hook(*_: object) -> None:
            if torch.compiler.is_compiling():  # a graph has no clock, and reading one would break it
                return
            if self._in_forward and self._step is not None:
                self._step.entered.setdefault(name, self._clock.mark())
                if is_layer:
                    self.current = name

        return hook

    def _on_gradient(self, name: str, _parameter: torch.Tensor) -> None:
        if self._step is not None:
            self._forward_ends()  # a backward within it, as in Lightning's manual optimization
            self._step.ready[name] = self._clock.mark()


def _nearest(name: str, entered: dict[str, int]) -> str:
    """Return ``name``, or the innermost module around it that was entered; empty if only the whole model was."""
    while name and name not in entered:
        name = name.rpartition(".")[0]
    return name


@dataclass(slots=True, kw_only=True)
class Measured:
    """One rank's raw part of a layer table. Times are in ns, one entry per step."""

    layers: LayerTimes
    backward: list[int] = field(default_factory=list)
    update: list[int] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    """Time of the loop's own work: the batch (unless a thread prepares it), the loss, unscaling gradients."""
    load: list[int] = field(default_factory=list)
    """Time that a loader thread takes to make one batch; empty if the training loop makes batches itself."""
    loaders: int = 0
    """Number of threads that make batches."""
    memory: dict[str, int] = field(default_factory=dict)
    """Bytes by the fields of ``Memory``."""
    gradient_noise: dict[str, Any] | None = None
    """Gradient noise by the fields of ``GradientNoise``."""
    touched: dict[str, list[int]] = field(default_factory=dict)
    """Number of elements that a step touches, for every sparse gradient."""
    activation_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes saved for the backward, by layer."""
    buffers_nbytes: int = 0
    averaged_nbytes: int = 0


class Alone(Communicators):
    """Communicators of a single rank; only the statistics of synchronised batch norm still use the other ranks."""

    def __init__(self, others: Communicators) -> None:
        self._others = others
        super().__init__("none", timedelta(), others.device, lambda _name: InlineLane(), others.errors)

    @property
    def trainers(self) -> int:
        """Number of trainers: 1."""
        return 1

    @property
    def rank(self) -> int:
        """Rank of this trainer: 0."""
        return 0

    def require(self, number: int, groups: Mapping[str, Parts] | None = None) -> None:
        """Do nothing, because there are no other ranks."""

    @property
    def beside(self) -> dist.ProcessGroup:
        """See ``Communicators``."""
        return self._others.beside


class ProfileLeg:
    """Measures layer times in steps of one strategy's compute, in which no gradient leaves the rank.

    Life cycle: warm-up -> counted steps. The caller trains; see ``steps``.
    """

    engine: Engine
    """Engine of the strategy, from the first step on."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, communicators: Communicators, *, reads_ahead: ReadsAhead | None = None
    ) -> None:
        """``reads_ahead`` is the source of batches, one per step, if threads prepare them."""
        self._model = model
        self._reads_ahead = reads_ahead if reads_ahead is not None and reads_ahead.loaders else None
        self._optimizer = optimizer
        self._communicators = communicators
        self._parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._clock = LayerClock(model, clock_of(communicators.device))
        self._noise: GradientNoise | None = None
        """Gradient noise, measured during the warm-up, whose times do not count; otherwise ``None``."""
        self._counted: set[int] = set()
        self._touched: dict[str, list[int]] = {}

    def steps(self, leg: Leg, on_step: Callable[[int], None]) -> Generator[SavedForBackward | None, None, Measured]:
        """Yield before each step that the caller trains; the value is a context for the step's forward.

        After each ``optimizer.step()``, while gradients exist, the caller calls ``update_done``.
        """
        self._clock.attach()  # before the engine, because work in its hooks belongs to compute
        self.engine = engine = Engine(self._model, leg.strategy, Alone(self._communicators), first_step=1 - leg.warmup_steps)
        engine.attach_optimizer(self._optimizer)
        engine.on_step = on_step
        if not leg.strategy.amp and not sparse_weights(self._model):
            self._noise = GradientNoise([*self._parameters.values()], self._communicators)
        try:
            saved, step_s = yield from self._warm_up(leg)
            found = None if self._noise is None else self._noise.measured()
            self._noise = None
            reset_peak(self._communicators.device)  # the noise's copies of parameters are not part of the training's memory
            for _ in range(max(LEAST_STEPS, min(leg.steps, int((1 - _WARMUP_SHARE) * leg.max_s / step_s)))):
                yield None
                self._counted.add(engine.step)
                self._clock.keep()
            engine.stopwatch.finish()
            return self._measured(engine, saved, found)
        finally:
            engine.close()
            self._clock.detach()

    def _warm_up(self, leg: Leg) -> Generator[SavedForBackward | None, None, tuple[dict[str, int], float]]:
        """Step until the plan has settled and blocks are compiled.

        Returns the bytes saved for a backward, by layer, and the seconds per step.
        """
        yield None
        saved = SavedForBackward(self._model, lambda: self._clock.current)
        yield saved
        step_s = yield from self._agreed_step_s()
        more = min(leg.warmup_steps - 3, int(_WARMUP_SHARE * leg.max_s / step_s))
        for _ in range(more - 1):
            yield None
        return dict(saved.by_name), (yield from self._agreed_step_s()) if more > 0 else step_s

    def _agreed_step_s(self) -> Generator[SavedForBackward | None, None, float]:
        """Make one step; return its seconds on the slowest rank, so that all ranks derive the same number of steps."""
        begin = time.monotonic()
        yield None
        took = torch.tensor([time.monotonic() - begin], dtype=torch.float64, device=self._communicators.device)
        if self._communicators.trainers > 1:
            self._communicators.require(1)
            self._communicators.all_reduce(took, "max")
        return float(took[0])

    def update_done(self) -> None:
        """Add a step's gradients to the noise after its update, and count the elements that sparse ones touch."""
        if self._noise is not None:
            self._noise.add()
        gradients = {name: parameter.grad for name, parameter in self._parameters.items()}
        sparse = {name: gradient for name, gradient in gradients.items() if gradient is not None and gradient.is_sparse}
        if sparse:
            with self.engine.stopwatch.pause():
                for name, gradient in sparse.items():
                    self._touched.setdefault(name, []).append(gradient.coalesce().values().numel())

    def _measured(self, engine: Engine, saved: dict[str, int], noise: dict[str, Any] | None) -> Measured:
        buffers = ModelBuffers(self._model)
        measured = Measured(
            gradient_noise=noise,
            layers=self._clock.times(),
            touched=self._touched,
            activation_bytes=saved,
            buffers_nbytes=buffers.nbytes,
            averaged_nbytes=buffers.averaged_nbytes,
            memory=memory_bytes(self._model, self._optimizer, sum(saved.values())),
        )
        forwards = map(sum, measured.layers.forward)
        steps = engine.stopwatch.steps
        # a step ends with the next one's forward, so each step gets the batch that was taken after it
        times = [] if self._reads_ahead is None else list(self._reads_ahead.times)
        batches = times[-len(steps) :][1:] if len(times) >= len(steps) else []
        measured.loaders = self._reads_ahead.loaders if self._reads_ahead is not None and batches else 0
        batches += [BatchTime(0, 0)] * (len(steps) - len(batches))
        for timed, batch in zip(steps, batches, strict=True):
            record = timed.record
            if record.step in self._counted:
                # the last forward's: earlier accumulation counts as the loop's own work
                forward = next(forwards)
                known = forward + record.backward_ns + record.stall_ns + record.update_ns + timed.paused_ns
                measured.backward.append(record.backward_ns)
                measured.update.append(record.update_ns)
                measured.read.append(max(0, record.end_ns - record.start_ns - known - batch.waited_ns))
                if batch.load_ns:
                    measured.load.append(batch.load_ns)
        return measured


def table_of(key: str, parts: list[dict[str, Any]]) -> LayerTable:
    """Return one layer table from all ranks' steps; ``parts`` are the ranks' ``Measured`` as dicts.

    The layers' backward follows from the times at which gradients are final.
    """
    first = parts[0]
    times = first["layers"]
    forward = np.concatenate([np.asarray(part["layers"]["forward"], dtype=float) for part in parts])
    backward, update, read = (round(_median(parts, name)) for name in ("backward", "update", "read"))
    steps = _ready_steps(parts)
    names = [name for name, _, _ in times["gradients"]]
    ready = {name: min(round(time), backward) for name, time in zip(names, np.median(steps, axis=0), strict=True)}
    touched = {name: round(median(count for part in parts for count in part["touched"].get(name, ()))) for name in first["touched"]}
    of_layer = {name: [index for index, gradient in enumerate(names) if gradient.rpartition(".")[0] == name] for name in times["layers"]}
    ends = {name: max((ready[names[index]] for index in members), default=0) for name, members in of_layer.items()}
    layers: list[Layer] = []
    before, before_steps = 0, np.zeros(len(steps))
    for index, name in sorted(enumerate(times["layers"]), key=lambda item: ends[item[1]]):
        end_steps = steps[:, of_layer[name]].max(axis=1, initial=0.0)
        layers.append(
            Layer(
                name=name,
                gradients=tuple(
                    Gradient(
                        name=gradient,
                        numel=numel,
                        dtype=dtype,
                        sparse=gradient in touched,
                        touched=touched.get(gradient, 0),
                        ready=Nanoseconds(ready[gradient]),
                    )
                    for gradient, numel, dtype in (times["gradients"][index] for index in of_layer[name])
                ),
                forward=Nanoseconds(round(float(np.median(forward[:, index])))),
                backward=Nanoseconds(ends[name] - before),
                activation_bytes=Bytes(first["activation_bytes"].get(name, 0)),
                forward_mad=_mad(forward[:, index]),
                backward_mad=_mad(end_steps - before_steps),
            )
        )
        before, before_steps = ends[name], end_steps
    layers[-1] = dataclasses.replace(layers[-1], backward=Nanoseconds(layers[-1].backward + backward - before))
    return LayerTable(
        key=key,
        layers=tuple(reversed(layers)),
        update=Nanoseconds(update),
        read=Nanoseconds(read),
        load=Nanoseconds(round(_median(parts, "load")) if first["loaders"] else 0),
        loaders=first["loaders"],
        buffers_nbytes=Bytes(first["buffers_nbytes"]),
        averaged_nbytes=Bytes(first["averaged_nbytes"]),
    )


def memory_of(parts: list[dict[str, Any]]) -> Memory:
    """Return the largest value of each kind of memory over all ranks."""
    return Memory(**{field.name: Bytes(max(part["memory"][field.name] for part in parts)) for field in dataclasses.fields(Memory)})


def _median(parts: list[dict[str, Any]], name: str) -> float:
    return float(median(value for part in parts for value in part[name]))


def _mad(values: Floats) -> Nanoseconds:
    return Nanoseconds(round(float(np.median(np.abs(values - np.median(values))))))


def _ready_steps(parts: list[dict[str, Any]]) -> Floats:
    """Return the time at which each gradient was final, shape ``(steps, gradients)``.

    A gradient that was missing, or later than the backward's end, has the backward's end.
    """
    return np.array(
        [
            [end if time is None else min(time, end) for time in step]
            for part in parts
            for step, end in zip(part["layers"]["ready"], part["backward"], strict=True)
        ],
        dtype=float,
    )


def memory_bytes(model: nn.Module, optimizer: torch.optim.Optimizer, activations: int) -> dict[str, int]:
    """Return bytes by the fields of ``fleetbench.measurements.Memory``.

    ``activations`` is the bytes of activations, which the caller has counted.
    """
    parameters = list(model.parameters())
    return {
        "parameters": sum(parameter.nbytes for parameter in parameters),
        "gradients": sum(parameter.nbytes for parameter in parameters if parameter.requires_grad),
        "optimizer_state": sum(leaf.nbytes for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, torch.Tensor)),
        "activations": activations,
        "peak": peak_bytes(parameters[0].device),
    }


def peak_bytes(device: torch.device) -> int:
    """Return the peak bytes so far, or since ``reset_peak``; 0 if the system does not report them.

    They are those of torch's allocator on a CUDA device, and of the whole process on a CPU.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def reset_peak(device: torch.device) -> None:
    """Let ``peak_bytes`` count from now on, if the system supports it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
