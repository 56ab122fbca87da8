"""Link test: what the links of a process group carry, in a job of its own or between two steps of a training.

``measure_links`` leaves nothing behind but a counter in the default store, through which ranks agree; groups
over other interfaces are made without torch's registry and without environment variables. Source of bus
bandwidth: nccl-tests, doc/PERFORMANCE.md.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist

from fleetbench.config import Config, decode, encode
from fleetbench.errors import ConfigError
from fleetbench.fitting.lines import Hockney, fit_line
from fleetbench.why.interfaces import Host, bytes_sent, interface_of_connections, shared_interfaces, this_host
from fleetbench.why.links import AllReduceTime, InterfaceTime, Links, PairTime

SIZES = (64 * 2**10, 2**20, 16 * 2**20)
_PAIR_BYTES = 4 * 2**20
_PAIR_REPEATS = 3
_LEAST, _MOST = 3, 200
"""Repeats of an all-reduce."""
_PREFIX = "fleetbench/links"
_INTERFACE_TIMEOUT = timedelta(seconds=10)
_CONNECT_TIMEOUT = _INTERFACE_TIMEOUT / 5  # gloo waits five times as long for connections
_ELEMENT = 4
"""Bytes of a float32."""
_VALUES = 256
"""Ranks contribute so many different numbers: their sum is exact."""

Times = tuple[AllReduceTime, ...]
Process = Any  # a ProcessGroup, or a Backend such as ProcessGroupGloo: torch declares no type that both have


def measure_links(
    group: dist.ProcessGroup | None = None,
    sizes: Sequence[int] = SIZES,
    seconds: float = 1.0,
    *,
    pairs: bool = True,
) -> Links:
    """Time all-reduces of ``sizes`` bytes in ``group``, by default the job's own; all its ranks call this.

    ``seconds``: about so long the all-reduces take, with at least three repeats of each size. Between several
    hosts there are messages of 4 MiB too (``pairs``: NCCL makes a communicator for each, which takes GPU
    memory), and with gloo the same all-reduces over each other interface. Takes memory for the largest size.
    Raises ``ConfigError`` where there is no process group, or this rank is not in it; a collective that fails
    raises torch's error.
    """
    if not dist.is_initialized():
        hint = "call torch.distributed.init_process_group first"
        raise ConfigError("there is no process group", "measure_links", hint=hint)
    process = group if group is not None else dist.group.WORLD
    if process is None or dist.get_rank(process) < 0:
        hint = "call it on the ranks of the group alone"
        raise ConfigError("this rank is not in the group", "measure_links", hint=hint)
    device = device_of_group(process)
    is_nccl = device.type == "cuda"
    before = {} if is_nccl else bytes_sent()
    times = _all_reduces(process, device, sizes, seconds)
    with Meeting(process, device) as meeting:
        interface = None if is_nccl else interface_of_connections(before)
        is_first = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0"  # whose word counts
        host = encode(this_host(asks_gpus=is_first))
        told = meeting.decide({"host": host, "interface": interface}, _told)
        found = decode(told, _Told, "hosts")
        own_pairs = _neighbours(process, device, found.host_of_rank) if pairs and len(found.hosts) > 1 else []
        all_pairs = meeting.decide(encode(own_pairs), _in_order)
        others = [] if is_nccl else _other_interfaces(meeting, found, sizes, seconds)
    line = fit_line([each.size_bytes for each in times], [each.median_s for each in times])
    return Links(
        backend="nccl" if is_nccl else "gloo",
        ranks=process.size(),
        hosts=found.hosts,
        host_of_rank=found.host_of_rank,
        times=times,
        fit=Hockney(trainers=process.size(), line=line).link if line.statement is None else None,
        interface=found.interface,
        pairs=decode(all_pairs, tuple[PairTime, ...], "pairs"),
        interfaces=tuple(others),
    )


def device_of_group(process: Process) -> torch.device:
    """This rank's GPU of a group of NCCL, the CPU of gloo. Raises ``ConfigError`` for other backends."""
    backends = dist.get_backend_config(process).split(",")
    if torch.cuda.is_available() and "cuda:nccl" in backends:
        return torch.device("cuda", torch.cuda.current_device())
    if "cpu:gloo" not in backends:
        hint = "time a group of gloo or NCCL"
        raise ConfigError("has links that cannot be timed", "the process group", ",".join(backends), hint)
    return torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told(Config):
    """What rank 0 makes of what all ranks say of their host."""

    hosts: tuple[Host, ...]
    host_of_rank: tuple[int, ...]
    interface: str | None = None


