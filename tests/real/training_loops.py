"""Loops as users write them, each a generator that trains one update after another.

A loop yields where ``.grad`` holds what its trainer will update from, before anything reads it. Under the
engine or DDP nothing happens there; in the written-out truth, that is where trainers' gradients are averaged.
It yields again, ``False``, after each ``optimizer.step()``, and ``None`` after ``meet``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import training_problem as problem
from torch import nn
from torch.nn.functional import cross_entropy

UPDATES = 6
Loop = Callable[["Script"], Iterator[bool | None]]


@dataclass
class Script:
    """What a script has: one trainer's model as it trains, its optimizer, and its batches."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    rank: int
    ranks: int
    no_sync: Callable[[], AbstractContextManager[None]] = nullcontext
    dtype: str = "float64"
    meet: Callable[[], None] = lambda: None
    """What a script does between two epochs: it synchronizes, ends an epoch, and saves."""
    batches: int = field(default=0, init=False)

    def loss(self) -> torch.Tensor:
        """Of the next batch."""
        inputs, labels = self.batch()
        return cross_entropy(self.model(inputs), labels)

    def batch(self) -> problem.Batch:
        """The next one."""
        self.batches += 1
        return problem.own_batch(self.batches, self.rank, self.ranks, self.dtype)


def usual(script: Script) -> Iterator[bool]:
    """One backward a step."""
    for _ in range(UPDATES):
        script.loss().backward()
        yield True
        script.optimizer.step()
        script.optimizer.zero_grad()
        yield False


def kept(script: Script) -> Iterator[bool]:
    """Gradients are zeroed, not dropped: what the loss does not reach has a gradient of zeros from its first one on."""
    for _ in range(UPDATES):
        script.loss().backward()
        yield True
        script.optimizer.step()
        script.optimizer.zero_grad(set_to_none=False)
        yield False


def in_no_sync(script: Script) -> Iterator[bool]:
    """Three batches a step, the first two of them inside ``no_sync``."""
    for _ in range(UPDATES):
        with script.no_sync():
            for _ in range(2):
                (script.loss() / 3).backward()
        (script.loss() / 3).backward()
        yield True
        script.optimizer.step()
        script.optimizer.zero_grad()
        yield False


def forward_outside(script: Script) -> Iterator[bool]:
    """The backward alone is inside ``no_sync``; gradients are zeroed, not dropped."""
    for _ in range(UPDATES):
        loss = script.loss()
        with script.no_sync():
            loss.backward()
        script.loss().backward()
        yield True
        script.optimizer.step()
        script.optimizer.zero_grad(set_to_none=False)
        yield False


def plain(script: Script) -> Iterator[bool]:
    """Two batches a step, as a loop for one process accumulates."""
    for _ in range(UPDATES):
        for _ in range(2):
            (script.loss() / 2).backward()
        yield True
        script.optimizer.step()
        script.optimizer.zero_grad()
        yield False


def mixed(script: Script) -> Iterator[bool]:
    """Outside, inside, outside ``no_sync``; every second step has one batch."""
    for update in range(UPDATES):
        if update % 2:
            script.loss().backward()
            with script.no_sync():
                script.loss().backward()
        script.loss().backward()
        yield True
        script.optimizer.step()
        script.optimizer.zero_grad()
        yield False


def two_forwards(script: Script) -> Iterator[bool]:
    """Two forwards, whose losses are one sum."""
    for _ in range(UPDATES):
        (script.loss() + 0.5 * script.loss()).backward()
        yield True
        script.optimizer.step()
        script.optimizer.zero_grad()
        yield False


def two_losses(script: Script) -> Iterator[bool]:
    """One forward, two losses, each with its backward."""
    for _ in range(UPDATES):
        inputs, labels = script.batch()
        output = script.model(inputs)
        cross_entropy(output, labels).backward(retain_graph=True)
        (0.1 * output.square().mean()).backward()
        yield True
        script.optimizer.step()
        script.optimizer.zero_grad()
        yield False


