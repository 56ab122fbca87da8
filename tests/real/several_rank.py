"""One rank of the tests of several models in one job: ``several_rank.py RANK RANKS STORE OUTPUT PHASE FOLDER NAMES``.

``train`` trains the cases of these names, a list as JSON, twice to its end, without a save and with one,
below FOLDER. ``resume`` loads them into other models and goes on; and then it misuses the checkpoints. ``scaled``
and ``joint`` train in FP16 beside DDP.
"""

from __future__ import annotations

import gc
import itertools
import json
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from living_fleet import be_rank, leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fleetbench.errors import FleetbenchError
from fleetbench.strategy import DistributedStrategy
from real.fleet import Fleet

SIZE, STEPS, SAVED = 6, 10, 6
ADAM, SGD = partial(torch.optim.AdamW, lr=0.01), partial(torch.optim.SGD, lr=0.05, momentum=0.9)
AMP = {"init_loss_scaling": 128.0, "incr_every_n_steps": 3, "decr_every_n_nan_or_inf": 1, "decr_ratio": 0.5}
SCALED: dict[str, Any] = {"amp": True, "amp_configs": AMP}
DILOCO = {"localsgd": True, "localsgd_configs": {"k_steps": 4, "outer_lr": 0.7, "outer_momentum": 0.9}}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A GAN under a strategy."""

    strategy: dict[str, Any]
    one: bool = False
    """One optimizer holds both models."""
    critics: int = 2
    """Number of the discriminator's updates for one of the generator's."""
    alone: bool = False
    """The generator's loss leaves no gradients of other ranks in the discriminator."""


CASES = {
    "synchronous": Case(strategy={}),
    "synchronous, one optimizer": Case(strategy={}, one=True),
    "merge": Case(strategy={"gradient_merge": True, "gradient_merge_configs": {"k_steps": 4}}, critics=1, alone=True),
    "Local SGD": Case(strategy={"localsgd": True, "localsgd_configs": {"k_steps": 3}}),
    "Local SGD, one optimizer": Case(strategy={"localsgd": True, "localsgd_configs": {"k_steps": 3}}, one=True),
    "DiLoCo": Case(strategy=DILOCO, critics=3),
    "loss scales": Case(strategy=SCALED, alone=True),
    "loss scales, one optimizer": Case(strategy=SCALED, alone=True, one=True),
}


