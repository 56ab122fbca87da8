"""Scripts that train several models in one process, or make one distributed again; each is a function of a ``Way``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch
from reducer_scripts import BY_BUCKET, LOCAL, MERGE, SCALED, SGD, SIZE, STATE, UNUSED, Script, Way, layers, train
from torch import nn

ADAM = partial(torch.optim.Adam, lr=0.01)
TWO: dict[str, Any] = {"nccl_comm_num": 2, "sync_nccl_allreduce": False}
LOCAL_UNUSED: dict[str, Any] = {**LOCAL, **UNUSED}
RESETS: dict[str, Any] = {"localsgd": True, "localsgd_configs": {"k_steps": 3, "momentum": "reset"}}
QUANTISED: dict[str, Any] = {"localsgd": True, "localsgd_configs": {"k_steps": 3, "outer_lr": 0.7, "outer_wire": "int8"}}
ADAPTIVE: dict[str, Any] = {"adaptive_localsgd": True}


def batch(way: Way, step: int, rows: int = 5) -> torch.Tensor:
    """By rank and step."""
    return torch.randn(rows, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + way.rank))


def small(norm: bool = False) -> nn.Sequential:
    """Another model than ``layers``, the same on all ranks."""
    torch.manual_seed(1)
    middle = nn.BatchNorm1d(SIZE, dtype=torch.float64) if norm else nn.Tanh()
    return nn.Sequential(nn.Linear(SIZE, SIZE, dtype=torch.float64), middle, nn.Linear(SIZE, SIZE, dtype=torch.float64))


def gan(
    way: Way,
    *,
    critics: int = 2,
    freezes: bool = False,
    alone: bool = False,
    clears: bool = True,
    meets: bool = False,
    one: bool = False,
    norm: bool = False,
    keeps: bool = True,
    spectral: bool = False,
    penalty: bool = False,
) -> nn.Module:
    """The generator's loss passes through the discriminator, which is stepped ``critics`` times as often.

    ``freezes``: it is frozen meanwhile; ``alone``: its gradients of that backward stay on this rank; ``clears``: they are cleared at once,
    rather than before its next backward; ``meets``: trainers meet after every step; ``one``: one optimizer holds both; ``keeps``: the
    discriminator has two losses, rather than one; ``spectral``: and a spectral norm; ``penalty``: on the gradient of its inputs.
    """
    networks = small(norm), layers(2)
    if spectral:
        nn.utils.parametrizations.spectral_norm(networks[1][0])
    generator, discriminator = way.wrap(networks[0]), way.wrap(networks[1])
    if one:
        shared = way.give(SGD([*networks[0].parameters(), *networks[1].parameters()]))
        ways = shared, shared
    else:
        ways = way.give(ADAM(networks[0].parameters())), way.give(SGD(networks[1].parameters()))
    for step in range(5):
        for number in range(critics):
            ways[1].zero_grad()
            fakes = generator(batch(way, 100 + 7 * step + number)).detach()
            real = discriminator(batch(way, step + 50 * number)).sigmoid().mean().neg()
            if keeps:
                real.backward()
                false = discriminator(fakes).sigmoid().mean()
                if penalty:
                    between = fakes.clone().requires_grad_()
                    (slope,) = torch.autograd.grad(discriminator(between).sigmoid().sum(), between, create_graph=True)
                    false = false + 0.1 * slope.square().mean()
                false.backward()
            else:
                (real + discriminator(fakes).sigmoid().mean()).backward()
            ways[1].step()
        networks[1].requires_grad_(not freezes)  # torch's signature
        ways[0].zero_grad()
        with discriminator.no_sync() if alone else nullcontext():
            discriminator(generator(batch(way, 200 + step))).sigmoid().mean().neg().backward()
        if one:
            networks[1].zero_grad()
        ways[0].step()
        networks[1].requires_grad_(True)  # torch's signature
        if clears:
            networks[1].zero_grad()
        if meets:
            way.meet()
    return nn.ModuleList(networks)


def headed(way: Way, *, one: bool, kept: bool = False) -> nn.Module:
    """A loss with parameters of its own is a second model; ``one``: one optimizer steps both; ``kept``: gradients become zeros."""
    network, head = layers(), small()
    model, loss = way.wrap(network), way.wrap(head)
    parameters = [[*network.parameters()], [*head.parameters()]]
    optimizers = [way.give(SGD([*parameters[0], *parameters[1]]))] if one else [way.give(SGD(own)) for own in parameters]
    for step in range(5):
        loss(model(batch(way, step))).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=not kept)
    return nn.ModuleList([network, head])


def summed(way: Way, *, one: bool) -> nn.Module:
    """Two models beside each other, in one backward; every third step is the first one's alone."""
    networks = layers(), small()
    models = [way.wrap(network) for network in networks]
    whole = [parameter for network in networks for parameter in network.parameters()]
    optimizers = [way.give(SGD(whole))] if one else [way.give(SGD(network.parameters())) for network in networks]
    for step in range(6):
        x = batch(way, step)
        loss = models[0](x).square().mean()
        if step % 3 != 2:
            loss = loss + models[1](x).tanh().mean()
        loss.backward()
        for optimizer in optimizers if step % 3 != 2 else optimizers[:1]:
            optimizer.step()
            optimizer.zero_grad()
    return nn.ModuleList(networks)


