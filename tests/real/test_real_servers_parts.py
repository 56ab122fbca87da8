"""What servers are made of: messages, optimizers and shards, each against something else than itself."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
import zmq
from hypothesis import given
from hypothesis import strategies as st

from fleetbench.errors import ConfigError
from fleetbench.plan.servers.rules import ServerRules, Table
from fleetbench.workloads.server_updates import OPTIONS, ROW, Layout, Updates, add_rows
from real.servers.checkpoints import load_shard, shard_path, write_shard
from real.servers.parameters import VERSION, Shard, Spec
from real.servers.wire import Head, WireError, decode, encode

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own sparse optimizers do not opt

GEO = ServerRules(mode="geo_sgd", trainers=3, servers=1, k_steps=4)


def spec(**changes: object) -> Spec:
    """A model with 5 dense numbers and a table of 6 rows of 2."""
    fields: dict[str, object] = {
        "rules": ServerRules(mode="asynchronous", trainers=3, servers=1),
        "dense": 5,
        "tables": (Table(name="words.weight", rows=6, width=2),),
        "dtype": "float32",
        "optimizer": "sgd",
        "options": OPTIONS["sgd"],
        "names": ("bias",),
        "sizes": (5,),
    }
    return Spec(**{**fields, **changes})  # type: ignore[arg-type]  # its fields


def frames(parts: list[bytes | memoryview]) -> list[zmq.Frame]:
    """As they come off a socket."""
    return [zmq.Frame(bytes(part)) for part in parts]


def push(dense: list[float], rows: list[int], values: list[list[float]], rate: float = 1.0) -> tuple[Head, list[memoryview]]:
    """A push off the wire."""
    tensors = [np.zeros(1, VERSION), np.array(dense, np.float32), np.array(rows, ROW), np.array(values, np.float32).reshape(len(rows), 2)]
    return decode(frames(encode(Head("gradient", rate=rate), tensors)))


@given(
    kind=st.sampled_from(("join", "gradient", "refused")),
    counts=st.tuples(*[st.integers(0, 2**64 - 1)] * 3),
    rate=st.floats(allow_nan=False),
    bodies=st.lists(st.binary(max_size=40), max_size=5),
)
def test_a_message_survives_the_wire(  # the fields of a head
    kind: str, counts: tuple[int, int, int], rate: float, bodies: list[bytes]
) -> None:
    """Whatever a head says, and whatever tensors follow it, comes out as it went in."""
    head = Head(kind, *counts[:2], rate=rate, count=counts[2])
    back, tensors = decode(frames(encode(head, bodies)))
    assert back == head
    assert [bytes(tensor) for tensor in tensors] == bodies


@pytest.mark.parametrize("coalesced", [True, False])
def test_a_change_keeps_nothing_of_the_gradients_memory(coalesced: bool) -> None:
    """A sender reads it while the next backward may write: rows, sorted or not, and a single dense gradient are copies."""
    table, dense = torch.zeros(4, 2), torch.zeros(3)
    rows = torch.sparse_coo_tensor([[1, 3]], [[1.0, 2.0], [3.0, 4.0]], (4, 2))
    gradients = [rows.coalesce() if coalesced else rows, torch.ones(3)]
    change = Layout({"table": table, "dense": dense}, {"table"}).change(gradients)
    gradients[0]._values().fill_(9)
    gradients[1].fill_(9)
    assert change.dense is not None
    assert change.dense.tolist() == [1, 1, 1]
    assert [part.tolist() for part in change.tables[0]] == [[1, 3], [[1, 2], [3, 4]]]


def test_a_tensor_travels_uncopied() -> None:
    """What is sent lies in the tensor's own memory, and it comes out whole."""
    tensor = np.arange(1000, dtype=np.float32)
    parts = encode(Head("gradient"), [tensor, np.ones(3)])
    assert [len(part) for part in parts[1:]] == [4000, 24]
    assert np.shares_memory(np.frombuffer(parts[1], np.float32), tensor)
    _, (whole, small) = decode(frames(parts))
    assert np.array_equal(np.frombuffer(whole, np.float32), tensor)
    assert len(small) == 24


