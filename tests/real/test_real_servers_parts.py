"""What servers are made of: messages, optimizers and shards, each against something else than itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fleetbench.errors import ConfigError
from fleetbench.plan.servers.rules import ServerRules, Shards, Table
from fleetbench.workloads.server_updates import OPTIONS, Change, Updates
from real.servers.checkpoints import load_shard, shard_path, write_shard
from real.servers.parameters import Shard, Spec

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own sparse optimizers do not opt


def spec(servers: int = 1, **changes: object) -> Spec:
    """A model with 5 dense numbers and a table of 6 rows of 2."""
    fields: dict[str, object] = {
        "rules": ServerRules(mode="asynchronous", trainers=3, servers=servers),
        "shards": Shards(servers=servers, dense=5, tables=(Table(name="words.weight", rows=6, width=2),)),
        "dense": ("bias 5",),
        "dtype": "float32",
        "optimizer": "sgd",
        "options": OPTIONS["sgd"],
    }
    return Spec(**{**fields, **changes})  # type: ignore[arg-type]  # its fields


def push(dense: list[float], rows: list[int], values: list[list[float]]) -> Change:
    """A push at a learning rate of 0.1."""
    return Change(torch.tensor(dense), [(torch.tensor(rows), torch.tensor(values))], 0.1)


TORCH = {
    "sgd": lambda p, decay: torch.optim.SGD(p, lr=0.1, weight_decay=decay),
    "momentum": lambda p, decay: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=decay),
    "nesterov": lambda p, decay: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=decay),
    "adagrad": lambda p, decay: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.2, initial_accumulator_value=0.3, weight_decay=decay),
    "adam": lambda p, decay: torch.optim.Adam(p, lr=0.1, weight_decay=decay),
}


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_dense_updates_are_torchs(name: str, decay: float) -> None:
    """Ten updates by random gradients and changing learning rates end where torch's optimizer ends, to 1e-12 in float64."""
    generator = torch.Generator().manual_seed(1)
    parameter = torch.nn.Parameter(torch.randn(7, dtype=torch.float64, generator=generator))
    held = parameter.detach().clone().numpy()
    changes = {"nesterov": {"nesterov": 1.0}, "adagrad": {"lr_decay": 0.2, "initial_accumulator_value": 0.3}}.get(name, {})
    kind = "momentum" if name == "nesterov" else name
    ours = Updates(kind, {**OPTIONS[kind], **changes, "weight_decay": decay}, [held])
    theirs = TORCH[name]([parameter], decay)
    for step in range(10):
        parameter.grad = torch.randn(7, dtype=torch.float64, generator=generator)
        theirs.param_groups[0]["lr"] = 0.1 / (1 + step)
        theirs.step()
        ours.update(0, parameter.grad.numpy().copy(), 0.1 / (1 + step))
    assert np.allclose(held, parameter.detach().numpy(), rtol=0, atol=1e-12)
    assert not np.array_equal(held, np.zeros(7))


@pytest.mark.parametrize("name", ["sgd", "adagrad", "sparse_adam"])
def test_rows_are_updated_as_torch_updates_sparse_gradients(name: str) -> None:
    """Pushed rows end where torch's sparse SGD, Adagrad and SparseAdam put them, and all others stay, their state included.

    The second step has no rows, and counts: it is one whose rows another server has.
    """
    generator = torch.Generator().manual_seed(2)
    parameter = torch.nn.Parameter(torch.randn(6, 3, dtype=torch.float64, generator=generator))
    start = parameter.detach().clone()
    held = start.clone().numpy()
    changes = {"adagrad": {"lr_decay": 0.5}, "sparse_adam": {"eps": 0.1}}.get(name, {})
    ours = Updates(name, {**OPTIONS[name], **changes}, [held])
    theirs = {
        "sgd": lambda: torch.optim.SGD([parameter], lr=0.1),
        "adagrad": lambda: torch.optim.Adagrad([parameter], lr=0.1, lr_decay=0.5),
        "sparse_adam": lambda: torch.optim.SparseAdam([parameter], lr=0.1, eps=0.1),
    }[name]()
    for rows in ([0, 3], [], [3], [5, 0, 3], [0]):
        values = torch.randn(len(rows), 3, dtype=torch.float64, generator=generator)
        parameter.grad = torch.sparse_coo_tensor(torch.tensor([rows], dtype=torch.int64), values, (6, 3), check_invariants=True)
        theirs.step()
        ours.update(0, values.numpy().copy(), 0.1, np.array(rows, np.int64))
    assert np.allclose(held, parameter.detach().numpy(), rtol=0, atol=1e-12)
    assert np.array_equal(held[[1, 2, 4]], start.numpy()[[1, 2, 4]])
    assert not np.allclose(held[[0, 3, 5]], start.numpy()[[0, 3, 5]])


