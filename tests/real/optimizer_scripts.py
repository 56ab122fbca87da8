"""Scripts with several optimizers, optimizers made anew, closures, and updates by hand; see ``reducer_scripts``.

The truth is plain DDP, or, where trainers update alone or merge gradients, ``WrittenOut``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from reducer_scripts import BY_BUCKET, LOCAL, MERGE, SCALED, SGD, SIZE, STATE, Script, Way, layers
from torch import nn

FUSED: dict[str, Any] = {"build_strategy": {"fuse_all_optimizer_ops": True}}
FUSED_BUCKETS: dict[str, Any] = {**BY_BUCKET, "fuse_grad_size_in_MB": 0.0001}
DILOCO: dict[str, Any] = {
    "localsgd": True,
    "localsgd_configs": {"k_steps": 2, "outer_lr": 0.7, "outer_momentum": 0.9},
}
RESET: dict[str, Any] = {"localsgd": True, "localsgd_configs": {"k_steps": 3, "momentum": "reset"}}
BOTH: dict[str, Any] = {**LOCAL, **MERGE}
FLUSHED: dict[str, Any] = {
    "gradient_merge": True,
    "gradient_merge_configs": {"k_steps": 3, "remainder": "flush"},
}
SLOWED: dict[str, Any] = {"learning_rate": {"scale": 0.5}}
ADAMW = partial(torch.optim.AdamW, lr=0.01)
Optimizer = torch.optim.Optimizer


def loss_of(way: Way, model: Any, step: int) -> torch.Tensor:
    """Of a step's batch, another on each rank."""
    x = torch.randn(5, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + way.rank))
    return model(x).square().mean()  # type: ignore[no-any-return]  # a model is called like any


def train(
    way: Way,
    model: Any,
    optimizers: Sequence[Optimizer],
    steps: int = 6,
    *,
    first: int = 1,
    chosen: Any = lambda _step, all_of: all_of,
) -> None:
    """The usual loop, in which those of the optimizers step that are ``chosen`` for a step."""
    for step in range(first, first + steps):
        loss_of(way, model, step).backward()  # type: ignore[no-untyped-call]  # torch's
        way.update(chosen(step, optimizers))
        for optimizer in optimizers:
            optimizer.zero_grad()


