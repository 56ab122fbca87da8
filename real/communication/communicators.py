"""Communicators: the process groups that carry a plan's operations, with one lane for each communicator.

Communicator i has a process group for the whole world and, in a hierarchy, one for this rank's part of every group. All
ranks create them in the same order and keep them for the life of the process, because creating one is itself a
collective. The functions at the end choose a trainer's device and what carries collectives on it.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fleetbench.digests import json_digest
from fleetbench.errors import ConfigError, EnvironmentLacks
from fleetbench.plan.groups import Parts, part_of, queue_depth, world_of
from fleetbench.strategy import DistributedStrategy
from real.communication.lanes import InlineLane, Lane, Started, StreamLane, ThreadLane, host_reads
from real.older_torch import ALL_GATHER, REDUCE_SCATTER, average
from real.processes.failures import CollectiveFailed

if TYPE_CHECKING:
    from real.elastic.workers import Workers

_ROUNDS = 4
_NUMELS = (1, 1000, 1 << 20)
"""Numbers of elements to sum: a large collective is still in flight when a small one on another communicator starts."""


@dataclass(frozen=True, slots=True)
class Way:
    """A process group of this rank, and the lane that its collectives run on."""

    name: str
    number: int
    """Number of the group, the same on all its ranks; sizes and values of the canary's tensors depend on it."""
    lane: Lane
    ranks: int
    """Number of ranks in the group."""
    place: int
    """This rank's index in the group."""
    total: Callable[[torch.Tensor], None]
    """Replaces a tensor with its sum over the group."""


def canary(ways: Sequence[Way], together: Sequence[Way], device: torch.device, timeout_s: float = 10.0) -> None:
    """Test communicators with collectives whose results are known, before they carry gradients.

    Two NCCL communicators in flight at once can deadlock if ranks run them in different orders, and gloo has silently
    corrupted results on CUDA tensors. Both errors show within seconds, if at all. The first collectives also open the
    connections, which NCCL would otherwise open in the first backward.

    Known numbers are summed on all ``ways`` one by one, and then on the ways of ``together`` at once, in this order.
    Every rank calls this at the same place, before any other operation is in flight. Single sums run under the groups'
    own timeout, those at once under ``timeout_s``. Operations of one lane follow each other.

    Raises ``EnvironmentLacks``, with the setting to switch off, for a wrong result, or for none in time. Exceptions of
    the collectives are passed on.
    """
    for turn, way in itertools.product(range(len(_NUMELS)), ways):
        if _wrong_ways([way], turn, device):
            raise _canary_error("gives wrong answers", way.name, together, device)
    if len({id(way.lane) for way in together}) < 2:  # one lane has one operation in flight
        return
    flight: Future[list[str]] = Future()

    def fly() -> None:
        try:
            torch.get_device_module(device).set_device(device)  # a thread begins on device 0
            flight.set_result([wrong for turn in range(_ROUNDS) for wrong in _wrong_ways(together, turn, device)])
        except BaseException as error:  # noqa: BLE001  # raised again by the caller's thread
            flight.set_exception(error)

    threading.Thread(target=fly, name="canary", daemon=True).start()  # one that hangs must not keep the process
    if wait([flight], timeout_s).not_done:
        raise _canary_error(f"gave no answer within {timeout_s:g} s", f"{len(together)} process groups in flight at once", together, device)
    if wrong := flight.result():
        raise _canary_error("gives wrong answers while others are in flight", wrong[0], together, device)


