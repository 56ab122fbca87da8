"""The parts of the real executor that need no second process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fleetbench.plan.fusion import Bucket
from fleetbench.plan.layers import Gradient, Layer, LayerTable
from fleetbench.result import steps_table
from fleetbench.stragglers import ONE
from fleetbench.target import Crossing
from real.communication.lanes import Flight, ThreadLane
from real.compute.injector import Delay, Injector
from real.engine.buckets import DeltaBucket, GradientBucket, views_of
from real.engine.stopwatch import Queue
from real.job.results import _to_target, collect


def test_released_sums_are_the_buffer() -> None:
    """A sum lies end to end in the buffer it was placed in, ``.grad`` is a view of it, and a parameter that never had one has zeros."""
    parameters = [nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad, parameters[1].grad = torch.arange(6.0).view(2, 3), torch.arange(6.0, 10.0)
    bucket = GradientBucket(Bucket(id=0, gradients=("a", "b", "c"), numel=11, dtype="float32"), parameters)
    bucket.buffer.fill_(7.0)
    placed = torch.full((11,), 7.0)
    assert bucket.place(placed)
    assert not bucket.place(placed)
    bucket.accumulate()
    bucket.release(1)
    assert torch.equal(placed, torch.tensor([*range(10), 0.0]))
    placed.mul_(2)
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


def test_delta_bucket_moves_to_snapshot_plus_delta() -> None:
    """P = snapshot + mean(p - snapshot): with a halved delta the parameter goes half the way, and starts there again."""
    parameter = nn.Parameter(torch.tensor([1.0, 2.0]))
    bucket = DeltaBucket(Bucket(id=0, gradients=("a",), numel=2, dtype="float32"), [parameter], [parameter.detach()])
    for expected in ([2.0, 2.0], [3.0, 2.0]):
        with torch.no_grad():
            parameter.add_(torch.tensor([2.0, 0.0]))
        bucket.pack()
        bucket.buffer.div_(2)
        bucket.merge()
        assert torch.equal(parameter.detach(), torch.tensor(expected))


def test_views_follow_a_slice_of_a_buffer_and_a_parameter_with_gaps() -> None:
    """Views of part of a buffer begin where it begins; a parameter with gaps or overlaps has a contiguous view."""
    buffer = torch.arange(20.0)
    matrix, gaps, repeated = torch.zeros(3, 2).t(), torch.zeros(6)[::2], torch.zeros(1).expand(2, 2)
    views = views_of(buffer[5:18], [matrix, gaps, repeated])
    assert views[0].tolist() == [[5, 7, 9], [6, 8, 10]]
    assert views[1].tolist() == [11, 12, 13]
    assert views[2].tolist() == [[14, 15], [16, 17]]
    views[2].fill_(0)
    assert buffer[14:18].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("shape", "strides", "dense"),
    [((2, 3), (3, 1), True), ((2, 3), (1, 2), True), ((2, 1, 3), (3, 99, 1), True), ((2, 3), (4, 1), False), ((2, 2), (1, 1), False)],
)
def test_a_view_keeps_strides_without_gap_and_overlap(shape: tuple[int, ...], strides: tuple[int, ...], dense: bool) -> None:
    """Whatever the order of dimensions; the stride of a dimension of size 1 says nothing. Other views fill their part all the same."""
    parameter = torch.zeros(300).as_strided(shape, strides)
    buffer = torch.zeros(parameter.numel())
    (view,) = views_of(buffer, [parameter])
    assert (view.stride() == strides) == dense
    view.fill_(1)
    assert buffer.sum() == parameter.numel()


class Carrier:
    """A backend that ends what it was handed when it is told to."""

    def __init__(self) -> None:
        self.handed: list[tuple[str, str]] = []
        """Names, and the threads that handed them over."""
        self.ended: dict[str, threading.Event] = {}

    def flight(self, name: str) -> Flight:
        """One that can be handed over."""
        return Flight(lambda: self._hand(name).wait(), lambda: self._hand(name))

    def stay(self, name: str) -> Flight:
        """One that can only be run."""
        return Flight(lambda: self._hand(name).wait(), lambda: None)

    def end(self, *names: str) -> None:
        """These have ended."""
        for name in names:
            self.ended[name].set()

    def _hand(self, name: str) -> _Handed:
        self.handed.append((name, threading.current_thread().name))
        self.ended[name] = threading.Event()
        return _Handed(self.ended[name])


class _Handed:
    def __init__(self, ended: threading.Event) -> None:
        self._ended = ended

    def wait(self) -> None:
        assert self._ended.wait(10)

    def is_done(self) -> bool:
        return self._ended.is_set()


MAIN, THREAD = threading.main_thread().name, "lane_0"


def test_a_thread_lane_hands_over_what_waits_for_nothing() -> None:
    """Three flights go to the backend at once, from the submitter's own thread, although none has ended."""
    carrier, lane = Carrier(), ThreadLane("lane")
    tickets = [lane.submit(carrier.flight(name), ()) for name in "abc"]
    assert carrier.handed == [("a", MAIN), ("b", MAIN), ("c", MAIN)]
    carrier.end("c", "a", "b")
    for ticket in tickets:
        ticket.wait()
    lane.close()


