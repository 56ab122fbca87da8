"""Canary: a few collectives with known answers, before communicators are trusted with gradients.

Two NCCL communicators in flight at once can deadlock where ranks run them in different orders, and
gloo has silently corrupted results on CUDA tensors. Both show in seconds where they show at all.
"""

from __future__ import annotations

import threading
from typing import Protocol

import torch

from fleetbench.errors import EnvironmentLacks
from real.communication.lanes import Lane
from real.communication.streams import host_reads

_ROUNDS = 4
_NUMELS = (1, 1000, 1 << 20)
"""A large collective is still in flight when a small one on another communicator starts."""


class AveragingCommunicators(Protocol):
    """What the canary needs of ``Communicators``."""

    @property
    def trainers(self) -> int:
        """Ranks of every communicator."""
        ...

    @property
    def rank(self) -> int:
        """This process's rank."""
        ...

    def lane(self, communicator: int) -> Lane:
        """The lane of a communicator."""
        ...

    def average(self, tensor: torch.Tensor, communicator: int) -> None:
        """Replace ``tensor`` by its mean over all ranks."""
        ...


def canary(communicators: AveragingCommunicators, number: int, device: torch.device, timeout_s: float = 10.0) -> None:
    """Average known numbers on the first ``number`` communicators, alone and then all at once.

    Every rank calls this at the same place, before any operation of its own is in flight. The
    communicators' first collectives, which also make their connections, run one by one and under
    the groups' own timeout; the concurrent ones under ``timeout_s``.

    Raises ``EnvironmentLacks``, with what to switch off, for a wrong answer and for none in time.
    What a collective itself raises is passed on.
    """
    for communicator in range(number):
        flight = _Flight(communicators, communicator, 0, device)
        flight.start()
        if not flight.is_right():
            raise _failure("gives wrong answers", f"communicator {communicator}", number, device)
    failed: list[BaseException] = []
    wrong: list[int] = []

    def fly() -> None:
        try:
            for turn in range(_ROUNDS):
                flights = [_Flight(communicators, communicator, turn, device) for communicator in range(number)]
                for flight in flights:
                    flight.start()
                wrong.extend(flight.communicator for flight in flights if not flight.is_right())
        except BaseException as error:  # noqa: BLE001  # raised again by the caller's thread
            failed.append(error)

    thread = threading.Thread(target=fly, name="canary", daemon=True)  # one that hangs must not keep the process
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        raise _failure(f"gave no answer within {timeout_s:g} s", f"{number} communicators in flight at once", number, device)
    if failed:
        raise failed[0]
    if wrong:
        raise _failure("gives wrong answers while others are in flight", f"communicator {wrong[0]}", number, device)


class _Flight:
    """One all-reduce: rank r brings r + c + i at element i, whose mean (P - 1) / 2 + c + i is exact in float32."""

    def __init__(self, communicators: AveragingCommunicators, communicator: int, turn: int, device: torch.device) -> None:
        self.communicator = communicator
        self._communicators = communicators
        numel = _NUMELS[(turn + communicator) % len(_NUMELS)]
        answer = torch.arange(numel, dtype=torch.float32, device=device).remainder_(1024).add_(100 * communicator + turn)
        self._tensor = answer + communicators.rank
        self._answer = answer.add_((communicators.trainers - 1) / 2)

    def start(self) -> None:
        """Submit it to its lane, behind nothing."""
        lane = self._communicators.lane(self.communicator)
        self._ticket = lane.submit(lambda: self._communicators.average(self._tensor, self.communicator), ())

    def is_right(self) -> bool:
        """Wait for it, on the host as well, and compare."""
        self._ticket.wait()
        with host_reads():
            return torch.equal(self._tensor, self._answer)


def _failure(what: str, where: str, number: int, device: torch.device) -> EnvironmentLacks:
    hint = "set sync_nccl_allreduce = true, or nccl_comm_num = 1" if number > 1 else 'use another run.backend, or run.device = "cpu"'
    if number > 1 and device.type == "cuda":
        hint += "; if it stays, another run.backend (gloo on CUDA tensors needs a recent torch)"
    return EnvironmentLacks(what, where, f"device {device}", hint)