def _wrong_ways(ways: Sequence[Way], turn: int, device: torch.device) -> list[str]:
    """Sum once on each way, starting all before waiting for any; return the names of ways with a wrong result.

    Element i of the rank at place r in group n is i mod 256 + 10 (n mod 16) + turn, plus 1 if r is odd: sums are exact
    in float32 up to 40,000 ranks.
    """
    flights = []
    for way in ways:
        numel = _NUMELS[(turn + way.number) % len(_NUMELS)]
        base = torch.arange(numel, dtype=torch.float32, device=device).remainder_(256).add_(10 * (way.number % 16) + turn)
        flights.append((way, base + way.place % 2, base.mul_(way.ranks).add_(way.ranks // 2)))
    tickets = [way.lane.submit(partial(way.total, tensor), ()) for way, tensor, _ in flights]
    wrong = []
    for (way, tensor, answer), ticket in zip(flights, tickets, strict=True):
        ticket.wait()
        with host_reads():  # the host waits as well
            if not torch.equal(tensor, answer):
                wrong.append(way.name)
    return wrong


def _canary_error(what: str, where: str, together: Sequence[Way], device: torch.device) -> EnvironmentLacks:
    hint = 'use another run.backend, or run.device = "cpu"'
    if len(together) > 1:
        hint = "set sync_nccl_allreduce = true, nccl_comm_num = 1 or sync_batch_norm = false"
        if device.type == "cuda":
            hint += "; if it stays, another run.backend (gloo on CUDA tensors needs a recent torch)"
    return EnvironmentLacks(what, where, f"device {device}", hint)


_CPU = torch.device("cpu")
Errors = Callable[[], AbstractContextManager[None]]
"""Returns a context manager that raises errors of the collectives inside as ``CollectiveFailed``."""
_BESIDE, _UNEVEN, _IN_TURN = -1, -2, -3
"""Numbers of communicators without a lane: for exchanges other than buckets, for uneven inputs, and for one all-reduce
at a time."""
_ONE_THREAD = "gloo_in_turn"
"""Name under which torch knows gloo with one thread per group."""
_OPERATORS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


@contextmanager
def collective_errors() -> Iterator[None]:
    """Raise errors of the collectives inside as ``CollectiveFailed``."""
    try:
        yield
    except RuntimeError as error:
        raise CollectiveFailed(str(error)) from error


class _StartedWork:
    """A collective in flight; see ``Started``."""

    def __init__(self, work: dist.Work, errors: Errors) -> None:
        self._work = work
        self._errors = errors

    def wait(self) -> None:
        with self._errors():
            self._work.wait()

    def is_done(self) -> bool:
        return self._work.is_completed()


class Communicators:
    """Process groups over all ranks and over parts of them, numbered from 0; ``require`` creates more than the first.

    Collectives are called on a communicator's lane, which the function ``lane`` creates. On gloo they block; on NCCL
    they return once they are enqueued. ``device`` is where the tensors are.
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
        """Returns the context manager that surrounds every collective."""
        self.workers: Workers | None = None
        """Elastic workers that this world, a single trainer, meets when a round ends; None in any other job."""
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
        """Number of operations that a communicator carries at once."""
        return queue_depth(self._backend)

    @property
    def in_turn(self) -> int:
        """Number of the communicator that carries one all-reduce at a time, in the order of their starts.

        On NCCL it is communicator 0, whose stream orders them. Every rank reads this property at the same place.
        """
        if self._backend != "gloo":
            return 0
        self._aside(_IN_TURN, "in turn")
        return _IN_TURN

    @property
    def trainers(self) -> int:
        """Number of ranks in the world."""
        return dist.get_world_size()

    @property
    def rank(self) -> int:
        """This process's rank."""
        return dist.get_rank()

    def require(self, number: int, groups: Mapping[str, Parts] | None = None) -> None:
        """Create communicators until there are ``number``, with ``groups``; every rank calls this at the same place."""
        self._parts = {"world": world_of(self.trainers), **(groups or {})}
        while len(self._lanes) < number:
            self._lanes.append(self._make_lane(f"communicator-{len(self._lanes)}"))
        for communicator in range(number):
            for name, parts in self._parts.items():
                if (parts, communicator) not in self._made:
                    self._made[parts, communicator] = self._make(parts, f"{name}-{communicator}", self._backend)

    def _make(self, parts: Parts, name: str, backend: str) -> dist.ProcessGroup | None:
        """Create the process groups of all parts, on every rank, and return this rank's; None if it is in no part."""
        own = None
        for part in parts:
            options = group_options(backend, self._timeout)
            made = dist.new_group(list(part), self._timeout, backend, options, group_desc=name)
            if self.rank in part:
                own = made
        return own

    def move(self, device: torch.device) -> None:
        """Carry tensors of ``device`` from now on, which gloo can do; nothing may be in flight."""
        self.close()
        self.device, self._make_lane = device, partial(make_lane, device, self._backend)
        self._lanes = [self._make_lane(f"communicator-{number}") for number in range(len(self._lanes))]
        self._update_lane, self._proved, self._num_tried = None, 1, 0

    def prove(self, together: int, *, beside: bool = False) -> None:
        """Test every process group, and the first ``together`` communicators at once, or all if one averages ``beside``.

        Every rank calls this at the same place. On NCCL this opens the connections before the first step. gloo on the
        CPU is only tested with several communicators at once, and not for one beside them: over links between sites it
        would take long. Raises ``EnvironmentLacks`` if a group fails.
        """
        trusted = self._backend == "gloo" and self.device.type == "cpu"
        if beside and not trusted:
            together = len(self._lanes)
        if self.trainers > 1 and (together > self._proved or (not trusted and len(self._made) > self._num_tried)):
            ways = {way: communicator for communicator in (*range(len(self._lanes)), _BESIDE, _IN_TURN) for way in self._ways(communicator)}
            canary([*ways], [way for way, communicator in ways.items() if communicator < together], self.device)
            self._proved, self._num_tried = max(together, self._proved), len(self._made)

    def _ways(self, communicator: int) -> list[Way]:
        """Return the process groups that a communicator has on this rank."""
        lane = InlineLane() if communicator < 0 else self.lane(communicator)
        where = {_BESIDE: "what is exchanged beside buckets", _IN_TURN: "buckets in turn"}.get(communicator, f"communicator {communicator}")
        ways = []
        for number, (name, parts) in enumerate(self._parts.items(), start=communicator):
            part = part_of(parts, self.rank)
            if part and (parts, communicator) in self._made:
                total = partial(self.all_reduce, operator="sum", group=name, communicator=communicator)
                ways.append(Way(f"{name} of {where}", number, lane, len(part), part.index(self.rank), total))
        return ways

    def group(self, name: str) -> dist.ProcessGroup:
        """Return communicator 0's process group of this rank's part of group ``name``; see ``require``."""
        return self._group(name, 0)

    def part(self, group: str) -> tuple[int, ...]:
        """Return the ranks in this rank's part of ``group``; empty if it is in no part."""
        return part_of(self._parts[group], self.rank)

    def lane(self, communicator: int) -> Lane:
        """Return the lane of a communicator."""
        return self._lanes[communicator]

    @property
    def update_lane(self) -> Lane:
        """The lane of updates that run during the backward; created at first use."""
        if self._update_lane is None:
            self._update_lane = self._make_lane("update")
        return self._update_lane

    def order_lanes(self) -> None:
        """Order every lane after the caller's work, and the caller after every lane, so that memory can be reused."""
        for lane in (*self._lanes, *((self._update_lane,) if self._update_lane else ())):
            lane.submit(lambda: None, ()).wait()

    def order_several(self) -> None:
        """Order the caller after all lanes if there are several, so that several models overlap no more than one."""
        if len(self._lanes) > 1:
            self.order_lanes()

    @property
    def world(self) -> dist.ProcessGroup:
        """The process group of communicator 0 over all ranks."""
        return self._group("world", 0)

    @property
    def beside(self) -> dist.ProcessGroup:
        """The process group for exchanges other than buckets: synchronised batch norm, and the Reducer's flags.

        Every rank reads this property at the same place.
        """
        return self._aside(_BESIDE, "beside")

    @property
    def uneven(self) -> dist.ProcessGroup:
        """The process group for messages about uneven inputs. Every rank reads this property at the same place."""
        return self._aside(_UNEVEN, "uneven")

    def _aside(self, number: int, name: str) -> dist.ProcessGroup:
        world = self._parts["world"]
        if (world, number) not in self._made:
            self._made[world, number] = self._make(world, name, one_thread() if number == _IN_TURN else self._backend)
        return self._group("world", number)

    def largest(self, number: int) -> int:
        """Return the largest of all ranks' numbers, exchanged in the group of uneven inputs; the host waits."""
        told = torch.tensor([number], device=self.device)
        self.all_reduce(told, "max", communicator=_UNEVEN)
        with host_reads():
            return int(told)

    def all_reduce(self, tensor: torch.Tensor, operator: str, group: str = "world", communicator: int = 0) -> None:
        """Replace ``tensor`` with its ``sum``, ``mean`` or ``max`` over this rank's part of ``group``.

        The result is bit-identical on all ranks of the part.
        """
        if self.trainers > 1:
            call = (
                partial(average, tensor, len(self.part(group)))
                if operator == "mean"
                else partial(dist.all_reduce, tensor, op=_OPERATORS[operator])
            )
            self._run(call, group, communicator)

    def start_average(
        self, tensor: torch.Tensor, communicator: int, ended: Callable[[], None] | None = None, group: str = "world"
    ) -> Started:
        """Start to replace ``tensor`` with its mean over this rank's part of ``group``.

        ``ended`` runs on the backend's thread when this ends or fails.
        """
        with self.errors():
            work = average(tensor, len(self.part(group)), group=self._group(group, communicator), async_op=True)
        assert work is not None, "this rank is not in the group"
        if ended is not None:
            work.get_future().add_done_callback(lambda _: ended())
        return _StartedWork(work, self.errors)

    def reduce(self, tensor: torch.Tensor, group: str, communicator: int) -> None:
        """Replace ``tensor`` on the first rank of this rank's part with the sum over the part."""
        self._run(partial(dist.reduce, tensor, dst=self.part(group)[0]), group, communicator)

    def spread(self, tensor: torch.Tensor, group: str, communicator: int, *, source: int = 0) -> None:
        """Replace ``tensor`` with that of the rank at index ``source`` of this rank's part."""
        self._run(partial(dist.broadcast, tensor, src=self.part(group)[source]), group, communicator)

    def reduce_scatter(self, own: torch.Tensor, whole: torch.Tensor, group: str, communicator: int) -> None:
        """Put this rank's piece of the sum of ``whole`` into ``own``; ``whole`` has one piece per rank of the part."""
        self._run(partial(getattr(dist, REDUCE_SCATTER), own, whole), group, communicator)

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor, group: str, communicator: int) -> None:
        """Put ``own`` of all ranks of the part, in its order, into ``whole``."""
        self._run(partial(getattr(dist, ALL_GATHER), whole, own), group, communicator)

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, communicator: int) -> None:
        """Send each rank its piece of ``sent``, cut along dimension 0; ``received`` gets all pieces for this rank."""
        self._run(partial(dist.all_to_all_single, received, sent), "world", communicator)

    def broadcast(self, *tensors: torch.Tensor, source: int = 0) -> None:
        """Replace ``tensors`` with rank ``source``'s, in one collective; their strides may differ between ranks."""
        if self.trainers == 1 or not tensors:
            return
        found = sorted(tensors, key=lambda tensor: -tensor.element_size())  # each begins at a multiple of its own elements' size
        plain = [tensor.resolve_conj().resolve_neg().reshape(-1).contiguous() for tensor in found]
        pieces = [tensor.view(torch.uint8) for tensor in plain]  # gloo knows neither complex numbers nor 8-bit floats
        whole = torch.cat(pieces)
        self.spread(whole, "world", 0, source=source)
        sent = torch.split(whole, [piece.numel() for piece in pieces])
        for tensor, piece in zip(found, sent, strict=True):
            own = piece.view(tensor.dtype).view(tensor.shape)
            once = tuple(slice(1 if stride == 0 else None) for stride in tensor.stride())
            tensor[once].copy_(own[once])  # an expanded tensor is written to once

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        with self.errors():
            dist.barrier(group=self._group("world", 0))

    def close(self) -> None:
        """Release the lanes; the process groups live as long as the process."""
        for lane in (*self._lanes, *((self._update_lane,) if self._update_lane else ())):
            lane.close()

    def _run(self, collective: Callable[..., dist.Work | None], group: str, communicator: int) -> None:
        """Run a collective and order the caller after it: on gloo by blocking, on NCCL in the current stream."""
        with self.errors():
            work = collective(group=self._group(group, communicator), async_op=True)
            if work is not None:
                work.wait()

    def _group(self, group: str, communicator: int) -> dist.ProcessGroup:
        made = self._made[self._parts[group], communicator]
        assert made is not None, "this rank is in no part of the group"
        return made


def strategy_digest(strategy: DistributedStrategy) -> str:
    """Return the hexadecimal digest of what a strategy changes; fields that a later version adds do not alter it."""
    return json_digest(strategy.changes())


_SAME_MODEL = "give every rank the same model and strategy: sort what comes from a set, and take sizes from all of the data"


def agree_on(lines: Sequence[str], where: str, communicators: Communicators, hint: str = _SAME_MODEL) -> None:
    """Raise ``ConfigError`` on every rank if any rank's ``lines`` differ from rank 0's: collectives would not match."""
    text = "\n".join(lines)
    if communicators.trainers == 1 or len(set(_texts(hashlib.sha256(text.encode()).hexdigest(), communicators))) == 1:
        return
    told = [own.split("\n") for own in _texts(text, communicators)]
    others = [rank for rank, own in enumerate(told) if own != told[0]]
    pairs = itertools.zip_longest(told[0], told[others[0]], fillvalue="nothing")
    first, other = next(pair for pair in pairs if pair[0] != pair[1])
    what = f"differs between rank 0 and {'rank' if len(others) == 1 else 'ranks'} {', '.join(map(str, others))}"
    raise ConfigError(what, where, f"{first or 'nothing'} on rank 0, {other or 'nothing'} on rank {others[0]}", hint)


def _texts(text: str, communicators: Communicators) -> list[str]:
    """Return the texts of all ranks, in rank order."""
    data = text.encode()
    lengths = _gathered(torch.tensor([len(data)], device="cpu"), communicators)
    padded = torch.tensor([*data.ljust(max(lengths), b"\0")], dtype=torch.uint8, device="cpu")
    told = bytes(_gathered(padded, communicators))
    return [told[rank * len(padded) :][:length].decode() for rank, length in enumerate(lengths)]


def _gathered(own: torch.Tensor, communicators: Communicators) -> list[int]:
    whole = own.repeat(communicators.trainers).to(communicators.device)
    if own.numel():
        communicators.all_gather(whole, own.to(communicators.device), "world", 0)
    with host_reads():
        return whole.tolist()


def require_cuda(trainers: int, backend: str) -> None:
    """Raise ``EnvironmentLacks`` if this machine has no CUDA device or, with NCCL, fewer than one per rank."""
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_devices == 0:
        hint = 'to simulate: fleetbench estimate EXPERIMENT.toml --gpu H100; to run: run.device = "cpu", and run.backend = "gloo"'
        raise EnvironmentLacks("there is no CUDA device", "run.device", "'cuda'", hint)
    if backend == "nccl" and num_devices < trainers:
        hint = 'to simulate: fleetbench estimate EXPERIMENT.toml; to run: fewer cluster.trainers_per_node, or run.backend = "gloo"'
        raise EnvironmentLacks(f"NCCL needs a device for each of {trainers} trainers", "run.backend", f"{num_devices} devices", hint)


def device_of(name: str, local_rank: int = 0) -> torch.device:
    """Return the CPU, or the CUDA device at this rank's place on the node. Raises ``EnvironmentLacks`` without one."""
    if name != "cuda":
        return torch.device("cpu")
    require_cuda(1, "gloo")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def nccl_device(local_rank: int, *, is_set: bool) -> torch.device:
    """Return this rank's GPU, by ``local_rank``, or as set by the script.

    ``is_set``: whether to use the GPU that the script has set, unless two ranks have set the same one. Every rank calls
    this at the same place. Raises ``EnvironmentLacks`` if two ranks share a GPU.
    """
    require_cuda(1, "nccl")
    ways = {"set": torch.cuda.current_device()} if is_set else {}
    ways["placed"] = local_rank % torch.cuda.device_count()
    for name, number in ways.items():
        own = f"{socket.gethostname()}, GPU {torch.cuda.get_device_properties(number).uuid}"
        gpus = texts_of_store(f"gpu-{name}", own)
        if len(set(gpus)) == len(gpus):
            torch.cuda.set_device(number)
            return torch.device("cuda", number)
    shared = next(gpu for gpu in gpus if gpus.count(gpu) > 1)
    ranks = ", ".join(str(rank) for rank, gpu in enumerate(gpus) if gpu == shared)
    hint = "start one trainer per GPU, or call torch.cuda.set_device(LOCAL_RANK) on each rank before fleet.init"
    what = f"ranks {ranks} are on one GPU, and NCCL needs a GPU for each"
    raise EnvironmentLacks(what, "fleet.init", shared, hint)


def texts_of_store(name: str, text: str) -> list[str]:
    """Return the texts of all ranks, in rank order, exchanged through their store, which needs no device."""
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001  # torch has no other name for it
    keys = [f"fleetbench/{name}/{rank}" for rank in range(dist.get_world_size())]
    store.set(keys[dist.get_rank()], text)
    return [found.decode() for found in store.multi_get(keys)]


def backend_of_world() -> str:
    """Return ``nccl`` if the job's process group has it for CUDA, as torch does by default; else ``gloo``."""
    return "nccl" if "cuda:nccl" in dist.get_backend_config().split(",") else "gloo"


def make_lane(device: torch.device, backend: str, name: str) -> Lane:
    """Return a lane for collectives of ``backend`` on tensors of ``device``.

    gloo blocks the waiting thread, on every device, so it needs a thread of its own; NCCL needs a stream.
    """
    return StreamLane(torch.get_device_module(device), priority=-1) if backend == "nccl" else ThreadLane(name, device)


def group_options(backend: str, timeout: timedelta) -> Any:
    """Return ``pg_options`` that make the device prefer a group's collectives to compute; None if not NCCL.

    NCCL runs collectives on a stream of its own, which does not inherit the priority of the stream that issues them.
    """
    if backend != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout  # noqa: SLF001  # new_group warns of options whose timeout is not its own; there is no public name
    return options


def one_thread() -> str:
    """Register gloo with one thread per process group, which carries one collective at a time; return its name."""
    if not hasattr(dist.Backend, _ONE_THREAD.upper()):
        dist.Backend.register_backend(_ONE_THREAD, _gloo_of_one_thread, devices=["cpu", "cuda"])
    return _ONE_THREAD


def _gloo_of_one_thread(store: Any, rank: int, ranks: int, timeout: timedelta) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()  # noqa: SLF001  # torch has no public name for a number of threads
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    options._devices = [gloo.create_device(interface=name) for name in names.split(",") if name] or [gloo.create_default_device()]  # noqa: SLF001
    options._timeout, options._threads = timeout, 1  # noqa: SLF001  # as above
    return gloo(store, rank, ranks, options)
