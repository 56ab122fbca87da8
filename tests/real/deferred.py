"""A process group with NCCL's semantics over gloo, and lanes that forget a dependency.

A collective starts after the stream that issues it, on a stream of its communicator; ``wait()``
returns at once and orders the current stream after it; until something ordered after that wait
touches the result, it is poison: NaN, or the largest integer. What NCCL lacks or the project does
not use is refused.

Use: ``streams = FakeStreams(); register(streams)`` once a process, then
``dist.new_group(backend="deferred")``, then the program inside ``with StreamOrder(streams)``.
Outside of a ``StreamOrder`` waits block, as on gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from fake_memory import Access, Flight, UnorderedAccess
from fake_streams import (
    ConcurrentCommunicators,
    FakeEvent,
    FakeStreams,
    HostSynchronised,
    StreamOrder,
    allowed,
    check_host_read,
)
from torch._C._distributed_c10d import AllgatherOptions

from real.communication.lanes import StreamLane, Ticket

__all__ = [
    "BACKEND",
    "DEPENDENCIES",
    "ConcurrentCommunicators",
    "FakeStreams",
    "ForgetfulLane",
    "HostSynchronised",
    "StreamOrder",
    "UnorderedAccess",
    "allowed",
    "register",
    "survey",
]

BACKEND = "deferred"
Opts = Any  # torch's option structures, which are handed on as they are
_registered: list[FakeStreams] = []


def register(streams: FakeStreams) -> None:
    """Make ``backend="deferred"`` known to torch.distributed; groups made from now on run on ``streams``."""
    if not _registered:
        dist.Backend.register_backend(BACKEND, _create, devices=["cpu"])
    _registered[:] = [streams]


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> DeferredGroup:
    return DeferredGroup(_registered[0], store, rank, size, timeout)


class DeferredWork(dist.Work):
    """A collective under way."""

    def __init__(self, streams: FakeStreams, access: Access, event: FakeEvent, flight: Flight, inner: dist.Work) -> None:
        super().__init__()
        self._streams, self._access, self._event, self._flight, self._inner = streams, access, event, flight, inner

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # noqa: ARG002  # torch's signature
        """Order the current stream after the collective; returns at once."""
        streams = self._streams
        if not streams.forgets_works:
            streams.current_stream().wait_event(self._event)
            if not streams.ordered:
                streams.memory.land(self._flight)
        return True

    def synchronize(self) -> None:
        """As ``wait``."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether gloo has done its part."""
        return self._inner.is_completed()

    def get_future(self) -> NoReturn:
        """Refused: its callbacks would run on another thread."""
        raise NotImplementedError("the deferred process group gives no futures")