class Gan:
    """A generator with dropout, a discriminator with a batch norm, and their loop."""

    def __init__(self, case: Case, rank: int, seed: int, wrap: Callable[[nn.Module], Any], give: Callable[[Any], Any]) -> None:
        self.case, self.rank = case, rank
        torch.manual_seed(10 * seed + rank)
        linear = partial(nn.Linear, SIZE, SIZE)
        drop: list[nn.Module] = [] if case.strategy.get("amp") else [nn.Dropout(0.3)]
        self.networks = [nn.Sequential(linear(), *drop, nn.Tanh(), linear()), nn.Sequential(linear(), nn.BatchNorm1d(SIZE), linear())]
        self.generator, self.discriminator = map(wrap, self.networks)
        held = [list(network.parameters()) for network in self.networks]
        shared = give(ADAM([*held[0], *held[1]])) if case.one else None
        self.optimizers = [shared, shared] if case.one else [give(ADAM(held[0])), give(SGD(held[1]))]
        self.history: list[np.ndarray] = []

    def train(
        self,
        first: int,
        last: int,
        *,
        backward: Callable[[int, torch.Tensor], None] = lambda _, loss: loss.backward(),
        step: Callable[[int, Any], None] = lambda _, optimizer: optimizer.step(),
    ) -> None:
        """Steps ``first`` to ``last``; ``backward`` and ``step`` get the number of the model that is trained."""
        for number in range(first, last + 1):
            for critic in range(self.case.critics):
                self.optimizers[1].zero_grad()
                false = self.discriminator(self.generator(self._noise(number, critic)).detach())
                backward(1, (false - self.discriminator(self._noise(number, 50 + critic))).tanh().mean() * self._scaled(number, 1))
                step(1, self.optimizers[1])
            self.networks[0].zero_grad()
            with self.discriminator.no_sync() if self.case.alone else nullcontext():
                backward(0, self.discriminator(self.generator(self._noise(number, 99))).tanh().mean().neg() * self._scaled(number, 0))
            self.networks[1].zero_grad()
            step(0, self.optimizers[0])
            self.history.append(self.everything())

    def _noise(self, step: int, part: int) -> torch.Tensor:
        return torch.randn(5, SIZE, generator=torch.Generator().manual_seed(1000 * step + 10 * part + self.rank))

    def _scaled(self, step: int, model: int) -> float:
        """Rank 1's loss of the discriminator overflows in step 2, and rank 0's of the generator in step 8."""
        return float("inf") if self.case.strategy.get("amp") and (step, model, self.rank) in ((2, 1, 1), (8, 0, 0)) else 1.0

    def everything(self) -> np.ndarray:
        """Parameters, buffers and optimizers' state."""
        tensors = [value for network in self.networks for value in network.state_dict().values()]
        for optimizer in dict.fromkeys(self.optimizers):
            tensors += [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
        return torch.cat([tensor.detach().reshape(-1).double() for tensor in tensors]).numpy().copy()


def _init(fleet: Fleet, case: Case) -> None:
    fleet.init(DistributedStrategy.from_dict({"fuse_grad_size_in_MB": 0.0002, **case.strategy}), timeout_s=30.0)


def _gan(fleet: Fleet, case: Case, rank: int, seed: int) -> Gan:
    _init(fleet, case)
    return Gan(case, rank, seed, fleet.distributed_model, fleet.distributed_optimizer)


def _end(fleet: Fleet, gan: Gan, prefix: str) -> dict[str, Any]:
    """The steps counted from the end, and what an averaging makes of it."""
    found = {f"{prefix}/step {number}": values for number, values in enumerate(reversed(gan.history))}
    fleet.synchronize()
    found[f"{prefix}/end"] = gan.everything()
    found[f"{prefix}/scales"] = np.array([engine.loss_scale for engine in fleet.job.models.engines])  # type: ignore[union-attr]  # it is there
    leave(fleet)
    return found


def train(folder: Path, rank: int, names: list[str]) -> dict[str, Any]:
    """Every case without a save, and with one that replaces another."""
    found: dict[str, Any] = {}
    for name, case in ((name, CASES[name]) for name in names):
        for prefix, saves in ((name, False), (f"saved {name}", True)):
            fleet = Fleet()
            gan = _gan(fleet, case, rank, seed=1)
            for step in range(1, STEPS + 1):
                gan.train(step, step)
                if saves and step in (SAVED - 1, SAVED):
                    fleet.save_persistables(folder / name, extra={"step": step, "rank": rank})
            found |= _end(fleet, gan, prefix)
    return found


def resume(folder: Path, rank: int, names: list[str]) -> dict[str, Any]:
    """Every case from its save, in models that have been trained otherwise."""
    found: dict[str, Any] = {}
    for name, case in ((name, CASES[name]) for name in names):
        fleet = Fleet()
        gan = _gan(fleet, case, rank, seed=2)
        gan.train(1, 3)
        extra = fleet.load_persistables(folder / name).extra
        assert extra == {"step": SAVED, "rank": rank}
        gan.history.clear()
        gan.train(extra["step"] + 1, STEPS)
        found |= _end(fleet, gan, name)
    return found | _misuses(folder / "synchronous", rank)


def _misuses(saved: Path, rank: int) -> dict[str, Any]:
    fleet, case = Fleet(), CASES["synchronous"]
    gan = _gan(fleet, case, rank, seed=2)
    before = gan.everything()
    generator, discriminator = gan.networks
    inputs, target = (torch.ones(2, SIZE),), saved.with_name("generator.pt2")
    found = {
        "some of which": _message(lambda: fleet.load_persistables(saved, predicate=lambda _: True)),
        "all of one": _message(lambda: fleet.load_persistables(saved, model=generator)),
        "export of which": _message(lambda: fleet.save_inference_model(target, inputs)),
        "another model": _message(lambda: fleet.save_inference_model(target, inputs, model=nn.Linear(1, 1))),
        "other optimizers": _message(lambda: fleet.load_persistables(saved.with_name("synchronous, one optimizer"))),
    }
    found["changed"] = np.array(not np.array_equal(before, gan.everything()))
    loaded = fleet.load_persistables(saved, predicate=lambda name: name.startswith("0."), model=discriminator)
    found["loaded"] = np.array(loaded.loaded)
    (file,) = saved.glob("save-*/model-1.pt")
    found["off"] = np.array(float((discriminator[0].weight - torch.load(file)["0.weight"]).abs().max()))
    found["others changed"] = np.array(not np.array_equal(gan.everything()[: SIZE * SIZE], before[: SIZE * SIZE]))
    fleet.save_inference_model(target, inputs, model=generator)
    exported, given = torch.export.load(target).module(), torch.full((3, SIZE), 0.5)
    found["exported"] = np.array(float((exported(given) - generator.eval()(given)).abs().max().detach()))
    leave(fleet)
    for name, order in (("one model", [0]), ("three models", [0, 1, 1]), ("in another order", [1, 0])):
        fleet = Fleet()
        _init(fleet, case)
        kept = [Gan(case, rank, 2, lambda model: model, lambda optimizer: optimizer).networks[number] for number in order]
        for network in kept:
            fleet.distributed_optimizer(SGD(fleet.distributed_model(network).parameters()))
        found[name] = _message(lambda: fleet.load_persistables(saved))  # noqa: B023  # called at once
        leave(fleet)
    return found


def joint(_: Path, rank: int, __: list[str]) -> dict[str, Any]:
    """One loss and one optimizer of two models, of which the second overflows in step 2; and the same by hand on DDP's gradients."""
    found = {}
    for way in ("fleet", "by hand"):
        torch.manual_seed(0)
        networks = [nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)]
        if way == "fleet":
            fleet = Fleet()
            _init(fleet, Case(strategy={"amp": True, "amp_configs": {"init_loss_scaling": 128.0, "use_dynamic_loss_scaling": False}}))
            models = [fleet.distributed_model(network) for network in networks]
            held = [parameter for network in networks for parameter in network.parameters()]
            optimizers = [fleet.distributed_optimizer(ADAM(held))]
        else:
            models = [DistributedDataParallel(_Cast(network)) for network in networks]
            optimizers = [ADAM(network.parameters()) for network in networks]
        overflows = [False]
        networks[1].bias.register_hook(lambda gradient: gradient * (float("inf") if overflows[0] else 1.0))  # noqa: B023  # called at once
        for step in range(1, 5):
            overflows[0] = step == 2 and rank == 1
            loss = models[1](models[0](torch.full((3, SIZE), 0.1 * step + rank))).square().mean()
            (loss if way == "fleet" else 128.0 * loss).backward()
            for number, optimizer in enumerate(optimizers):
                gradients = [parameter.grad for parameter in networks[number].parameters()]
                torch._foreach_div_(gradients, 128.0 if way == "by hand" else 1.0)
                if way == "fleet" or all(bool(gradient.isfinite().all()) for gradient in gradients if gradient is not None):
                    optimizer.step()
                optimizer.zero_grad()
        found[way] = torch.cat([parameter.detach().reshape(-1) for network in networks for parameter in network.parameters()]).numpy()
    leave(fleet)
    return found


