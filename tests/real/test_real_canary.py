"""The canary: concurrent collectives with known answers, here against communicators that are well, wrong, or stuck."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from fleetbench.errors import EnvironmentLacks
from real.communication.communicators import Way, canary
from real.communication.lanes import Lane, ThreadLane

CPU = torch.device("cpu")


class Others:
    """Process groups of 3 ranks, of which this is the second, whose others bring what the canary brings; ``before`` may spoil it."""

    def __init__(self, number: int, before: Callable[[torch.Tensor, int], None]) -> None:
        self._lanes: list[Lane] = [ThreadLane(f"canary-lane-{index}") for index in range(number)]
        self._before = before
        self.count = 0
        self._in_flight = 0
        self._together = number
        self.met = threading.Event()
        """Set once all communicators have been in flight at the same time."""
        self._lock = threading.Lock()

    @property
    def ways(self) -> list[Way]:
        """A process group a lane."""
        return [Way(f"group {number}", number, lane, 3, 1, self._total_of(number)) for number, lane in enumerate(self._lanes)]

    def _total_of(self, group: int) -> Callable[[torch.Tensor], None]:
        def total(tensor: torch.Tensor) -> None:
            """Places 0 and 2 bring one less than place 1."""
            with self._lock:
                self.count += 1
                self._in_flight += 1
                if self._in_flight == self._together:
                    self.met.set()
            tensor.mul_(3).sub_(2)
            self._before(tensor, group)
            with self._lock:
                self._in_flight -= 1

        return total

    def close(self) -> None:
        """Release the lanes."""
        for lane in self._lanes:
            lane.close()


@pytest.fixture
def stop() -> Iterator[threading.Event]:
    """Set at the end, to let stuck threads go."""
    event = threading.Event()
    yield event
    event.set()


def _canary_thread_is_gone() -> bool:
    return not any(thread.name == "canary" for thread in threading.enumerate())


PATIENCE_S = 0.3
"""So long a collective waits for another one to be in flight."""


@pytest.mark.parametrize("number", [1, 3])
def test_healthy_communicators_pass(number: int) -> None:
    """Right answers raise nothing, on one communicator and on three that really are in flight at once."""
    others = Others(number, lambda *_: None)
    others._before = lambda *_: others.met.wait(PATIENCE_S)  # type: ignore[assignment, return-value]  # the answer is dropped
    canary(others.ways, others.ways, CPU)
    assert others.count == 3 * number + (0 if number == 1 else 4 * number)
    assert others.met.is_set()
    assert _canary_thread_is_gone()
    others.close()


def test_concurrent_corruption_is_found() -> None:
    """One element, wrong by one, and only where two are in flight: named, with what to switch off."""
    others = Others(2, lambda *_: None)

    def spoil(tensor: torch.Tensor, group: int) -> None:
        if others.met.wait(PATIENCE_S) and group == 1:
            tensor.view(-1)[-1] += 1

    others._before = spoil
    with pytest.raises(EnvironmentLacks, match=r"(?s)group 1: gives wrong answers while others.*sync_nccl_allreduce = true"):
        canary(others.ways, others.ways, CPU)
    others.close()


def test_a_single_communicator_that_lies_is_found() -> None:
    """What was summed is not what is there: as gloo once did on CUDA tensors."""
    others = Others(1, lambda tensor, _: tensor.add_(1))
    with pytest.raises(EnvironmentLacks, match=r"(?s)group 0: gives wrong answers.*another run.backend"):
        canary(others.ways, others.ways, CPU)
    assert others.count == 1
    others.close()


@pytest.mark.slow
def test_a_deadlock_of_two_communicators_is_reported_in_time(stop: threading.Event) -> None:
    """Two that block each other are given up after the timeout, although their threads are still stuck."""
    others = Others(2, lambda *_: None)
    others._before = lambda *_: others.met.wait(PATIENCE_S) and stop.wait(20)  # type: ignore[assignment, return-value]  # see above
    begin = time.monotonic()
    with pytest.raises(EnvironmentLacks, match=r"(?s)no answer within 1 s.*nccl_comm_num = 1"):
        canary(others.ways, others.ways, CPU, timeout_s=1.0)
    assert time.monotonic() - begin < 10
    stop.set()
    others.close()


def test_what_a_collective_raises_is_passed_on() -> None:
    """A rank that died is not a sick communicator."""
    others = Others(2, lambda *_: None)

    def fail(_tensor: torch.Tensor, _group: int) -> None:
        if others.count > 6:
            raise RuntimeError("connection closed by peer")

    others._before = fail
    with pytest.raises(RuntimeError, match="connection closed"):
        canary(others.ways, others.ways, CPU)
    others.close()


def test_the_thread_of_the_canary_works_on_the_ranks_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread begins on device 0; the one that flies is told the rank's, before its first collective."""
    told: list[tuple[str, torch.device, int]] = []
    others = Others(2, lambda *_: None)
    monkeypatch.setattr(torch.cpu, "set_device", lambda device: told.append((threading.current_thread().name, device, others.count)))
    canary(others.ways, others.ways, CPU)
    assert told == [("canary", CPU, 6)]
    others.close()


def test_groups_of_one_lane_fly_one_after_another() -> None:
    """A lane carries one operation at a time, so there is nothing to be tried at once."""
    others = Others(1, lambda *_: None)
    canary([*others.ways, *others.ways], [*others.ways, *others.ways], CPU)
    assert others.count == 6
    others.close()
