"""Communicators: what the process groups are asked for, against a stand-in for torch.distributed's NCCL."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from opening_rank import STRATEGIES
from processes import Arrays, run_ranks

from fleetbench.errors import EnvironmentLacks
from real.communication.communicators import Communicators
from real.communication.lanes import InlineLane, ThreadLane

TIMEOUT = timedelta(seconds=7)


class Options:
    """Stands in for ``dist.ProcessGroupNCCL.Options``, with its default time limit."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = timedelta(minutes=10)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of every process group that is made; this is rank 1 of 4."""
    groups: list[dict[str, Any]] = []

    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, pg_options: Any = None, **others: Any) -> object:
        groups.append({"ranks": ranks, "timeout": timeout, "backend": backend, "pg_options": pg_options, **others})
        return groups[-1]

    nccl = type("ProcessGroupNCCL", (), {"Options": Options})
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_world_size", lambda _group=None: 4)
    monkeypatch.setattr(dist, "get_rank", lambda _group=None: 1)
    return groups


def communicators_of(backend: str) -> Communicators:
    """Communicators of a backend that is not there."""
    return Communicators(backend, TIMEOUT, torch.device("cpu"), lambda _name: InlineLane())


def test_collectives_of_nccl_run_on_streams_of_high_priority(made: list[dict[str, Any]]) -> None:
    """Every process group of NCCL is asked for one, with the group's time limit; gloo has no such options."""
    communicators_of("nccl").require(2, {"inner": ((0, 1), (2, 3))})
    assert len(made) == 6
    assert all(group["pg_options"].is_high_priority_stream for group in made)
    assert {group["pg_options"]._timeout for group in made} == {TIMEOUT}
    assert len({id(group["pg_options"]) for group in made}) == 6  # torch writes to them
    made.clear()
    communicators_of("gloo").require(1)
    assert [group["pg_options"] for group in made] == [None]


class Sums:
    """Stands in for ``dist.all_reduce``: adds what the canary brings at the other places of a group; ``wrong`` is added to one group's."""

    def __init__(self, wrong: str = "") -> None:
        self.flown: list[str] = []
        self._wrong = wrong

    def all_reduce(self, tensor: torch.Tensor, op: Any, group: Any, async_op: bool) -> None:
        """In place; ``group`` is the arguments that it was made with."""
        assert async_op
        assert op == dist.ReduceOp.SUM
        self.flown.append(group["group_desc"])
        places = len(group["ranks"])
        tensor.sub_(group["ranks"].index(1) % 2).mul_(places).add_(places // 2 + (group["group_desc"] == self._wrong))


@pytest.fixture
def sums(made: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Sums:
    """All-reduces of the groups that are made, all of them right."""
    assert made == []
    found = Sums()
    monkeypatch.setattr(dist, "all_reduce", found.all_reduce)
    return found


HIERARCHY = {"inner": ((0, 1), (2, 3)), "leaders": ((0, 2),), "outer": ((0, 2), (1, 3))}
OWN = [f"{name}-{communicator}" for communicator in (0, 1) for name in ("world", "inner", "outer")]
"""Rank 1 leads no node."""


def test_every_group_of_nccl_is_tried_before_training_and_once(sums: Sums) -> None:
    """One by one, in one order, three times each: the first collective opens a group's connections. Later, only new groups are a reason."""
    communicators = communicators_of("nccl")
    communicators.require(2, HIERARCHY)
    communicators.prove(1)
    assert sums.flown == OWN * 3
    communicators.require(2, HIERARCHY)
    communicators.prove(1)
    assert len(sums.flown) == 18
    communicators.require(3, HIERARCHY)
    communicators.prove(1)
    assert len(sums.flown) == 18 + 27


@pytest.mark.parametrize("wrong", OWN)
def test_a_group_that_lies_is_found_whichever_it_is(made: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    """Not only the groups of all ranks; the error names it."""
    assert made == []
    monkeypatch.setattr(dist, "all_reduce", Sums(wrong).all_reduce)
    communicators = communicators_of("nccl")
    communicators.require(2, HIERARCHY)
    name, communicator = wrong.split("-")
    with pytest.raises(EnvironmentLacks, match=f"{name} of communicator {communicator}: gives wrong answers"):
        communicators.prove(2)


def test_batch_norm_meets_on_a_group_of_its_own(made: list[dict[str, Any]], sums: Sums) -> None:
    """On NCCL too, where it is tried alone, and then beside the bucket that may be in flight."""
    communicators = communicators_of("nccl")
    communicators.require(1)
    group = communicators.beside
    assert group is communicators.beside
    assert group is not communicators._group("world", 0)
    assert [one["group_desc"] for one in made] == ["world-0", "beside"]
    communicators.prove(1)
    assert sums.flown == ["world-0", "beside"] * (3 + 4)


def test_gloo_on_the_cpu_is_trusted_with_one_communicator_at_a_time(sums: Sums) -> None:
    """It opens its connections as a group is made."""
    communicators = communicators_of("gloo")
    communicators.require(1, HIERARCHY)
    communicators.prove(1)
    assert sums.flown == []


def test_what_moves_to_a_device_is_carried_by_lanes_of_its_own(made: list[dict[str, Any]]) -> None:
    """The process groups stay, and are open for two communicators as before."""
    communicators = Communicators("gloo", TIMEOUT, lane=lambda _name: InlineLane())
    communicators.require(2)
    before, groups = communicators.lane(1), len(made)
    communicators.move(torch.device("cpu", 0))
    assert len(made) == groups
    assert communicators.device == torch.device("cpu", 0)
    assert isinstance(before, InlineLane)
    assert isinstance(communicators.lane(1), ThreadLane)
    communicators.close()


@pytest.fixture(scope="module")
def counted() -> list[Arrays]:
    """Collectives of every communicator on four ranks; see ``opening_rank.py``."""
    return run_ranks(Path(__file__).with_name("opening_rank.py"), 4)


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_communicator_is_open_before_the_first_step(counted: list[Arrays], name: str) -> None:
    """Each has carried a collective when the engine is ready, and training makes no other."""
    for found in counted:
        first, later = found[f"{name}/at first"], found[f"{name}/later"]
        assert len(first) == len(later)
        assert np.all(first > 0)
        assert np.any(later > first)
        if name == "batch norm":  # 3 layers, four times a step, two steps
            assert later[-1] - first[-1] == 24