def test_a_thread_lane_keeps_the_order_behind_what_waits() -> None:
    """What comes after the first goes over as that ends, from the lane's thread; what waits for nothing goes after it, at once."""
    carrier, lane = Carrier(), ThreadLane("lane")
    first = lane.submit(carrier.flight("a"), ())
    second = lane.submit(carrier.flight("b"), (first,))
    third = lane.submit(carrier.flight("c"), ())
    time.sleep(0.05)
    assert carrier.handed == [("a", MAIN)]
    carrier.end("a")
    _until(lambda: len(carrier.handed) == 3)
    assert carrier.handed[1:] == [("b", THREAD), ("c", THREAD)]  # c, too, while b is under way
    carrier.end("b")
    second.wait()
    fourth = lane.submit(carrier.flight("d"), (second,))  # what it comes after has ended, and the thread has nothing left
    assert carrier.handed[3:] == [("d", MAIN)]
    carrier.end("c", "d")
    for ticket in (third, fourth):
        ticket.wait()
    lane.close()


def test_what_a_thread_lane_can_only_run_is_alone() -> None:
    """It begins when all before it have ended, and what comes after it waits for its end."""
    carrier, lane = Carrier(), ThreadLane("lane")
    for name in "ab":
        lane.submit(carrier.flight(name), ())
    alone = lane.submit(carrier.stay("c"), ())
    behind = lane.submit(carrier.flight("d"), (alone,))
    carrier.end("b")
    time.sleep(0.05)
    assert len(carrier.handed) == 2
    carrier.end("a")
    _until(lambda: len(carrier.handed) == 3)
    time.sleep(0.05)
    assert carrier.handed[2:] == [("c", THREAD)]
    carrier.end("c")
    _until(lambda: len(carrier.handed) == 4)
    carrier.end("d")
    behind.wait()
    lane.close()


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_a_queue_says_when_each_began() -> None:
    """Two at once, of four that are handed over at 1, 2, 3 and 4: the third begins with the first end, and that is the second's."""
    moments = iter(range(1, 100))
    times = Queue(2, lambda: next(moments))
    ends = [times.join() for _ in range(4)]
    assert ends[1]() == (2, 5)  # the third begins
    assert ends[0]() == (1, 6)  # and the fourth
    assert ends[3]() == (6, 7)
    assert ends[2]() == (5, 8)
    late = times.join()
    assert late() == (9, 10)


def test_a_queue_of_one_is_one_behind_the_other() -> None:
    """Each begins as the one before it ends."""
    moments = iter(range(1, 100))
    times = Queue(1, lambda: next(moments))
    ends = [times.join() for _ in range(3)]
    assert [end() for end in ends] == [(1, 4), (4, 5), (5, 6)]


def test_what_ends_before_it_could_begin_has_no_length() -> None:
    """A backend that carries more than was thought: nothing is lost, and no time is made up."""
    moments = iter(range(1, 100))
    times = Queue(1, lambda: next(moments))
    first, second = times.join(), times.join()
    assert second() == (3, 3)
    assert first() == (1, 4)
    assert times.join()() == (5, 6)


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
    injector = Injector(_table(), Delay(sleep))
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


