"""One rank of the tests of the deferred process group: runs every program, and saves what it raised or computed.

``deferred_rank.py RANK RANKS STORE OUTPUT``: under ``NAME/raised`` the error's class name, or nothing, and
under ``NAME/result`` the numbers of a program that ran through.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from deferred import BACKEND, DEPENDENCIES, FakeStreams, ForgetfulLane, StreamOrder, allowed, register, survey
from torch import nn

from real.communication.lanes import Lane, StreamLane

PROGRAMS: dict[str, Callable[[], torch.Tensor]] = {}
TIMEOUT = timedelta(seconds=30)


def program(function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Run this function inside a stream order."""
    PROGRAMS[function.__name__] = function
    return function


class Place:
    """Where a program runs: the fake device, two communicators, and the rank."""

    streams: FakeStreams
    groups: tuple[dist.ProcessGroup, dist.ProcessGroup]
    rank: int
    ranks: int


here = Place()


def tensor() -> torch.Tensor:
    """Eight numbers of this rank: 0 to 7, plus ten times the rank."""
    return torch.arange(8.0) + 10 * here.rank


def reduce_on(lane: Lane, data: torch.Tensor, group: int = 0, after: Any = ()) -> Any:
    """Sum ``data`` over the ranks, on a lane."""

    def run() -> None:
        work = dist.all_reduce(data, group=here.groups[group], async_op=True)
        assert work is not None
        work.wait()

    return lane.submit(run, after)


@program
def waits_and_uses() -> torch.Tensor:
    """``wait(); div_()`` is right on NCCL."""
    data = tensor()
    work = dist.all_reduce(data, group=here.groups[0], async_op=True)
    assert work is not None
    assert data.data_ptr()
    work.wait()
    return data.div_(here.ranks)


@program
def misses_a_wait() -> torch.Tensor:
    """Uses what is in flight."""
    data = tensor()
    dist.all_reduce(data, group=here.groups[0], async_op=True)
    return data.div_(here.ranks)


@program
def misses_a_wait_through_a_view() -> torch.Tensor:
    """Reads what is in flight, by another name."""
    data = tensor()
    view = data.view(2, 4)[1]
    dist.all_reduce(data, group=here.groups[0], async_op=True)
    return view + 1


@program
def uses_another_slice() -> torch.Tensor:
    """Half of a flat buffer is in flight, and only the other half is used."""
    data = tensor()
    work = dist.all_reduce(data[:4], group=here.groups[0], async_op=True)
    assert work is not None
    data[4:].add_(1)
    work.wait()
    return data


@program
def overwrites_what_is_sent() -> torch.Tensor:
    """A collective still reads what the next operation overwrites."""
    data, gathered = tensor(), torch.empty(8 * here.ranks)
    work = dist.all_gather_single(gathered, data, group=here.groups[0], async_op=True)
    data.zero_()
    assert work is not None
    work.wait()
    return gathered


@program
def never_waits() -> torch.Tensor:
    """Nobody waits, and nobody uses it either."""
    dist.all_reduce(tensor(), group=here.groups[0], async_op=True)
    return torch.zeros(1)


@program
def reads_an_item() -> torch.Tensor:
    """``.item()`` waits for the device."""
    return torch.full((1,), tensor().sum().item())


@program
def asks_a_condition() -> torch.Tensor:
    """So does ``if tensor:``."""
    return tensor() if tensor().sum() > 0 else torch.zeros(1)


@program
def reads_a_list() -> torch.Tensor:
    """So does ``.tolist()``."""
    return torch.tensor(tensor().tolist())


@program
def reads_as_numpy() -> torch.Tensor:
    """So does ``.numpy()``."""
    return torch.tensor(tensor().numpy().sum())


@program
def finds_nonzeros() -> torch.Tensor:
    """So does an operation whose result's size depends on data."""
    return tensor().nonzero()


@program
def meets_at_a_barrier() -> torch.Tensor:
    """So does a barrier."""
    dist.barrier(group=here.groups[0])
    return torch.zeros(1)


@program
def reads_in_a_gradient_hook() -> torch.Tensor:
    """A read inside a backward is seen as well."""
    data = tensor().requires_grad_()
    data.register_hook(lambda gradient: torch.tensor(gradient.tolist()))
    data.sum().backward()
    assert data.grad is not None
    return data.grad


@program
def reads_where_it_may() -> torch.Tensor:
    """Inside ``allowed()`` the host may read, if it reads what is ordered."""
    data = tensor()
    dist.all_reduce(data, group=here.groups[0])
    with allowed():
        return torch.tensor(data.tolist())


@program
def reads_too_early_where_it_may() -> torch.Tensor:
    """``allowed()`` does not make up for a wait."""
    data = tensor()
    dist.all_reduce(data, group=here.groups[0], async_op=True)
    with allowed():
        return torch.tensor(data.tolist())


