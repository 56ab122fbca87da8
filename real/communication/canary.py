"""Canary: a few collectives with known answers, before communicators are trusted with gradients.

Two NCCL communicators in flight at once can deadlock where ranks run them in different orders, and
gloo has silently corrupted results on CUDA tensors. Both show in seconds where they show at all.
The first collectives also open the connections, which NCCL would else do inside the first backward.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from fleetbench.errors import EnvironmentLacks
from real.communication.lanes import Lane
from real.communication.streams import host_reads

_ROUNDS = 4
_NUMELS = (1, 1000, 1 << 20)
"""A large collective is still in flight when a small one on another communicator starts."""


@dataclass(frozen=True, slots=True)
class Way:
    """A process group of this rank, and the lane that its collectives run on."""

    name: str
    number: int
    """Of the group, the same on all its ranks: it chooses sizes and numbers."""
    lane: Lane
    ranks: int
    """Of the group."""
    place: int
    """This rank's, in the group."""
    total: Callable[[torch.Tensor], None]
    """Replaces a tensor by its sum over the group."""


def canary(ways: Sequence[Way], together: Sequence[Way], device: torch.device, timeout_s: float = 10.0) -> None:
    """Sum known numbers on all ``ways``, one by one, and then on several at once: those ``together``, in this order.

    Every rank calls this at the same place, before any operation of its own is in flight. What runs one
    by one runs under the groups' own timeout, what runs at once under ``timeout_s``. Operations of one
    lane follow each other.

    Raises ``EnvironmentLacks``, with what to switch off, for a wrong answer and for none in time.
    What a collective itself raises is passed on.
    """
    for turn, way in itertools.product(range(len(_NUMELS)), ways):
        if _wrong([way], turn, device):
            raise _failure("gives wrong answers", way.name, together, device)
    if len({id(way.lane) for way in together}) < 2:  # one lane has one operation in flight
        return
    failed: list[BaseException] = []
    wrong: list[str] = []

    def fly() -> None:
        try:
            torch.get_device_module(device).set_device(device)  # a thread begins on device 0
            for turn in range(_ROUNDS):
                wrong.extend(_wrong(together, turn, device))
        except BaseException as error:  # noqa: BLE001  # raised again by the caller's thread
            failed.append(error)

    thread = threading.Thread(target=fly, name="canary", daemon=True)  # one that hangs must not keep the process
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        raise _failure(f"gave no answer within {timeout_s:g} s", f"{len(together)} process groups in flight at once", together, device)
    if failed:
        raise failed[0]
    if wrong:
        raise _failure("gives wrong answers while others are in flight", wrong[0], together, device)


def _wrong(ways: Sequence[Way], turn: int, device: torch.device) -> list[str]:
    """Sum once on each, all started before any is waited for; the names of those with a wrong answer.

    Place r brings i + 10 n + turn at element i of group n, and one more where r is odd: exact in float32 up to 40,000 ranks.
    """
    flights = []
    for way in ways:
        numel = _NUMELS[(turn + way.number) % len(_NUMELS)]
        base = torch.arange(numel, dtype=torch.float32, device=device).remainder_(256).add_(10 * (way.number % 16) + turn)
        flights.append((way, base + way.place % 2, base.mul_(way.ranks).add_(way.ranks // 2)))
    tickets = [way.lane.submit(partial(way.total, tensor), ()) for way, tensor, _ in flights]
    wrong = []
    for (way, tensor, answer), ticket in zip(flights, tickets, strict=True):
        ticket.wait()
        with host_reads():  # the host waits as well
            if not torch.equal(tensor, answer):
                wrong.append(way.name)
    return wrong


def _failure(what: str, where: str, together: Sequence[Way], device: torch.device) -> EnvironmentLacks:
    hint = 'use another run.backend, or run.device = "cpu"'
    if len(together) > 1:
        hint = "set sync_nccl_allreduce = true, nccl_comm_num = 1 or sync_batch_norm = false"
        if device.type == "cuda":
            hint += "; if it stays, another run.backend (gloo on CUDA tensors needs a recent torch)"
    return EnvironmentLacks(what, where, f"device {device}", hint)
