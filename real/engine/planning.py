"""Planning: the plan of a model's gradients, in the order in which they become ready.

Before the first backward, this is the reverse of the order in which parameters were registered. Afterwards, all ranks
plan by the order that rank 0 has observed.
"""

import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from fleetbench.errors import ConfigError
from fleetbench.plan.build import Plan, Setting, build_plan
from fleetbench.plan.fusion import Cost
from fleetbench.plan.layers import Gradient
from fleetbench.plan.state import State
from fleetbench.quantities import MIB, Nanoseconds
from fleetbench.strategy import DistributedStrategy
from fleetbench.workloads.training import sparse_weights
from real.communication.communicators import Communicators, agree_on
from real.communication.lanes import host_reads
from real.engine.buckets import ModelBuffers, dense_strides

_SMALL, _LARGE = 1024, 4 * MIB  # bytes of the all-reduces that are timed
_REPEATS = 5
_WIDTH, _FEW = 128, 10  # width of the matrices that are multiplied, and number of products that are timed alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A strategy's progress on a model, as plain data. With the tensors, another engine can continue from it."""

    state: State
    order: Mapping[str, int]
    """Time at which each gradient was final, in ns since the backward's start, by name; in the order of readiness."""
    settled: bool = False
    """Whether the current plan was made from that order, and is final."""
    cost: Cost | None = None
    """Cost of an all-reduce that the plan was made with, in ns and ns per byte."""
    plan: str | None = None
    """Digest of the current plan; None if the engine that continues will make another plan."""


