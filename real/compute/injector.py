"""Injected stragglers: X times the profiled time, added before each layer's forward and backward.

Delays aim at cumulative totals: if one takes too long, the next is shorter, so that errors do not add up
over the layers. On a CPU a delay is a sleep. On a CUDA device it is a kernel in the compute stream, because
the host runs ahead of the device and a sleep there would delay nothing.
"""

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from fleetbench.plan.layers import LayerTable
from fleetbench.stragglers import ONE
from real.communication.clocks import Clock, Mark, clock_of

_SHORTEST_SLEEP_NS = 50_000  # below the kernel's timer slack a sleep overshoots by more than itself
_SHORTEST_KERNEL_NS = 5_000  # about the cost of its launch
_SHORTEST_MEASURED_NS = 500_000  # the microseconds between a mark and its kernel are one percent of it
_CALIBRATION_CYCLES = 2_000_000  # short, because a device soon clocks up again after a load
_LOAD_S = 0.3
_REMEMBERED = 31


class Delay:
    """Delays the compute that follows. This class sleeps, for devices on which the host computes."""

    shortest_ns = _SHORTEST_SLEEP_NS
    """Shortest delay, in nanoseconds; shorter ones are added to the next."""

    def __init__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        self._sleep = sleep

    def add(self, missing_ns: int) -> int:
        """Delay by about ``missing_ns``; return the actual nanoseconds if known, else ``missing_ns``."""
        begin = time.monotonic_ns()
        self._sleep(missing_ns * 1e-9)
        return time.monotonic_ns() - begin


class KernelDelay(Delay):
    """Delays by a kernel that spins in the current stream for a number of cycles.

    A device has fewer cycles per second under load than when idle. It is therefore calibrated right after a
    load, and then from the delays that training has passed: the median of the last ones.
    """

    shortest_ns = _SHORTEST_KERNEL_NS

    def __init__(self, clock: Clock, spin: Callable[[int], None], load: Callable[[], None]) -> None:
        """``spin`` enqueues a kernel of a number of cycles; ``load`` keeps the device busy and leaves work enqueued."""
        self._clock = clock
        self._spin = spin
        self._passing: deque[tuple[int, Mark, Mark]] = deque()
        self._cycles_per_ns: deque[float] = deque(maxlen=_REMEMBERED)
        load()
        self._measured(_CALIBRATION_CYCLES)
        self._learn(wait=True)

    def add(self, missing_ns: int) -> int:
        """See ``Delay``. Enqueues the kernel and returns ``missing_ns``."""
        self._learn(wait=False)
        cycles = round(missing_ns * median(self._cycles_per_ns))
        if missing_ns < _SHORTEST_MEASURED_NS:
            self._spin(cycles)
        else:
            self._measured(cycles)
        return missing_ns

    def _measured(self, cycles: int) -> None:
        begin = self._clock.mark()
        self._spin(cycles)
        self._passing.append((cycles, begin, self._clock.mark()))

    def _learn(self, *, wait: bool) -> None:
        """Record the cycles per nanosecond of the delays that the device has passed."""
        while self._passing and (wait or self._clock.passed(self._passing[0][2])):
            cycles, *marks = self._passing.popleft()
            begin, end = self._clock.resolve(marks)
            self._cycles_per_ns.append(cycles / (end - begin))


def delay_of(device: torch.device) -> Delay:
    """Return the delay for ``device``; on CUDA the calibration takes a third of a second."""
    if device.type != "cuda":
        return Delay()
    # torch's own tests delay with _sleep; there is no public name
    return KernelDelay(clock_of(device), torch.cuda._sleep, partial(_load, device))  # noqa: SLF001  # see above


def _load(device: torch.device) -> None:
    """Multiply matrices until the device's clock rate has dropped; leave some milliseconds enqueued."""
    generator = torch.Generator(device).manual_seed(0)  # the script's random numbers stay what they are
    matrix = torch.rand(4096, 4096, device=device, generator=generator)
    product = torch.empty_like(matrix)
    until = time.monotonic() + _LOAD_S
    while time.monotonic() < until:
        torch.cuda.synchronize(device)
        for _ in range(8):
            torch.mm(matrix, matrix, out=product)


class Injector:
    """Delays a model's layers by a share of their profiled times.

    Life cycle: ``attach``; in every step ``begin`` with the step's X, then the model's hooks, then
    ``finish`` at the end of the backward; ``detach``. Nothing is delayed inside a compiled block, because
    that would break its graph; its delay is added at the next layer outside it, or at the end.
    """

    def __init__(self, table: LayerTable, delay: Delay) -> None:
        """``table`` has the profiled times of the model's layers; ``delay`` is the device's."""
        self._table = table
        self._delay = delay
        self._handles: list[RemovableHandle] = []
        self._x = 0
        self._delayed_ns = 0

    def attach(self, model: torch.nn.Module) -> None:
        """Hook the layers that the table names."""
        modules = dict(model.named_modules())
        total = 0
        before_backward = self._table.forward_ns + self._table.backward_ns
        for layer in self._table.layers:
            total += layer.forward
            module = modules.get(layer.name)
            if module is not None:
                self._handles.append(module.register_forward_pre_hook(partial(self._forward_begins, total)))
                self._handles.append(module.register_forward_hook(partial(self._forward_ends, before_backward)))
            before_backward -= layer.backward

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def begin(self, x: int) -> None:
        """Start a step whose compute takes 1 + X times its own; ``x`` is X in units of 2^-24."""
        self._x, self._delayed_ns = x, 0

    def finish(self) -> None:
        """Add the rest of the step's delay."""
        self._until(self._table.forward_ns + self._table.backward_ns)

    def _until(self, base_ns: int) -> None:
        """Delay until the step's delays amount to X times ``base_ns``."""
        missing = base_ns * self._x // ONE - self._delayed_ns
        if missing >= self._delay.shortest_ns:
            self._delayed_ns += self._delay.add(missing)

    def _forward_begins(self, base_ns: int, _module: torch.nn.Module, _inputs: Any) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._until(base_ns)

    def _forward_ends(self, base_ns: int, _module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        """Hook a layer's output: its gradient arrives where the layer's backward begins."""
        if isinstance(output, torch.Tensor) and output.requires_grad and not torch.compiler.is_compiling():
            output.register_hook(lambda _gradient: self._until(base_ns))
