"""Causes and simulated remedies, of steps that are written by hand."""

from __future__ import annotations

import dataclasses

import pytest

from fleetbench.cluster import Link
from fleetbench.quantities import BitsPerSecond, Nanoseconds
from fleetbench.why.interfaces import Host, Interface
from fleetbench.why.links import AllReduceTime, InterfaceTime, Links
from fleetbench.why.observed import Loader, Model, RankLog, Readiness
from fleetbench.why.shares import Share
from fleetbench.why.steps import shares_of
from tuner.why.causes import Cause, Seen, Tried, causes_of, ranked
from tuner.why.simulated import Simulated, simulated_of

MS = 10**6
NUMEL, LAYERS = 250_000, 4
ALL_REDUCE_S_PER_BYTE = 1e-8
"""Of all bytes: 10 ms for 1 MB, and no latency."""


def seen(
    *,
    slow_ms: float = 0.0,
    slow: str = "forward",
    input_ms: float = 1.0,
    buffers_ms: float = 0.0,
    exposed_ms: float = 5.0,
    batches: tuple[int, int] = (64, 64),
    stall: tuple[str, float, int] = ("loop", 0.0, 1),
    threads: int = 2,
    sets_threads: bool = False,
    backwards: int = 1,
    cpu_cores: float = 0.4,
    model: Model | None = None,
) -> Seen:
    """Two ranks, 40 steps: a batch, buffers, 10 ms of forward, 20 of backward, an exchange, and 2 of update; rank 1 may be slow."""
    events: list[list[tuple[str, int, int, int]]] = [[], []]
    ends: list[list[int]] = [[0], [0]]
    now = [0.0, 0.0]

    def does(rank: int, kind: str, ms: float, computed: float = 0.0) -> None:
        if kind != "loop" and ms > 0:
            events[rank].append((kind, round(now[rank] * MS), round((now[rank] + ms) * MS), round(computed * MS)))
        now[rank] += ms

    for step in range(40):
        for rank in (0, 1):
            more = slow_ms if rank == 1 else 0.0
            does(rank, "input", input_ms + (more if slow == "input" else 0.0))
            does(rank, "buffers", buffers_ms)
            does(rank, "forward", 10.0 + (more if slow == "forward" else 0.0))
            if step % stall[2] == 0 and rank == 0:
                does(rank, stall[0], stall[1])
        for _ in range(backwards):
            done = max(now) + 20.0 + exposed_ms
            for rank in (0, 1):
                does(rank, "backward", done - now[rank], now[rank] + 20.0)
        for rank in (0, 1):
            does(rank, "optimizer", 2.0)
            ends[rank].append(round(now[rank] * MS))
    own = model or Model(
        nbytes=4 * NUMEL * LAYERS,
        bucket_nbytes=(4 * NUMEL * LAYERS,),
        bucket_cap_mb=25.0,
        buffers_nbytes=50_000_000 if buffers_ms else 0,
    )
    logs = tuple(
        RankLog(
            rank=rank,
            host="a",
            device="cpu",
            threads=threads,
            sets_threads=sets_threads,
            cores=4,
            cpu_cores=cpu_cores,
            step_ends_ns=tuple(ends[rank]),
            events=tuple(events[rank]),
            batches=(batches[rank],) * 40,
            model=own,
            loader=Loader(num_workers=0),
        )
        for rank in (0, 1)
    )
    return Seen(logs=logs, shares=shares_of(logs), ready=readiness(), links=links())


def readiness() -> Readiness:
    """Layers of 1 MB, whose gradients are ready after 5, 10, 15 and 20 ms."""
    return Readiness(
        names=tuple(f"layer{number}.weight" for number in range(LAYERS)),
        nbytes=(4 * NUMEL,) * LAYERS,
        ready_ns=tuple((LAYERS - number) * 5 * MS for number in range(LAYERS)),
    )


def links(**changes: object) -> Links:
    """All-reduces of 10 ms per MB."""
    sizes = (65_536, 524_288, 4_194_304)
    times = tuple(
        AllReduceTime(
            size_bytes=size,
            median_s=size * ALL_REDUCE_S_PER_BYTE,
            num=10,
            busbw_bytes_per_s=1 / ALL_REDUCE_S_PER_BYTE,
            is_correct=True,
        )
        for size in sizes
    )
    link = Link(bandwidth=BitsPerSecond(round(8 / ALL_REDUCE_S_PER_BYTE)), latency=Nanoseconds(0), payload=True)
    host = Host(name="a", interfaces=(Interface(name="lo", addresses=("127.0.0.1/8",), mtu=65536),))
    plain = Links(backend="gloo", ranks=2, hosts=(host,), times=times, fit=link, interface="lo")
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]  # fields of it


def first(found: Seen) -> Cause:
    """The cause that takes the most of a step."""
    return max(causes_of(found), key=lambda cause: cause.seconds)


