"""The loop of a random case, one text for all who run it, and the algorithms of its strategy, written out.

``Trainer`` is what the loop trains with: as it is, a model and an optimizer that somebody else (fleet, or
DistributedDataParallel) has made distributed. ``WrittenOut`` does by hand, with one all-reduce of plain
tensors, what a strategy says: it shares nothing with the code under test.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from random_cases import RANKS, Case
from random_models import BATCH, CLASSES, FEATURES, SHIFTS, Network, Vector, flat_of, real, second_of
from torch import nn
from torch.nn.functional import cross_entropy


class Trainer:
    """A model and an optimizer as a loop meets them. ``history``: all parameters, flat, after every step, and at the end."""

    def __init__(self, case: Case, network: Network, optimizer: torch.optim.Optimizer, model: Callable[..., Any]) -> None:
        self.case = case
        self.network = network
        self.optimizer = optimizer
        self.model = model
        self.rank = network.rank
        self.history: list[Vector] = []
        self.no_sync: Callable[[], AbstractContextManager[None]] = nullcontext
        self.tell: Callable[[torch.Tensor], None] = lambda _loss: None
        self.end_epoch: Callable[[], None] = lambda: None
        self.synchronize: Callable[[], None] = lambda: None
        self.give: Callable[[Any], object] = lambda _optimizer: None

    def forward_begins(self) -> None:
        """A training forward is about to begin."""

    def backward_came(self) -> None:
        """A backward outside of ``no_sync`` has come to its end."""

    def backwards_came(self, scale: float) -> None:
        """The step's last backward has; ``scale`` is by what the script has multiplied its losses."""

    def before_step(self, scaler: torch.amp.GradScaler | None) -> None:
        """The optimizer is about to step."""

    def step(self, closure: Callable[[], torch.Tensor] | None) -> None:
        """Step the optimizer."""
        self.optimizer.step(closure) if closure else self.optimizer.step()  # type: ignore[arg-type]  # torch wants a float

    def after_step(self) -> None:
        """It has stepped, or its scaler has left the step out."""
        self.remember()

    def remember(self) -> None:
        """Add to the history."""
        self.history.append(flat_of(self.network.parameters()))