@program
def side_stream() -> torch.Tensor:
    """Packs, reduces on a lane, waits, uses."""
    lane = StreamLane(here.streams)
    data = tensor() * 1
    ticket = reduce_on(lane, data)
    independent = tensor() * 2
    ticket.wait()
    return data + independent


@program
def side_stream_without_waiting_for_the_ticket() -> torch.Tensor:
    """The work was waited for, but on the side stream."""
    data = tensor()
    reduce_on(StreamLane(here.streams), data)
    return data + 1


@program
def update_stream() -> torch.Tensor:
    """A third stream updates a bucket once it has arrived."""
    streams, lane = here.streams, StreamLane(here.streams)
    update = streams.Stream()
    data, parameters = tensor(), torch.zeros(8)
    ticket = reduce_on(lane, data)
    update.wait_stream(streams.current_stream())
    with streams.stream(update):
        ticket.wait()
        parameters.sub_(data)
    streams.current_stream().wait_stream(update)
    return parameters * 1


@program
def update_stream_without_ticket() -> torch.Tensor:
    """The updating stream does not wait for the bucket."""
    streams, lane = here.streams, StreamLane(here.streams)
    update = streams.Stream()
    data, parameters = tensor(), torch.zeros(8)
    reduce_on(lane, data)
    update.wait_stream(streams.current_stream())
    with streams.stream(update):
        parameters.sub_(data)
    return parameters


@program
def update_stream_without_return() -> torch.Tensor:
    """The next forward does not wait for the updating stream."""
    streams = here.streams
    update = streams.Stream()
    parameters = torch.zeros(8)
    update.wait_stream(streams.current_stream())
    with streams.stream(update):
        parameters.sub_(1)
    return parameters * 1


@program
def overwrites_what_another_stream_reads() -> torch.Tensor:
    """Reading needs an order, too, before a write."""
    streams = here.streams
    other, data = streams.Stream(), tensor()
    other.wait_stream(streams.current_stream())
    with streams.stream(other):
        result = data + 1
    data.zero_()
    return result


@program
def drops_what_another_stream_reads() -> torch.Tensor:
    """Memory goes back to its stream when it is dropped, whoever else uses it."""
    streams = here.streams
    other, data = streams.Stream(), tensor()
    other.wait_stream(streams.current_stream())
    with streams.stream(other):
        result = data + 1
    del data
    streams.current_stream().wait_stream(other)
    return result * 1


@program
def drops_it_in_order() -> torch.Tensor:
    """The same, with the wait in time."""
    streams = here.streams
    other, data = streams.Stream(), tensor()
    other.wait_stream(streams.current_stream())
    with streams.stream(other):
        result = data + 1
    streams.current_stream().wait_stream(other)
    del data
    doubled = result * 2
    other.wait_stream(streams.current_stream())
    return doubled


@program
def all_kinds() -> torch.Tensor:
    """Every collective that is not refused, with results that follow from the ranks alone."""
    group, parts = here.groups[0], []
    total = tensor()
    dist.reduce(total, 0, group=group)
    if here.rank == 0:
        parts.append(total * 1)
    else:
        parts.append(torch.arange(8.0) * here.ranks + 10 * sum(range(here.ranks)))
    mine = tensor()
    dist.broadcast(mine, here.ranks - 1, group=group)
    parts.append(mine)
    shard = torch.empty(2)
    dist.reduce_scatter_single(shard, torch.arange(2.0 * here.ranks), group=group)
    whole = torch.empty(2 * here.ranks)
    dist.all_gather_single(whole, shard, group=group)
    parts.append(whole)
    pieces = [torch.empty(8) for _ in range(here.ranks)]
    dist.all_gather(pieces, tensor(), group=group)
    parts += pieces
    most = torch.full((3,), here.rank, dtype=torch.int64)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    parts.append(most.float())
    mean = tensor()
    dist.all_reduce(mean, dist.ReduceOp.AVG, group=group)
    return torch.cat([*parts, mean])


@program
def uses_a_reduction_beside_the_root() -> torch.Tensor:
    """Only the root has the sum; elsewhere it is poison."""
    data = tensor()
    dist.reduce(data, 0, group=here.groups[0])
    return torch.isnan(data).float()


@program
def sends() -> torch.Tensor:
    """Point to point is refused."""
    dist.send(tensor(), (here.rank + 1) % here.ranks, group=here.groups[0])
    return torch.zeros(1)


