"""The parts of the real executor that need no second process."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from fleetbench.declared import first_hit
from fleetbench.plan.fusion import Bucket
from fleetbench.plan.layers import Gradient, Layer, LayerTable
from fleetbench.result import StepRecord
from fleetbench.stragglers import ONE
from real.collect import RankPart, collect
from real.communication.lanes import Flight, ThreadLane
from real.compute.injector import Injector
from real.engine.buckets import DeltaBucket, GradientBucket
from real.engine.flat import FlatParameters
from real.engine.stopwatch import TimedStep


def test_packed_gradients_are_the_buffer() -> None:
    """Packed gradients lie end to end, ``.grad`` is the buffer, and a parameter without one has zeros."""
    parameters = [nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad, parameters[1].grad = torch.arange(6.0).view(2, 3), torch.arange(6.0, 10.0)
    bucket = GradientBucket(Bucket(id=0, gradients=("a", "b", "c"), numel=11, dtype="float32"), parameters)
    bucket.buffer.fill_(7.0)
    bucket.pack()
    assert torch.equal(bucket.buffer, torch.tensor([*range(10), 0.0]))
    bucket.buffer.mul_(2)
    assert parameters[1].grad is not None
    assert torch.equal(parameters[1].grad, 2 * torch.arange(6.0, 10.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_small_types_are_kept_in_float32(dtype: torch.dtype) -> None:
    """256 + 1 is 256 in bfloat16: two of the one added to it are lost there, and are not here."""
    parameter = nn.Parameter(torch.zeros(1, dtype=dtype))
    bucket = GradientBucket(Bucket(id=0, gradients=("a",), numel=1, dtype=str(dtype).removeprefix("torch.")), [parameter])
    for value in (256.0, 1.0, 1.0):
        parameter.grad = torch.tensor([value], dtype=dtype)
        bucket.accumulate()
        assert parameter.grad.item() == value
    bucket.release(1)
    assert parameter.grad.item() == 258.0
    bucket.accumulate()
    bucket.release(2)
    assert parameter.grad.item() == 129.0


@pytest.mark.parametrize("flattens", [True, False])
def test_delta_bucket_moves_to_snapshot_plus_delta(flattens: bool) -> None:
    """P = snapshot + mean(p - snapshot): with a halved delta the parameter goes half the way, and starts there again."""
    parameter = nn.Parameter(torch.tensor([1.0, 2.0]))
    flat = FlatParameters([parameter]) if flattens else None
    bucket = DeltaBucket(Bucket(id=0, gradients=("a",), numel=2, dtype="float32"), [parameter], [parameter.detach()], flat)
    for expected in ([2.0, 2.0], [3.0, 2.0]):
        with torch.no_grad():
            parameter.add_(torch.tensor([2.0, 0.0]))
        bucket.pack()
        bucket.buffer.div_(2)
        bucket.merge()
        assert torch.equal(parameter.detach(), torch.tensor(expected))


def test_a_thread_lane_starts_at_once_what_it_can_and_keeps_the_order() -> None:
    """Idle, it begins a flight in the submitter's own thread; behind one that is still in flight, on its own, and in order."""
    done: list[str] = []
    threads: list[str] = []

    def flight(name: str) -> Flight:
        def start() -> Callable[[], None]:
            threads.append(threading.current_thread().name)
            return lambda: done.append(name)

        def run() -> None:
            threads.append(threading.current_thread().name)
            done.append(name)

        return Flight(run, start)

    lane = ThreadLane("lane")
    first = lane.submit(flight("first"), ())
    second = lane.submit(flight("second"), (first,))
    for ticket in (second, first):
        ticket.wait()
    lane.close()
    assert done == ["first", "second"]
    assert threads == [threading.main_thread().name, "lane_0"]


def _table() -> LayerTable:
    def layer(name: str, ready: int) -> Layer:
        return Layer(name=name, gradients=(Gradient(name=f"{name}.weight", numel=1, ready=ready),), forward=10**6, backward=2 * 10**6)  # type: ignore[arg-type]  # nanoseconds

    return LayerTable(key="test", layers=(layer("0", 4 * 10**6), layer("1", 2 * 10**6)))


def test_injected_sleep_aims_at_totals_and_lateness_does_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """With X = 2 every layer's sleep is twice its time; a sleep that overshoots by 0.3 ms shortens the next."""
    clock = [0]
    monkeypatch.setattr("real.compute.injector.time.monotonic_ns", lambda: clock[0])
    sleeps: list[float] = []

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        clock[0] += round(seconds * 1e9) + 300_000

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    injector = Injector(_table(), sleep)
    injector.attach(model)
    injector.begin(2 * ONE)
    model(torch.zeros(1, 2)).sum().backward()
    injector.finish()
    injector.detach()
    np.testing.assert_allclose(sleeps, [2e-3, 2e-3 - 3e-4, 4e-3 - 3e-4, 4e-3 - 3e-4], rtol=1e-9)
    assert clock[0] == pytest.approx(2 * 6 * 10**6 + 300_000)
    injector.begin(2 * ONE)
    model(torch.zeros(1, 2)).sum().backward()
    assert len(sleeps) == 4


def test_a_compiled_block_is_not_broken_and_its_delay_comes_at_the_end() -> None:
    """One graph, which ``fullgraph`` asks for, whatever the hooks; with X = 2 all 12 ms come behind the backward."""
    sleeps: list[float] = []
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    injector = Injector(_table(), sleeps.append)
    injector.attach(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    injector.begin(2 * ONE)
    compiled(torch.zeros(1, 2)).sum().backward()
    assert sleeps == []
    injector.finish()
    injector.detach()
    assert sleeps == [pytest.approx(12e-3)]


def test_pauses_stop_rank_0s_clock() -> None:
    """Rank 0 pauses 50 ns behind step 1: step 2 starts 50 ns earlier on its clock, on every rank, and the target's time leaves it out."""

    def step(rank: int, number: int, start: int, end: int, paused: int) -> TimedStep:
        record = StepRecord(
            rank=rank, step=number, start_ns=start, forward_ns=10, backward_ns=20, stall_ns=0, update_ns=0,
            end_ns=end, arrival_ns=None, local_steps=1, loss=1.0, bytes_sent=0,
        )  # fmt: skip
        return TimedStep(record, paused)

    held_out = tuple((number, 0.0) for number in (2, 3, 4))
    ranks = []
    for rank in range(2):
        starts = [1000, 1150, 1250, 1350, 1450]
        steps = [step(rank, number, starts[number - 1], starts[number], 50 if number == 1 else 0) for number in (1, 2, 3, 4)]
        ranks.append(RankPart(tuple(steps), (), held_out))
    collected = collect(ranks, 0.5)
    assert [(record.start_ns, record.end_ns) for record in collected.records if record.rank == 1] == [
        (0, 100),
        (100, 200),
        (200, 300),
        (300, 400),
    ]
    assert collected.time_to_target_s == pytest.approx(200e-9)


@pytest.mark.parametrize(("hits", "index"), [("0111", 1), ("1101", None), ("110111", 3), ("11", None), ("", None), ("111", 0)])
def test_three_hits_in_a_row_count_from_the_first(hits: str, index: int | None) -> None:
    """Two hits and a miss are none."""
    assert first_hit([hit == "1" for hit in hits]) == index