def one_of_two_losses(script: Script) -> Iterator[bool]:
    """The same with the first backward inside ``no_sync``."""
    for _ in range(UPDATES):
        inputs, labels = script.batch()
        output = script.model(inputs)
        with script.no_sync():
            cross_entropy(output, labels).backward(retain_graph=True)
        (0.1 * output.square().mean()).backward()
        yield True
        script.optimizer.step()
        script.optimizer.zero_grad()
        yield False


def whole(script: Script) -> Iterator[bool]:
    """Groups with rates of their own and one that comes later, a scheduler, clipping, and evaluations at every place."""
    model, optimizer = script.model, script.optimizer
    (group,) = optimizer.param_groups
    *most, last = group["params"]
    group["params"] = most[::2]
    optimizer.add_param_group({"params": most[1::2], "lr": problem.LR / 2, "weight_decay": 0.01})
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    for update in range(UPDATES):
        if update == UPDATES // 2:
            optimizer.add_param_group({"params": [last], "lr": problem.LR})
            scheduler.base_lrs.append(problem.LR)
            scheduler.lr_lambdas.append(scheduler.lr_lambdas[0])
        evaluate(script)
        with script.no_sync():
            script.loss().backward()
        evaluate(script)
        script.loss().backward()
        yield True
        evaluate(script)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        model.zero_grad(set_to_none=bool(update % 2))
        yield False


def evaluate(script: Script) -> None:
    """A look at the model, with and without gradients."""
    script.model.eval()
    inputs, _ = problem.own_batch(1, script.rank, script.ranks, script.dtype)
    script.model(inputs)
    with torch.no_grad():
        script.model(inputs)
    script.model.train()


def dropped(script: Script) -> Iterator[bool]:
    """Every third batch is thrown away after its backward, which is everybody's decision."""
    for update in range(UPDATES):
        if update % 3 == 1:
            script.loss().backward()
            yield True
            script.optimizer.zero_grad(set_to_none=bool(update % 2))
        script.loss().backward()
        yield True
        script.optimizer.step()
        script.optimizer.zero_grad()
        yield False


def left_over(script: Script) -> Iterator[bool | None]:
    """Every second update ends an epoch, which leaves over batches inside ``no_sync``, a forward, or both."""
    for update in range(UPDATES):
        script.loss().backward()
        yield True
        script.optimizer.step()
        script.optimizer.zero_grad()
        yield False
        if update % 2 == 0:
            continue
        if update % 4 == 1:
            with script.no_sync():
                for _ in range(2):
                    (script.loss() * torch.nan).backward()
            script.optimizer.zero_grad(set_to_none=update > 3)
        if update != 1:
            script.loss()
        script.meet()
        yield None


def no_backward(script: Script) -> Iterator[bool | None]:
    """A forward is left out in every place: before a step, between its batches, and last."""
    for _ in range(UPDATES):
        script.loss()
        with script.no_sync():
            script.loss().backward()
        script.loss()
        script.loss().backward()
        yield True
        script.optimizer.step()
        script.optimizer.zero_grad()
        yield False
    script.loss()
    script.meet()
    yield None


def scaler_of_its_own(script: Script) -> Iterator[bool]:
    """Torch's GradScaler in the script, which leaves out the step of a batch that overflows on one rank."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    for update in range(UPDATES):
        loss = script.loss()
        if update == 4 and script.rank == 1:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        yield True
        scaler.step(script.optimizer)
        scaler.update()
        script.optimizer.zero_grad()
        yield False


def penalty(script: Script, *, set_to_none: bool = True) -> Iterator[bool]:
    """A penalty on the gradient of the inputs: ``torch.autograd.grad`` within the step, and a backward through it."""
    for _ in range(UPDATES):
        inputs, labels = script.batch()
        inputs = inputs.clone().requires_grad_()
        output = script.model(inputs)
        (slope,) = torch.autograd.grad(output.square().sum(), inputs, create_graph=True)
        (cross_entropy(output, labels) + 0.01 * slope.square().mean()).backward()
        yield True
        script.optimizer.step()
        script.optimizer.zero_grad(set_to_none=set_to_none)
        yield False


def kept_penalty(script: Script) -> Iterator[bool]:
    """The same where gradients are zeroed, not dropped."""
    return penalty(script, set_to_none=False)
