"""Replicas: all trainers' parameters, gradients and optimizers as stacked tensors, and the plan's operations on them.

The first dimension counts trainers; trainers whose parameters never differ share one member. The rules are
those of the real engine: a plain all-reduce is a mean. Every other exchange divides by the number of
trainers, casts to the wire's type, and adds up in that type, one rank after the other.
"""

import math
from collections.abc import Sequence

import torch
from torch import nn

from fleetbench.declared import learning_rate
from fleetbench.plan.build import Plan
from fleetbench.plan.combination import Combination
from fleetbench.plan.drive import Scalar
from fleetbench.plan.exchange import is_plain
from fleetbench.plan.groups import Parts
from fleetbench.plan.operations import COLLECTIVES, Operation
from fleetbench.workload import OPTIMIZER_STATE, Workload
from fleetbench.workloads.training import make_optimizer
from sim.learning.gradients import Arguments, Tensors, Way


class Replicas:
    """State of all trainers: ``compute`` leaves gradients, ``run`` executes operations, ``scalar`` observes scalars."""

    def __init__(self, model: nn.Module, workload: Workload, plan: Plan, combination: Combination) -> None:
        """Create replicas: all trainers begin with the parameters and buffers of ``model``, on its device."""
        self.trainers = plan.trainers
        self.shares, self.averages = sharing(plan, combination)
        members = 1 if self.shares else self.trainers
        self.parameters = {name: nn.Parameter(_stacked(value, members)) for name, value in model.named_parameters()}
        self.buffers = {name: _stacked(value, self.trainers) for name, value in model.named_buffers()}
        self._values = [parameter.detach() for parameter in self.parameters.values()]
        self._device = self._values[0].device
        self.losses = torch.zeros(self.trainers)
        self._plan = plan
        self._combination = combination
        self._workload = workload
        self._optimizer = make_optimizer(nn.ParameterList(self.parameters.values()), workload)
        self._snapshot = {} if self.shares else {name: value.detach()[:1].clone() for name, value in self.parameters.items()}
        self._gradients: dict[str, torch.Tensor] = {}
        self._sums: dict[str, torch.Tensor] = {}
        self._arrived: dict[tuple[str, int], Tensors] = {}
        self._velocity: dict[str, torch.Tensor] = {}
        self._mean_buffers: dict[str, torch.Tensor] = {}
        self._rate = workload.lr
        self._scale = 1.0
        self._holds = False

    def arguments(self, inputs: torch.Tensor, labels: torch.Tensor, scale: float) -> Arguments:
        """Return the arguments of a ``Way`` for joint batches ``(trainers * batch, ...)``."""
        shape = (self.trainers, len(labels) // self.trainers)
        scaled = torch.tensor(scale, dtype=self._values[0].dtype, device=self._device)
        inputs, labels = (joint.to(self._device).view(*shape, *joint.shape[1:]) for joint in (inputs, labels))
        return self._values, [*self.buffers.values()], scaled, inputs, labels

    def begin_step(self, counted: int) -> None:
        """Begin a step with the learning rate of step or update number ``counted``."""
        self._rate = learning_rate(self._workload, counted)
        self._holds = False

    def compute(self, way: Way, inputs: torch.Tensor, labels: torch.Tensor, scale: float) -> None:
        """Compute forward and backward of all trainers."""
        gradients, self.losses, moved = way(*self.arguments(inputs, labels, scale))
        self._gradients = dict(zip(self.parameters, gradients, strict=True))
        self._scale = scale
        if not self._holds:
            self.buffers = dict(zip(self.buffers, moved, strict=True))

    @torch.no_grad()
    def run(self, operation: Operation) -> None:
        """Execute one operation on all trainers."""
        kind = operation.kind
        if kind in COLLECTIVES:
            self._meet(operation)
        elif kind in ("accumulate", "release"):
            self._sum(operation)
        elif kind == "update":
            assert operation.bucket is None, "buckets that update alone change the clock, and nothing that is learnt"
            self._update([self._gradients[name] for name in self.parameters])
        elif kind in ("difference", "outer", "merge"):
            self._end_round(operation)
        elif kind == "reset" and operation.payload == "state":
            for state in self._state(list(self.parameters)):
                state.zero_()
        elif kind == "reset":
            self._sums.clear()
        elif kind == "hold":
            self._holds = True
        else:
            assert kind == "skip", f"nothing executes {kind}"

    def _update(self, gradients: Tensors) -> None:
        rate = self._rate * self._combination.lr_scale
        self._optimizer.param_groups[0]["lr"] = rate
        for parameter, gradient in zip(self.parameters.values(), gradients, strict=True):
            parameter.grad = gradient
        self._optimizer.step()

    def scalar(self, name: Scalar) -> float:
        """Return the scalar that all trainers observe now; ``found_inf`` also unscales the gradients."""
        if name == "lr":
            return self._rate
        if name == "loss":
            return math.fsum(self.losses.tolist()) / self.trainers
        found, inverse = (torch.full((1,), value, device=self._device) for value in (0.0, 1.0 / self._scale))
        self._gradients = {name: gradient.contiguous() for name, gradient in self._gradients.items()}
        torch._amp_foreach_non_finite_check_and_unscale_([*self._gradients.values()], found, inverse)  # as torch.amp.GradScaler does
        return float(found)

    @torch.no_grad()
    def evaluated(self) -> torch.Tensor:
        """Return the mean over trainers of parameters, then floating-point buffers, for an evaluation."""
        values = [*self.parameters.values(), *(buffer for buffer in self.buffers.values() if buffer.is_floating_point())]
        return torch.cat([value.detach().mean(0).reshape(-1) for value in values])

    def _sum(self, operation: Operation) -> None:
        """Add a bucket's gradients to its sum, or replace them by the sum over the divisor."""
        assert operation.bucket is not None
        for name in self._plan.buckets[operation.bucket].gradients:
            if operation.kind == "release":
                self._gradients[name] = self._sums.pop(name) / operation.divisor
            else:
                gradient = self._gradients[name]  # cloned below, because the next step may reuse its memory
                self._sums[name] = self._sums[name].add_(gradient) if name in self._sums else gradient.clone()

    def _meet(self, operation: Operation) -> None:
        payload, bucket = operation.payload, operation.bucket
        if payload in ("agreement", "loss", "found_inf"):
            return  # all trainers' values are in this process already
        if payload == "buffers" and operation.kind == "broadcast":
            self.buffers = {name: _stacked(buffer[0], self.trainers) for name, buffer in self.buffers.items()}
            return
        if payload == "buffers":
            self._mean_buffers = {name: _mean_buffer(buffer) for name, buffer in self.buffers.items() if buffer.dtype != torch.bool}
            return
        assert payload is not None
        assert bucket is not None, f"nothing carries {payload}"
        names, chain = self._plan.buckets[bucket].gradients, self._plan.chain(bucket, payload)
        if operation.group == "inner" and is_plain(chain, self._plan.buckets[bucket].dtype):
            self._arrive(payload, bucket, [_means(value, self._plan.parts["inner"]) for value in self._cargo(payload, names)])
            return
        if is_plain(chain, self._plan.buckets[bucket].dtype) or payload == "rows":
            self._arrive(payload, bucket, [value.mean(0, keepdim=True) for value in self._cargo(payload, names)])
            return
        if (operation.kind, operation.group) != (chain[0].kind, chain[0].group):
            return  # the first of a chain has carried it to its end
        wire = getattr(torch, operation.wire_dtype or self._plan.buckets[bucket].dtype)
        rows = [value.expand(self.trainers, *value.shape[1:]) for value in self._cargo(payload, names)]
        carried = [(value / self._plan.num_summed(chain)).to(wire) for value in rows]
        for value in carried:
            for one in chain:
                _exchange(value, one.kind, self._plan.parts[one.group])
        like = next(iter(self.parameters.values())).dtype
        alike = payload != "gradient" or self._combination.worker_trainers == 1  # all trainers have the same values now
        self._arrive(payload, bucket, [(value[:1] if alike else value).to(like) for value in carried])

    def _cargo(self, payload: str, names: Sequence[str]) -> Tensors:
        if payload == "delta":
            return [self.parameters[name] - self._snapshot[name] for name in names]
        return self._state(names) if payload == "state" else [self._gradients[name] for name in names]

    def _arrive(self, payload: str, bucket: int, values: Tensors) -> None:
        if payload in ("delta", "state"):
            self._arrived[payload, bucket] = values
        else:
            self._gradients.update(zip(self._plan.buckets[bucket].gradients, values, strict=True))

    def _end_round(self, operation: Operation) -> None:
        """Execute ``difference``, ``outer`` or ``merge`` for one fragment or the whole model; see ``Operation``."""
        plan = self._plan
        buckets = range(len(plan.buckets)) if operation.fragment is None else plan.fragments[operation.fragment]
        if operation.kind == "outer":
            self._step_outside(buckets)
        elif operation.kind == "merge":
            self._merge(operation, buckets)
        else:
            for bucket in buckets:
                self._arrive("delta", bucket, self._cargo("delta", plan.buckets[bucket].gradients))

    def _step_outside(self, buckets: Sequence[int]) -> None:
        """Turn the mean differences into the outer optimizer's step, without its learning rate."""
        outer = self._combination.outer
        assert outer is not None
        for bucket in buckets if outer.momentum else ():
            for name, value in zip(self._plan.buckets[bucket].gradients, self._arrived["delta", bucket], strict=True):
                velocity = self._velocity.setdefault(name, torch.zeros_like(value)).mul_(outer.momentum).add_(value)
                value.add_(velocity, alpha=outer.momentum) if outer.nesterov else value.copy_(velocity)

    def _merge(self, operation: Operation, buckets: Sequence[int]) -> None:
        """Add the step to the snapshot, and replace the parameters by it, except for a share that they keep.

        Optimizer state is replaced by its average.
        """
        outer, fragments = self._combination.outer, self._combination.fragments
        share = fragments.mixing if fragments is not None and operation.payload == "mixture" else 0.0
        for bucket in buckets:
            names = self._plan.buckets[bucket].gradients
            for name, value in zip(names, self._arrived.pop(("delta", bucket), ()), strict=False):
                self._snapshot[name].add_(value, alpha=1.0 if outer is None else outer.lr)
                own, agreed = self.parameters[name], self._snapshot[name]
                own.copy_(share * own + (1 - share) * agreed if share else agreed)
            for state, value in zip(self._state(names), self._arrived.pop(("state", bucket), ()), strict=False):
                state.copy_(value)
        self.buffers.update({name: buffer.expand_as(self.buffers[name]).clone() for name, buffer in self._mean_buffers.items()})
        self._mean_buffers = {}

    def _state(self, names: Sequence[str]) -> Tensors:
        """Return the optimizer's tensors that trainers average or reset; some do not exist before the first update."""
        slots = self._combination.slots(OPTIMIZER_STATE[self._workload.optimizer])
        state = self._optimizer.state
        found = [state[self.parameters[name]].get(slot) for name in names for slot in slots]
        return [tensor for tensor in found if tensor is not None]


def sharing(plan: Plan, combination: Combination) -> tuple[bool, bool]:
    """Return whether all trainers share parameters, and whether only the mean of gradients is needed."""
    plain = all(is_plain(chain, plan.buckets[bucket].dtype) or chain[0].payload == "rows" for bucket, chain in plan.of_bucket.items())
    shares = not combination.is_local or (plan.trainers == 1 and combination.outer is None and combination.fragments is None)
    return shares, shares and plain


def expected_bytes(model: nn.Module, workload: Workload, plan: Plan, combination: Combination) -> int:
    """Return the largest memory in bytes of a training run's replicas, without activations."""
    one = sum(value.nbytes for value in model.parameters())
    shares, averages = sharing(plan, combination)
    own = one if shares else one * plan.trainers
    gradients = (one if averages else one * plan.trainers) * (2 if combination.merges else 1)
    return own * (1 + len(OPTIMIZER_STATE[workload.optimizer])) + gradients + (0 if shares else own + 2 * one)


def _stacked(value: torch.Tensor, members: int) -> torch.Tensor:
    return value.detach().expand(members, *value.shape).clone()


def _means(value: torch.Tensor, parts: Parts) -> torch.Tensor:
    """Return for every trainer the mean over its part, ``(trainers, ...)``; each trainer is in one part of the same size."""
    ranks = torch.tensor(parts)
    found = torch.empty_like(value)
    found[ranks.reshape(-1)] = value[ranks].mean(1).repeat_interleave(ranks.shape[1], 0)
    return found


def _mean_buffer(buffer: torch.Tensor) -> torch.Tensor:
    """Return a buffer's mean over trainers, or the maximum if it is a count: ``(1, ...)``."""
    if buffer.is_floating_point():
        return buffer.to(torch.float64).mean(0, keepdim=True).to(buffer.dtype)
    return buffer.amax(0, keepdim=True)


def _exchange(value: torch.Tensor, kind: str, parts: Parts) -> None:
    """Execute one operation of a chain in place, on all ranks' tensors ``(ranks, ...)``.

    Each of ``parts`` exchanges only inside itself. After a reduce-scatter every rank holds the totals of all
    pieces, not only those of its own, so that an all-gather has nothing left to do.
    """
    if kind == "all_gather":
        return
    ranks = torch.tensor(parts)
    if kind == "broadcast":
        value[ranks.reshape(-1)] = value[ranks[:, 0]].repeat_interleave(ranks.shape[1], 0)
        return
    total = value[ranks[:, 0]]
    for place in range(1, ranks.shape[1]):
        total = total + value[ranks[:, place]]
    meant = ranks[:, :1] if kind == "reduce" else ranks
    value[meant.reshape(-1)] = total.repeat_interleave(meant.shape[1], 0)
