"""Loops of a script that knows DistributedDataParallel and nothing else: ``plain_loops.py RANK RANKS STORE OUTPUT LOOP...``."""

from __future__ import annotations

import contextlib
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 6


class Net(nn.Module):
    """Has statistics, and a layer that some losses do not reach."""

    def __init__(self, *, has_norm: bool) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(16) if has_norm else nn.Identity()
        self.body = nn.Sequential(nn.Linear(8, 16), norm, nn.ReLU(), nn.Linear(16, 4))
        self.last = nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor, *, has_last: bool = True) -> torch.Tensor:
        """Logits of four classes."""
        found: torch.Tensor = self.body(inputs)
        return self.last(found) if has_last else found


def batch(rank: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in every run."""
    inputs = torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * number + rank))
    return inputs, (inputs[:, 0] > 0).long() + 2 * (inputs[:, 1] > 0).long()


class Plain:
    """The usual loop. ``losses``: of every forward, evaluations too, and at the end sums over parameters and buffers."""

    finds_unused, is_static, has_norm, cap_mb = False, False, True, 0.0005

    def __init__(self, rank: int) -> None:
        torch.manual_seed(0)
        self.rank, self.losses = rank, list[float]()
        self.model = Net(has_norm=self.has_norm)
        self.wrap()
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)

    def wrap(self) -> None:
        """Make ``ddp`` and the optimizer."""
        options = {"find_unused_parameters": self.finds_unused, "static_graph": self.is_static}
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=self.cap_mb, **options)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.1, momentum=0.9)

    def loss(self, number: int, **named: bool) -> torch.Tensor:
        """Of a forward."""
        inputs, labels = batch(self.rank, number)
        found = nn.functional.cross_entropy(self.ddp(inputs, **named), labels)
        self.losses.append(found.item())
        return found

    def backward(self, number: int) -> None:
        """Forward and backward."""
        self.loss(number).backward()

    def update(self) -> None:
        """What follows."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self) -> list[float]:
        """Train."""
        for number in range(STEPS):
            self.backward(number)
            self.update()
            self.schedule.step()
        return self.losses + self.sums()

    def sums(self) -> list[float]:
        """Of parameters, and of rank 0's buffers, which the others take before the next forward at the latest."""
        known = self.model.parameters() if self.rank else self.ddp.state_dict().values()
        return [value.double().sum().item() for value in known]


class Early(Plain):
    """The optimizer comes before the wrapper."""

    def wrap(self) -> None:
        """See ``Plain``."""
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        super().wrap()
        self.optimizer = optimizer


class Several(Plain):
    """Two optimizers."""

    def wrap(self) -> None:
        """See ``Plain``."""
        super().wrap()
        self.optimizer = torch.optim.SGD(self.model.body.parameters(), lr=0.1)
        self.other = torch.optim.Adam(self.model.last.parameters(), lr=0.01)

    def update(self) -> None:
        """See ``Plain``."""
        super().update()
        self.other.step()
        self.other.zero_grad()


class Unused(Plain):
    """Some losses do not reach all layers."""

    finds_unused = True

    def backward(self, number: int) -> None:
        """See ``Plain``."""
        self.loss(number, has_last=number % 2 == 0).backward()


class Static(Plain):
    """No loss reaches the last layer, and a static graph knows it."""

    is_static = True

    def backward(self, number: int) -> None:
        """See ``Plain``."""
        self.loss(number, has_last=False).backward()


class Accumulate(Plain):
    """Two batches an update, by ``no_sync``."""

    def backward(self, number: int) -> None:
        """See ``Plain``."""
        with self.ddp.no_sync():
            self.loss(STEPS + number).backward()
        self.loss(number).backward()


class Flag(Plain):
    """Two batches an update, by the flag, as nanoGPT has it."""

    def backward(self, number: int) -> None:
        """See ``Plain``."""
        for is_last in (False, True):
            self.ddp.require_backward_grad_sync = is_last
            self.loss(number + STEPS * is_last).backward()


class Apart(Plain):
    """What counts is where the forward was."""

    def backward(self, number: int) -> None:
        """See ``Plain``."""
        with self.ddp.no_sync():
            kept = self.loss(STEPS + number)
        kept.backward()
        exchanged = self.loss(number)
        with self.ddp.no_sync():
            exchanged.backward()


class Closure(Plain):
    """Forward and backward are within ``optimizer.step``, as Lightning has it."""

    def backward(self, number: int) -> None:
        """See ``Plain``."""
        self.number = number

    def closure(self) -> torch.Tensor:
        """Forward and backward."""
        loss = self.loss(self.number)
        self.optimizer.zero_grad()
        loss.backward()
        return loss

    def update(self) -> None:
        """See ``Plain``."""
        self.losses.append(float(self.optimizer.step(self.closure)))  # type: ignore[arg-type]  # a tensor is a number


class Manual(Plain):
    """Backward and update are within the wrapper's forward, as in Lightning's manual optimization."""

    def run(self) -> list[float]:
        """See ``Plain``."""
        plain = self.model.forward

        def step(number: int) -> None:
            self.model.forward = plain  # type: ignore[method-assign]  # as there
            inputs, labels = batch(self.rank, number)
            loss = nn.functional.cross_entropy(self.model(inputs), labels)
            self.losses.append(loss.item())
            self.ddp.reducer._rebuild_buckets()  # as there
            self.ddp.reducer.prepare_for_backward([])
            loss.backward()
            self.update()
            self.ddp.require_backward_grad_sync = False

        for number in range(STEPS):
            self.model.forward = step  # type: ignore[assignment, method-assign]  # as there
            self.ddp.require_backward_grad_sync = True
            self.ddp(number)
        return self.losses + self.sums()


class Evaluate(Plain):
    """Evaluates after every update, with gradients in every second."""

    def update(self) -> None:
        """See ``Plain``."""
        super().update()
        self.ddp.eval()
        number = len(self.losses)
        with torch.set_grad_enabled(number % 4 == 1):
            self.loss(2 * STEPS + number)
        self.ddp.train()


class Modes(Plain):
    """The wrapper is in evaluation mode and the model is not, as with Lightning; from the third step on the model is, too."""

    def backward(self, number: int) -> None:
        """See ``Plain``."""
        self.ddp.eval()
        self.model.train(number < STEPS // 2)
        super().backward(number)


class Join(Plain):
    """Rank 1 has fewer batches."""

    has_norm = False

    def run(self) -> list[float]:
        """See ``Plain``."""
        with self.ddp.join():
            for number in range(STEPS - self.rank):
                self.backward(number)
                self.update()
        return self.losses + self.sums()


class Twice(Plain):
    """The model is wrapped again, as by a second `fit` of Lightning's."""

    def run(self) -> list[float]:
        """See ``Plain``."""
        super().run()
        self.wrap()
        return super().run()


class Compiled(Plain):
    """The wrapper is compiled, as Accelerate does it."""

    cap_mb = 25

    def wrap(self) -> None:
        """See ``Plain``."""
        super().wrap()
        self.ddp.compile(backend="eager")


KINDS = (Plain, Early, Several, Unused, Static, Accumulate, Flag, Apart, Closure, Manual, Evaluate, Modes, Join, Twice, Compiled)
LOOPS = {kind.__name__: kind for kind in KINDS}

if __name__ == "__main__":
    rank, ranks, store, output = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    np.savez(output, **{name: np.array(LOOPS[name](rank).run()) for name in sys.argv[5:]})
    with contextlib.suppress(ValueError):  # as a script's `finally` may
        dist.barrier()
    dist.destroy_process_group()
