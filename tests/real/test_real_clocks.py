"""The clock of a CUDA device, on a ``torch.cuda`` that is not there: its clock and the host's drift apart."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
import torch

from real.communication import clocks

SECOND_NS = 10**9
MINUTE_NS = 60 * SECOND_NS


class Device:
    """A device whose clock gains 50 us a second on the host's; looking at the host's clock takes it 100 ns."""

    def __init__(self) -> None:
        self.now_ns = 5 * MINUTE_NS
        self.wait_ns = 8_000
        """What an event of an idle stream takes to be seen."""
        self.recorded: list[str] = []

    def monotonic_ns(self) -> int:
        """The host's clock, which is the truth."""
        self.now_ns += 100
        return self.now_ns

    def ms(self) -> float:
        """The device's own clock, which has a zero of its own."""
        return (self.now_ns * (1 + 50e-6)) / 1e6 - 12_345.0


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """In the place of ``torch.cuda`` and of the host's clock."""
    device = Device()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: str) -> None:
            device.recorded.append(stream)
            self._idle = stream == "idle"
            self._ms = device.ms()

        def synchronize(self) -> None:
            if self._idle:
                device.now_ns += device.wait_ns // 2
                self._ms = device.ms()
                device.now_ns += device.wait_ns // 2
                self._idle = False

        def query(self) -> bool:
            return True

        def elapsed_time(self, later: Event) -> float:
            return float(np.float32(later._ms - self._ms))

    cuda = types.SimpleNamespace(
        Event=Event,
        Stream=lambda _device, priority: "idle" if priority < 0 else "side",
        current_stream=lambda _device: "compute",
        synchronize=lambda _device: None,
    )
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(clocks, "time", types.SimpleNamespace(monotonic_ns=device.monotonic_ns))
    return device


def steps(device: Device, clock: clocks.Clock, minutes: float) -> list[int]:
    """How wrong the marks of steps of 100 ms are, which are resolved a step later; in nanoseconds."""
    wrong: list[int] = []
    waiting: Any = None
    begin = device.now_ns
    while device.now_ns - begin < minutes * MINUTE_NS:
        mark, truth = clock.mark(), device.now_ns
        if waiting is not None:
            (told,) = clock.resolve([waiting[0]])
            wrong.append(abs(told - waiting[1]))
        waiting = mark, truth
        device.now_ns += SECOND_NS // 10
    return wrong


def test_a_devices_clock_is_held_to_the_hosts(device: Device) -> None:
    """In ten minutes the device gains 30 ms; no mark is wrong by more than the drift of some two seconds."""
    wrong = steps(device, clocks.CudaClock(torch.device("cuda")), 10)
    assert len(wrong) > 5000
    assert max(wrong) < 100_000


def test_an_anchor_that_had_to_wait_is_not_taken(device: Device) -> None:
    """Where an event of the idle stream waits 40 ms for compute, what was known before is better, for as long as drift explains."""
    clock = clocks.CudaClock(torch.device("cuda"))
    steps(device, clock, 0.1)
    device.wait_ns = 2 * 20_000_000
    assert max(steps(device, clock, 0.5)) < 2_000_000
    device.wait_ns = 8_000
    assert max(steps(device, clock, 0.5)[20:]) < 100_000


def test_marks_of_one_call_are_on_one_scale(device: Device) -> None:
    """A stretch of 10 ms is 10 ms and the device's drift, also where a new anchor is due."""
    clock = clocks.CudaClock(torch.device("cuda"))
    for _ in range(50):
        begin = clock.mark()
        device.now_ns += SECOND_NS // 100
        end = clock.mark()
        device.now_ns += SECOND_NS // 3
        first, last = clock.resolve([begin, end])
        assert abs(last - first - SECOND_NS // 100) < 1_000


def test_anchors_are_of_the_idle_stream_alone_and_rare(device: Device) -> None:
    """Compute is never waited for; a second has three tries at most."""
    clock = clocks.CudaClock(torch.device("cuda"))
    device.recorded.clear()
    steps(device, clock, 1)
    assert 100 <= device.recorded.count("idle") <= 180