@pytest.mark.parametrize(
    ("planted", "name", "said", "remedy"),
    [
        ({"slow_ms": 15.0}, "a slow rank", "rank 1 computes its forward for 25.00 ms per step, the others for 10.00 ms", ""),
        ({"slow_ms": 15.0, "slow": "input"}, "a slow rank", "rank 1 waits for its batches for 16.00 ms per step", "num_workers="),
        ({"slow_ms": 15.0, "batches": (64, 128)}, "uneven batches", "its batches are 2 times as large", "DistributedSampler"),
        ({"input_ms": 30.0}, "the loader", "each rank waits 30.00 ms per step for its next batch, with num_workers=0", "num_workers="),
        ({"buffers_ms": 12.0}, "buffers", "rank 0 sends 50.00 MB of buffers before each forward", "broadcast_buffers=False"),
        ({"stall": ("save", 400.0, 10)}, "periodic work", "rank 0 saves for 400.0 ms in every 10 steps", "async_save"),
        ({"exposed_ms": 25.0}, "the network", "4.00 MB of gradients in 1 bucket, of which the backward does not hide 25.00 ms", ""),
    ],
)
def test_what_is_planted_is_named(planted: dict[str, object], name: str, said: str, remedy: str) -> None:
    """The largest cause is the planted one, with its evidence in numbers, and what to type where a setting helps."""
    found = first(seen(**planted))  # type: ignore[arg-type]  # its arguments
    assert found.name == name
    assert said in found.what
    assert remedy in found.remedy


def test_accumulation_without_no_sync_is_named() -> None:
    """Four backwards a step expose 10 ms each, of which three go with ``no_sync``; one backward is no accumulation."""
    found = seen(backwards=4, exposed_ms=10.0)
    cause = next(cause for cause in causes_of(found) if cause.name == "an exchange in each backward")
    assert "each of the 4 backwards of a step exchanges 4.00 MB of gradients" in cause.what
    assert "no_sync" in cause.remedy
    assert cause.simulated_s == pytest.approx(found.shares.step_s - 0.030, abs=1e-4)
    assert all(cause.name != "an exchange in each backward" for cause in causes_of(seen(exposed_ms=10.0)))


def test_a_small_cause_without_a_remedy_has_no_number() -> None:
    """3 % of a step that nobody can change is a part of it, and no more; 3 % with a remedy is a cause."""
    share = Share(kind="gradients", seconds=0.003)
    small, typed = Cause(name="the network", what="", shares=(share,)), Cause(name="buffers", what="", shares=(share,), remedy="type this")
    assert ranked([small, typed], 0.1) == [typed]


def test_without_a_fault_the_network_alone_is_named() -> None:
    """What each training has is no cause: its batches, its update, its loss."""
    assert [cause.name for cause in causes_of(seen())] == ["the network"]


@pytest.mark.parametrize(
    ("threads", "said"), [(8, "2 ranks with 8 threads each share 4 cores"), (1, "leave most of 4 cores idle"), (2, None)]
)
def test_threads_and_cores(threads: int, said: str | None) -> None:
    """Threads are named where they are more than the cores, or leave half of them idle."""
    found = [cause for cause in causes_of(seen(threads=threads, cpu_cores=1.0)) if cause.name == "threads"]
    assert [said in cause.what for cause in found] == ([] if said is None else [True])


def simulated(found: Seen) -> Simulated:
    """Its steps by the simulator."""
    own = simulated_of(found)
    assert own is not None
    return own


def test_a_proved_remedy_comes_before_as_large_a_gain_without_one() -> None:
    """Of a step of 40 ms: threads gain 10 as tried; without a network 12 would go, of which nobody says how; a slow rank takes 22."""
    tried = Tried(today_s=0.040, other_s=0.030, low_s=0.029, high_s=0.031, pairs=6)
    threads = Cause(name="threads", what="", shares=(), remedy="OMP_NUM_THREADS=1", tried=tried)
    network = Cause(name="the network", what="", shares=(Share(kind="gradients", seconds=0.012),), simulated_s=0.028)
    slow = Cause(name="a slow rank", what="", shares=(Share(kind="forward", seconds=0.022, rank=1),), simulated_s=0.018)
    assert [cause.name for cause in ranked([network, threads, slow], 0.040)] == ["a slow rank", "threads", "the network"]


def test_a_step_with_other_buckets_is_that_of_the_closed_form() -> None:
    """One bucket of 4 MB follows the backward for 40 ms; of four, which take 10 ms each, the last ends 45 ms after the backward's begin.

    So 32 ms of batch, forward and update, with 60 or with 45 ms of backward and exchange.
    """
    found = simulated(seen(exposed_ms=40.0))
    today_s = 1e-3 * (1 + 10 + 20 + 40 + 2)
    assert found.error == pytest.approx(0.0, abs=1e-3)
    assert found.step_s(()) == pytest.approx(today_s)
    assert found.step_s((), cap_mb=0.5) == pytest.approx(1e-3 * (1 + 10 + 5 + 4 * 10 + 2), rel=1e-3)
    assert found.best_cap((0.5, 25.0))[0] == 0.5


def test_a_faster_interface_is_simulated() -> None:
    """Over an interface with four times the bandwidth, 40 ms of exchange take 10."""
    slow = seen(exposed_ms=40.0)
    assert slow.links is not None
    fast = tuple(dataclasses.replace(one, busbw_bytes_per_s=4 * one.busbw_bytes_per_s) for one in slow.links.times)
    timed = (InterfaceTime(name="lo", times=slow.links.times), InterfaceTime(name="eth1", times=fast))
    slow = dataclasses.replace(slow, links=links(interfaces=timed))
    (cause,) = (cause for cause in causes_of(slow) if cause.name == "the network")
    assert cause.remedy == "GLOO_SOCKET_IFNAME=eth1"
    assert simulated(slow).step_s([cause]) == pytest.approx(43e-3, rel=1e-3)