class Planning:
    """Makes plans from the order in which a model's gradients become ready.

    ``order`` names the gradients whose readiness is known, each with its time in ns from the start of
    the backward; ``settle`` makes it complete, and the same on all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        strategy: DistributedStrategy,
        communicators: Communicators,
        trainers_per_node: int,
        forecast: tuple[Cost, Mapping[str, int]] | None,
    ) -> None:
        """``forecast``: see ``Engine``."""
        cost, ready = forecast or (None, None)
        self.order: dict[str, int] = {}
        self.sparse = sparse_weights(model)
        """Names of the parameters whose gradients are sparse."""
        self.buffers = ModelBuffers(model)
        self.setting = Setting(
            trainers=communicators.trainers,
            trainers_per_node=trainers_per_node,
            queue_depth=communicators.queue_depth,
            cost=cost or (measured_cost(communicators, slows=strategy.fusion == "optimal") if strategy.fuses_by_cost else None),
            buffers_nbytes=self.buffers.nbytes,
            averaged_nbytes=self.buffers.averaged_nbytes,
            holds_scatters=communicators.device.type == "cpu",
            order=tuple(parameters),
        )
        self._model = model
        self._parameters = parameters
        self._strategy = strategy
        self._communicators = communicators
        self._forecast_ready: Mapping[str, int] | None = ready

    def lines(self) -> list[str]:
        """Return a line for each parameter and buffer; the lines and their order must be the same on every rank."""
        trained = self._parameters
        found = []
        for name, tensor in self._model.named_parameters():
            strides = f", strides {dense_strides(tensor)}" if name in trained else ""  # which buckets depend on
            sparse = ", sparse gradients" if name in self.sparse else ""
            kind = "parameter" if name in trained else "frozen parameter"
            found.append(f"{kind} {name} {list(tensor.shape)} {tensor.dtype}{strides}{sparse}")
        return found + self._buffer_lines()

    def take_buffers(self) -> None:
        """Exchange the model's current buffers from now on.

        Raises ``ConfigError`` on every rank if ranks have different ones.
        """
        hint = 'let each rank have the same buffers, or set broadcast_buffers = false, with local steps buffers = "local"'
        agree_on(self._buffer_lines(), "the model", self._communicators, hint)
        self.buffers = ModelBuffers(self._model)

    def _buffer_lines(self) -> list[str]:
        return [f"buffer {name} {list(tensor.shape)} {tensor.dtype}" for name, tensor in self._model.named_buffers()]

    def registered(self) -> list[str]:
        """Return the order to plan by before any is observed: names of parameters, last registered first."""
        return list(self._parameters)[::-1]

    def plan(self, order: Sequence[str]) -> Plan:
        """Return the plan for gradients in this order."""
        gradients = [
            Gradient(
                name=name,
                numel=self._parameters[name].numel(),
                dtype=str(self._parameters[name].dtype).removeprefix("torch."),
                sparse=name in self.sparse,
                ready=Nanoseconds(self.order.get(name, position)),
            )
            for position, name in enumerate(order)
        ]
        return build_plan(self._strategy, gradients, self.setting)

    def settle(self) -> None:
        """Adopt rank 0's order of readiness. Every rank calls it.

        A strategy that fuses by cost uses the forecast's times of readiness instead, if there is a forecast.
        """
        names = list(self._parameters)
        missing = [name for name in reversed(names) if name not in self.order]
        self.order |= dict.fromkeys(missing, max(self.order.values(), default=0))
        rows = [[names.index(name), ready] for name, ready in self.order.items()]
        found = torch.tensor(rows, dtype=torch.int64, device=self._parameters[names[0]].device).reshape(-1, 2)
        self._communicators.broadcast(found)
        with host_reads():
            self.order = {names[index]: ready for index, ready in found.tolist()}
        if (known := self._forecast_ready) is not None and self._strategy.fuses_by_cost:
            self.order = dict(sorted(((name, known.get(name, ready)) for name, ready in self.order.items()), key=lambda item: item[1]))

    def resume(self, progress: Progress, where: str) -> list[str]:
        """Restore the order and the cost from ``progress``, and return the order to plan by.

        Raises ``ConfigError`` if the plan would differ from the one in ``progress``.
        """
        before = self.order, self.setting
        self.order = dict(progress.order) if progress.settled else {}
        self.setting = dataclasses.replace(self.setting, cost=progress.cost or self.setting.cost)
        order = list(self.order) or self.registered()
        plan = self.plan(order)
        if progress.plan not in (None, plan.digest):
            self.order, self.setting = before
            what = "this model and these trainers make another plan than was saved"
            hint = "start as many trainers a node, with the same model, as were saved"
            raise ConfigError(what, where, f"plan {plan.digest}, saved {progress.plan}", hint)
        return order


def measured_cost(communicators: Communicators, *, slows: bool) -> Cost:
    """Return rank 0's cost of an all-reduce on communicator 0, on every rank: a small and a large one are timed.

    ``slows``: on a CPU, compute as long as the large one also runs next to it. Together they take from once to twice as
    long as one of them; by that share each is assumed to slow the other.
    """
    device = communicators.device
    small, large = (torch.zeros(nbytes // 4, dtype=torch.float32, device=device) for nbytes in (_SMALL, _LARGE))
    small_ns, large_ns = (_median_ns(communicators, tensor) for tensor in (small, large))
    per_byte = max(0.0, (large_ns - small_ns) / (_LARGE - _SMALL))
    slowdown = 0.0
    if slows and device.type == "cpu":
        products = max(1, round(_FEW * large_ns / max(1.0, _median_ns(communicators, None, _FEW))))
        slowdown = min(1.0, max(0.0, _median_ns(communicators, large, products) / max(1.0, large_ns) - 1.0))
    found = torch.tensor([max(0.0, small_ns - per_byte * _SMALL), per_byte, slowdown], dtype=torch.float64, device=device)
    communicators.broadcast(found)
    with host_reads():
        latency_ns, ns_per_byte, slowdown = found.tolist()
    return Cost(latency_ns=latency_ns, ns_per_byte=ns_per_byte, compute_slowdown=slowdown, own_slowdown=slowdown)


def _median_ns(communicators: Communicators, tensor: torch.Tensor | None, products: int = 0) -> float:
    """Return the median time in ns until an all-reduce of ``tensor`` and ``products`` products of small matrices have ended."""
    factor, times_ns = torch.zeros(_WIDTH, _WIDTH, dtype=torch.float32), []
    for _ in range(_REPEATS):
        with host_reads():
            communicators.barrier()
        begin = time.monotonic_ns()
        ticket = None if tensor is None else communicators.lane(0).submit(partial(communicators.all_reduce, tensor, "mean"), ())
        for _ in range(products):
            torch.mm(factor, factor)
        if ticket is not None:
            ticket.wait()
            with host_reads():
                float(tensor[0])  # type: ignore[index]  # the host waits for the device
        times_ns.append(time.monotonic_ns() - begin)
    return statistics.median(times_ns)
