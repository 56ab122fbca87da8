"""Lanes on streams, and the fake streams that hold them to their order, in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from fake_memory import Segment, UnorderedAccess, _carve
from fake_streams import FakeStreams, HostSynchronised, StreamOrder, allowed, host_may_wait
from torch import nn

from fleetbench.plan.layers import Layer, LayerTable
from fleetbench.plan.operations import Operation
from fleetbench.quantities import Nanoseconds
from fleetbench.stragglers import ONE
from real.communication.communicators import make_lane
from real.communication.lanes import InlineLane, Lane, StreamLane, ThreadLane, host_reads
from real.compute.injector import Injector, KernelDelay
from real.engine.stopwatch import Stopwatch


@pytest.fixture
def streams() -> FakeStreams:
    """A device without history."""
    return FakeStreams()


LANES: dict[str, Callable[[], Lane]] = {
    "thread": lambda: ThreadLane("test"),
    "stream": lambda: StreamLane(FakeStreams()),
    "stream on a host": lambda: StreamLane(torch.cpu),
    "inline": InlineLane,
}


@pytest.mark.parametrize("make", LANES.values(), ids=LANES)
def test_every_lane_runs_in_order_and_behind_tickets(make: Callable[[], Lane]) -> None:
    """Three operations on two lanes, each after the one before, run in that order; a ticket may be waited for twice."""
    both, ran = (make(), make()), []
    tickets = []
    for number in range(6):
        tickets.append(both[number % 2].submit(lambda number=number: ran.append(number), tickets[-1:]))  # type: ignore[misc]  # a default binds it
    for ticket in (*tickets, *tickets):
        ticket.wait()
    assert ran == list(range(6))
    for lane in both:
        lane.close()


@pytest.mark.parametrize("make", LANES.values(), ids=LANES)
def test_what_an_operation_raises_is_not_lost(make: Callable[[], Lane]) -> None:
    """It comes out of ``submit`` or of ``wait``, and the lane works on."""
    lane = make()

    def fail() -> None:
        raise RuntimeError("connection closed")

    with pytest.raises(RuntimeError, match="connection closed"):
        lane.submit(fail, ()).wait()
    lane.submit(lambda: None, ()).wait()
    lane.close()


def test_a_stream_lane_blocks_nobody_and_an_inline_lane_does_not_leave_the_thread() -> None:
    """Both run their operations in the submitter's thread, at once."""
    ran: list[threading.Thread] = []
    for lane in (StreamLane(FakeStreams()), InlineLane()):
        lane.submit(lambda: ran.append(threading.current_thread()), ())
    assert ran == [threading.current_thread()] * 2


def test_the_thread_of_a_lane_works_on_the_ranks_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread begins on device 0; a lane's is told the rank's before its first operation."""
    told: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(torch.cpu, "set_device", lambda device: told.append((threading.current_thread().name, device)))
    lane = make_lane(torch.device("cpu"), "gloo", "told")
    lane.submit(lambda: told.append(("ran", torch.device("cpu"))), ()).wait()
    lane.close()
    assert told == [("told_0", torch.device("cpu")), ("ran", torch.device("cpu"))]


def test_the_thread_of_a_lane_works_on_the_submitters_stream(streams: FakeStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo orders its copies after the stream of the thread that calls it, and a thread would begin on the default one."""
    monkeypatch.setattr(streams, "set_device", lambda _device: None, raising=False)
    monkeypatch.setattr(torch, "get_device_module", lambda _device: streams)
    lane, stream, seen = ThreadLane("test"), streams.Stream(), []
    with streams.stream(stream):
        ticket = lane.submit(lambda: seen.append(streams.current_stream()), ())
    ticket.wait()
    lane.close()
    assert seen == [stream]