@pytest.mark.parametrize("name", ["momentum", "nesterov", "adam"])
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_rows_under_momentum_and_adam_are_torchs_row_by_row(name: str, decay: float) -> None:
    """Each row moves as a parameter of its own under torch's dense optimizer, which steps when the row is pushed and at no other time.

    Adam's corrections go by the steps of the whole table, those without the row and that without any row among them.
    """
    generator = torch.Generator().manual_seed(3)
    parameters = [torch.nn.Parameter(torch.randn(3, dtype=torch.float64, generator=generator)) for _ in range(6)]
    held = torch.stack([parameter.detach() for parameter in parameters]).numpy()
    start = held.copy()
    kind = "momentum" if name == "nesterov" else name
    changes = {"nesterov": {"nesterov": 1.0}}.get(name, {})
    ours = Updates(kind, {**OPTIONS[kind], **changes, "weight_decay": decay}, [held])
    theirs = [TORCH[name]([parameter], decay) for parameter in parameters]
    for step, rows in enumerate(([0, 3], [], [3], [5, 0, 3], [0], [3, 5])):
        values = torch.randn(len(rows), 3, dtype=torch.float64, generator=generator)
        for row, value in zip(rows, values, strict=True):
            parameters[row].grad = value.clone()
            theirs[row].param_groups[0]["lr"] = 0.1 / (1 + step)
            state = theirs[row].state[parameters[row]]
            if name == "adam" and not state:  # its own beginning, which has no number of steps yet
                state |= {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(value), "exp_avg_sq": torch.zeros_like(value)}
            if name == "adam":
                state["step"].fill_(step)
            theirs[row].step()
        ours.update(0, values.numpy().copy(), 0.1 / (1 + step), np.array(rows, np.int64))
    assert np.allclose(held, torch.stack([parameter.detach() for parameter in parameters]).numpy(), rtol=0, atol=1e-12)
    assert np.array_equal(held[[1, 2, 4]], start[[1, 2, 4]])
    assert not np.allclose(held[[0, 3, 5]], start[[0, 3, 5]], atol=0.01)


@pytest.mark.parametrize("optimizer", OPTIONS)
def test_a_shard_survives_its_checkpoint(optimizer: str, tmp_path: Path) -> None:
    """Parameters, the optimizer's state and the number of updates come back, and the next update goes on as if nothing had been."""
    described = spec(optimizer=optimizer, options=OPTIONS[optimizer])
    shard, never_saved = Shard(described, 0), Shard(described, 0)
    steps = [push([1.0, -2, 3, 0, 5], [1, 4], [[1.0, 2], [3, 4]]), push([0.0, 1, 1, 1, 1], [4], [[9.0, 9]])]
    shard.update([steps[0]], 1)
    assert write_shard(tmp_path, shard, 7) == ""
    back = load_shard(tmp_path, 0, 1)
    assert back is not None
    held, version = back
    assert version == 7
    for step in steps:
        never_saved.update([step], 1)
    held.update([steps[1]], 1)
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(held.arrays, never_saved.arrays, strict=True))
    assert list(tmp_path.iterdir()) == [shard_path(tmp_path, 0, 1)]


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    """Nothing there is no error; a file of another shape, another number of servers, or no checkpoint at all is, and names the file."""
    assert load_shard(tmp_path, 0, 1) is None
    write_shard(tmp_path, Shard(spec(), 0), 1)
    with pytest.raises(ConfigError, match="another number of servers"):
        load_shard(tmp_path, 0, 2)
    shard_path(tmp_path, 0, 1).write_bytes(b"x" * 100)
    with pytest.raises(ConfigError, match="shard-00000"):
        load_shard(tmp_path, 0, 1)
