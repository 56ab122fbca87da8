"""One rank of the sharding tests.

``sharding_rank.py RANK RANKS STORE OUTPUT train`` trains every case and saves its parameters after the first and the
last update, its losses, and what the last update asked torch.distributed for; ``... refusals`` saves what is said of
what is refused; ``... save FOLDER`` trains cases to their half, saves, and trains on; ``... load FOLDER`` trains the
other half from there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import sharding_cases as problem
import torch
import torch.distributed as dist
from living_fleet import be_rank, leave
from sharding_cases import OVERFLOW, STEPS, Case, cases, net, optimizer_of, own_batch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from fleetbench.errors import ConfigError
from fleetbench.strategy import DistributedStrategy
from real.fleet import Fleet
from real.job.folder import write_json
from real.processes.place import Place

Saved = dict[str, Any]
KINDS = ("allgather", "reduce_scatter", "allreduce")


def main() -> None:
    """Do what is wanted."""
    rank, ranks, store, output, what, *arguments = sys.argv[1:]
    be_rank(int(rank), int(ranks))
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks), timeout=timeout)
    torch.set_num_threads(1)
    saved = {"train": train_all, "refusals": refusals, "save": save_all, "load": load_all, "workers": resume_workers}[what](*arguments)
    np.savez(output, **saved)
    dist.barrier()
    dist.destroy_process_group()


def fleet_of(case: Case) -> Fleet:
    """A fleet of the case's strategy."""
    fleet = Fleet()
    fields = {
        "sharding": True,
        "sharding_configs": case.configs,
        "broadcast_buffers": True,
        **(case.strategy or {}),
    }
    fleet.init(DistributedStrategy.from_dict(fields), timeout_s=60)
    return fleet


def begun(case: Case) -> tuple[Fleet | None, nn.Module, torch.optim.Optimizer]:
    """A case's model and optimizer; each rank's model begins elsewhere, and all train from rank 0's."""
    model = net(case.kind, getattr(torch, case.dtype))
    if case.strategy is None:
        if case.loop.endswith("by hand"):
            wire = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
            if case.loop != "by hand":
                wire = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            for block in model.blocks:
                fully_shard(block, mp_policy=wire)
            return None, fully_shard(model, mp_policy=wire), optimizer_of(case.optimizer, model)
        return None, DistributedDataParallel(model), optimizer_of(case.optimizer, model)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(dist.get_rank())
    fleet = fleet_of(case)
    assert fleet.distributed_model(model) is model
    assert model.module is model
    return fleet, model, fleet.distributed_optimizer(optimizer_of(case.optimizer, model))


def whole(model: nn.Module) -> torch.Tensor:
    """All parameters of a sharded model, as one vector."""
    found = [own.full_tensor() if hasattr(own, "full_tensor") else own for own in model.parameters()]
    return torch.cat([own.detach().reshape(-1).double() for own in found])