def train(lane: Lane) -> torch.Tensor:
    """Three steps of a small network whose gradients are packed and reduced in hooks, as an engine does; the flat parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    flat = torch.zeros(sum(item.numel() for item in model.parameters()))
    views = dict(zip(model.parameters(), flat.split([item.numel() for item in model.parameters()]), strict=True))
    tickets: list[Any] = []

    def on_gradient(parameter: torch.Tensor) -> None:
        view = views[parameter]  # type: ignore[index]  # a parameter comes as a tensor
        assert parameter.grad is not None
        view.copy_(parameter.grad.reshape(-1))
        tickets.append(reduce_on(lane, view))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(on_gradient)
    inputs, targets = (torch.arange(8.0).reshape(2, 4) + here.rank) / 9, torch.ones(2, 2)
    for _ in range(3):
        tickets.clear()
        nn.functional.mse_loss(model(inputs), targets).backward()
        for ticket in tickets:
            ticket.wait()
        flat.div_(here.ranks)
        for parameter, view in views.items():
            parameter.grad = view.view_as(parameter)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([item.detach().reshape(-1) for item in model.parameters()])


@program
def trains() -> torch.Tensor:
    """Backward, hooks and the optimizer under a stream order."""
    return train(StreamLane(here.streams))


def forgetting(dependency: str) -> Callable[[], torch.Tensor]:
    """Training on a lane that leaves out a dependency; two collectives on one buffer for the order between tickets."""

    def run() -> torch.Tensor:
        lane = ForgetfulLane(here.streams, dependency)
        if dependency != "after":
            return train(lane)
        data = tensor()
        first = reduce_on(StreamLane(here.streams), data, 0)
        second = reduce_on(lane, data, 1, after=[first])
        second.wait()
        return data * 1

    return run


@contextmanager
def noted(saved: dict[str, Any], name: str) -> Iterator[None]:
    """Note what is raised inside."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  # what it was is what the test asks
        saved[f"{name}/raised"] = np.array(type(error).__name__)
        saved[f"{name}/message"] = np.array(str(error))


def run_program(name: str, function: Callable[[], torch.Tensor], saved: dict[str, Any], *, serialised: bool = False) -> None:
    """Run a program on an idle device."""
    here.streams.reset()
    result = None
    with noted(saved, name):
        with StreamOrder(here.streams, serialised=serialised):
            result = function()
        assert result is not None
        saved[f"{name}/result"] = result.detach().numpy()
        saved[f"{name}/issued"] = np.array([f"{item}" for item in here.streams.issued])


def two_communicators() -> torch.Tensor:
    """Two collectives in flight on two communicators."""
    one, other = tensor(), tensor()
    tickets = [reduce_on(StreamLane(here.streams), one, 0), reduce_on(StreamLane(here.streams), other, 1)]
    for ticket in tickets:
        ticket.wait()
    return one + other


def two_in_turn() -> torch.Tensor:
    """The second waits for the first."""
    one, other = tensor(), tensor()
    first = reduce_on(StreamLane(here.streams), one, 0)
    reduce_on(StreamLane(here.streams), other, 1, after=[first]).wait()
    return one + other


def survey_sites(saved: dict[str, Any]) -> None:
    """``trains`` without the waits of one site, for every site; and a rank that has sites of its own."""

    def lopsided() -> torch.Tensor:
        if here.rank == 0:
            other = here.streams.Stream()
            other.wait_stream(here.streams.current_stream())
        return trains()

    for name, function in (("trains", trains), ("lopsided", lopsided)):
        found = survey(here.streams, function)
        saved[f"survey of {name}/sites"] = np.array(list(found))
        saved[f"survey of {name}/violations"] = np.array(list(found.values()))


def goes_on(saved: dict[str, Any]) -> None:
    """An order that only notes what is wrong lets the program compute what it would have with every wait."""
    here.streams.reset()
    with StreamOrder(here.streams, raises=False):
        result = misses_a_wait()
        never_waits()
        with allowed():
            result = torch.tensor(result.tolist())
        reads_an_item()
    saved["goes on/result"] = result.numpy()
    saved["goes on/violations"] = np.array([type(error).__name__ for error in here.streams.violations])


def main() -> None:
    """Run everything, in the same order on every rank."""
    here.rank, here.ranks = int(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=here.rank, world_size=here.ranks, timeout=TIMEOUT)
    torch.set_num_threads(1)
    here.streams = FakeStreams()
    register(here.streams)
    here.groups = (dist.new_group(backend=BACKEND, timeout=TIMEOUT), dist.new_group(backend=BACKEND, timeout=TIMEOUT))
    saved: dict[str, Any] = {}
    for name, function in PROGRAMS.items():
        run_program(name, function, saved)
    for dependency in DEPENDENCIES:
        run_program(f"forgets {dependency}", forgetting(dependency), saved)
    run_program("free", two_communicators, saved)
    run_program("serialised", two_communicators, saved, serialised=True)
    run_program("in turn", two_in_turn, saved, serialised=True)
    survey_sites(saved)
    goes_on(saved)
    np.savez(sys.argv[4], **saved)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
