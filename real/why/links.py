"""Links: how fast the links of a process group are, in a job of their own or between two steps of a training.

Ranks exchange their findings by collectives of the group itself. ``measure_links`` leaves nothing behind,
neither in torch's registry of groups nor in environment variables. Only if it has made groups over other
interfaces, a counter stays in the default store. Source of bus bandwidth: nccl-tests, doc/PERFORMANCE.md.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fleetbench.config import decode, encode
from fleetbench.errors import ConfigError
from fleetbench.fitting.lines import Hockney, fit_line
from fleetbench.why.interfaces import Host, gloo_interface, shared_interfaces, this_host
from fleetbench.why.links import AllReduceTime, InterfaceTime, Links, PairTime

SIZES = (64 * 2**10, 2**20, 16 * 2**20)
_PAIR_BYTES = 4 * 2**20
_PAIR_REPEATS = 3
_LEAST, _MOST = 3, 200
"""Smallest and largest number of repeats of an all-reduce."""
_PREFIX = "fleetbench/links"
"""Prefix of keys in the default store."""
_INTERFACE_TIMEOUT = timedelta(seconds=10)
_CONNECT_TIMEOUT = _INTERFACE_TIMEOUT / 5  # gloo waits five times as long for connections
_ELEMENT = 4
"""Bytes of a float32."""
_VALUES = 256
"""Number of different values that ranks contribute, small enough for an exact sum."""
_CPU = torch.device("cpu")

Times = tuple[AllReduceTime, ...]
Process = Any  # a ProcessGroup, or a Backend such as ProcessGroupGloo: torch declares no type that both have


def measure_links(
    group: dist.ProcessGroup | None = None,
    sizes: Sequence[int] = SIZES,
    seconds: float = 1.0,
    *,
    device: torch.device | None = None,
    host: Host | None = None,
    pairs: bool = True,
) -> Links:
    """Time all-reduces of ``sizes`` bytes in ``group`` (default: all ranks); all its ranks call this.

    The all-reduces take about ``seconds``, with at least three repeats of each size, on ``device`` (default:
    ``device_of_group``). ``host`` describes this rank's host; that of a host's first rank counts. Between
    several hosts, messages of 4 MiB are timed too (``pairs``: NCCL makes a communicator for each, which takes
    GPU memory), and with gloo the same all-reduces over each other interface. It takes memory for the largest
    size. A collective that fails raises torch's error.
    """
    process: Process = group or dist.group.WORLD
    device = device or device_of_group(process)
    is_nccl = device.type == "cuda"
    times = _all_reduces(process, device, sizes, seconds)
    told = gathered(process, device, [encode(host or this_host()), None if is_nccl else gloo_interface()])
    hosts, host_of_rank = _by_host([decode(each, Host, "hosts") for each, _ in told])
    used = Counter(each for _, each in told).most_common(1)[0][0]
    own_pairs = _neighbours(process, device, host_of_rank) if pairs and len(hosts) > 1 else []
    all_pairs = decode(list(itertools.chain(*gathered(process, device, encode(own_pairs)))), tuple[PairTime, ...], "pairs")
    line = fit_line([each.size_bytes for each in times], [each.median_s for each in times])
    return Links(
        backend="nccl" if is_nccl else "gloo",
        ranks=process.size(),
        hosts=hosts,
        times=times,
        fit=Hockney(trainers=process.size(), line=line).link if line.statement is None else None,
        interface=used,
        pairs=tuple(sorted(all_pairs, key=lambda pair: pair.hosts)),
        interfaces=() if is_nccl else tuple(_other_interfaces(process, hosts, used, sizes, seconds)),
    )


def device_of_group(process: Process, kind: str = "cuda") -> torch.device:
    """Return this rank's GPU for an NCCL group, unless ``kind`` is ``cpu``; the CPU for gloo.

    Raises ``ConfigError`` for other backends.
    """
    backends = dist.get_backend_config(process).split(",")
    if kind == "cuda" and torch.cuda.is_available() and "cuda:nccl" in backends:
        return torch.device("cuda", torch.cuda.current_device())
    if "cpu:gloo" not in backends:
        hint = "time a group of gloo or NCCL"
        raise ConfigError("has links that cannot be timed", "the process group", ",".join(backends), hint)
    return _CPU


def gathered(process: Process, device: torch.device, own: Any) -> list[Any]:
    """Return every rank's JSON data, by rank; all ranks of the group call this."""
    text = json.dumps(own).encode()
    (longest,) = _largest(process, device, len(text))
    told = torch.frombuffer(bytearray(text.ljust(int(longest))), dtype=torch.uint8).to(device)
    found = [torch.empty_like(told) for _ in range(process.size())]
    process.allgather([found], [told]).wait()
    return [json.loads(each.cpu().numpy().tobytes()) for each in found]