def _step(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tokens, labels = own_batch(step, rank, ranks)
    if case.loop == "adversarial":
        x = torch.zeros(2, problem.WIDTH, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.grad(model(x).square().sum(), x)[0].abs().sum() > 0
    if case.loop == "no_sync":
        half = problem.BATCH // 2
        with model.no_sync():  # type: ignore[operator]  # fleet gives it
            loss = cross_entropy(model(tokens[:half]), labels[:half]) / 2
            loss.backward()
        last = cross_entropy(model(tokens[half:]), labels[half:]) / 2
        last.backward()
        loss = loss + last
    else:
        with torch.autocast("cpu", torch.bfloat16, enabled=case.loop == "bf16 parameters by hand"):
            scores = model(tokens)
        loss = cross_entropy(scores.to(getattr(torch, case.dtype)), labels)
        overflows = case.loop == "overflow" and step == OVERFLOW and rank == ranks - 1
        (loss * 1e38 if overflows else loss).backward()
    if case.loop == "evaluate":
        _evaluate(model)
    if case.loop == "clip":
        nn.utils.clip_grad_norm_(model.parameters(), problem.CLIP)
    optimizer.step()
    optimizer.zero_grad()
    if case.loop == "evaluate":
        model.zero_grad()
        _evaluate(model)
        model.eval()
        model(tokens)  # with a graph, which no backward follows
        model.train()
    return loss.item()


def _evaluate(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        told = model(torch.arange(9).reshape(3, 3))
        expected = told.clone()
        dist.broadcast(expected, 0)
        assert torch.equal(told, expected), "ranks evaluate one model"
    model.train()


def train(case: Case) -> Saved:
    """See the module."""
    fleet, model, optimizer = begun(case)
    history, losses, counts = [], [], dict.fromkeys(KINDS, 0)
    for step in range(1, STEPS + 1):
        seen = CommDebugMode() if case.loop == "plain" and step > STEPS - case.merge else None
        with seen or nullcontext():
            losses.append(_step(case, model, optimizer, step))
        for kind in KINDS if seen is not None else ():
            counts[kind] += sum(number for name, number in seen.get_comm_counts().items() if kind in str(name))
        if step in case.looked_at:
            history.append(whole(model).numpy())
    found = {
        "history": np.array(history),
        "losses": np.array(losses),
        "counts": np.array([counts[kind] for kind in KINDS]),
    }
    found["buffers"] = torch.cat([torch.zeros(1), *(own.reshape(-1).float() for own in model.buffers())]).numpy()
    if fleet is not None:
        fleet.synchronize()
        found["agreed"] = whole(model).numpy()
        fleet.end_epoch()
        leave(fleet, groups=False)
    return found


def train_all() -> Saved:
    """Every case."""
    saved: Saved = {}
    for case in cases(dist.get_world_size()):
        try:
            saved |= {f"{case.name}/{name}": value for name, value in train(case).items()}
        except Exception as error:
            raise RuntimeError(f"case {case.name!r}") from error
    return saved


def refusals() -> Saved:
    """What is said, by the name of what is refused."""
    return {name: _said(refused) for name, refused in REFUSED.items()}


def _said(refused: Callable[[Fleet], object]) -> str:
    fleet = Fleet()
    try:
        refused(fleet)
    except ConfigError as error:
        return str(error)
    finally:
        leave(fleet, groups=False)
    return "nothing"


def _of(fleet: Fleet, kind: str = "plain", *, blocks: tuple[str, ...] = (), **fields: Any) -> nn.Module:
    configs = {"stage": 3, "blocks": blocks, **fields.pop("configs", {})}
    fleet.init(DistributedStrategy.from_dict({"sharding": True, "sharding_configs": configs, **fields}), timeout_s=60)
    return fleet.distributed_model(net(kind))


def _optimizer_before(fleet: Fleet) -> None:
    fleet.init(DistributedStrategy(sharding=True))
    model = net()
    optimizer = optimizer_of("adamw", model)
    fleet.distributed_model(model)
    fleet.distributed_optimizer(optimizer)


def _second_optimizer(fleet: Fleet) -> None:
    model = _of(fleet)
    for _ in range(2):
        fleet.distributed_optimizer(optimizer_of("adamw", model))


def _experts(fleet: Fleet) -> None:
    model = _of(fleet, "experts")
    optimizer = fleet.distributed_optimizer(optimizer_of("adamw", model))
    for own in model.parameters():
        own.grad = torch.zeros_like(own)
    optimizer.zero_grad(set_to_none=False)
    model.blocks[1].turn = dist.get_rank()
    model(own_batch(1, 0, 1)[0]).sum().backward()


def _changed(change: Callable[[nn.Module], object]) -> Callable[[Fleet], None]:
    def refused(fleet: Fleet) -> None:
        model = _of(fleet)
        optimizer = fleet.distributed_optimizer(optimizer_of("adamw", model))
        model(own_batch(1, 0, 1)[0]).sum().backward()
        optimizer.step()
        change(model)
        model(own_batch(1, 0, 1)[0]).sum().backward()

    return refused


def _save_in_merge(fleet: Fleet) -> None:
    model = _of(fleet, gradient_merge=True, gradient_merge_configs={"k_steps": 3})
    optimizer = fleet.distributed_optimizer(optimizer_of("adamw", model))
    model(own_batch(1, 0, 1)[0]).sum().backward()
    optimizer.step()
    fleet.save_persistables("never")


def _own_state(fleet: Fleet) -> None:
    model = _of(fleet)
    optimizer = fleet.distributed_optimizer(optimizer_of("adamw", model))
    model(own_batch(1, 0, 1)[0]).sum().backward()
    optimizer.step()
    optimizer.state[model.head.weight]["rows"] = torch.zeros(3)
    fleet.save_persistables("never")


def _tuned(fleet: Fleet) -> None:
    folder = Path(sys.argv[4]).with_suffix(".tuning")
    for part in ("legs", "beats"):
        (folder / part).mkdir(parents=True)
    write_json(folder / "driver.json", asdict(Place.here()), parents=False)
    os.environ["FLEETBENCH_TUNING"] = str(folder)
    try:
        fleet.init(DistributedStrategy(sharding=True))
    finally:
        del os.environ["FLEETBENCH_TUNING"]


REFUSED: dict[str, Callable[[Fleet], object]] = {
    "optimizer before": _optimizer_before,
    "second optimizer": _second_optimizer,
    "whole optimizer": lambda fleet: fleet.distributed_optimizer(torch.optim.LBFGS(_of(fleet).parameters())),
    "tied blocks": lambda fleet: _of(fleet, "tied blocks"),
    "sparse": lambda fleet: _of(fleet, "sparse"),
    "degree": lambda fleet: _of(fleet, configs={"sharding_degree": 3}),
    "join": lambda fleet: (_of(fleet), fleet.join()),
    "inference": lambda fleet: (_of(fleet), fleet.save_inference_model("model.pt2", ())),
    "experts": _experts,
    "frozen later": _changed(lambda model: model.head.requires_grad_(requires_grad=False)),
    "replaced": _changed(lambda model: setattr(model.head, "weight", nn.Parameter(model.head.weight * 2))),
    "moved": _changed(lambda model: model.float()),
    "save in a merge": _save_in_merge,
    "own state": _own_state,
    "tuning": _tuned,
}


def _half(case: Case, fleet: Fleet, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> torch.Tensor:
    for step in steps:
        _step(case, model, optimizer, step)
    found = whole(model)
    leave(fleet, groups=False)
    return found


def save_all(folder: str) -> Saved:
    """See the module."""
    saved: Saved = {}
    for case in problem.SAVED:
        fleet, model, optimizer = begun(case)
        assert fleet is not None
        for step in range(1, problem.HALF + 1):
            _step(case, model, optimizer, step)
            model(own_batch(1, 0, 1)[0])  # an evaluation with gradients is no step
            fleet.save_persistables(Path(folder, case.name), extra={"note": step, "rank": dist.get_rank()})
        saved[case.name] = _half(case, fleet, model, optimizer, range(problem.HALF + 1, STEPS + 1)).numpy()
    return saved


def load_all(folder: str) -> Saved:
    """See the module: each case goes on from its own save, as two trainers, and from that of the first."""
    saved, first = Saved(), problem.SAVED[0]
    for case in problem.SAVED:
        others = [first] if case.optimizer == first.optimizer else []
        for source in dict.fromkeys([case, *others] if dist.get_world_size() == 2 else others):
            fleet, model, optimizer = begun(case)
            assert fleet is not None
            loaded = fleet.load_persistables(Path(folder, source.name))
            assert loaded.step == problem.HALF
            assert loaded.extra["note"] == problem.HALF
            saved[f"{case.name} from {source.name}"] = _half(case, fleet, model, optimizer, range(problem.HALF + 1, STEPS + 1)).numpy()
    return saved


def resume_workers(folder: str) -> Saved:
    """A round, a save, and another round; and the second round of those who loaded that. Sharded workers, and those of other numbers.

    ``larger``: the momenta of Adam that workers of two have read from workers of one, whose own differ.
    """
    case, other = (next(case for case in problem.WORKERS if case.name == name) for name in ("two workers, DiLoCo", "four workers, DiLoCo"))
    fleet, model, optimizer = begun(case)
    assert fleet is not None
    second = range(problem.HALF + 1, STEPS + 1)
    for step in range(1, problem.HALF + 1):
        if step == problem.HALF:
            try:
                fleet.save_persistables(Path(folder, "never"))
            except ConfigError as error:
                refused = str(error)
        _step(case, model, optimizer, step)
    fleet.save_persistables(Path(folder, "half"))
    saved = {"went on": _half(case, fleet, model, optimizer, second).numpy(), "refused": np.array(refused)}
    for name, one in (("loaded", case), ("loaded by four", other)):
        fleet, model, optimizer = begun(one)
        assert fleet is not None
        assert fleet.load_persistables(Path(folder, "half")).step == problem.HALF
        saved[name] = _half(one, fleet, model, optimizer, second).numpy()
    fleet, model, optimizer = begun(other)
    assert fleet is not None
    for step in (1, 2):
        _step(other, model, optimizer, step)
    fleet.save_persistables(Path(folder, "single"))
    saved["single"] = _momenta(optimizer).numpy()
    leave(fleet, groups=False)
    fleet, model, optimizer = begun(case)
    assert fleet is not None
    fleet.load_persistables(Path(folder, "single"))
    saved["larger"] = _momenta(optimizer).numpy()
    leave(fleet, groups=False)
    return saved


def _momenta(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """``exp_avg`` of all parameters, whole, as the trainer's worker has it."""
    found = [optimizer.state[own]["exp_avg"] for group in optimizer.param_groups for own in group["params"]]
    return torch.cat([own.full_tensor().reshape(-1) for own in found])


if __name__ == "__main__":
    main()