class Loop:
    """A case's loop: ``run`` trains. Losses and batches depend on the step, the rank and the place within the step."""

    def __init__(self, case: Case, trainer: Trainer) -> None:
        self._case = case
        self._trainer = trainer
        self._batches = 0
        self._scaler = (
            torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=case.growth_interval, backoff_factor=0.5) if case.scaler else None
        )
        self._step = 0
        self._second = second_of(case, trainer.network)
        if case.second == "given":
            trainer.give(self._second)

    def run(self) -> None:
        """All steps, and the trainers' last meeting."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16 if self._case.mode == "default type" else before)
        try:
            self._run()
        finally:
            torch.set_default_dtype(before)

    def _run(self) -> None:
        case, trainer = self._case, self._trainer
        scheduler = self._scheduler()
        for self._step in range(1, case.steps + 1):
            self._before()
            if case.closure:
                trainer.step(self._closure)
            else:
                self._backwards_and_step()
            trainer.after_step()
            if scheduler is not None:
                scheduler.step()
            self._after()
        if case.drops.startswith("last"):
            self._drop(case.drops.removeprefix("last "))
        self._synchronize()
        trainer.remember()

    def _before(self) -> None:
        if self._case.drops and not self._case.drops.startswith("last") and self._step % 3 == 0:
            self._drop(self._case.drops)
        if self._case.turn and self._step == 3:
            network = self._trainer.network
            (network.first if self._case.turn == "thaws" else network.last.bias).requires_grad_(self._case.turn == "thaws")
        if self._case.evaluates:
            self._evaluate()
        if self._case.zero.endswith("before") and not self._case.closure:
            self._zero()

    def _after(self) -> None:
        case, trainer = self._case, self._trainer
        if case.zero.endswith("after"):
            self._zero()
        if case.epoch and self._step % case.epoch == 0:
            trainer.end_epoch()
        if self._step == case.synchronizes:
            self._synchronize()

    def _drop(self, phase: str) -> None:
        """Throw a batch away: after its backward, inside ``no_sync`` or outside, or after its forward."""
        if phase == "forward":
            self._loss(*self._batch())
        else:
            self._backward("batch", synced=phase == "synced")
        self._zero()

    def _synchronize(self) -> None:
        with torch.inference_mode() if self._case.mode == "inference" else nullcontext():
            self._trainer.synchronize()

    def _backwards_and_step(self) -> None:
        trainer, scaler = self._trainer, self._scaler
        self._backwards()
        if scaler is not None and self._case.scaler == "unscale":
            scaler.unscale_(trainer.optimizer)
        self._edit()
        trainer.before_step(scaler)
        if self._case.second == "new" and self._step > 2:
            self._second.step()
        elif scaler is None:
            trainer.step(None)
            if self._second is not None:
                self._second.step()
        else:
            scaler.step(trainer.optimizer)
            scaler.update()

    def _closure(self) -> torch.Tensor:
        self._zero()
        loss = self._backwards()
        self._edit()
        self._trainer.before_step(None)
        return loss

    def _scheduler(self) -> torch.optim.lr_scheduler.LRScheduler | None:
        factors: dict[str, Callable[[int], float]] = {
            "shared": lambda step: 0.8**step,
            "by rank": lambda step: (0.9 - 0.4 * self._trainer.rank) ** step,
        }
        if not self._case.schedule:
            return None
        return torch.optim.lr_scheduler.LambdaLR(self._trainer.optimizer, factors[self._case.schedule])

    def _backwards(self) -> torch.Tensor:
        for kind, synced in self._case.backwards:
            loss = self._backward(kind, synced=synced)
        self._trainer.tell(loss)
        self._trainer.backwards_came(self._scale)
        return loss

    @property
    def _scale(self) -> float:
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())

    def _backward(self, kind: str, *, synced: bool) -> torch.Tensor:
        trainer, num = self._trainer, len(self._case.backwards)
        with nullcontext() if synced else trainer.no_sync():
            inputs, labels = self._batch()
            if kind == "penalty" or self._case.model == "reentrant":
                inputs.requires_grad_()
            scores, loss = self._loss(inputs, labels)
            told = loss.detach()
            loss = self._scaled(self._more_of(kind, loss, scores, inputs) / num)
            if kind in ("two losses", "one of two losses"):
                with trainer.no_sync() if kind == "one of two losses" else nullcontext():
                    loss.backward(retain_graph=True)
                if synced and kind == "two losses":
                    trainer.backward_came()
                loss = self._scaled(0.1 * scores.square().mean() / num)
            loss.backward(create_graph=kind == "create graph")
        if synced:
            trainer.backward_came()
        return told

    def _loss(self, inputs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and their loss."""
        if self._case.writes == "sent":
            dist.broadcast(self._trainer.network.mean, 0)
        self._trainer.forward_begins()
        output = self._trainer.model(inputs)
        if isinstance(output, dict):
            return output["scores"], cross_entropy(output["scores"], labels) + 0.01 * output["hidden"][0].square().mean()
        return output, cross_entropy(output, labels)

    def _more_of(self, kind: str, loss: torch.Tensor, scores: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """The loss with what is special about this backward."""
        network = self._trainer.network
        if self._case.large:
            loss = loss + SHIFTS[self._trainer.rank] * network.shift.sum()
        if self._case.overflow == self._step and self._trainer.rank == 1:
            loss = loss * torch.inf
        if kind in ("penalty", "parameter penalty"):
            of = inputs if kind == "penalty" else network.middle[0].weight
            (slope,) = torch.autograd.grad(scores.square().sum(), of, create_graph=True)
            loss = loss + 0.5 * slope.square().mean()
        if kind == "two forwards":
            loss = loss + self._loss(*self._batch())[1]
        return loss

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return loss if self._scaler is None else self._scaler.scale(loss)

    def _batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        self._batches += 1
        generator = torch.Generator().manual_seed(100 * self._case.index + 7 * self._batches + self._trainer.rank)
        inputs = torch.randn(BATCH, FEATURES, generator=generator, dtype=torch.float64)
        return inputs.to(getattr(torch, self._case.dtype)), torch.randint(0, CLASSES, (BATCH,), generator=generator)

    def _evaluate(self) -> None:
        trainer = self._trainer
        trainer.network.eval()
        inputs = torch.ones(2, FEATURES, dtype=getattr(torch, self._case.dtype))
        trainer.model(inputs)
        with torch.inference_mode() if self._case.mode == "inference" else torch.no_grad():
            trainer.model(inputs)
        trainer.network.train()

    def _zero(self) -> None:
        for optimizer in (self._trainer.optimizer, self._second):
            if optimizer is not None:
                optimizer.zero_grad(set_to_none="none" in self._case.zero)

    @torch.no_grad()
    def _edit(self) -> None:
        parameters = list(self._trainer.network.parameters())
        gradients = [parameter for parameter in parameters if parameter.grad is not None]
        edit = self._case.edit
        if edit == "clip norm":
            nn.utils.clip_grad_norm_(parameters, 0.3)
        elif edit == "clip value":
            nn.utils.clip_grad_value_(parameters, 0.02)
        elif edit == "drop one" and gradients:
            gradients[-1].grad = None
        elif edit == "zero one" and gradients:
            gradients[-1].grad.zero_()
        for parameter in gradients:
            if edit == "data mul":
                parameter.grad.data.mul_(0.5)
            elif edit == "mul":
                parameter.grad.mul_(0.5)
            elif edit == "replace":
                parameter.grad = parameter.grad * 0.5


class WrittenOut(Trainer):
    """A strategy's algorithm by hand, after Fleet's documents; every rank makes one.

    Steps that share an update: gradients are summed outside of ``.grad``, each without its script's scale; the
    step that closes finds the sum, or its average, in ``.grad``, and the others' optimizer finds nothing.
    """

    def __init__(self, case: Case, network: Network, optimizer: torch.optim.Optimizer, model: Callable[..., Any]) -> None:
        super().__init__(case, network, optimizer, model)
        self._parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
        self._snapshot = [parameter.detach().clone() for parameter in self._parameters]
        self._merging = case.strategy.get("gradient_merge_configs", {})
        self._sums: list[torch.Tensor | None] = [None for _ in self._parameters]
        self._merged = self._phase = self._updates = self._epoch = self._last = 0
        self._skips = self._epoch_ended = False
        self._hidden: list[torch.Tensor | None] = []
        self._loss = 0.0
        self._rounds = Rounds(case.strategy["adaptive_localsgd_configs"]) if case.strategy.get("adaptive_localsgd") else None
        self._was_synced, self._keeps = True, False
        self.no_sync = self._no_sync
        self.tell = self._tell
        self.end_epoch = self._end_epoch
        self.synchronize = self._synchronize
        self._given: list[torch.optim.Optimizer] = []
        self.give = self._given.append

    def forward_begins(self) -> None:
        """See ``Trainer``: rank 0's buffers are sent, unless the last forward was inside ``no_sync``."""
        if self._was_synced and not self.case.is_local and self._phase == 0:
            for buffer in self.network.buffers():
                sent = buffer.contiguous()
                dist.broadcast(sent, 0)
                buffer.data.copy_(sent)  # which leaves a graph of before good
        self._was_synced = not self._keeps

    @contextmanager
    def _no_sync(self) -> Iterator[None]:
        before, self._keeps = self._keeps, True
        yield
        self._keeps = before

    def _tell(self, loss: torch.Tensor) -> None:
        self._loss = float(loss)

    def backward_came(self) -> None:
        """See ``Trainer``."""
        if not self.case.is_local and self.case.merge == 1:
            self._share(1.0)

    def backwards_came(self, scale: float) -> None:
        """See ``Trainer``."""
        self._phase += 1
        if self.case.merge > 1:
            self._merged += 1
            for index, parameter in enumerate(self._parameters):
                if parameter.grad is not None:
                    own = parameter.grad.detach() / scale
                    self._sums[index] = own.clone() if self._sums[index] is None else self._sums[index] + own
            if self._closes:
                self._release(scale)
        if self._closes and self.case.amp == "fp16":
            found = any(not parameter.grad.isfinite().all() for parameter in self._parameters if parameter.grad is not None)
            self._skips = bool(_mean([torch.tensor(float(found))])[0])

    @property
    def _closes(self) -> bool:
        return self._phase == self.case.merge

    def _release(self, scale: float) -> None:
        divisor = self._merged if self._merging.get("avg", True) else 1
        for parameter, total in zip(self._parameters, self._sums, strict=True):
            parameter.grad = None if total is None else (total.to_dense() if total.is_sparse else total) / divisor
        self._sums = [None for _ in self._parameters]
        self._merged = 0
        if not self.case.is_local:
            self._share(1.0)
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad *= scale

    def _share(self, scale: float) -> None:
        """Average gradients; one that no rank has stays away."""
        gradients = [parameter.grad for parameter in self._parameters]
        flags = torch.tensor([float(gradient is not None) for gradient in gradients])
        dense = [
            torch.zeros_like(parameter) if gradient is None else gradient.detach().to_dense()
            for parameter, gradient in zip(self._parameters, gradients, strict=True)
        ]
        *means, found = _mean([*dense, flags])
        for parameter, mean, flag in zip(self._parameters, means, found.tolist(), strict=True):
            if flag:
                parameter.grad = mean * scale

    def before_step(self, scaler: torch.amp.GradScaler | None) -> None:
        """See ``Trainer``."""
        if self._closes and not self._skips:
            return
        if scaler is not None and self.case.scaler == "step" and not self._closes:
            scaler.unscale_(self.optimizer)  # it looks at every batch's gradients
        self._hidden = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None

    def step(self, closure: Callable[[], torch.Tensor] | None) -> None:
        """See ``Trainer``."""
        if closure is not None:
            with torch.enable_grad():
                closure()
        self.optimizer.step()

    def after_step(self) -> None:
        """See ``Trainer``."""
        for parameter, gradient in zip(self._parameters, self._hidden, strict=False):
            parameter.grad = gradient
        self._hidden = []
        if self._closes:
            self._phase, self._skips = 0, False
            self._update_came()
        self.remember()

    def _update_came(self) -> None:
        self._updates += 1
        if self._meets():
            self._meet()
            if self._rounds is not None:
                lr = torch.tensor(float(self.optimizer.param_groups[0]["lr"]), dtype=torch.float64)
                loss = torch.tensor(self._loss, dtype=torch.float64)
                lr, loss = (float(value) for value in _mean([lr, loss]))
                self._epoch_ended &= not self._rounds.met(self._updates, lr, loss, epoch_ended=self._epoch_ended)

    def _meets(self) -> bool:
        update, configs = self._updates, self.case.strategy.get("localsgd_configs", {})
        if self._rounds is not None:
            return update <= self._rounds.begin or update - self._last >= self._rounds.k
        if not self.case.strategy.get("localsgd"):
            return False
        k, begin = configs["k_steps"], configs.get("begin_step", 1)
        if configs["schedule"] == "torch":
            return update >= begin and (update - begin) % k == 0
        if configs["schedule"] == "document":
            return (update - 1) % self._document_k(configs) == 0
        return update <= begin or update - self._last >= k

    def _document_k(self, configs: dict[str, Any]) -> int:
        after = self._epoch - configs["warmup_epochs"]
        if after < 0:
            return 1
        grown = {"const": configs["k_steps"], "exp": 2**after, "linear": 2 * after if after else 1}[configs["warmup"]]
        return min(grown, configs["k_steps"])

    @torch.no_grad()
    def _meet(self) -> None:
        """Average parameters by their distance from a snapshot, and what else the strategy says."""
        self._last = self._updates
        deltas = _mean([parameter.detach() - kept for parameter, kept in zip(self._parameters, self._snapshot, strict=True)])
        for parameter, kept, delta in zip(self._parameters, self._snapshot, deltas, strict=True):
            kept.add_(delta)
            parameter.copy_(kept)
        configs = self.case.strategy.get("localsgd_configs", {}) | self.case.strategy.get("adaptive_localsgd_configs", {})
        buffers = [buffer for buffer in self.network.buffers() if buffer.is_floating_point()]
        if configs.get("buffers") == "average" and buffers:
            for buffer, mean in zip(buffers, _mean(buffers), strict=True):
                buffer.copy_(mean)
        if configs.get("optimizer_state") == "average":
            self._average_state((*self._momentum, "exp_avg_sq") if "exp_avg" in self._momentum else self._momentum)
        elif configs.get("momentum") == "average":
            self._average_state(self._momentum)
        elif configs.get("momentum") == "reset":
            for state in self.optimizer.state.values():
                for name in self._momentum:
                    if state.get(name) is not None:
                        state[name].zero_()

    @property
    def _momentum(self) -> tuple[str, ...]:
        return {"adam": ("exp_avg",), "adamw": ("exp_avg",), "sgd": ()}.get(self.case.optimizer, ("momentum_buffer",))

    def _average_state(self, names: tuple[str, ...]) -> None:
        """State that a rank lacks counts as zeros."""
        for parameter in self._parameters:
            state = self.optimizer.state[parameter] if names else {}
            for name in names:
                own = state.get(name)
                flag, mean = _mean([torch.tensor(float(own is not None)), torch.zeros_like(parameter) if own is None else own])
                if flag:
                    state[name] = mean
                    if name != "momentum_buffer":
                        state.setdefault("step", torch.zeros(()))  # Adam counts each trainer's own
                        state.setdefault("exp_avg_sq", torch.zeros_like(parameter))

    def _end_epoch(self) -> None:
        self._epoch, self._epoch_ended = self._epoch + 1, True
        remainder = self._merging.get("remainder", "carry") if self.case.merge > 1 else "carry"
        if remainder == "carry" or not self._merged:
            return
        self._phase = 0
        if remainder == "drop":
            self._sums, self._merged = [None for _ in self._parameters], 0
            return
        self._release(1.0)
        for optimizer in (self.optimizer, *self._given):
            optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None
        self._update_came()

    @torch.inference_mode(False)
    def _synchronize(self) -> None:
        if self.case.is_local and self._updates != self._last:
            self._meet()
            if self._rounds is not None and self._rounds.variant == "qsr":  # a round begins, at the learning rate of now
                (lr,) = _mean([torch.tensor(float(self.optimizer.param_groups[0]["lr"]), dtype=torch.float64)])
                self._rounds.met(self._updates, float(lr), 0.0, epoch_ended=False)


class Rounds:
    """Adaptive K after the four published formulas, by averages over all trainers."""

    def __init__(self, configs: dict[str, Any]) -> None:
        self.k = self._k0 = configs["init_k_steps"]
        self.begin = configs.get("begin_step", 1)
        self.variant = configs["variant"]
        self._alpha = configs.get("alpha", 0.01)
        self._first: tuple[float, float] | None = None

    def met(self, update: int, lr: float, loss: float, *, epoch_ended: bool) -> bool:
        """Choose the next K; whether the loss was looked at."""
        if self.variant == "qsr":
            self.k = max(self._k0, math.floor((self._alpha / lr) ** 2))
            return False
        if self._first is None:
            self._first = lr, loss
            return True
        if not (epoch_ended if self.variant == "document" else update > self.begin):
            return False
        lr0, loss0 = self._first
        if self.variant == "document":
            if loss >= 0.6:
                grown = max(1, int(self._k0 * math.sqrt(lr0 * (loss - 0.6) / (lr * max(loss0 - 0.6, 1e-12)))))
                self.k = self.k if grown - self.k > 20 else grown
            return True
        ratio = lr0 * loss / (lr * loss0)
        self.k = (
            math.ceil(self._k0 * math.sqrt(ratio)) if self.variant == "paper" else min(max(1, math.ceil(math.sqrt(ratio * self._k0))), 16)
        )
        return True


@torch.no_grad()
def _mean(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The means over all ranks, by one all-reduce of float64."""
    flat = flat_of(tensors)
    dist.all_reduce(flat)
    found = []
    for part, tensor in zip(torch.split(flat / RANKS, [real(tensor).numel() for tensor in tensors]), tensors, strict=True):
        whole = part.reshape(real(tensor).shape).to(real(tensor).dtype)
        found.append(torch.view_as_complex(whole) if tensor.is_complex() else whole)
    return found


@contextmanager
def autocast(case: Case) -> Iterator[None]:
    """What mixed precision means for a forward."""
    with torch.autocast("cpu", dtype={"fp16": torch.float16, "bf16": torch.bfloat16}[case.amp]) if case.amp else nullcontext():
        yield