def _told(told: Sequence[dict[str, Any]]) -> Any:
    """Hosts of all ranks, each once, as a ``_Told``; network namespaces of a machine differ in addresses."""
    addresses = [[each["addresses"] for each in own["host"]["interfaces"]] for own in told]
    keys = [str((own["host"]["name"], each)) for own, each in zip(told, addresses, strict=True)]
    first = list(dict.fromkeys(keys))
    hosts = [told[keys.index(key)]["host"] for key in first]
    used = Counter(own["interface"] for own in told).most_common(1)[0][0]
    return encode({"hosts": hosts, "host_of_rank": [first.index(key) for key in keys], "interface": used})


def _in_order(told: Sequence[Any]) -> Any:
    return sorted(itertools.chain(*told), key=lambda pair: pair["hosts"])


class Meeting:
    """Decisions that all ranks of a group take alike: each tells rank 0, which decides, in the default store.

    Every rank asks for the same decisions in the same order; at the end of the ``with`` their keys are gone.
    """

    def __init__(self, process: Process, device: torch.device) -> None:
        store = dist.distributed_c10d._get_default_store()  # noqa: SLF001  # torch has no public name for it
        own = float(store.add(f"{_PREFIX}/meetings", 1)) if process.rank() == 0 else 0.0
        (number,) = _largest(process, device, own)
        self.store = _part_of(store, f"{_PREFIX}/{number:.0f}")
        self.process, self._device = process, device
        self.turn = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        if failed is None:
            _largest(self.process, self._device, 0.0)  # all have read everything
            can_list = hasattr(self.store, "list_keys")  # from torch 2.8 on
            for key in self.store.list_keys() if can_list and self.process.rank() == 0 else ():  # gloo's own among them
                self.store.delete_key(key)

    def decide(self, own: Any, decision: Callable[[list[Any]], Any]) -> Any:
        """What rank 0 decides of every rank's ``own``, in the order of ranks; both are what JSON can say."""
        self.turn += 1
        keys = [f"{self.turn}/{rank}" for rank in range(self.process.size())]
        answer = f"{self.turn}/answer"
        self.store.set(keys[self.process.rank()], json.dumps(own))
        if self.process.rank() == 0:
            told = [json.loads(text) for text in self.store.multi_get(keys)]
            self.store.set(answer, json.dumps(decision(told)))
        return json.loads(self.store.get(answer))


def _part_of(store: Any, prefix: str) -> Any:
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]  # missing from __all__ only


def _largest(process: Process, device: torch.device, *numbers: float) -> list[float]:
    """Each number's maximum over all ranks."""
    told = torch.tensor(numbers, dtype=torch.float64, device=device)
    process.allreduce([told], dist.ReduceOp.MAX).wait()
    return told.tolist()


