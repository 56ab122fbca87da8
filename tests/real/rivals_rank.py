"""One rank of the comparison with other Local SGDs: ``rivals_rank.py RANK RANKS STORE OUTPUT``.

Saves, a case, both parameter histories, what each holds after the end of training, and the sizes of
the all-reduces that torch was asked for. Then what differs: storage, gradients that are missing.
"""

from __future__ import annotations

import importlib.util
import sys
import types
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import training_problem as problem
from counting import counted
from rivals_cases import RIVALS, SEVERAL, Rival
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from fleetbench.strategy import DistributedStrategy
from real.communication.communicators import Communicators
from real.engine.engine import Engine

DTYPE = "float64"
Saved = dict[str, Any]
OnStep = Callable[[int], None]


class StandInManager:
    """Answers torchft's LocalSGD as a manager does whose group is complete and never fails."""

    def disallow_state_dict_read(self) -> None:
        """Nobody reads."""

    def allow_state_dict_read(self) -> None:
        """Nobody reads."""

    def start_quorum(self) -> None:
        """All ranks take part."""

    def should_commit(self) -> bool:
        """Nothing has failed."""
        return True

    def allreduce(self, tensor: torch.Tensor) -> dist.Work:
        """The mean over the ranks, under way."""
        work = dist.all_reduce(tensor, dist.ReduceOp.AVG, async_op=True)
        assert work is not None
        return work


def torchft_local_sgd() -> Any:
    """The class LocalSGD of torchft; raises ``ImportError`` with the reason where there is none.

    Importing the package takes its servers' telemetry along; ``local_sgd`` alone needs torch, and
    the manager's name for an annotation.
    """
    package = importlib.util.find_spec("torchft")
    if package is None or package.submodule_search_locations is None:
        raise ImportError("torchft is not installed")
    names = ("torchft", "torchft.manager")
    stand_ins = {name: types.ModuleType(name) for name in names}
    stand_ins["torchft"].__path__ = list(package.submodule_search_locations)
    stand_ins["torchft.manager"].Manager = StandInManager  # type: ignore[attr-defined]  # a module made here
    sys.modules.update(stand_ins)
    try:
        from torchft.local_sgd import LocalSGD
    finally:
        for name in names:
            del sys.modules[name]
    return LocalSGD


def network_of(kind: str, rank: int) -> nn.Module:
    """The model of a case on this rank."""
    network = problem.model(DTYPE, kind)
    if isinstance(network, problem.Gated):
        network.rank = rank
    return network


def train(network: nn.Module, forward: nn.Module, optimizer: torch.optim.Optimizer, on_step: OnStep = lambda _: None) -> np.ndarray:
    """The problem's training; ``(steps, parameters)``."""
    history = []
    for step in range(1, problem.STEPS + 1):
        problem.decay(optimizer, step)
        inputs, labels = problem.own_batch(step, dist.get_rank(), dist.get_world_size(), DTYPE)
        cross_entropy(forward(inputs), labels).backward()
        optimizer.step()
        on_step(step)
        optimizer.zero_grad()
        history.append(problem.flat(network).numpy().copy())
    return np.array(history)


def engine_of(network: nn.Module, optimizer: torch.optim.Optimizer, communicators: Communicators, **fields: Any) -> Engine:
    """Ours, around a model and an optimizer."""
    engine = Engine(network, DistributedStrategy.from_dict({"localsgd": True, **SEVERAL, **fields}), communicators)
    engine.attach_optimizer(optimizer)
    return engine


def ours(case: Rival, communicators: Communicators) -> Saved:
    """The engine's training of a case."""
    network = network_of(case.model, communicators.rank)
    optimizer = problem.optimizer_of(case.optimizer)(network)
    engine = engine_of(network, optimizer, communicators, localsgd_configs={"k_steps": case.k_steps, **case.configs})
    with counted() as sizes:
        history = train(network, network, optimizer)
    engine.flush(end=True)
    found = {"history": history, "end": problem.flat(network).numpy().copy(), "sizes": np.array(sizes)}
    found["buckets"] = np.array(len(engine.plan.buckets))
    engine.close()
    return found


