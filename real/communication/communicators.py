"""Communicators: the process groups that carry a plan's operations, one lane each.

Communicator i has a process group for the whole world and, in a hierarchy, one for the part of
every group that this rank is in. They are made in one order on every rank and kept for the life
of the process, because making one is itself a collective.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from fleetbench.config import encode
from fleetbench.errors import ConfigError
from fleetbench.plan.groups import Parts, part_of, queue_depth, world_of
from fleetbench.strategy import DistributedStrategy
from real.communication.canary import Way, canary
from real.communication.device import group_options, make_lane
from real.communication.lanes import InlineLane, Lane, Started
from real.communication.streams import host_reads
from real.processes.failures import CollectiveFailed

_CPU = torch.device("cpu")
Errors = Callable[[], AbstractContextManager[None]]
"""Turns what breaks a collective inside into a ``CollectiveFailed``."""
_STATISTICS = -1
"""The communicator of synchronised batch norm: its collectives are the compute's own, in the order of the caller's stream."""
_OPERATORS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX}


@contextmanager
def collective_errors() -> Iterator[None]:
    """Say of what breaks inside that it was a collective."""
    try:
        yield
    except RuntimeError as error:
        raise CollectiveFailed(str(error)) from error


class _StartedWork:
    """A collective under way; see ``Started``."""

    def __init__(self, work: dist.Work, errors: Errors) -> None:
        self._work = work
        self._errors = errors

    def wait(self) -> None:
        with self._errors():
            self._work.wait()

    def is_done(self) -> bool:
        return self._work.is_completed()


def _finish(work: dist.Work | None) -> None:
    """Order what comes after a collective: on gloo by blocking, on NCCL in the current stream."""
    if work is not None:
        work.wait()


class Communicators:
    """Process groups over all ranks and over parts of them, numbered from 0; the first is made at once, the others on first use.

    Collectives are called on a communicator's lane, which ``lane`` makes; on gloo they block, on
    NCCL they return once they are enqueued. ``device`` is where the tensors are.
    """

    def __init__(
        self,
        backend: str,
        timeout: timedelta,
        device: torch.device = _CPU,
        lane: Callable[[str], Lane] | None = None,
        errors: Errors = collective_errors,
    ) -> None:
        self.device = device
        self.errors = errors
        """Stands around every collective."""
        self._backend = backend
        self._timeout = timeout
        self._make_lane = lane or partial(make_lane, device, backend)
        self._proved = 1
        self._num_tried = 0
        self._made: dict[tuple[Parts, int], dist.ProcessGroup | None] = {}
        self._parts: dict[str, Parts] = {"world": world_of(self.trainers)}
        self._lanes: list[Lane] = []
        self._update_lane: Lane | None = None
        self.require(1)

    @property
    def queue_depth(self) -> int:
        """Operations that a communicator carries at once."""
        return queue_depth(self._backend)

    @property
    def trainers(self) -> int:
        """Ranks of the world."""
        return dist.get_world_size()

    @property
    def rank(self) -> int:
        """This process's rank."""
        return dist.get_rank()

    def require(self, number: int, groups: Mapping[str, Parts] | None = None) -> None:
        """Make communicators up to ``number`` of them, with ``groups``; every rank calls this at the same place."""
        self._parts = {"world": world_of(self.trainers), **(groups or {})}
        while len(self._lanes) < number:
            self._lanes.append(self._make_lane(f"communicator-{len(self._lanes)}"))
        for communicator in range(number):
            for name, parts in self._parts.items():
                if (parts, communicator) not in self._made:
                    self._made[parts, communicator] = self._make(parts, f"{name}-{communicator}")

    def _make(self, parts: Parts, name: str) -> dist.ProcessGroup | None:
        """This rank's process group; all ranks make those of all parts."""
        own = None
        for part in parts:
            options = group_options(self._backend, self._timeout)
            made = dist.new_group(list(part), self._timeout, self._backend, options, group_desc=name)
            if self.rank in part:
                own = made
        return own

    def prove(self, together: int) -> None:
        """Try every process group, and the first ``together`` communicators at once; every rank calls this at the same place.

        On NCCL this opens the connections before the first step. gloo on the CPU is trusted with one
        communicator at a time. Raises ``EnvironmentLacks`` where a group fails.
        """
        trusted = self._backend == "gloo" and self.device.type == "cpu"
        if self.trainers > 1 and (together > self._proved or (not trusted and len(self._made) > self._num_tried)):
            ways = {way: communicator for communicator in (*range(len(self._lanes)), _STATISTICS) for way in self._ways(communicator)}
            canary([*ways], [way for way, communicator in ways.items() if communicator < together], self.device)
            self._proved, self._num_tried = max(together, self._proved), len(self._made)

    def _ways(self, communicator: int) -> list[Way]:
        """The process groups that a communicator has on this rank."""
        lane = InlineLane() if communicator == _STATISTICS else self.lane(communicator)
        where = "synchronised batch norm" if communicator == _STATISTICS else f"communicator {communicator}"
        ways = []
        for number, (name, parts) in enumerate(self._parts.items(), start=communicator):
            part = part_of(parts, self.rank)
            if part and (parts, communicator) in self._made:
                total = partial(self.all_reduce, operator="sum", group=name, communicator=communicator)
                ways.append(Way(f"{name} of {where}", number, lane, len(part), part.index(self.rank), total))
        return ways

    def part(self, group: str) -> tuple[int, ...]:
        """The ranks that this one meets in ``group``; empty where it meets none."""
        return part_of(self._parts[group], self.rank)

    def lane(self, communicator: int) -> Lane:
        """The lane of a communicator."""
        return self._lanes[communicator]

    @property
    def update_lane(self) -> Lane:
        """The lane of updates that run beside the backward."""
        if self._update_lane is None:
            self._update_lane = self._make_lane("update")
        return self._update_lane

    def order_lanes(self) -> None:
        """Order every lane after what the caller did, and the caller after every lane: then memory may change hands."""
        for lane in (*self._lanes, *((self._update_lane,) if self._update_lane else ())):
            lane.submit(lambda: None, ()).wait()

    @property
    def statistics(self) -> dist.ProcessGroup:
        """The group of synchronised batch norm, whose layers meet while buckets travel; every rank asks for it at the same place."""
        world = self._parts["world"]
        if (world, _STATISTICS) not in self._made:
            self._made[world, _STATISTICS] = self._make(world, "statistics")
        return self._group("world", _STATISTICS)

    def world(self, communicator: int) -> dist.ProcessGroup:
        """The process group of all ranks that a communicator has."""
        return self._group("world", communicator)

    def average(self, tensor: torch.Tensor, communicator: int = 0) -> None:
        """Replace ``tensor`` by its mean over all ranks, bit-identical on each."""
        self.all_reduce(tensor, "mean", "world", communicator)

    def all_reduce(self, tensor: torch.Tensor, operator: str, group: str = "world", communicator: int = 0) -> None:
        """Replace ``tensor`` by its ``sum``, ``mean`` or ``max`` over this rank's part of ``group``."""
        with self.errors():
            _finish(dist.all_reduce(tensor, op=_OPERATORS[operator], group=self._group(group, communicator), async_op=True))

    def start_average(self, tensor: torch.Tensor, communicator: int, ended: Callable[[], None] | None = None) -> Started:
        """Begin to replace ``tensor`` by its mean over all ranks; ``ended`` runs on the backend's thread as it ends, or fails."""
        with self.errors():
            work = dist.all_reduce(tensor, op=dist.ReduceOp.AVG, group=self._group("world", communicator), async_op=True)
        assert work is not None, "this rank is not in the group"
        if ended is not None:
            work.get_future().add_done_callback(lambda _: ended())
        return _StartedWork(work, self.errors)

    def reduce(self, tensor: torch.Tensor, group: str, communicator: int) -> None:
        """Replace ``tensor`` on the part's first rank by the sum over the part."""
        with self.errors():
            _finish(dist.reduce(tensor, dst=self.part(group)[0], group=self._group(group, communicator), async_op=True))

    def spread(self, tensor: torch.Tensor, group: str, communicator: int) -> None:
        """Replace ``tensor`` by that of the part's first rank."""
        with self.errors():
            _finish(dist.broadcast(tensor, src=self.part(group)[0], group=self._group(group, communicator), async_op=True))

    def reduce_scatter(self, own: torch.Tensor, whole: torch.Tensor, group: str, communicator: int) -> None:
        """Put this rank's piece of the sum of ``whole`` into ``own``; ``whole`` is as many of it as the part has ranks."""
        with self.errors():
            _finish(dist.reduce_scatter_single(own, whole, group=self._group(group, communicator), async_op=True))

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor, group: str, communicator: int) -> None:
        """Put all ranks' ``own``, in the part's order, into ``whole``."""
        with self.errors():
            _finish(dist.all_gather_single(whole, own, group=self._group(group, communicator), async_op=True))

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, communicator: int) -> None:
        """Give every rank its piece of ``sent``, which is cut along its first dimension; ``received`` is all ranks' pieces for this one."""
        with self.errors():
            _finish(dist.all_to_all_single(received, sent, group=self._group("world", communicator), async_op=True))

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Replace ``tensor`` by rank 0's."""
        self.spread(tensor, "world", 0)

    def barrier(self) -> None:
        """Meet all ranks."""
        with self.errors():
            dist.barrier(group=self._group("world", 0))

    def close(self) -> None:
        """Release the lanes; the process groups go with the process."""
        for lane in (*self._lanes, *((self._update_lane,) if self._update_lane else ())):
            lane.close()

    def _group(self, group: str, communicator: int) -> dist.ProcessGroup:
        made = self._made[self._parts[group], communicator]
        assert made is not None, "this rank is in no part of the group"
        return made


def strategy_digest(strategy: DistributedStrategy) -> str:
    """Hexadecimal digest of all of a strategy's fields."""
    return hashlib.sha256(json.dumps(encode(strategy), sort_keys=True).encode()).hexdigest()


def agree_on(digest: str, what: str, communicators: Communicators) -> None:
    """Raise ``ConfigError`` on a rank whose hexadecimal ``digest`` is not rank 0's: its collectives would not match."""
    if communicators.trainers == 1:
        return
    own = torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8, device=communicators.device)
    first = own.clone()
    communicators.broadcast(first)
    with host_reads():
        same = torch.equal(own, first)
    if not same:
        raise ConfigError(what, f"rank {communicators.rank}", digest, "give every rank the same model and strategy")
