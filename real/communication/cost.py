"""Cost: what an all-reduce takes, which a fusion by cost asks for."""

from __future__ import annotations

import time

import torch

from fleetbench.plan.fusion import Cost
from fleetbench.quantities import MIB
from real.communication.communicators import Communicators
from real.communication.streams import host_reads

_SMALL, _LARGE = 1024, 4 * MIB
_REPEATS = 5


def measured_cost(communicators: Communicators) -> Cost:
    """That of this process's communicator 0, from a small and a large all-reduce; rank 0's, on every rank."""
    communicators.require(1)
    medians = []
    for nbytes in (_SMALL, _LARGE):
        tensor = torch.zeros(nbytes // 4, device=communicators.device)
        times_ns = []
        for _ in range(_REPEATS):
            begin = time.monotonic_ns()
            communicators.lane(0).submit(lambda tensor=tensor: communicators.average(tensor), ()).wait()  # type: ignore[misc]  # a default binds the loop's variable
            with host_reads():
                float(tensor[0])  # the host waits for the device
            times_ns.append(time.monotonic_ns() - begin)
        medians.append(sorted(times_ns)[_REPEATS // 2])
    per_byte = max(0.0, (medians[1] - medians[0]) / (_LARGE - _SMALL))
    found = torch.tensor([max(0.0, medians[0] - per_byte * _SMALL), per_byte], dtype=torch.float64, device=communicators.device)
    communicators.broadcast(found)
    with host_reads():
        latency_ns, ns_per_byte = found.tolist()
    return Cost(latency_ns=latency_ns, ns_per_byte=ns_per_byte)