def halves(network: nn.Module, kinds: Sequence[Callable[..., Optimizer]] = (SGD, ADAMW)) -> list[Optimizer]:
    """One optimizer for each of as many parts of the model."""
    held, number = list(network.parameters()), len(kinds)
    return [kind(held[len(held) * part // number : len(held) * (part + 1) // number]) for part, kind in enumerate(kinds)]


def matrices(network: nn.Module) -> list[Optimizer]:
    """Muon for what it is made for, and another for the rest."""
    held = list(network.parameters())
    muon = getattr(torch.optim, "Muon", SGD)
    return [muon([own for own in held if own.dim() == 2]), ADAMW([own for own in held if own.dim() != 2])]


def several(
    way: Way,
    *,
    of: Callable[[nn.Module], list[Optimizer]] = halves,
    chosen: Any = lambda _step, all_of: all_of,
    turned: bool = False,
    late: bool = False,
) -> nn.Module:
    """Fleet is given them in turn, or ``turned``, or the last after two steps; they step as ``chosen``."""
    network = layers()
    model = way.wrap(network)
    optimizers = of(network)
    if late:
        first = [way.give(one) for one in optimizers[:-1]]
        train(way, model, first, steps=2)
        way.give(optimizers[-1])
    else:
        optimizers = [way.give(one) for one in (optimizers[::-1] if turned else optimizers)]
    train(way, model, optimizers, first=3, chosen=chosen)
    return network


def normed(way: Way, *, closures: bool) -> nn.Module:
    """A batch norm, whose statistics are rank 0's in every forward."""
    network = nn.Sequential(*layers(), nn.BatchNorm1d(SIZE, dtype=torch.float64), *layers(1))
    model = way.wrap(network)
    optimizers = [way.give(one) for one in halves(network)]
    if closures:
        by_closure(way, model, optimizers)
    else:
        train(way, model, optimizers, chosen=lambda step, all_of: all_of[step % 2 :])
    return network


def own_zero(way: Way) -> nn.Module:
    """The second steps every third step, on what has added up since; the first clears its own gradients before the other steps."""
    network = layers()
    model = way.wrap(network)
    one, two = (way.give(each) for each in halves(network))
    for step in range(1, 8):
        loss_of(way, model, step).backward()  # type: ignore[no-untyped-call]  # torch's
        one.step()
        one.zero_grad()
        if step % 3 == 0:
            nn.utils.clip_grad_norm_(network.parameters(), 0.1)
            two.step()
            two.zero_grad(set_to_none=False)
    return network


def cleared_between(way: Way) -> nn.Module:
    """Each optimizer clears its gradients as soon as it has stepped."""
    network = layers()
    model = way.wrap(network)
    optimizers = [way.give(one) for one in halves(network)]
    for step in range(1, 7):
        loss_of(way, model, step).backward()  # type: ignore[no-untyped-call]  # torch's
        for number, optimizer in enumerate(optimizers):
            optimizer.step()
            optimizer.zero_grad(set_to_none=bool(number))
    return network


def repeated(way: Way, *, cleared: bool) -> nn.Module:
    """Steps without a backward between, also after a forward that nobody uses; ``cleared``: on gradients of zeros."""
    network = layers()
    model = way.wrap(network)
    optimizers = [way.give(one) for one in halves(network)]
    for step in range(1, 6):
        loss_of(way, model, step).backward()  # type: ignore[no-untyped-call]  # torch's
        for one in (*optimizers, optimizers[0]):
            one.step()
        if cleared:
            for one in optimizers:
                one.zero_grad(set_to_none=False)
        if step == 4:
            loss_of(way, model, 30)
        for one in optimizers:
            one.step()
        for one in optimizers:
            one.zero_grad()
    return network


def scaled(way: Way) -> nn.Module:
    """Torch's GradScaler leaves out the step of the optimizer whose gradients overflow."""
    network = layers()
    model = way.wrap(network)
    optimizers = [way.give(one) for one in halves(network)]
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(1, 7):
        loss = loss_of(way, model, step)
        if step == 3 and way.rank == 1:
            loss = loss + torch.inf * network[2].bias.sum()
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]  # torch's
        for one in optimizers:
            scaler.step(one)
        scaler.update()
        for one in optimizers:
            one.zero_grad()
    return network


def two_losses(way: Way) -> nn.Module:
    """One forward, and a loss for each optimizer; a further one that nobody hears of holds a layer."""
    network = layers(4)
    model = way.wrap(network)
    optimizers = [way.give(one) for one in halves(network, (SGD, ADAMW, SGD))]
    for step in range(1, 6):
        loss_of(way, model, step).backward()  # type: ignore[no-untyped-call]  # torch's
        optimizers[0].step()
        loss_of(way, model, 10 + step).backward()  # type: ignore[no-untyped-call]  # torch's
        for one in optimizers[1:]:
            one.step()
        for one in optimizers:
            one.zero_grad()
    return network


class Looked(nn.Module):
    """An embedding with sparse gradients before a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(9, SIZE, sparse=True, dtype=torch.float64)
        self.layer = nn.Linear(SIZE, SIZE, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of numbers that rows are chosen by."""
        return self.layer(self.table((x.abs() * 3).long() % 9).sum(dim=1))  # type: ignore[no-any-return]  # torch's modules return Any


def looked(way: Way) -> nn.Module:
    """SparseAdam for the embedding, and another for the rest."""
    network = Looked()
    model = way.wrap(network)
    optimizers = [
        torch.optim.SparseAdam(list(network.table.parameters()), lr=0.01),
        SGD(network.layer.parameters()),
    ]
    train(way, model, [way.give(one) for one in optimizers])
    return network


# Closures


def by_closure(way: Way, model: Any, optimizers: Sequence[Optimizer], steps: int = 5) -> None:
    """As Lightning does: each optimizer's step runs a forward and a backward."""
    for step in range(1, steps + 1):
        for number, one in enumerate(optimizers):

            def closure(one: Optimizer = one, number: int = number, step: int = step) -> torch.Tensor:
                one.zero_grad()
                loss = loss_of(way, model, 10 * step + number)
                loss.backward()  # type: ignore[no-untyped-call]  # torch's
                return loss

            one.step(closure)  # type: ignore[arg-type]  # torch wants a float, and takes a tensor


def closures(way: Way, *, kinds: Sequence[Callable[..., Optimizer]] = (SGD,), given: bool = True) -> nn.Module:
    """One or several optimizers that step by closures."""
    network = layers()
    model = way.wrap(network)
    by_closure(way, model, [way.give(one) if given else one for one in halves(network, kinds)])
    return network


def raising_closure(way: Way) -> nn.Module:
    """A closure raises, and the loop goes on without one."""
    network = layers()
    model, optimizer = way.wrap(network), way.give(SGD(network.parameters()))

    def closure() -> float:
        raise KeyError("a batch is missing")

    for step in range(1, 6):
        with suppress(KeyError):
            optimizer.step(closure)
        train(way, model, [optimizer], steps=1, first=step)
    return network


LBFGS = partial(torch.optim.LBFGS, lr=0.3, max_iter=4)


# Optimizers made anew


def anew(way: Way, *, second: Callable[[nn.Module], Optimizer], also: bool = False) -> nn.Module:
    """From the fourth step on another one holds some parameters; ``also``: the first goes on, too."""
    network = layers()
    model, one = way.wrap(network), way.give(SGD(network.parameters()))
    train(way, model, [one], steps=3)
    two = way.give(second(network))
    train(way, model, [one, two] if also else [two], steps=4, first=4)
    return network


def frozen_layer(network: nn.Module) -> Optimizer:
    """Of all but one layer."""
    return SGD([own for name, own in network.named_parameters() if not name.startswith("0.")])


def of_halves(way: Way) -> nn.Module:
    """Of two optimizers, the second is made anew, with another after it."""
    network = layers()
    model = way.wrap(network)
    optimizers = [way.give(one) for one in halves(network)]
    train(way, model, optimizers, steps=3)
    optimizers[1] = way.give(SGD(optimizers[1].param_groups[0]["params"]))
    train(way, model, optimizers, steps=4, first=4)
    return network


# Updates by hand


def by_hand(way: Way, *, beside: bool = False, steps: int = 6, accumulates: bool = False) -> nn.Module:
    """``p -= lr * p.grad``, of all or ``beside`` an optimizer of the first layer, with the sum of two batches in every other step."""
    network = layers()
    model = way.wrap(network)
    optimizer = way.give(SGD(network[0].parameters())) if beside else None
    for step in range(1, steps + 1):
        loss_of(way, model, step).backward()  # type: ignore[no-untyped-call]  # torch's
        if accumulates and step % 2:
            continue
        if optimizer is not None:
            optimizer.step()
        with torch.no_grad():
            for own in (network[1:] if beside else network).parameters():
                assert own.grad is not None
                own.sub_(0.05 * own.grad)
        network.zero_grad()
    return network


def shared_by_two(way: Way) -> nn.Module:
    """A parameter joins a second optimizer, too."""
    network = layers()
    model = way.wrap(network)
    optimizers = [way.give(one) for one in halves(network)]
    train(way, model, optimizers, steps=2)
    optimizers[1].add_param_group({"params": [network[0].bias]})
    train(way, model, optimizers, steps=2)
    return network


def given_in_a_step(way: Way) -> nn.Module:
    """Fleet is given the second between the backward and the steps."""
    network = layers()
    model = way.wrap(network)
    one, two = halves(network)
    way.give(one)
    loss_of(way, model, 1).backward()  # type: ignore[no-untyped-call]  # torch's
    way.give(two)
    return network


class WrittenOut:
    """Local SGD (averages after updates 1, 1 + k, ...), its outer optimizer, or a gradient merge, by hand: all of a truth's updates."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._merge = fields.get("gradient_merge_configs", {}).get("k_steps", 1)
        self._configs = fields.get("localsgd_configs", {})
        self._parameters: list[nn.Parameter] = []
        self._theta: list[torch.Tensor] = []
        self._sums: list[torch.Tensor] = []
        self._velocity: list[torch.Tensor] = []
        self._steps = self._updates = 0

    def wrap(self, network: nn.Module) -> nn.Module:
        """Begin with its parameters."""
        self._parameters = list(network.parameters())
        self._theta = [own.detach().clone() for own in self._parameters]
        self._velocity = [torch.zeros_like(own) for own in self._parameters]
        return network

    def update(self, optimizers: Sequence[Optimizer]) -> None:
        """The gradients are there."""
        self._steps += 1
        gradients = [own.grad for own in self._parameters]
        assert all(gradient is not None for gradient in gradients)
        self._sums = (
            [total + own for total, own in zip(self._sums, gradients, strict=True)] if self._sums else [own.clone() for own in gradients]
        )  # type: ignore[operator, union-attr]  # none is None
        if self._steps % self._merge:
            return
        for own, total in zip(self._parameters, self._sums, strict=True):
            own.grad = total / self._merge if self._configs else mean_of(total) / self._merge
        self._sums = []
        for one in optimizers:
            one.step()
        self._updates += 1
        outer = "outer_lr" in self._configs
        k_steps = self._configs.get("k_steps")
        if k_steps and self._updates % k_steps == (0 if outer else 1 % k_steps):
            self._meet(optimizers, outer=outer)

    @torch.no_grad()
    def _meet(self, optimizers: Sequence[Optimizer], *, outer: bool) -> None:
        for own, theta, velocity in zip(self._parameters, self._theta, self._velocity, strict=True):
            mean = mean_of(own.detach())
            if outer:
                velocity.mul_(self._configs["outer_momentum"]).add_(theta - mean)
                mean = theta - self._configs["outer_lr"] * (theta - mean + self._configs["outer_momentum"] * velocity)
            theta.copy_(mean)
            own.copy_(mean)
        for one in optimizers:
            for state in one.state.values():
                for name in ("momentum_buffer", "exp_avg", "exp_avg_sq"):
                    if name in state and self._configs.get("optimizer_state") == "average":
                        state[name].copy_(mean_of(state[name]))
                    elif name in state and self._configs.get("momentum") == "reset" and name != "exp_avg_sq":
                        state[name].zero_()


def mean_of(tensor: torch.Tensor) -> torch.Tensor:
    """Over all ranks."""
    whole = tensor.clone()
    dist.all_reduce(whole)
    return whole / dist.get_world_size()


_MISSING = r"optimizer AdamW, number 2 of 2 given to fleet: has not stepped, but another has, and with {} all step once in every step"
_ARGUMENTS = r"optimizer.step\(\): must be called without arguments: {}.*\(got a closure\)"
_BY_HAND = (
    r"loss.backward\(\): a second backward comes before optimizer.step\(\), and fleet does not know the optimizer, whose steps {} counts"
)
_FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "K = 3": (LOCAL, "localsgd"),
    "merge": (MERGE, "gradient_merge"),
    "scaled": (SCALED, "amp in FP16"),
    "by bucket": (BY_BUCKET, "build_strategy.enable_backward_optimizer_op_deps = false"),
}
_ONE = partial(several, chosen=lambda step, all_of: all_of[: 1 if step == 4 else 2])
_TWICE = partial(several, chosen=lambda _step, all_of: [all_of[0], *all_of])

REFUSED: dict[str, tuple[Script, dict[str, Any], str]] = {
    **{f"one of two steps, {name}": (_ONE, fields, _MISSING.format(said)) for name, (fields, said) in _FIELDS.items()},
    **{f"one steps twice, {name}": (_TWICE, fields, _MISSING.format(said)) for name, (fields, said) in _FIELDS.items()},
    **{f"a closure, {name}": (closures, fields, _ARGUMENTS.format(said)) for name, (fields, said) in _FIELDS.items()},
    "a closure, fused": (closures, FUSED, _ARGUMENTS.format("build_strategy.fuse_all_optimizer_ops")),
    "LBFGS, K = 3": (
        partial(closures, kinds=(LBFGS,)),
        LOCAL,
        "optimizer: updates all parameters as one, from a closure, and localsgd",
    ),
    **{f"by hand, {name}": (by_hand, fields, _BY_HAND.format(said)) for name, (fields, said) in _FIELDS.items() if name != "by bucket"},
    "by hand, by bucket": (by_hand, BY_BUCKET, "fleet.distributed_optimizer: there is no optimizer yet"),
    "held by two": (
        shared_by_two,
        {},
        r"parameter 0.bias: is held by two optimizers that fleet was given \(got SGD and AdamW\)",
    ),
    "given in a step": (given_in_a_step, {}, "fleet.distributed_optimizer: comes in the middle of a step"),
    "the earlier one goes on, K = 3": (
        partial(anew, second=frozen_layer, also=True),
        LOCAL,
        "optimizer SGD: has stepped parameters of the model, and was not given to fleet, or another has taken its place",
    ),
}
"""By name: the script, its strategy, and how it is refused."""

TRAINED: dict[str, tuple[Script, dict[str, Any], bool]] = {
    **{
        f"several, {name}": (several, fields, True)
        for name, fields in (
            ("usual", {}),
            ("fused", FUSED),
            ("by bucket", BY_BUCKET),
            ("K = 3", LOCAL),
            ("merge", MERGE),
            ("both", BOTH),
            ("DiLoCo", DILOCO),
            ("state averaged", STATE),
            ("momentum reset", RESET),
        )
    },
    "several, turned": (partial(several, turned=True), {}, True),
    "several, turned, state averaged": (partial(several, turned=True), STATE, True),
    "Muon": (partial(several, of=matrices), {}, True),
    "Muon, DiLoCo": (partial(several, of=matrices), DILOCO, True),
    "three": (partial(several, of=partial(halves, kinds=(ADAMW, SGD, torch.optim.Adagrad))), {}, True),
    "three, merge": (
        partial(several, of=partial(halves, kinds=(ADAMW, SGD, torch.optim.Adagrad))),
        MERGE,
        True,
    ),
    "SparseAdam and another": (looked, {}, True),
    "SparseAdam and another, by bucket": (looked, BY_BUCKET, True),
    "SparseAdam and another, K = 3": (looked, LOCAL, True),
    "one later": (partial(several, late=True), {}, True),
    "one later, K = 3": (partial(several, late=True), LOCAL, True),
    "one later, merge": (partial(several, late=True), MERGE, True),
    "one later, state averaged": (partial(several, late=True), STATE, True),
    "one of two in turn": (partial(several, chosen=lambda step, all_of: [all_of[step % 2]]), {}, True),
    "none at times": (partial(several, chosen=lambda step, all_of: all_of[step % 3 :]), {}, True),
    "one twice": (_TWICE, {}, True),
    "a batch norm, in turn": (partial(normed, closures=False), {}, True),
    "a batch norm, closures": (partial(normed, closures=True), {}, True),
    "cleared by itself": (own_zero, {}, True),
    "cleared between": (cleared_between, {}, True),
    "cleared between, by bucket": (cleared_between, FUSED_BUCKETS, True),
    "steps without a backward": (partial(repeated, cleared=False), {}, True),
    "steps on zeros": (partial(repeated, cleared=True), {}, True),
    "a GradScaler of two": (scaled, {}, True),
    "two backwards": (two_losses, {}, True),
    "a closure": (closures, {}, True),
    "closures of two": (partial(closures, kinds=(SGD, ADAMW)), {}, True),
    "closures of one not given": (partial(closures, given=False), {}, True),
    "a closure that raises": (raising_closure, {}, True),
    "LBFGS": (partial(closures, kinds=(LBFGS,)), {}, True),
    "LBFGS and another": (partial(closures, kinds=(LBFGS, ADAMW)), {}, True),
    "made anew": (partial(anew, second=lambda network: ADAMW(network.parameters())), {}, True),
    "made anew, K = 3": (partial(anew, second=lambda network: ADAMW(network.parameters())), LOCAL, True),
    "made anew, state averaged": (
        partial(anew, second=lambda network: ADAMW(network.parameters())),
        STATE,
        True,
    ),
    "made anew, merge": (partial(anew, second=lambda network: ADAMW(network.parameters())), MERGE, True),
    "made anew of less": (partial(anew, second=frozen_layer), {}, True),
    "made anew of less, K = 3": (partial(anew, second=frozen_layer), LOCAL, True),
    "the earlier one goes on": (partial(anew, second=frozen_layer, also=True), {}, True),
    "one of two anew": (of_halves, {}, True),
    "one of two anew, K = 3": (of_halves, LOCAL, True),
    "one of two anew, by bucket": (of_halves, BY_BUCKET, True),
    "by hand": (by_hand, {}, True),
    "by hand, of two batches": (partial(by_hand, accumulates=True), {}, True),
    "by hand beside": (partial(by_hand, beside=True), {}, True),
}
"""By name: the script, its strategy, and that DDP or ``WrittenOut`` is its truth."""