def halved(way: Way, *, closes: bool = False, again: bool = False, partly: bool = False) -> nn.Module:
    """A GAN of which each model has two optimizers.

    ``closes``: the first of the generator's runs a closure; ``partly``: one of each steps every other time; ``again``: in the middle the
    discriminator is wrapped again, and one optimizer takes the place of its two.
    """
    networks = layers(), small()
    generator, discriminator = map(way.wrap, networks)
    held = [[list(network.parameters())[part::2] for part in range(2)] for network in networks]
    optimizers = [[way.give(kind(own)) for kind, own in zip((SGD, ADAM), parts, strict=True)] for parts in held]

    def stepped(own: list[torch.optim.Optimizer], step: int) -> None:
        for optimizer in own[step % 2 :] if partly else own:
            optimizer.step()

    for step in range(6):
        if again and step == 3:
            discriminator = way.wrap(networks[1])
            optimizers[1] = [way.give(SGD(networks[1].parameters()))]
        discriminator(generator(batch(way, step)).detach()).square().mean().backward()
        stepped(optimizers[1], step)
        networks[1].zero_grad()

        def closure(step: int = step, discriminator: nn.Module = discriminator) -> torch.Tensor:
            networks[0].zero_grad()
            loss: torch.Tensor = discriminator(generator(batch(way, 50 + step))).tanh().mean()
            loss.backward()
            return loss

        if closes:
            optimizers[0][0].step(closure)
            optimizers[0][1].step()
        else:
            closure()
            stepped(optimizers[0], step)
        networks[1].zero_grad()
    return nn.ModuleList(networks)


def closed(way: Way) -> nn.Module:
    """One optimizer of two models steps with a closure, and trainers meet after every step."""
    networks = layers(), small()
    models = [way.wrap(network) for network in networks]
    optimizer = way.give(SGD([parameter for network in networks for parameter in network.parameters()]))
    for step in range(4):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = models[1](models[0](batch(way, step))).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        way.meet()
    return nn.ModuleList(networks)


def between_two(way: Way) -> nn.Module:
    """Wraps again when one of two optimizers has stepped."""
    network = layers()
    model = way.wrap(network)
    parameters = list(network.parameters())
    optimizers = [way.give(SGD(parameters[:2])), way.give(SGD(parameters[2:]))]
    model(batch(way, 0)).square().mean().backward()
    optimizers[0].step()
    return way.wrap(network)


def distilled(way: Way, *, flows: bool = False) -> nn.Module:
    """A teacher is trained, and then teaches a student, from whose loss gradients may flow into it."""
    networks = layers(), small(norm=True)
    teacher = way.wrap(networks[0])
    train(way, teacher, way.give(SGD(networks[0].parameters())), steps=3)
    student, optimizer = way.wrap(networks[1]), way.give(SGD(networks[1].parameters()))
    for step in range(4):
        x = batch(way, step)
        with torch.set_grad_enabled(flows):
            wanted = teacher(x)
        (student(x) - wanted).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return nn.ModuleList(networks)