def _all_reduces(process: Process, device: torch.device, sizes: Sequence[int], seconds: float) -> Times:
    """Each size's all-reduce: once to see whether its sum is right, then as often as the slowest rank can."""
    ranks, found = process.size(), list[AllReduceTime]()
    if ranks == 1:
        return ()
    whole = torch.zeros(max(sizes) // _ELEMENT, dtype=torch.float32, device=device)
    _time(process, whole[: min(sizes) // _ELEMENT], device)  # which opens connections
    for size in sorted(sizes):
        part = whole[: size // _ELEMENT]
        part.fill_(process.rank() % _VALUES + 1)
        first = _time(process, part, device)
        is_wrong = bool((part != sum(rank % _VALUES + 1 for rank in range(ranks))).any())
        part.zero_()
        first, wrong = _largest(process, device, first, is_wrong)
        num = max(_LEAST, min(_MOST, int(seconds / len(sizes) / first)))
        own = statistics.median([_time(process, part, device) for _ in range(num)])
        (median,) = _largest(process, device, own)
        speed = part.numel() * _ELEMENT / median
        found.append(
            AllReduceTime(
                size_bytes=part.numel() * _ELEMENT,
                median_s=median,
                num=num,
                algbw_bytes_per_s=speed,
                busbw_bytes_per_s=2 * (ranks - 1) / ranks * speed,
                is_correct=not wrong,
            )
        )
    return tuple(found)


def _time(process: Process, tensor: torch.Tensor, device: torch.device) -> float:
    """Seconds of one all-reduce, in which ranks wait for one another."""
    begin = time.perf_counter()
    process.allreduce([tensor]).wait()
    _wait_for(device)
    return time.perf_counter() - begin


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _neighbours(process: Process, device: torch.device, host_of_rank: Sequence[int]) -> list[PairTime]:
    """What this rank has timed of messages between a host's first rank and the next host's."""
    leaders = [host_of_rank.index(host) for host in range(max(host_of_rank) + 1)]
    num, found = len(leaders), list[PairTime]()
    chain = [(host, host + 1) for first in (0, 1) for host in range(first, num - 1, 2)]
    for hosts in (*chain, *([(num - 1, 0)] if num > 2 else [])):
        ends = [leaders[host] for host in hosts]
        if process.rank() not in ends:
            continue
        is_first, took = process.rank() == ends[0], list[float]()
        whole = torch.zeros(_PAIR_BYTES // _ELEMENT, dtype=torch.float32, device=device)
        for message in (whole[:1], *[whole] * _PAIR_REPEATS):  # the first opens the connection
            begin = time.perf_counter()
            for sends in (is_first, not is_first):
                move = process.send if sends else process.recv
                move([message], ends[is_first], 0).wait()
            _wait_for(device)
            took.append((time.perf_counter() - begin) / 2)
        if is_first:
            median = statistics.median(took[1:])
            speed = _PAIR_BYTES / median
            found.append(PairTime(hosts=hosts, size_bytes=_PAIR_BYTES, median_s=median, bytes_per_s=speed))
    return found


def _other_interfaces(
    meeting: Meeting,
    told: _Told,
    sizes: Sequence[int],
    seconds: float,
) -> list[InterfaceTime]:
    """All-reduces over each interface that all hosts share; over the one in use twice, as moments differ."""
    shared = shared_interfaces(told.hosts)
    others = [name for name in shared if name != told.interface]
    used = [name for name in shared if name == told.interface]
    return [_over(name, meeting, sizes, seconds) for name in (*used, *others, *used)] if others else []


def _over(name: str, meeting: Meeting, sizes: Sequence[int], seconds: float) -> InterfaceTime:
    """All-reduces in a gloo group over one interface; all ranks agree on whether it was made and worked."""
    error, group = None, None
    times: Times = ()
    try:
        group = gloo_over(name, meeting)
    except RuntimeError as failed:
        error = _said(failed)
    error = meeting.decide(error, _first_error)
    if error is None:
        try:
            times = _all_reduces(group, torch.device("cpu"), sizes, seconds)
        except RuntimeError as failed:
            error = _said(failed)
        error = meeting.decide(error, _first_error)
    return InterfaceTime(name=name, times=times if error is None else (), error=error)


def gloo_over(interface: str, meeting: Meeting) -> Process:
    """A gloo group of the meeting's ranks, as if made with GLOO_SOCKET_IFNAME; torch does not list it.

    It ends with its last reference. Raises ``RuntimeError`` where a rank is not reached within 10 s.
    """
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()  # noqa: SLF001  # as torch's own tests do
    options._timeout = _CONNECT_TIMEOUT  # noqa: SLF001  # as above
    device = gloo.create_device(interface=interface, lazy_init=False)
    options._devices = [device]  # noqa: SLF001  # as above
    process = meeting.process
    store = _part_of(meeting.store, f"gloo/{meeting.turn}")
    group = gloo(store, process.rank(), process.size(), options)
    group.set_timeout(_INTERFACE_TIMEOUT)
    return group


def _said(failed: RuntimeError) -> str:
    return str(failed).strip().partition("\n")[0]


def _first_error(told: Sequence[str | None]) -> str | None:
    return next((error for error in told if error is not None), None)
