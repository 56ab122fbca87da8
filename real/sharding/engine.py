"""ShardedEngine: trains a sharded model as the strategy says; torch's ``fully_shard`` gathers and scatters.

A step's phases are ``idle`` -> ``forward`` -> ``update`` (a backward has ended) -> ``idle`` (the optimizer has
stepped). A backward inside ``no_sync`` leaves its gradients on this trainer, inside torch: ``kept``. In a gradient
merge of k steps, the last one updates. Until then the sum is hidden between two backwards, so that neither
``optimizer.step()`` nor ``zero_grad()`` finds it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fleetbench.errors import ConfigError
from fleetbench.plan.combination import Combination
from fleetbench.plan.loss_scaling import Scale
from fleetbench.plan.operations import COLLECTIVES, wire_bytes
from fleetbench.plan.replay import Decider, Recording
from fleetbench.plan.steps import StepKind, operations_of
from fleetbench.plan.training import family
from fleetbench.strategy import DistributedStrategy
from real.communication.clocks import clock_of
from real.communication.communicators import Communicators, agree_on
from real.communication.lanes import host_reads
from real.compute.compute import apply_compute
from real.compute.mixed_precision import unscale
from real.engine.gradients import shard_of, tensors_of
from real.engine.optimizers import OptimizerControl, hide
from real.engine.outside import owners_of, refuse_replaced
from real.engine.phase import Phase
from real.engine.planning import Planning
from real.engine.reducer import leaves_gradients, nodes_of
from real.engine.refusals import (
    given_of,
    refuse_again,
    refuse_arguments,
    refuse_graph_of_gradients,
    refuse_in_step,
    refuse_model,
    refuse_moved,
    refuse_optimizer,
    refuse_scaler,
    refuse_unfinished,
    refuse_update,
)
from real.engine.stopwatch import Stopwatch
from real.sharding.rounds import Rounds
from real.sharding.waits import Exchange, places, replaced
from real.sharding.wrapping import refuse_unshardable_model, shard

OPTIMIZER = "fleet.distributed_optimizer"
_WHOLE = ("LBFGS", "ZeroRedundancyOptimizer")
"""Names of optimizers that flatten or share out parameters by themselves."""


class ShardedEngine:
    """Runs one strategy on one model. Every rank creates it at the same place; it lives as long as its model.

    Raises ``ConfigError`` if ranks have different models or strategies, and in a step in which a parameter gets no
    gradient.
    """

    on_step: Callable[[int], None] | None = None
    """Called with the number of each step when it begins."""
    on_compute_end: Callable[[], None] | None = None
    """Called when the backward's computation ends, before the wait for the last gradients."""

    def __init__(
        self,
        model: nn.Module,
        strategy: DistributedStrategy,
        communicators: Communicators,
        *,
        first_step: int = 1,
        keep_times: bool = False,
    ) -> None:
        """Start from rank 0's parameters and buffers, and shard the model."""
        refuse_model(model, communicators.device)
        fields = [f"{name} = {json.dumps(value)}" for name, value in strategy.changes().items()]
        agree_on(fields, "the strategy", communicators)
        trained = {name: own for name, own in model.named_parameters() if own.requires_grad}
        planning = Planning(model, trained, strategy, communicators, 1, None)
        self.plan = planning.plan(planning.registered())
        """Plan whose blocks are gathered, and whose operations torch carries out."""
        refuse_unshardable_model(model, strategy.sharding_configs.blocks)
        agree_on(planning.lines(), "the model", communicators)
        for tensor in (*model.parameters(), *model.buffers()):
            communicators.broadcast(tensor.detach())
        first = next(model.parameters())
        self._was_like = first.dtype, first.device
        self.model, self.strategy, self.communicators = model, strategy, communicators
        self.modules = shard(model, self.plan, strategy.sharding_configs, communicators)
        """FSDP modules: the model, and its blocks in the order of the forward."""
        communicators.prove(1)
        self.parameters = {name: own for name, own in model.named_parameters() if own.requires_grad}
        """Shards of the trained parameters, by name."""
        self._frozen = [own for own in model.parameters() if not own.requires_grad]
        self._owners = owners_of(model)
        self.step, self.epoch, self.merged = first_step - 1, 0, 0
        """Number of steps that have begun; epochs that have ended; and steps whose gradients wait for their update."""
        self._what = Combination.of(strategy)
        self.scale = self._what.scaler.start() if self._what.scaler else None
        sends = strategy.broadcast_buffers and planning.buffers.nbytes and not strategy.is_local
        self._buffers = planning.buffers if sends else None
        self._phase, self._is_in_backward, self._keeps, self._was_synced = Phase.IDLE, False, False, True
        self._overflows = False
        self._expected: tuple[bool, bool, bool] | None = None
        """Settings of torch's next backward: whether it reduces gradients, also over replicas, and frees parameters; or
        None."""
        self._restore: Callable[[], None] | None = None
        """Restores the hidden gradient sum of a merge; None if none is hidden."""
        self._nodes: dict[str, Any] = {}
        """Autograd's node that leaves the gradient of each parameter gathered so far, by name."""
        self._reached: set[str] = set()
        """Names of parameters that the current backward has reached."""
        self.stopwatch = Stopwatch(communicators.rank, keep_times, clock_of(communicators.device), strategy.fetch_every_n_steps)
        self._timed = ExitStack()
        """Restores the functions of torch that were wrapped to time its waits."""
        for place in places(self._waiting) if keep_times else ():
            self._timed.enter_context(replaced(*place))
        self._optimizer: Optimizer | None = None
        self.rounds = self._rounds(first_step) if self._what.is_local else None
        """Rounds of workers that update alone; None if all trainers update together."""
        self.num_updates = 0
        """Number of the optimizer's updates so far."""
        apply_compute(
            model,
            strategy,
            device=communicators.device,
            group=communicators.beside if strategy.sync_batch_norm else None,
            errors=communicators.errors,
            scale=lambda: self.loss_scale,
        )
        for module in self.modules:
            module.register_forward_pre_hook(lambda *_: self._note_nodes())
        model.register_forward_pre_hook(lambda *_: self._forward_begins(), prepend=True)
        # Before torch's own, whose hooks on the output then follow ours.
        model.register_forward_hook(lambda _module, _inputs, output: self._forward_ends(output), prepend=True)

    @property
    def loss_scale(self) -> float:
        """Factor on the loss in the current or next backward; 1 without loss scaling."""
        return 1.0 if self.scale is None else self.scale.value

    @property
    def num_done(self) -> int:
        """Number of finished steps; a forward without a backward after it does not count."""
        return self.step - (self._phase == Phase.FORWARD)

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer whose steps are the updates. Raises ``ConfigError`` if there is none yet."""
        if self._optimizer is None:
            raise ConfigError("there is no optimizer yet", OPTIMIZER, hint=f"call {OPTIMIZER} first")
        return self._optimizer

    def attach_optimizer(self, optimizer: Optimizer) -> None:
        """Make ``optimizer.step()`` the update. Raises ``ConfigError`` for an optimizer that cannot update shards."""
        refuse_optimizer(optimizer, self._what)
        kind = type(optimizer).__name__
        if self._optimizer not in (None, optimizer):
            hint = "put all parameters into the groups of one optimizer"
            raise ConfigError("is given a second optimizer of a sharded model", OPTIMIZER, kind, hint)
        if any(base.__name__ in _WHOLE for base in type(optimizer).__mro__):
            hint = "use an optimizer that treats parameters one by one, such as AdamW"
            raise ConfigError(
                "treats parameters as one, or shards by itself, and each trainer has a shard of each",
                OPTIMIZER,
                kind,
                hint,
            )
        known = {id(own) for own in (*self.parameters.values(), *self._frozen)}
        held = [own for group in optimizer.param_groups for own in group["params"]]
        if held and not any(id(own) in known for own in held):
            what = "holds none of the model's parameters: fleet.distributed_model has replaced them by shards"
            hint = "make the optimizer after fleet.distributed_model: torch.optim.AdamW(model.parameters())"
            raise ConfigError(what, OPTIMIZER, kind, hint)
        self._control = OptimizerControl(optimizer, self._what, self.parameters, set)
        if self._optimizer is None:
            optimizer.register_step_pre_hook(self._step_begins)
            optimizer.register_step_post_hook(self._step_ends)
        self._optimizer = optimizer

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backwards inside leave their gradients on this trainer; the next one outside exchanges the sum.

        torch keeps these gradients internally and unsharded, so ``zero_grad()`` does not clear them.
        """
        before, self._keeps = self._keeps, True
        self._expect()
        try:
            yield
        finally:
            self._keeps = before
            self._expect()

    def reshard(self) -> None:
        """Free gathered parameters: ``model.parameters()`` are shards until the next forward gathers them."""
        for module in self.modules:
            module.reshard()

    def between_steps(self, where: str) -> None:
        """Raise ``ConfigError`` in the middle of a step or of a gradient merge, else free gathered parameters."""
        refuse_in_step(Phase.IDLE if self._phase == Phase.FORWARD else self._phase, where)
        if self.merged:
            hint = "call it after the k-th batch of a gradient merge"
            raise ConfigError(
                "comes while gradients wait for more before their update",
                where,
                f"{self.merged} merged",
                hint,
            )
        self.reshard()

    def resume(self, step: int, epoch: int, scale: Scale | None) -> None:
        """Continue after ``step`` and ``epoch``; ``scale``: the saved loss scale, or None if there was none."""
        self.step, self.epoch, self._phase = step, epoch, Phase.IDLE
        if self.scale is not None and scale is not None:
            self.scale = scale

    def end_epoch(self) -> None:
        """Count an epoch; a gradient merge continues into the next one."""
        self.epoch += 1

    def report(self, loss: torch.Tensor | float) -> None:
        """Ignore the loss, on which nothing depends here."""

    def flush(self, *, end: bool = False) -> None:  # noqa: ARG002  # as other engines': sums that wait stay where they are
        """Make workers that have updated alone agree."""
        if self.rounds is not None:
            self.rounds.meet()
            self.reshard()

    def recordings(self) -> list[Recording]:
        """Return no recordings: torch carries out the plan, and no events are reported."""
        return []

    def close(self) -> None:
        """Stop timing torch's waits; the model stays sharded, so another engine needs another model."""
        self._timed.close()

    @contextmanager
    def _waiting(self, what: Exchange, _: Any) -> Iterator[None]:
        if what == "gradients":
            self.stopwatch.arrives()
        with self.stopwatch.waits():
            yield

    def _rounds(self, first_step: int) -> Rounds:
        shards = {name: shard_of(own).detach() for name, own in self.parameters.items()}
        decider = Decider.start(family(self.strategy, self.plan), self.communicators.rank, first_step=first_step)
        return Rounds(decider, shards, self.communicators, self.stopwatch)

    def _bytes_sent(self) -> int:
        """Return the bytes that this trainer sends in the current step for the plan's operations."""
        step = StepKind(closes=self._closes, merged=self.merged + 1, meets=False, asks_loss=False)  # rounds count what they send
        told = (one for _, operations in operations_of(self.plan, self._what, step).told(self.plan, 1) for one in operations)
        return sum(wire_bytes(one, len(self.plan.parts[one.group][0])) for one in told if one.kind in COLLECTIVES)

    @property
    def _closes(self) -> bool:
        """Whether the current step, or the next one, updates."""
        return self.merged + 1 == self._what.steps_per_update

    def _expect(self) -> None:
        """Set what torch exchanges in the next backward."""
        stage = self.strategy.sharding_configs.stage
        syncs = not self._keeps and (self._closes or stage > 1)
        wanted = (syncs, syncs and self._closes, self._closes or stage == 3)
        if wanted != self._expected:
            root = self.modules[0]
            root.set_requires_gradient_sync(syncs)
            root.set_requires_all_reduce(wanted[1])
            root.set_reshard_after_backward(wanted[2])
            self._expected = wanted

    def _forward_begins(self) -> None:
        refuse_unfinished(Phase.BACKWARD if self._is_in_backward else self._phase, self.communicators.rank)
        if torch.is_grad_enabled() and self._phase == Phase.IDLE:
            self._begin_step()
        if self._buffers is not None and self._was_synced and not self.merged:  # as under DDP
            with self.stopwatch.waits():
                self._buffers.send(self.communicators)

    def _begin_step(self) -> None:
        self._phase = Phase.FORWARD
        self.step += 1
        self.stopwatch.begin_step(self.step)
        if self.on_step is not None:
            self.on_step(self.step)
        self._overflows = False
        if not self.merged:
            self.reshard()  # another optimizer may have stepped
            self._refuse_changed()
        self._expect()

    def _refuse_changed(self) -> None:
        """Raise ``ConfigError`` if the model's parameters are not those that torch has sharded."""
        refuse_moved(next(self.model.parameters()), *self._was_like)
        self._owners = refuse_replaced(self._owners, self.parameters, self.model)
        is_frozen = not all(own.requires_grad for own in self.parameters.values())
        if is_frozen or any(own.requires_grad for own in self._frozen):
            hint = "let all that is ever trained require gradients before it, and optimize it later"
            raise ConfigError(
                "was frozen or unfrozen after fleet.distributed_model, which torch does not follow",
                "the model",
                hint=hint,
            )

    def _note_nodes(self) -> None:
        """Keep the nodes of newly gathered parameters, which stay the same objects from now on."""
        if len(self._nodes) == len(self.parameters) or not torch.is_grad_enabled():
            return
        for name, own in self.model.named_parameters():
            if own.requires_grad and name not in self._nodes and not isinstance(own, DTensor):
                (self._nodes[name],) = nodes_of([own])
                own.register_post_accumulate_grad_hook(partial(lambda name, _: self._reached.add(name), name))

    def _forward_ends(self, output: Any) -> None:
        if not torch.is_grad_enabled():
            self.reshard()  # `model.parameters()` are shards, which an optimizer steps
            return
        self._was_synced = not self._keeps
        self.stopwatch.forward_ends()
        outputs = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
        for tensor in outputs:
            tensor.register_hook(self._backward_begins)
        if not outputs and self.model.training:
            hint = "return tensors in tuples, lists, dicts or dataclasses"
            raise ConfigError(
                "returns no tensor with a gradient, and shards are gathered as its gradient comes",
                "the model",
                hint=hint,
            )

    def _backward_begins(self, _gradient: torch.Tensor) -> None:
        if self._is_in_backward or not leaves_gradients(self._nodes.values()):
            return
        refuse_graph_of_gradients(exchanges=True)
        if self._phase == Phase.IDLE:
            self._begin_step()
        if self._phase == Phase.UPDATE and not self._keeps:
            refuse_again(self._what, is_attached=self._optimizer is not None, dropped=False)
        self._is_in_backward = True
        self._show()
        self._reached.clear()
        queue_callback = Variable._execution_engine.queue_callback  # noqa: SLF001  # as FSDP hears of the end

        def compute_ends() -> None:
            if self.on_compute_end is not None:
                self.on_compute_end()
            queue_callback(self._backward_ends)  # after torch's, which the backward has queued

        queue_callback(compute_ends)

    def _show(self) -> None:
        if self._restore is not None:
            self._restore()
            self._restore = None

    def _backward_ends(self) -> None:
        self._is_in_backward = False
        self.stopwatch.backward_ends()
        if self.stopwatch.keep:
            self.stopwatch.sends(self._bytes_sent())
        self._phase = Phase.KEPT if self._keeps else Phase.UPDATE
        exchanges = self._expected is not None and self._expected[0]
        if exchanges and (missing := [name for name in self.parameters if name not in self._reached]):
            hint = "let the loss reach it on every rank, or freeze it before fleet.distributed_model"
            where, told = f"parameters {', '.join(missing[:5])}", f"{len(missing)} of {len(self.parameters)}"
            raise ConfigError("got no gradient in this step", where, told, hint)
        if self._keeps or not self._closes:
            if self._what.merges:
                self._restore = hide([*self.parameters.values(), *self.model.parameters()])
            return
        self._finish_gradients()

    @torch.no_grad()
    def _finish_gradients(self) -> None:
        """Divide a merge's sum if the strategy averages it, and unscale it."""
        sharded = [own.grad for own in self.parameters.values() if isinstance(own.grad, DTensor)]
        found = [gradient.to_local() for gradient in sharded]
        if self._what.merges and self._what.averages_gradient:
            torch._foreach_div_(found, self._what.steps_per_update)  # torch has no public name for it
        if self._what.scaler is not None and self.scale is not None:
            flag = unscale([own for own in found if own.numel()], self.scale.value, self.communicators.device)
            with self.stopwatch.waits():
                self.communicators.all_reduce(flag, "max")
                with host_reads():
                    self._overflows = bool(flag.item())
            self.scale = self._what.scaler.after(self.scale, self._overflows)

    def _step_begins(self, _: Optimizer, arguments: Sequence[Any], named: Mapping[str, Any]) -> None:
        refuse_arguments(given_of(arguments, named), self._what)
        refuse_scaler(self._what)
        if self._phase == Phase.KEPT or (self._phase != Phase.UPDATE and not self._what.leaves_averages):
            refuse_update(self._phase, [*self.parameters.values()], self.model)
        self._control.begin(updates=self._closes and not self._overflows)
        self.stopwatch.update_begins()

    def _step_ends(self, *_: Any) -> None:
        self._control.end()
        if self._phase == Phase.UPDATE:
            if self.rounds is not None:
                self.rounds.step_ends(self.step, overflows=self._overflows)
            elif self._closes:
                self.stopwatch.closes_round(1)
            self.stopwatch.update_ends()
            self.num_updates += self._closes and not self._overflows
            self._phase = Phase.IDLE
            self.merged = 0 if self._closes else self.merged + 1
        if not self.merged:
            self.reshard()