class DeferredGroup(dist.ProcessGroup):
    """A process group whose results arrive when a stream that waited for them needs them."""

    def __init__(self, streams: FakeStreams, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, self._gloo)
        self._streams = streams
        communicators = _communicators(streams)
        self._number = len(communicators)
        self._stream = streams.named(f"communicator {self._number}")
        communicators.append(self)
        self._last: Access | None = None

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Opts = None) -> dist.Work:
        """In place."""
        (tensor,) = tensors
        opts = opts or dist.AllreduceOptions()
        return self._issue("all_reduce", [tensor], [tensor], lambda ins, outs: self._gloo.allreduce(_copied(ins, outs), opts))

    def reduce(self, tensors: Sequence[torch.Tensor], opts: Opts = None) -> dist.Work:
        """In place on the root; on the others the tensor stays poison, because torch promises nothing."""
        (tensor,) = tensors
        return self._issue(
            "reduce", [tensor], [tensor], lambda ins, outs: self._gloo.reduce(_copied(ins, outs), opts), lands=opts.rootRank == self.rank()
        )

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Opts = None) -> dist.Work:
        """The root's tensor is only read, the others' only written."""
        (tensor,) = tensors
        if opts.rootRank == self.rank():
            return self._issue("broadcast", [tensor], [], lambda ins, _: self._gloo.broadcast(ins, opts))
        return self._issue("broadcast", [], [tensor], lambda _, outs: self._gloo.broadcast(outs, opts))

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Opts = None) -> dist.Work:  # noqa: A002  # torch's name
        """``output`` may be this rank's slice of ``input``."""
        opts = opts or dist.ReduceScatterOptions()
        return self._issue("reduce_scatter", [input], [output], lambda ins, outs: self._gloo._reduce_scatter_base(outs[0], ins[0], opts))

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Opts = None) -> dist.Work:  # noqa: A002  # torch's name
        """``input`` may be this rank's slice of ``output``."""
        opts = opts or AllgatherOptions()
        return self._issue("all_gather", [input], [output], lambda ins, outs: self._gloo._allgather_base(outs[0], ins[0], opts))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002  # torch's name
        received: list[int],
        sent: list[int],
        opts: Opts = None,
    ) -> dist.Work:
        """Pieces of both tensors, by rank."""
        opts = opts or dist.AllToAllOptions()
        start = self._gloo.alltoall_base
        return self._issue("all_to_all", [input], [output], lambda ins, outs: start(outs[0], ins[0], received, sent, opts))

    alltoall_base = all_to_all_single
    _reduce_scatter_base = reduce_scatter_single
    _allgather_base = all_gather_single

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Opts = None) -> dist.Work:
        """From a list of tensors."""
        opts = opts or dist.ReduceScatterOptions()
        return self._issue("reduce_scatter", inputs[0], outputs, lambda ins, outs: self._gloo.reduce_scatter(outs, [ins], opts))

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Opts = None) -> dist.Work:
        """Into a list of tensors."""
        opts = opts or AllgatherOptions()
        return self._issue("all_gather", inputs, outputs[0], lambda ins, outs: self._gloo.allgather([outs], ins, opts))

    def barrier(self, opts: Opts = None) -> dist.Work:
        """The host waits for everything, as NCCL's barrier does for what was issued."""
        check_host_read(self._streams, "barrier")
        inner = self._gloo.barrier(opts or dist.BarrierOptions())
        inner.wait()
        self._stream.follow(self._streams.current_stream())
        self._streams.synchronise(self._stream)
        flight = Flight(self._stream.runs("barrier"), lambda: None)
        return DeferredWork(self._streams, flight.access, self._stream.record_event(), flight, inner)

    def _refuse(self, *_arguments: Any, **_options: Any) -> NoReturn:
        raise NotImplementedError("the deferred process group has no such collective")

    gather = scatter = alltoall = send = recv = recv_anysource = _refuse
    allreduce_coalesced = allgather_coalesced = allgather_into_tensor_coalesced = reduce_scatter_tensor_coalesced = _refuse
    all_gather_single_coalesced = reduce_scatter_single_coalesced = monitored_barrier = _refuse

    def _issue(
        self,
        kind: str,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        start: Callable[[list[torch.Tensor], list[torch.Tensor]], dist.Work],
        *,
        lands: bool = True,
    ) -> dist.Work:
        streams = self._streams
        for tensor in (*inputs, *outputs):
            if tensor.layout is not torch.strided or not tensor.is_contiguous():
                raise ValueError(f"{kind}: NCCL takes dense, contiguous tensors")
        self._stream.follow(streams.current_stream())
        self._check_serial(kind)
        access = self._stream.runs(f"{kind} {len(streams.issued)}")
        first = (*inputs, *outputs)[0]
        streams.issued.append((self._stream.name, kind, first.numel(), str(first.dtype).removeprefix("torch.")))
        if streams.ordered:
            for tensors, write in ((inputs, False), (outputs, True)):
                for tensor in tensors:
                    streams.memory.touch(access, tensor, write=write)
        with streams.stepping_aside(), torch.no_grad():
            sent = [tensor.detach().clone() for tensor in inputs]
            staged = [torch.empty_like(tensor) for tensor in outputs]
            inner = start(sent, staged)
            for tensor in outputs:
                poison(tensor)

        def land() -> None:
            inner.wait()
            with streams.stepping_aside(), torch.no_grad():
                for tensor, result in zip(outputs, staged, strict=True):
                    if lands:
                        tensor.detach().copy_(result)
            sent.clear()  # gloo reads them until its work has ended

        self._last = access
        event = FakeEvent(dict(self._stream.clock))
        flight = Flight(access, land)
        streams.memory.fly(flight, outputs)
        return DeferredWork(streams, access, event, flight, inner)

    def _check_serial(self, kind: str) -> None:
        order = self._streams.order
        if order is None or not self._streams.ordered or not order.serialised:
            return
        for other in _communicators(self._streams):
            if other._last is not None and not self._stream.is_behind(other._last):
                self._streams.refuse(ConcurrentCommunicators(f"{kind} on {self._stream.name} is not ordered after {other._last}"))