def _by_host(told: Sequence[Host]) -> tuple[tuple[Host, ...], tuple[int, ...]]:
    """Return the hosts of all ranks, each once, and the index of every rank's host.

    Network namespaces of one machine count as hosts: their addresses differ.
    """
    keys = [(host.name, *(each.addresses for each in host.interfaces)) for host in told]
    first = list(dict.fromkeys(keys))
    return tuple(told[keys.index(key)] for key in first), tuple(first.index(key) for key in keys)


def _largest(process: Process, device: torch.device, *numbers: float) -> list[float]:
    """Return each number's maximum over all ranks."""
    told = torch.tensor(numbers, dtype=torch.float64, device=device)
    process.allreduce([told], dist.ReduceOp.MAX).wait()
    return told.tolist()


def _all_reduces(process: Process, device: torch.device, sizes: Sequence[int], seconds: float) -> Times:
    """Time each size's all-reduce: once with a check of its sum, then as often as the slowest rank's time allows."""
    ranks, found = process.size(), list[AllReduceTime]()
    if ranks == 1:
        return ()
    whole = torch.zeros(max(sizes) // _ELEMENT, dtype=torch.float32, device=device)
    _time(process, whole[: min(sizes) // _ELEMENT], device)  # opens the connections
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
                busbw_bytes_per_s=2 * (ranks - 1) / ranks * speed,
                is_correct=not wrong,
            )
        )
    return tuple(found)


def _time(process: Process, tensor: torch.Tensor, device: torch.device) -> float:
    """Return the seconds of one all-reduce, including waits of ranks for one another."""
    begin = time.perf_counter()
    process.allreduce([tensor]).wait()
    _wait_for(device)
    return time.perf_counter() - begin


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _neighbours(process: Process, device: torch.device, host_of_rank: Sequence[int]) -> list[PairTime]:
    """Return the times that this rank has measured of messages between first ranks of neighbouring hosts."""
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
            found.append(PairTime(hosts=hosts, bytes_per_s=_PAIR_BYTES / statistics.median(took[1:])))
    return found


def _other_interfaces(
    process: Process, hosts: Sequence[Host], interface: str | None, sizes: Sequence[int], seconds: float
) -> list[InterfaceTime]:
    """Time all-reduces over each interface that all hosts share; the one in use first and last, as times change."""
    shared = shared_interfaces(hosts)
    others, used = [name for name in shared if name != interface], [name for name in shared if name == interface]
    if not others:
        return []
    torch_dist: Any = dist  # whose stores are missing from __all__
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001  # torch has no public name for it
    number = gathered(process, _CPU, store.add(f"{_PREFIX}/tests", 1) if process.rank() == 0 else 0)[0]
    own = torch_dist.PrefixStore(f"{_PREFIX}/{number}", store)
    names = enumerate([*used, *others, *used])
    found = [_over(name, process, torch_dist.PrefixStore(str(turn), own), sizes, seconds) for turn, name in names]
    can_list = hasattr(own, "list_keys")  # from torch 2.8 on
    for key in own.list_keys() if can_list and process.rank() == 0 else ():  # gloo's
        own.delete_key(key)
    return found


def _over(name: str, process: Process, store: Any, sizes: Sequence[int], seconds: float) -> InterfaceTime:
    """Time all-reduces in a gloo group over one interface.

    If they fail on some rank, the result has an error and no times.
    """
    times: Times = ()
    error = None
    try:
        times = _all_reduces(_gloo_over(name, process, store), _CPU, sizes, seconds)
    except RuntimeError as failed:
        error = str(failed).strip().partition("\n")[0]
    error = next((each for each in gathered(process, _CPU, error) if each is not None), None)
    return InterfaceTime(name=name, times=times if error is None else (), error=error)


def _gloo_over(interface: str, process: Process, store: Any) -> Process:
    """Return a gloo group of the same ranks, as if made with GLOO_SOCKET_IFNAME; torch does not list it.

    The group ends when its last reference is gone. Raises ``RuntimeError`` if it cannot reach a rank within
    10 s.
    """
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()  # noqa: SLF001  # as torch's own tests do
    options._timeout = _CONNECT_TIMEOUT  # noqa: SLF001  # as above
    options._devices = [gloo.create_device(interface=interface, lazy_init=False)]  # noqa: SLF001  # as above
    group = gloo(store, process.rank(), process.size(), options)
    group.set_timeout(_INTERFACE_TIMEOUT)
    return group