def scaled(_: Path, rank: int, names: list[str]) -> dict[str, Any]:
    """Scales of fleet's strategy, and DDP under autocast with a ``GradScaler`` for each model."""
    case = CASES[names[0]]
    fleet = Fleet()
    gan = _gan(fleet, case, rank, seed=1)
    gan.train(1, STEPS)
    scales = [engine.loss_scale for engine in fleet.job.models.engines]  # type: ignore[union-attr]  # it is there
    leave(fleet)
    scalers = [torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=3) for _ in range(2)]
    truth = Gan(case, rank, 1, lambda model: DistributedDataParallel(_Cast(model)), lambda optimizer: optimizer)
    for network in truth.networks:  # DDP has sent rank 0's
        network.zero_grad()

    def backward(number: int, loss: torch.Tensor) -> None:
        scalers[number].scale(loss).backward()

    def step(number: int, optimizer: Any) -> None:
        scalers[number].step(optimizer)
        scalers[number].update()

    truth.train(1, STEPS, backward=backward, step=step)
    pairs: Iterable[tuple[np.ndarray, np.ndarray]] = itertools.zip_longest(gan.history, truth.history)
    return {
        "off": np.array([float(np.abs(one - other).max()) for one, other in pairs]),
        "moved": np.array(float(np.abs(gan.history[0] - gan.history[-1]).max())),
        "scales": np.array(scales),
        "torch's": np.array([scaler.get_scale() for scaler in scalers]),
    }


class _Cast(nn.Module):
    """A model under autocast, whose outputs are float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of a batch."""
        with torch.autocast("cpu", dtype=torch.float16):
            found: torch.Tensor = self.model(x)
        return found.float()


def _message(call: Callable[[], object]) -> np.ndarray:
    try:
        call()
    except FleetbenchError as error:
        return np.array(str(error))
    return np.array("")


def main() -> None:
    """Save what the phase found."""
    rank, ranks, store, output, phase, folder, names = sys.argv[1:]
    torch.set_num_threads(1)
    gc.freeze()  # collections look at what has been imported no more
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks), timeout=timedelta(seconds=60))
    be_rank(int(rank), int(ranks))
    found = {"train": train, "resume": resume, "scaled": scaled, "joint": joint}[phase](Path(folder), int(rank), json.loads(names))
    np.savez(output, **found)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
