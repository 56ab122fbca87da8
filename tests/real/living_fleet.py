"""One fleet after the other in a process that lives on, so that many trainings need one start."""

from __future__ import annotations

import atexit
import os

import torch.distributed as dist

from real.collective import Collective
from real.communication.communicators import collective_errors
from real.communication.lanes import ThreadLane
from real.fleet import Fleet


def be_rank(rank: int, ranks: int) -> None:
    """Set what a launcher sets; a rank that fails lives on, and does not end the others."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
    Collective._watch_failures = lambda _: collective_errors  # type: ignore[method-assign]  # which would end the process


def in_flight(fleet: Fleet) -> bool:
    """Whether a training that was refused has left a collective that others may never join: ``leave`` would wait for it."""
    if (job := fleet._job) is None:
        return False
    assert isinstance(job, Collective)
    lanes = [lane for lane in job.communicators._lanes if isinstance(lane, ThreadLane)]
    return not all(left.is_done() for lane in lanes for left in (*lane._handed, *([lane._last] if lane._last else [])))


def leave(fleet: Fleet, *, groups: bool = True) -> None:
    """Give back what a fleet has opened; every rank has left its training. ``groups``: process groups, too, which DTensors remember."""
    if (job := fleet._job) is not None:
        assert isinstance(job, Collective)
        atexit.unregister(job.leave)
        for engine in job.models.engines:
            engine.close()
        job.communicators.close()
    for group in list(dist.distributed_c10d._world.pg_map) if groups else ():
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
