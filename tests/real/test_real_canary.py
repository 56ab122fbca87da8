"""The canary: concurrent collectives with known answers, here against communicators that are well, wrong, or stuck."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from fleetbench.errors import EnvironmentLacks
from real.communication.canary import canary
from real.communication.lanes import Lane, ThreadLane

CPU = torch.device("cpu")


class Others:
    """Stands in for ``Communicators``: rank 1 of 3, whose others bring what the canary brings; ``before`` may spoil it."""

    trainers = 3
    rank = 1

    def __init__(self, number: int, before: Callable[[torch.Tensor, int], None]) -> None:
        self._lanes: list[Lane] = [ThreadLane(f"canary-lane-{index}") for index in range(number)]
        self._before = before
        self.count = 0
        self._in_flight = 0
        self._together = number
        self.met = threading.Event()
        """Set once all communicators have been in flight at the same time."""
        self._lock = threading.Lock()

    def lane(self, communicator: int) -> Lane:
        """See ``Communicators``."""
        return self._lanes[communicator]

    def average(self, tensor: torch.Tensor, communicator: int) -> None:
        """The mean of ranks 0, 1 and 2 is what rank 1 brings: nothing changes in a healthy one."""
        with self._lock:
            self.count += 1
            self._in_flight += 1
            if self._in_flight == self._together:
                self.met.set()
        self._before(tensor, communicator)
        with self._lock:
            self._in_flight -= 1

    def close(self) -> None:
        """See ``Communicators``."""
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
    canary(others, number, CPU)
    assert others.count > 2 * number
    assert others.met.is_set()
    assert _canary_thread_is_gone()
    others.close()


def test_concurrent_corruption_is_found() -> None:
    """One element, wrong by one, and only where two are in flight: named, with what to switch off."""
    others = Others(2, lambda *_: None)

    def spoil(tensor: torch.Tensor, communicator: int) -> None:
        if others.met.wait(PATIENCE_S) and communicator == 1:
            tensor.view(-1)[-1] += 1

    others._before = spoil
    with pytest.raises(EnvironmentLacks, match=r"(?s)communicator 1: gives wrong answers while others.*sync_nccl_allreduce = true"):
        canary(others, 2, CPU)
    others.close()


def test_a_single_communicator_that_lies_is_found() -> None:
    """What was summed is not what is there: as gloo once did on CUDA tensors."""
    others = Others(1, lambda tensor, _: tensor.add_(1))
    with pytest.raises(EnvironmentLacks, match=r"(?s)communicator 0: gives wrong answers.*another run.backend"):
        canary(others, 1, CPU)
    assert others.count == 1
    others.close()


def test_a_deadlock_of_two_communicators_is_reported_in_time(stop: threading.Event) -> None:
    """Two that block each other are given up after the timeout, although their threads are still stuck."""
    others = Others(2, lambda *_: None)
    others._before = lambda *_: others.met.wait(PATIENCE_S) and stop.wait(20)  # type: ignore[assignment, return-value]  # see above
    begin = time.monotonic()
    with pytest.raises(EnvironmentLacks, match=r"(?s)no answer within 1 s.*nccl_comm_num = 1"):
        canary(others, 2, CPU, timeout_s=1.0)
    assert time.monotonic() - begin < 10
    stop.set()
    others.close()


def test_what_a_collective_raises_is_passed_on() -> None:
    """A rank that died is not a sick communicator."""
    others = Others(2, lambda *_: None)

    def fail(_tensor: torch.Tensor, _communicator: int) -> None:
        if others.count > 2:
            raise RuntimeError("connection closed by peer")

    others._before = fail
    with pytest.raises(RuntimeError, match="connection closed"):
        canary(others, 2, CPU)
    others.close()