@pytest.mark.slow
def test_a_compiled_block_is_not_broken_and_its_delay_comes_at_the_end() -> None:
    """One graph, which ``fullgraph`` asks for, whatever the hooks; with X = 2 all 12 ms come after the backward."""
    sleeps: list[float] = []
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    injector = Injector(_table(), Delay(sleeps.append))
    injector.attach(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    injector.begin(2 * ONE)
    compiled(torch.zeros(1, 2)).sum().backward()
    assert sleeps == []
    injector.finish()
    injector.detach()
    assert sleeps == [pytest.approx(12e-3)]


def test_until_the_last_has_started_an_exchange_of_an_earlier_step_it_is_waited_for() -> None:
    """Rank 0 started an exchange at 90 and waits for it from 160 to 230, rank 1 started it at 180: 20 of 70 ns are waiting."""

    def step(rank: int, started_ns: int, stall_ns: int) -> dict[str, Any]:
        record = {
            "rank": rank, "step": 2, "start_ns": 100, "forward_ns": 20, "backward_ns": 40, "stall_ns": stall_ns, "update_ns": 0,
            "end_ns": 230, "arrival_ns": 230 - stall_ns, "local_steps": 1, "loss": 1.0, "bytes_sent": 0,
        }  # fmt: skip
        return {"record": record, "paused_ns": 0, "started_ns": started_ns}

    parts = [{"steps": [step(0, 90, 70)], "spans": []}, {"steps": [step(1, 180, 10)], "spans": []}]
    table = steps_table(collect(parts)[0])
    assert [round(value * 1e9) for value in table["wait_s"]] == [20, 0]
    assert [round(value * 1e9) for value in table["exposed_comm_s"]] == [50, 10]


@pytest.mark.parametrize(("first", "second"), [(50, 50), (50, 30), (30, 50)])
def test_pauses_stop_the_clocks_of_all_ranks_for_as_long(first: int, second: int) -> None:
    """Both ranks pause after step 1 and begin step 2 together: as long as both pause is on no clock, and the target's time leaves it out.

    What one pauses longer than the other stays in its step. A transfer that is under way in the pause ends where step 2 has it.
    """

    def step(rank: int, number: int, start: int, end: int, paused: int) -> dict[str, Any]:
        record = {
            "rank": rank, "step": number, "start_ns": start, "forward_ns": 10, "backward_ns": 20, "stall_ns": 0, "update_ns": 0,
            "end_ns": end, "arrival_ns": None, "local_steps": 1, "loss": 1.0, "bytes_sent": 0,
        }  # fmt: skip
        return {"record": record, "paused_ns": paused}

    ranks = []
    for rank, paused in enumerate((first, second)):
        starts = [1000, 1100 + max(first, second), 1250, 1350, 1450]
        steps = [step(rank, number, starts[number - 1], starts[number], paused if number == 1 else 0) for number in (1, 2, 3, 4)]
        ranks.append({"steps": steps, "spans": [{"step": 1, "name": "all_reduce 0", "start_ns": 1010, "end_ns": 1200, "communicator": 0}]})
    records, spans, host_s = collect(ranks)
    assert host_s == pytest.approx(450e-9)
    cut = min(first, second)
    for rank in range(2):
        assert [(record.start_ns, record.end_ns) for record in records if record.rank == rank] == [
            (0, 150 - cut),
            (150 - cut, 250 - cut),
            (250 - cut, 350 - cut),
            (350 - cut, 450 - cut),
        ]
    assert [(span.start_ns, span.duration_ns) for span in spans] == [(10, 190 - cut)] * 2
    table = steps_table(records).set_index(["rank", "step"])
    assert table.loc[(1, 1), "other_s"] == pytest.approx(1e-9 * (150 - cut - 30))
    held_out = [(number, 0.0) for number in (2, 3, 4)]
    assert _to_target(held_out, 0.5, records) == (pytest.approx(1e-9 * (250 - cut)), Crossing(2, 2.0))