def test_an_inline_lane_waits_for_tickets_of_other_lanes(streams: FakeStreams) -> None:
    """What a side stream has written is ordered before an operation that comes after it; without ``after`` it is not."""
    data = torch.zeros(4)
    with StreamOrder(streams):
        ticket = StreamLane(streams).submit(lambda: data.add_(1), ())  # type: ignore[arg-type, return-value]  # the sum is dropped
        with pytest.raises(UnorderedAccess):
            InlineLane().submit(lambda: data.add_(1), ())  # type: ignore[arg-type, return-value]  # see above
        InlineLane().submit(lambda: data.add_(1), [ticket])  # type: ignore[arg-type, return-value]  # see above


def test_an_operation_runs_on_the_side_stream_and_the_caller_stays_where_it_was(streams: FakeStreams) -> None:
    """``stream`` holds for the operation only, also when it raises."""
    lane, seen, before = StreamLane(streams), [], streams.current_stream()
    lane.submit(lambda: seen.append(streams.current_stream()), ())
    with pytest.raises(ZeroDivisionError):
        lane.submit(lambda: print(1 // 0), ())
    assert seen == [lane.stream]
    assert streams.current_stream() is before


def test_legal_reads_are_marked_for_as_long_as_they_last() -> None:
    """``host_reads`` ends with its context, also inside another."""
    assert not host_may_wait()
    with host_reads():
        with host_reads():
            pass
        assert host_may_wait()
    assert not host_may_wait()


def test_slices_of_a_buffer_are_told_apart(streams: FakeStreams) -> None:
    """Two streams may write two slices of one buffer; a read of both needs an order after both."""
    other = streams.Stream()
    with StreamOrder(streams):
        buffer = torch.zeros(10)
        other.wait_stream(streams.current_stream())
        with streams.stream(other):
            buffer[:5].add_(1)
        buffer[5:].add_(2)
        with pytest.raises(UnorderedAccess, match="bytes 0-40"):
            buffer.sum()
        streams.current_stream().wait_stream(other)
        total = buffer.sum()
    assert total == 15


def test_an_order_passes_on_through_a_third_stream(streams: FakeStreams) -> None:
    """A before B and B before C is A before C; an event holds what it held when it was recorded."""
    first, second = streams.Stream(), streams.Stream()
    with StreamOrder(streams):
        data = torch.zeros(4)
        first.wait_stream(streams.current_stream())
        with streams.stream(first):
            event = first.record_event()
            data.add_(1)
        second.wait_event(event)
        with streams.stream(second), pytest.raises(UnorderedAccess):
            data.add_(1)
        second.wait_stream(first)
        streams.current_stream().wait_event(second.record_event())
        data.add_(1)


def test_views_and_shapes_are_no_accesses(streams: FakeStreams) -> None:
    """To take a view of bytes that another stream writes, or an empty tensor like them, touches nothing."""
    other = streams.Stream()
    with StreamOrder(streams):
        data = torch.zeros(2, 4)
        other.wait_stream(streams.current_stream())
        with streams.stream(other):
            data.add_(1)
        data.t().reshape(4, 2)[1:].detach().view(-1, 1) if data.t().is_contiguous() else data[1:].view(-1).detach()
        torch.empty_like(data)
        streams.current_stream().wait_stream(other)


def test_many_tensors_in_one_operation_are_all_seen(streams: FakeStreams) -> None:
    """Operations on lists read and write every one of their tensors."""
    other = streams.Stream()
    with StreamOrder(streams):
        sources, targets = [torch.ones(3) for _ in range(3)], [torch.zeros(3) for _ in range(3)]
        other.wait_stream(streams.current_stream())
        with streams.stream(other):
            torch._foreach_copy_(targets, sources)
        with pytest.raises(UnorderedAccess, match="overwrites"):
            sources[2].zero_()
        with pytest.raises(UnorderedAccess, match="reads"):
            targets[1] + 1
        streams.current_stream().wait_stream(other)


def test_running_statistics_are_written(streams: FakeStreams) -> None:
    """Batch norm in training writes its running mean, although torch's schema does not say so."""
    other, norm = streams.Stream(), nn.BatchNorm1d(3)
    with StreamOrder(streams):
        data = torch.ones(4, 3)
        other.wait_stream(streams.current_stream())
        with streams.stream(other):
            output = norm(data)
        with pytest.raises(UnorderedAccess):
            norm.running_mean + 1
        streams.current_stream().wait_stream(other)
        del output


def test_a_read_by_the_host_orders_what_comes_later(streams: FakeStreams) -> None:
    """Once the host has waited for a stream, every stream comes after it."""
    other = streams.Stream()
    with StreamOrder(streams):
        data = torch.zeros(4)
        other.wait_stream(streams.current_stream())
        with streams.stream(other), allowed():
            data.add_(1)
            assert data.sum().item() == 4
        data.add_(1)


def test_indexing_waits_only_for_a_mask(streams: FakeStreams) -> None:
    """Positions give a result of known size; a mask does not."""
    with StreamOrder(streams):
        data = torch.arange(4.0)
        data[torch.tensor([2, 1])].sum()
        with pytest.raises(HostSynchronised, match="index"):
            data[data > 1]


def test_torchs_optimizers_may_read_their_own_steps(streams: FakeStreams) -> None:
    """Adam counts steps in the host's memory; that read is no synchronisation, and one in a hook after the step is."""
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([parameter], lr=0.1, foreach=False)
    with StreamOrder(streams):
        parameter.grad = torch.ones(3)
        optimizer.step()
        optimizer.register_step_post_hook(lambda *_: print(parameter.sum().item()))
        with pytest.raises(HostSynchronised):
            optimizer.step()


def test_torchs_methods_are_back_behind_the_order(streams: FakeStreams) -> None:
    """``tolist`` and the others are torch's own again, also after an error."""
    before = {name: getattr(torch.Tensor, name) for name in ("numpy", "tolist", "cpu", "__array__")}
    with pytest.raises(ZeroDivisionError), StreamOrder(streams):
        print(1 // 0)
    assert {name: getattr(torch.Tensor, name) for name in before} == before
    assert torch.ones(2).tolist() == [1.0, 1.0]


def test_a_new_tensor_at_an_old_address_has_no_past(streams: FakeStreams) -> None:
    """Memory that came back to the allocator is not held against its next owner."""
    other = streams.Stream()
    with StreamOrder(streams):
        for _ in range(2000):
            with streams.stream(other):
                torch.ones(16)
            torch.ones(16)
    assert len(streams.memory._blocks) < 2000


def test_segments_cover_what_was_asked_for() -> None:
    """Cut at both ends, with gaps filled, and the rest untouched."""
    segments = [Segment(0, 4), Segment(4, 10), Segment(12, 20)]
    inside = _carve(segments, 6, 15)
    assert [(item.start, item.end) for item in inside] == [(6, 10), (10, 12), (12, 15)]
    assert [(item.start, item.end) for item in segments] == [(0, 4), (4, 6), (6, 10), (10, 12), (12, 15), (15, 20)]
    assert [(item.start, item.end) for item in _carve(segments, 30, 31)] == [(30, 31)]
    assert segments[-1].start == 30


class DeviceClock:
    """A device far behind the host: a mark is passed when ``reached`` says so, and nothing waits unless ``may_wait``."""

    def __init__(self) -> None:
        self.now = self.reached = 0
        self.may_wait = False

    def mark(self) -> int:
        """See ``Clock``; the n-th mark is at n times n ns, so that no two stretches are alike."""
        self.now += 1
        return self.now

    def passed(self, mark: int) -> bool:
        """See ``Clock``."""
        return mark <= self.reached

    def resolve(self, marks: Sequence[int]) -> list[int]:
        """See ``Clock``."""
        assert self.may_wait or all(self.passed(mark) for mark in marks), "the host waits for the device inside a step"
        return [mark * mark for mark in marks]


def _synchronous_step(watch: Stopwatch, step: int, loss: float | torch.Tensor) -> None:
    """Eight marks, the begin of the step among them."""
    watch.begin_step(step)
    watch.forward_ends()
    watch.arrives()
    watch.backward_ends()
    watch.sends(100)
    with watch.collective(Operation(id=0, kind="all_reduce", payload="gradient", bucket=0), step):
        pass
    watch.stall_ends()
    watch.update_begins()
    watch.update_ends()
    watch.loss(loss)


def test_a_step_is_computed_when_the_device_has_passed_it() -> None:
    """Three steps are begun while the device is at none; it reaches the first, and only that becomes a record."""
    clock = DeviceClock()
    watch = Stopwatch(0, clock=clock)
    for step in range(3):
        _synchronous_step(watch, step, 0.5)
    assert watch.steps == []
    clock.reached = 10  # the begin of the second step, nine marks after that of the first
    watch.begin_step(3)
    assert [timed.record.step for timed in watch.steps] == [0]
    record = watch.steps[0].record
    assert (record.start_ns, record.end_ns) == (1, 100)
    assert (record.forward_ns, record.backward_ns) == (2**2 - 1, 4**2 - 2**2)
    assert (record.arrival_ns, record.stall_ns, record.update_ns) == (3**2, 7**2 - 4**2, 9**2 - 8**2)
    assert (record.loss, record.bytes_sent) == (0.5, 100)
    assert [(span.name, span.start_ns, span.end_ns) for span in watch.spans] == [
        ("forward", 1, 4), ("backward", 4, 16), ("all_reduce 0", 25, 36), ("wait", 16, 49), ("update", 64, 81)
    ]  # fmt: skip
    clock.may_wait = True
    watch.finish()
    assert [timed.record.step for timed in watch.steps] == [0, 1, 2]
    assert len(watch.spans) == 15


def test_a_stall_behind_the_update_belongs_to_no_update() -> None:
    """Local SGD: what comes before the averaging and what comes after it are update, what lies between is stall; a pause counts apart."""
    clock = DeviceClock()
    clock.may_wait = True
    watch = Stopwatch(0, clock=clock)
    watch.begin_step(1)  # 1
    watch.forward_ends()
    watch.backward_ends()
    watch.update_begins()  # 4
    watch.stall_begins()
    watch.stall_ends()
    watch.update_ends()  # 7
    watch.closes_round(4)
    with watch.pause():
        pass
    watch.finish()
    (timed,) = watch.steps
    assert (timed.record.update_ns, timed.record.stall_ns) == (25 - 16 + 49 - 36, 36 - 25)
    assert (timed.record.arrival_ns, timed.record.local_steps, timed.paused_ns) == (25, 4, 81 - 64)
    assert [span.name for span in watch.spans] == ["forward", "backward", "update", "wait", "merge"]


def test_an_exchange_of_an_earlier_step_was_started_there() -> None:
    """The exchange of an average is started at the end of step 1 and waited for in step 2, behind one of a scalar."""
    clock = DeviceClock()
    clock.may_wait = True
    watch = Stopwatch(0, clock=clock)
    watch.begin_step(1)  # 1
    watch.forward_ends()
    watch.backward_ends()
    watch.update_begins()  # 4
    watch.arrives(of_average=True)
    watch.update_ends()
    watch.begin_step(2)
    watch.forward_ends()
    watch.backward_ends()  # 9
    watch.arrives()
    watch.update_begins()
    watch.stall_begins()
    watch.stall_ends()
    watch.update_ends()
    watch.finish()
    first, second = watch.steps
    assert (first.record.arrival_ns, first.started_ns) == (25, None)
    assert (second.record.arrival_ns, second.started_ns) == (144, 25)


@pytest.mark.parametrize("fetch_every", [1, 3])
def test_losses_stay_on_the_device_until_they_are_read_together(streams: FakeStreams, fetch_every: int) -> None:
    """Inside a stream order, which refuses unmarked reads: seven losses that are overwritten after their step."""
    watch, loss = Stopwatch(0, fetch_every=fetch_every), torch.zeros(())
    known = []
    with StreamOrder(streams):
        for step in range(7):
            loss.fill_(step / 4)
            _synchronous_step(watch, step, loss)
            known.append(len(watch.steps))
            with pytest.raises(HostSynchronised):
                loss.item()
        watch.finish()
    assert known == ([0, 1, 2, 3, 4, 5, 6] if fetch_every == 1 else [0, 0, 0, 3, 3, 3, 6])
    assert [timed.record.loss for timed in watch.steps] == [step / 4 for step in range(7)]


def test_nothing_is_remembered_where_nothing_is_kept() -> None:
    """A user's own training may run for weeks."""
    watch = Stopwatch(0, keep=False)
    for step in range(3):
        _synchronous_step(watch, step, torch.ones(()))
    watch.finish()
    assert (watch.steps, watch.spans) == ([], [])
    assert not watch._closed
    assert not watch._stretches


class ExactDelay:
    """A device that delays by what it is told, in steps of its own."""

    shortest_ns = 1_000_000

    def __init__(self) -> None:
        self.added: list[int] = []

    def add(self, missing_ns: int) -> int:
        """See ``Delay``."""
        self.added.append(missing_ns)
        return missing_ns


def test_delays_below_the_devices_shortest_are_saved_up() -> None:
    """X = 1/2 of three layers of 1 ms forward and 2 ms backward: nothing is too short to count, and all adds up to half of 9 ms."""
    layers = tuple(Layer(name=str(index), gradients=(), forward=Nanoseconds(10**6), backward=Nanoseconds(2 * 10**6)) for index in range(3))
    model, delay = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))), ExactDelay()
    injector = Injector(LayerTable(key="test", layers=layers), delay)
    injector.attach(model)
    injector.begin(ONE // 2)
    model(torch.zeros(1, 2)).sum().backward()
    injector.finish()
    injector.detach()
    assert sum(delay.added) == 4_500_000
    assert delay.added == [1_000_000, 1_500_000, 1_000_000, 1_000_000]


class BoostingDevice:
    """A device of 2 cycles a nanosecond when it idles and 1.4 under load, whose times are known as soon as they have passed."""

    def __init__(self) -> None:
        self.now_ns = 0.0
        self.cycles_per_ns = 2.0
        self.passed_ns = 0.0

    def load(self) -> None:
        """Work, which lowers the rate."""
        self.cycles_per_ns = 1.4

    def spin(self, cycles: int) -> None:
        """A delay."""
        self.now_ns += cycles / self.cycles_per_ns

    def mark(self) -> float:
        """See ``Clock``."""
        return self.now_ns

    def passed(self, mark: float) -> bool:
        """See ``Clock``."""
        return mark <= self.passed_ns

    def resolve(self, marks: Sequence[float]) -> list[int]:
        """See ``Clock``."""
        return [round(mark) for mark in marks]


def test_delays_of_a_device_are_as_long_as_asked_for_under_load() -> None:
    """The first one already; and where training takes more power than the calibration did, those after the first that have passed."""
    device = BoostingDevice()
    delay = KernelDelay(device, device.spin, device.load)

    def added(missing_ns: int) -> float:
        before = device.now_ns
        assert delay.add(missing_ns) == missing_ns
        return device.now_ns - before

    assert added(10_000_000) == pytest.approx(10_000_000, rel=1e-3)
    assert added(20_000) == pytest.approx(20_000, rel=1e-3)
    device.cycles_per_ns = 1.2
    for _ in range(40):
        assert added(1_000_000) == pytest.approx(1_000_000 * 1.4 / 1.2, rel=1e-3)  # the device is after
    device.passed_ns = device.now_ns
    assert added(1_000_000) == pytest.approx(1_000_000, rel=1e-3)
    assert added(20_000) == pytest.approx(20_000, rel=1e-3)