@given(parts=st.lists(st.binary(max_size=120), min_size=1, max_size=4))
def test_another_protocol_is_no_message(parts: list[bytes]) -> None:
    """Nor is another version of this one: the one error that a server passes over."""
    for text in (parts[0], bytes(encode(Head("pull"))[0]).replace(b"FBPS 8", b"FBPS 7")):
        with pytest.raises(WireError):
            decode([zmq.Frame(text), *map(zmq.Frame, parts[1:])])


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


def test_the_sum_of_several_trainers_is_added_in_their_order() -> None:
    """Synchronous: dense numbers and rows of three pushes, over three, bit for bit as written out in float32."""
    shard = Shard(spec(), 0)
    own = [
        ([0.1, 0, 0, 0, 1e8], [1, 4], [[0.1, 1], [2, 2]]),
        ([0.2, 0, 0, 0, 1.0], [4], [[0.3, 3]]),
        ([0.3, 0, 0, 0, -1e8], [0, 4], [[5, 5], [0.7, 7]]),
    ]
    shard.update([shard.read_push(*push(*one)) for one in own], 3)
    f = np.float32
    assert shard.dense[0] == -(f(0.1) + f(0.2) + f(0.3)) / f(3)
    assert shard.dense[4] == -((f(1e8) + f(1.0)) + f(-1e8)) / f(3)
    assert shard.tables[0][4, 0] == -((f(2) + f(0.3)) + f(0.7)) / f(3)
    assert np.array_equal(shard.tables[0][:2], -np.array([[5, 5], [0.1, 1]], np.float32) / f(3))


@given(st.lists(st.sets(st.integers(0, 9)), min_size=1, max_size=4))
def test_sums_of_rows_are_the_dense_sums(parts: list[set[int]]) -> None:
    """Rows that several parts hold are added, and the others come through."""
    dense = np.zeros((10, 2))
    sparse = []
    for number, rows in enumerate(parts, 1):
        values = np.full((len(rows), 2), float(number))
        sparse.append((torch.from_numpy(np.array(sorted(rows), ROW)), torch.from_numpy(values)))
        dense[sorted(rows)] += values
    rows, values = add_rows(sparse)
    back = np.zeros((10, 2))
    back[rows] = values
    assert np.array_equal(back, dense)
    assert list(rows) == sorted(set().union(*parts))


def test_each_trainer_pulls_what_others_changed_and_once() -> None:
    """A row changed by one is news for the other two."""
    shard = Shard(spec(rules=GEO), 0)
    first, second = (shard.read_push(*push([0] * 5, rows, [[1, 1]] * len(rows))) for rows in ([1, 4], [2]))
    shard.accumulate(first)
    shard.mark(0, first)
    assert list(shard.parameters(0)[1]) == []
    _, rows, values = shard.parameters(1)
    assert (list(rows), values.tolist()) == ([1, 4], [[1, 1], [1, 1]])
    shard.accumulate(second)
    shard.mark(2, second)
    assert list(shard.parameters(1)[1]) == [2]
    assert list(shard.parameters(1)[1]) == []
    assert list(shard.parameters(2)[1]) == [1, 4]


@pytest.mark.parametrize("optimizer", OPTIONS)
def test_a_shard_survives_its_checkpoint(optimizer: str, tmp_path: Path) -> None:
    """Parameters, the optimizer's state and the number of updates come back, and the next update goes on as if nothing had been."""
    described = spec(optimizer=optimizer, options=OPTIONS[optimizer])
    shard, never_saved = Shard(described, 0), Shard(described, 0)
    steps = [push([1, -2, 3, 0, 5], [1, 4], [[1, 2], [3, 4]], 0.1), push([0, 1, 1, 1, 1], [4], [[9, 9]], 0.1)]
    shard.update([shard.read_push(*steps[0])], 1)
    assert write_shard(tmp_path, shard, 7) == ""
    back = load_shard(tmp_path, 0, 1)
    assert back is not None
    held, version = back
    assert version == 7
    for step in steps:
        never_saved.update([never_saved.read_push(*step)], 1)
    held.update([held.read_push(*steps[1])], 1)
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
    two = spec(rules=dataclasses.replace(spec().rules, servers=2))
    write_shard(tmp_path, Shard(two, 1), 1)
    shard_path(tmp_path, 1, 2).rename(shard_path(tmp_path, 0, 2))
    with pytest.raises(ConfigError, match="server 1"):
        load_shard(tmp_path, 0, 2)