def _communicators(streams: FakeStreams) -> list[DeferredGroup]:
    return cast("list[DeferredGroup]", streams.communicators)


def _copied(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> list[torch.Tensor]:
    """The targets, holding the sources: for collectives in place."""
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
    return targets


def poison(tensor: torch.Tensor) -> None:
    """Make a mistaken use visible where no operation shows it."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.detach().fill_(float("nan"))
    elif tensor.dtype is torch.bool:
        tensor.detach().fill_(True)
    else:
        tensor.detach().fill_(torch.iinfo(tensor.dtype).max)


DEPENDENCIES = ("submitter", "after", "work", "ticket")
"""What a stream lane orders: after the submitter's stream, after other tickets, after the collective, the waiter after the lane."""


class ForgetfulLane(StreamLane):
    """A ``StreamLane`` that leaves out one of ``DEPENDENCIES``."""

    def __init__(self, streams: FakeStreams, forgotten: str, priority: int = 0) -> None:
        assert forgotten in DEPENDENCIES
        super().__init__(streams, priority)
        self._fake = streams
        self._forgotten = forgotten

    def submit(self, operation: Callable[[], None], after: Sequence[Ticket]) -> Ticket:
        """See ``Lane``."""

        def run() -> None:
            with self._fake.forgetting_works():
                operation()

        return super().submit(run if self._forgotten == "work" else operation, after)

    def follow_submitter(self) -> None:
        """See ``StreamLane``."""
        if self._forgotten != "submitter":
            super().follow_submitter()

    def follow(self, tickets: Sequence[Ticket]) -> None:
        """See ``StreamLane``."""
        if self._forgotten != "after":
            super().follow(tickets)

    def ticket(self, event: FakeEvent) -> Ticket:
        """See ``StreamLane``."""
        return _Forgotten() if self._forgotten == "ticket" else super().ticket(event)


def survey(streams: FakeStreams, program: Callable[[], object], *, serialised: bool = False) -> dict[str, int]:
    """How often this rank's ``program`` goes wrong without the waits of a site, for every site that any rank has.

    Under ``""`` the same with all its waits, which must be 0. Every rank calls this at the same
    place, with the default group on gloo. A site that no rank misses is redundant, or untested.
    """

    def violations(omitted: str) -> int:
        streams.reset(lambda site: site == omitted)
        with StreamOrder(streams, serialised=serialised, raises=False):
            program()
        return len(streams.violations)

    found = {"": violations("")}
    for site in _union(set(streams.waits)):
        found[site] = violations(site)
    streams.reset()
    return found


def _union(own: set[str]) -> list[str]:
    """All ranks' strings, sorted."""
    text = torch.tensor(list("\n".join(sorted(own)).encode()), dtype=torch.uint8)
    longest = torch.tensor([len(text)])
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    padded = torch.full((int(longest),), ord("\n"), dtype=torch.uint8)
    padded[: len(text)] = text
    everybodys = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
    dist.all_gather(everybodys, padded)
    return sorted({line for item in everybodys for line in bytes(item.tolist()).decode().split("\n") if line})


class _Forgotten:
    def wait(self) -> None:
        """Does nothing."""
