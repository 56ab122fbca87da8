"""Another job begins from a server's checkpoint: parameters and the optimizer's state are the file's, the rules the job's own."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server_desk import Desk, desk

from fleetbench.plan.servers.rules import Mode, Table
from fleetbench.workloads.server_updates import OPTIONS
from real.servers.parameters import Spec


def of(server: Desk, **changes: Any) -> Spec:
    """The desk's description with other fields; of ``rules`` those that are given."""
    rules = dataclasses.replace(server.spec.rules, **changes.pop("rules", {}))
    return dataclasses.replace(server.spec, rules=rules, **changes)


def momentum(value: float) -> dict[str, Any]:
    """Fields of a description."""
    return {"optimizer": "momentum", "options": {**OPTIONS["momentum"], "momentum": value}}


def joins(server: Desk, rank: int, spec: Spec) -> str:
    """A trainer of another job joins; the kind of its answer, or why it is refused."""
    ((kind, _),) = server.say("join", rank, [spec.to_json()])
    return server.said("refused")[0].decode() if kind == "refused" else kind


def saved(folder: Path, mode: Mode = "asynchronous") -> None:
    """Two trainers, momentum 0.9, one gradient of (1, 2) or in GeoSGD one delta; then the file."""
    with desk(mode) as before:
        before.spec = of(before, **({} if mode == "geo_sgd" else momentum(0.9)))
        before.enter(0, 1)
        kind = "delta" if mode == "geo_sgd" else "gradient"
        before.say(kind, 0, before.push([1, 2], []), rate=1.0, count=1)
        assert before.server._save(folder) == ""


@pytest.mark.parametrize("trainers", [1, 3])
def test_a_job_of_other_trainers_rules_and_options_goes_on(trainers: int, tmp_path: Path) -> None:
    """V = g, p = -v in the first job; in the second, with momentum 0.5: v = 0.5 (1, 2) + (1, 1), p = -(1, 2) - v. Its own rules hold."""
    saved(tmp_path)
    with desk(trainers=trainers, restore=tmp_path) as server:
        rules = {"max_merge": 4, "queue_size": 7}
        spec = of(server, rules=rules, **momentum(0.5))
        for rank in range(trainers):
            assert joins(server, rank, spec) == "ready"
        assert server.dense() == [-1, -2]
        server.say("gradient", 0, server.push([1, 1], []), rate=1.0, count=1)
        assert server.dense() == [-2.5, -4]
        assert server.state.version == 2
        assert server.server.role is not None
        assert server.server.role.strategy.rules == dataclasses.replace(spec.rules, trainers=trainers)
        for rank in range(trainers):
            assert not server.state.stopped
            server.say("leave", rank)
        assert server.state.stopped


def test_a_synchronous_job_closes_its_rounds_with_its_own_trainers(tmp_path: Path) -> None:
    """An asynchronous job of two wrote the file; three synchronous ones wait for each other and move by their mean, (1 + 2 + 6) / 3."""
    saved(tmp_path)
    with desk("synchronous", trainers=3, restore=tmp_path) as server:
        spec = of(server, **momentum(0.0))
        for rank in range(3):
            joins(server, rank, spec)
        for rank, number in enumerate((1, 2, 6)):
            assert server.dense() == [-1, -2]
            server.say("gradient", rank, server.push([number, number], []), rate=1.0, count=1)
        assert server.dense() == [-4, -5]


def test_a_trainer_that_the_file_does_not_know_begins_with_all_rows(tmp_path: Path) -> None:
    """GeoSGD with two trainers, then with three and another K: the third one joins and has every row, and its first pull brings none."""
    saved(tmp_path, "geo_sgd")
    with desk("geo_sgd", trainers=3, restore=tmp_path) as server:
        spec = of(server, rules={"k_steps": 5})
        for rank in range(3):
            assert joins(server, rank, spec) == "ready"
        ((_, tensors),) = server._sent
        assert np.frombuffer(tensors[0], np.float32).tolist() == [1, 2]
        assert np.frombuffer(tensors[1], np.float32).tolist() == [0] * 4
        server.say("pull", 2)
        assert server._sent[-1][1][1] == b""


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dtype": "float64"}, "dtype ('float32' on the server, 'float64' on the trainer)"),
        ({"optimizer": "sgd", "options": OPTIONS["sgd"]}, "optimizer ('momentum' on the server, 'sgd' on the trainer)"),
        (
            {"dense": 3, "names": ("d", "e"), "sizes": (2, 1)},
            "dense (2 on the server, 3 on the trainer); names (('d',) on the server, ('d', 'e') on the trainer)",
        ),
        (
            {"tables": (Table(name="t", rows=9, width=1),)},
            "tables (({'name': 't', 'rows': 4, 'width': 1},) on the server, ({'name': 't', 'rows': 9, 'width': 1},) on the trainer)",
        ),
        ({"rules": {"trainers": 5}}, "trainers (2 on the server, 5 on the trainer)"),
    ],
    ids=["dtype", "optimizer", "parameters", "embedding", "trainers"],
)
def test_another_model_or_optimizer_is_refused_by_name(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    """What cannot go on from the file, and what of it; the next trainer, who fits, does."""
    saved(tmp_path)
    with desk(restore=tmp_path) as server:
        assert named in joins(server, 0, of(server, **{**momentum(0.9), **changes}))
        assert joins(server, 1, of(server, **momentum(0.9))) == "ready"


def test_trainers_of_one_job_have_one_set_of_rules(tmp_path: Path) -> None:
    """The first one's hold, others are refused by name: with a checkpoint, and without."""
    different = "it differs in max_merge (1 on the server, 4 on the trainer); momentum (0.9 on the server, 0.5 on the trainer)"
    saved(tmp_path)
    with desk() as fresh, desk(restore=tmp_path) as resumed:
        for server in (fresh, resumed):
            assert joins(server, 0, of(server, **momentum(0.9))) in ("ready", "blank")
            assert joins(server, 1, of(server, rules={"max_merge": 4}, **momentum(0.5))) == different