def theirs(case: Rival, local_sgd: Any) -> Saved:
    """The other library's training of a case."""
    network = network_of(case.model, dist.get_rank())
    optimizer = problem.optimizer_of(case.optimizer)(network)
    forward: nn.Module = network
    if case.kind == "torchft":
        with local_sgd(StandInManager(), network, optimizer, sync_every=case.k_steps), counted() as sizes:
            history = train(network, network, optimizer)
        return {"history": history, "end": problem.flat(network).numpy().copy(), "sizes": np.array(sizes)}
    if case.kind == "post_local_ddp":
        wrapped = DistributedDataParallel(network)
        state = PostLocalSGDState(None, None, start_localSGD_iter=case.warmup, post_local_gradient_allreduce=False)
        wrapped.register_comm_hook(state, post_localSGD_hook)
        forward = wrapped
    with warnings.catch_warnings(action="ignore"):  # that K = 1 had better be DDP
        averager = PeriodicModelAverager(period=case.k_steps, warmup_steps=case.warmup)
    with counted() as sizes:
        history = train(network, forward, PostLocalSGDOptimizer(optimizer, averager))
    return {"history": history, "end": problem.flat(network).numpy().copy(), "sizes": np.array(sizes)}


def aliases(communicators: Communicators) -> Saved:
    """Whether another name for a parameter's data, taken after step 3, still is the parameter at the end."""
    found: Saved = {}
    for name in ("ours", "theirs"):
        network = network_of("plain", communicators.rank)
        optimizer = problem.optimizer_of("sgd")(network)
        engine = engine_of(network, optimizer, communicators, localsgd_configs={"k_steps": 4}) if name == "ours" else None
        if engine is None:
            optimizer = PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(period=4))
        taken: list[torch.Tensor] = []

        def take(step: int, network: nn.Module = network, taken: list[torch.Tensor] = taken) -> None:
            if step == 3:
                taken.extend(parameter.detach() for parameter in network.parameters())

        train(network, network, optimizer, take)
        pairs = zip(taken, network.parameters(), strict=True)
        found[f"alias/{name}"] = np.array([torch.equal(alias, parameter.detach()) for alias, parameter in pairs])
        if engine is not None:
            engine.close()
    return found


def missing_gradients(communicators: Communicators) -> Saved:
    """A model whose ranks reach different parameters: ours trains it; of torch's averager, what it would have sent."""
    network = network_of("gated", communicators.rank)
    optimizer = problem.optimizer_of("momentum")(network)
    engine = engine_of(network, optimizer, communicators, find_unused_parameters=True, localsgd_configs={"k_steps": 4})
    found = {"gated/ours": train(network, network, optimizer)}
    engine.close()
    network = network_of("gated", communicators.rank)
    inputs, labels = problem.own_batch(1, communicators.rank, communicators.trainers, DTYPE)
    cross_entropy(network(inputs), labels).backward()
    sent: list[int] = []
    original = dist.all_reduce
    dist.all_reduce = lambda tensor, *_, **__: sent.append(tensor.numel())  # sizes that differ would end the processes
    try:
        PeriodicModelAverager(period=4).average_parameters(network.parameters())
    finally:
        dist.all_reduce = original
    return found | {"gated/sent": np.array(sent), "gated/all": np.array(sum(parameter.numel() for parameter in network.parameters()))}


def statistics(communicators: Communicators) -> Saved:
    """Batch-norm statistics after an averaging."""
    found: Saved = {}
    for name in ("ours", "theirs"):
        network = network_of("normed", communicators.rank)
        optimizer = problem.optimizer_of("sgd")(network)
        configs = {"k_steps": 1, "buffers": "average"}
        engine = engine_of(network, optimizer, communicators, localsgd_configs=configs) if name == "ours" else None
        if engine is None:
            with warnings.catch_warnings(action="ignore"):
                optimizer = PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(period=1))
        train(network, network, optimizer)
        found[f"statistics/{name}"] = torch.cat([buffer.reshape(-1).double() for buffer in network.buffers()]).numpy().copy()
        if engine is not None:
            engine.close()
    return found


def main() -> None:
    """Train everything, in one order on all ranks."""
    rank, ranks, store, output = sys.argv[1:]
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks), timeout=timeout)
    torch.set_num_threads(1)
    communicators = Communicators("gloo", timeout)
    saved: Saved = {}
    local_sgd = None
    try:
        local_sgd = torchft_local_sgd()
    except ImportError as error:
        saved["torchft/missing"] = np.array(str(error))
    for case in RIVALS:
        saved |= {f"{case.name}/ours/{name}": value for name, value in ours(case, communicators).items()}
        if case.kind != "torchft" or local_sgd is not None:
            saved |= {f"{case.name}/theirs/{name}": value for name, value in theirs(case, local_sgd).items()}
    saved |= aliases(communicators) | missing_gradients(communicators) | statistics(communicators)
    np.savez(output, **saved)
    communicators.barrier()
    communicators.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