def folds(way: Way, *, beside: bool, number: int = 3) -> nn.Module:
    """Several trainings of like models, one after the other or beside each other."""
    networks = [layers(2) for _ in range(number)]
    if not beside:
        for network in networks:
            train(way, way.wrap(network), way.give(SGD(network.parameters())))
        return nn.ModuleList(networks)
    models = [way.wrap(network) for network in networks]
    optimizers = [way.give(SGD(network.parameters())) for network in networks]
    for step in range(4):
        for fold, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            model(batch(way, step + 100 * fold)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return nn.ModuleList(networks)


# One model, made distributed again


def thawed_again(way: Way, *, own: bool, meets: bool = False) -> nn.Module:
    """A layer is unfrozen in the third step, and the model made distributed again; ``own``: the optimizer gets it, and is no new one."""
    network = layers()
    network[0].requires_grad_(False)  # torch's signature
    model = way.wrap(network)
    optimizer = way.give(SGD([parameter for parameter in network.parameters() if parameter.requires_grad]))
    train(way, model, optimizer, steps=2)
    if meets:
        way.meet()
    network[0].requires_grad_(True)  # torch's signature
    model = way.wrap(network)
    if own:
        optimizer.add_param_group({"params": list(network[0].parameters())})
    else:
        optimizer = way.give(ADAM(network.parameters()))
    train(way, model, optimizer)
    return network


def grown_again(way: Way, *, apart: bool = False) -> nn.Module:
    """A layer comes in the third step; ``apart``: ranks begin it differently, and the gradients of the step before stay."""
    network = layers()
    model, optimizer = way.wrap(network), way.give(SGD(network.parameters()))
    train(way, model, optimizer, steps=2)
    if apart:
        model(batch(way, 9)).square().mean().backward()
        optimizer.step()
    torch.manual_seed(way.rank if apart else 0)
    network.append(nn.Linear(SIZE, SIZE, dtype=torch.float64))
    model = way.wrap(network)
    optimizer.add_param_group({"params": list(network[-1].parameters())})
    train(way, model, optimizer)
    return network


def shrunk_again(way: Way) -> nn.Module:
    """The last layer is another in the third step, with another optimizer."""
    network = layers()
    train(way, way.wrap(network), way.give(SGD(network.parameters())), steps=2)
    network[2] = nn.Linear(SIZE, SIZE, dtype=torch.float64)
    train(way, way.wrap(network), way.give(ADAM(network.parameters())))
    return network


def in_the_middle(way: Way, *, phase: str) -> nn.Module:
    """The model is made distributed again in the middle of a ``phase``."""
    network = layers()
    model, optimizer = way.wrap(network), way.give(SGD(network.parameters()))
    train(way, model, optimizer, steps=3)
    if phase == "step":
        model(batch(way, 1)).square().mean().backward()
    elif phase == "kept":
        with model.no_sync():
            model(batch(way, 1)).square().mean().backward()
    loss = model(batch(way, 1)).square().mean() if phase == "graph" else None
    way.wrap(network)
    if loss is not None:
        loss.backward()
    return network


def through_module(way: Way) -> nn.Module:
    """``.module`` is the model: its state is saved and loaded by plain names."""
    network = layers()
    model, optimizer = way.wrap(network), way.give(SGD(network.parameters()))
    train(way, model, optimizer, steps=2)
    assert model.module is network
    state = copy.deepcopy(model.module.state_dict())
    assert list(state) == [f"{number}.{name}" for number in range(3) for name in ("weight", "bias")]
    train(way, model, optimizer, steps=2)
    model.module.load_state_dict(state)
    train(way, model, optimizer, steps=2)
    return network


# Complex numbers


class Waves(nn.Module):
    """Complex parameters, alone or beside real ones."""

    def __init__(self, *, mixed: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        randn = partial(torch.randn, generator=generator, dtype=torch.complex128)
        self.first = nn.Parameter(randn(SIZE, SIZE))
        self.real = nn.Parameter(randn(SIZE, SIZE).real.clone()) if mixed else None
        self.second = nn.Parameter(randn(SIZE))
        self.register_buffer("turn", randn(SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(batch, SIZE)``, real."""
        if self.real is not None:
            x = x @ self.real
        found: torch.Tensor = ((x.to(torch.complex128) @ self.first) * self.second + self.turn).abs()
        return found


def waves(way: Way, *, mixed: bool, kind: Callable[..., torch.optim.Optimizer] = SGD, steps: int = 5) -> nn.Module:
    """The usual loop."""
    network = Waves(mixed=mixed)
    model, optimizer = way.wrap(network), way.give(kind(network.parameters()))
    for step in range(steps):
        model(batch(way, step)).square().mean().mul(0.01).backward()
        optimizer.step()
        optimizer.zero_grad()
    return network


# Unequally many batches


class Uneven(nn.Module):
    """With an embedding, a batch norm, or a part that a batch may not use."""

    def __init__(self, rank: int, *, sparse: bool, norm: bool, gated: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rank, self.calls, self.gated = rank, 0, gated
        self.table = nn.Embedding(7, SIZE, sparse=True, dtype=torch.float64) if sparse else None
        self.body = small(norm)
        self.part = nn.Linear(SIZE, SIZE, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(batch, SIZE)``."""
        self.calls += 1
        if self.table is not None:
            x = x + self.table((x[:, 0].abs() * 5).long() % 7)
        x = self.body(x)
        uses = not self.gated or (self.calls + self.rank) % 3 == 0
        return self.part(x) if uses else x  # type: ignore[no-any-return]  # torch's modules return Any


def uneven(
    way: Way,
    *,
    extra: tuple[int, ...] = (0, 3, 1),
    first: int = 2,
    batches: int = 1,
    alone: bool = False,
    sparse: bool = False,
    norm: bool = False,
    gated: bool = False,
    evaluates: bool = False,
    goes_on: bool = False,
    **own: bool,
) -> nn.Module:
    """``first`` steps and some ``extra`` ones, by rank, of so many ``batches``, all but the last ``alone`` on their rank.

    ``evaluates``: now and then, without exchanges; ``goes_on``: with even inputs, afterwards; ``own``: options of the model's own ``join``.
    """
    network = Uneven(way.rank, sparse=sparse, norm=norm, gated=gated)
    model, optimizer = way.wrap(network), way.give(torch.optim.SGD(network.parameters(), lr=0.05, weight_decay=0.0 if sparse else 0.01))
    with model.join(**own) if own else way.join([model]):
        for step in range(first + extra[way.rank]):
            for number in range(batches):
                with model.no_sync() if alone and number < batches - 1 else nullcontext():
                    model(batch(way, 100 * number + step)).square().mean().backward()
            if evaluates:
                with torch.no_grad():
                    network(batch(way, 7))
            optimizer.step()
            optimizer.zero_grad()
    if goes_on:
        train(way, model, optimizer)
    return network


def thrown(way: Way, *, norm: bool) -> nn.Module:
    """All trainers end an epoch with the first that has no data left, and begin another."""
    network = Uneven(way.rank, sparse=False, norm=norm, gated=False)
    model, optimizer = way.wrap(network), way.give(SGD(network.parameters()))
    for epoch in range(2):
        with suppress(RuntimeError), model.join(throw_on_early_termination=True):
            for step in range(2 + 2 * (way.rank + epoch) % 4):
                optimizer.zero_grad()
                model(batch(way, 10 * epoch + step)).square().mean().backward()
                optimizer.step()
    train(way, model, optimizer)
    return network


def uneven_beside(way: Way) -> nn.Module:
    """Two models that are trained in turns."""
    networks = layers(2), small()
    models = [way.wrap(network) for network in networks]
    optimizers = [way.give(torch.optim.SGD(network.parameters(), lr=0.05)) for network in networks]
    with way.join(models):
        for step in range(2 + 2 * way.rank):
            for model, optimizer in zip(models, optimizers, strict=True):
                model(batch(way, step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    return nn.ModuleList(networks)


# What is refused


def overlapping(way: Way, *, part_first: bool) -> nn.Module:
    """A model and a part of it."""
    network = layers()
    for module in (network[1], network) if part_first else (network, network[1]):
        way.wrap(module)
    return network


def of_none(way: Way) -> nn.Module:
    """An optimizer of neither model."""
    networks = layers(), small()
    for network in networks:
        way.wrap(network)
    way.give(SGD(layers(1).parameters()))
    return nn.ModuleList(networks)


def before_its_model(way: Way) -> nn.Module:
    """An optimizer holds parameters of a model that is distributed after it was given."""
    networks = layers(), small()
    way.wrap(networks[0])
    way.give(SGD([parameter for network in networks for parameter in network.parameters()]))
    way.wrap(networks[1])
    return nn.ModuleList(networks)


def averaged_by_hand(tensors: Iterable[torch.Tensor], mean: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Every rank's become the mean."""
    for tensor in tensors:
        tensor.data.copy_(mean(tensor.detach()))


SECOND = "a second backward comes before optimizer.step"
MIDDLE = "fleet.distributed_model: comes "

MODELS_REFUSED: dict[str, tuple[Script, dict[str, Any], str]] = {
    **{
        f"a GAN, {name}": (partial(gan, keeps=False, critics=1), fields, rf"loss\.backward\(\): {SECOND}")
        for name, fields in (("merge", MERGE), ("by bucket", BY_BUCKET))
    },
    "again, between two optimizers": (between_two, {}, MIDDLE + "in the middle of a step"),
    "a part of a model": (partial(overlapping, part_first=False), {}, "fleet.distributed_model: has a parameter of another"),
    "a model around another": (partial(overlapping, part_first=True), LOCAL, "fleet.distributed_model: has a parameter of another"),
    "two models that follow a loss": (partial(headed, one=False), ADAPTIVE, "strategy.adaptive_localsgd: follows one reported loss"),
    "an optimizer of no model": (of_none, {}, "fleet.distributed_optimizer: holds parameters of no distributed model"),
    "an optimizer before its model": (before_its_model, {}, "the optimizer: holds parameters that are not the distributed model's"),
    "one optimizer that two models reset": (partial(headed, one=True), RESETS, "fleet.distributed_optimizer: is one for several"),
    "complex, quantised": (partial(waves, mixed=True), QUANTISED, "parameter .*: cannot be quantised"),
    **{
        f"uneven, {name}": (uneven, fields, r"fleet\.join: needs gradients that are averaged in every backward")
        for name, fields in (("K = 3", LOCAL), ("merge", MERGE), ("by bucket", BY_BUCKET), ("scaled", SCALED))
    },
    "uneven, divided": (
        partial(uneven, divide_by_initial_world_size=False),
        {},
        r"model\.join: divides by the number of",
    ),
    "again, in a step": (partial(in_the_middle, phase="step"), {}, MIDDLE + "in the middle of a step"),
    "again, in a step that waits": (partial(in_the_middle, phase="kept"), {}, MIDDLE + "in the middle of a step"),
    "again, before a backward": (partial(in_the_middle, phase="graph"), {}, r"loss\.backward\(\): its forward read parameters"),
    "again, in a round": (partial(in_the_middle, phase="round"), LOCAL, MIDDLE + "in the middle of a round"),
    "again, in a merge": (partial(in_the_middle, phase="merge"), MERGE, MIDDLE + "while gradients wait"),
}
"""By name: the script, its strategy, and how it is refused."""

MODELS_TRAINED: dict[str, tuple[Script, dict[str, Any], bool | int]] = {
    "a GAN": (gan, {}, True),
    "a GAN with a batch norm": (partial(gan, norm=True, critics=3), {}, True),
    "a GAN, two communicators": (gan, TWO, True),
    "a GAN, frozen": (partial(gan, freezes=True), {}, True),
    "a GAN, frozen, unused": (partial(gan, freezes=True), UNUSED, True),
    "a GAN, cleared later": (partial(gan, clears=False, meets=True), {}, True),
    "a GAN, alone": (partial(gan, alone=True), {}, True),
    "a GAN with a spectral norm": (partial(gan, spectral=True, norm=True), {}, True),
    "a GAN with a penalty": (partial(gan, penalty=True), {}, True),
    "a GAN with a penalty, K = 3": (partial(gan, penalty=True), LOCAL, 3),
    "a GAN, one optimizer": (partial(gan, one=True, meets=True), {}, True),
    "a GAN, one optimizer, alone": (partial(gan, one=True, alone=True), {}, True),
    "two models in one closure": (closed, {}, True),
    "a GAN, K = 3": (gan, LOCAL, 3),
    "a GAN, K = 3, cleared later": (partial(gan, clears=False), LOCAL, 3),
    "a GAN, K = 3, frozen": (partial(gan, freezes=True), LOCAL, 3),
    "a GAN that meets, K = 3": (partial(gan, clears=False, meets=True), LOCAL, False),
    "a GAN, merge, alone": (partial(gan, alone=True, keeps=False), MERGE, False),
    **{f"a loss with parameters, {'one optimizer' if one else 'two'}": (partial(headed, one=one), {}, True) for one in (True, False)},
    "two optimizers of each": (halved, {}, True),
    "two optimizers of each, K = 3": (halved, LOCAL, 3),
    "two optimizers of each, some step": (partial(halved, partly=True), {}, True),
    "two optimizers of each, a closure": (partial(halved, closes=True), {}, True),
    "two optimizers of each, and again": (partial(halved, again=True), {}, True),
    "a loss with parameters, unused": (partial(headed, one=True, kept=True), UNUSED, True),
    "a loss with parameters, fused": (partial(headed, one=True), {"build_strategy": {"fuse_all_optimizer_ops": True}}, True),
    "a loss with parameters, by bucket": (partial(headed, one=True), BY_BUCKET, True),
    **{f"a loss with parameters, K = 3, {one}": (partial(headed, one=one), LOCAL, 3) for one in (True, False)},
    "two models in one loss": (partial(summed, one=False), {}, True),
    "two models in one loss, one optimizer": (partial(summed, one=True), {}, True),
    "two models in one loss, one optimizer, K = 3": (partial(summed, one=True), LOCAL, 3),
    "two models in one loss, K = 3": (partial(summed, one=False), LOCAL, 3),
    "a teacher": (distilled, {}, True),
    "a teacher, K = 3": (distilled, LOCAL, 3),
    "a teacher that gradients flow into": (partial(distilled, flows=True), {}, True),
    "folds": (partial(folds, beside=False), {}, True),
    "folds, K = 3": (partial(folds, beside=False), LOCAL, 3),
    "folds beside each other": (partial(folds, beside=True), UNUSED, True),
    **{f"unfrozen, and again{', a new optimizer' * (not own)}": (partial(thawed_again, own=own), {}, True) for own in (True, False)},
    "unfrozen, and again, K = 3": (partial(thawed_again, own=True, meets=True), LOCAL, False),
    "a later layer, and again": (grown_again, {}, True),
    "a later layer by rank, and again": (partial(grown_again, apart=True), {}, True),
    "another layer, and again": (shrunk_again, {}, True),
    "by its module": (through_module, {}, True),
    "uneven": (uneven, {}, True),
    "uneven, the other way": (partial(uneven, extra=(3, 0, 1)), {}, True),
    "uneven, nothing for one": (partial(uneven, extra=(3, 0, 1), first=0), {}, True),
    "uneven, nothing for the first": (partial(uneven, extra=(0, 3, 1), first=0, norm=True), {}, True),
    "uneven, two batches a step": (partial(uneven, batches=2), {}, True),
    "uneven, two batches, one alone": (partial(uneven, batches=2, alone=True), {}, True),
    "uneven, sparse": (partial(uneven, sparse=True), {}, True),
    "uneven with a batch norm": (partial(uneven, norm=True), {}, True),
    "uneven with a batch norm, the other way": (partial(uneven, norm=True, extra=(3, 0, 1), batches=2), {}, True),
    "uneven, unused": (partial(uneven, gated=True, norm=True), UNUSED, True),
    "uneven, unused, the other way": (partial(uneven, gated=True, extra=(4, 0, 1), first=3), UNUSED, True),
    "uneven, compressed": (partial(uneven, sparse=True), {"fp16_allreduce": True}, False),
    "uneven, fused": (uneven, {"build_strategy": {"fuse_all_optimizer_ops": True}}, True),
    "uneven with evaluations": (partial(uneven, evaluates=True), {}, True),
    "uneven, by the model": (partial(uneven, enable=True), {}, True),
    "uneven, not enabled": (partial(uneven, enable=False, extra=(1, 1, 1)), {}, True),
    "uneven, thrown": (partial(thrown, norm=False), {}, True),
    "uneven, thrown with a batch norm": (partial(thrown, norm=True), {}, True),
    "uneven, and on": (partial(uneven, goes_on=True), {}, True),
    "uneven beside each other": (uneven_beside, {}, True),
    **{f"complex{', mixed' * mixed}": (partial(waves, mixed=mixed), {}, True) for mixed in (True, False)},
    "complex, Adam": (partial(waves, mixed=True, kind=ADAM), {}, True),
    "complex, unused": (partial(waves, mixed=True), UNUSED, True),
    "complex, by bucket": (partial(waves, mixed=True), BY_BUCKET, True),
    "complex, merge": (partial(waves, mixed=True, steps=6), MERGE, False),
    "complex, compressed": (partial(waves, mixed=False), {"fp16_allreduce": True}, True),
    "complex, averaged state": (partial(waves, mixed=True, steps=6), STATE, False),
    "complex, K = 3": (partial(waves, mixed=True), LOCAL, 3),
}
"""By name: the script, its strategy, and its truth: DDP, an averaging by hand after every so many updates, or that ranks end equal."""
