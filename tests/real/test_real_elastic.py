"""Elastic local steps on processes: workers that die, leave early and join, against loops written out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import training_problem as problem
from processes import ForkedLaunches
from torch.nn.functional import cross_entropy

from fleetbench import DistributedStrategy
from fleetbench.errors import ConfigError, WorkerFailed

WORKER = str(Path(__file__).with_name("elastic_worker.py"))
DILOCO = {"k_steps": 3, "outer_lr": 0.7, "outer_momentum": 0.9}
pytestmark = [pytest.mark.torchft, pytest.mark.usefixtures("forked_launches")]


@pytest.fixture(autouse=True)
def quiet_torchft(monkeypatch: pytest.MonkeyPatch) -> None:
    """As importing torchft leaves it."""
    monkeypatch.setenv("RUST_LOG", "warn")


def launched(folder: Path, restarts: int = 0, **job: Any) -> list[str]:
    """Train three workers, and return the notes of their ends."""
    from real.elastic.launching import launch_elastic

    notes: list[str] = []
    job["configs"] = {**job["configs"], "elastic": True}
    script = [WORKER, str(folder), json.dumps(job)]
    launch_elastic(3, script, restarts=restarts, log_dir=folder / "log", echo=lambda _: None, say=notes.append)
    return notes


def saved(folder: Path, rank: int, step: int, life: int = 0) -> np.ndarray[Any, Any]:
    """Return a worker's parameters after a step."""
    found: np.ndarray[Any, Any] = np.load(folder / f"{rank}-{life}-{step}.npy")
    return found


def written_out(rounds: Sequence[Mapping[int, Sequence[int]]], outer: tuple[float, float], merge: int = 1) -> list[torch.Tensor]:
    """Parameters after each round: those who arrive, each with the steps that it has trained, and torch's SGD as outer optimizer."""
    networks = [problem.model("float64") for _ in range(3)]
    inner = [torch.optim.AdamW(network.parameters(), lr=0.01) for network in networks]
    theta = [own.detach().clone().requires_grad_() for own in networks[0].parameters()]
    sgd, found = torch.optim.SGD(theta, outer[0], outer[1], nesterov=outer[1] > 0), []
    for members in rounds:
        for rank, steps in members.items():
            for step in steps:
                inputs, labels = problem.own_batch(step, rank, 3, "float64")
                (cross_entropy(networks[rank](inputs), labels) / merge).backward()
                if step % merge == 0:
                    inner[rank].step()
                    inner[rank].zero_grad()
        total = sum(map(len, members.values()))
        with torch.no_grad():
            for place, own in enumerate(theta):
                own.grad = sum((own - [*networks[rank].parameters()][place]) * (len(steps) / total) for rank, steps in members.items())
        sgd.step()
        with torch.no_grad():
            for network in networks:
                for own, agreed in zip(network.parameters(), theta, strict=True):
                    own.copy_(agreed)
        found.append(problem.flat(networks[0]))
    return found


def test_rounds_are_over_those_that_arrive(tmp_path: Path) -> None:
    """A round of all, one with unequal steps, one that a worker dies in, one with a death in the exchange, and one alone."""
    acts = {1: [(5, "synchronize"), (8, "die in exchange")], 2: [(8, "die")]}
    notes = launched(tmp_path, configs=DILOCO, steps=15, acts=acts)
    rounds: list[dict[int, Sequence[int]]] = [
        {0: (1, 2, 3), 1: (1, 2, 3), 2: (1, 2, 3)},
        {0: (4, 5, 6), 1: (4, 5), 2: (4, 5, 6)},
        {0: (7, 8, 9)},  # worker 2 has died before its second step, and worker 1 when all distances were to be summed
        {0: (10, 11, 12)},
        {0: (13, 14, 15)},
    ]
    truth = written_out(rounds, (0.7, 0.9))
    for after, agreed in enumerate(truth, start=1):
        np.testing.assert_allclose(saved(tmp_path, 0, 3 * after) - 0, agreed, rtol=0, atol=1e-12, err_msg=f"round {after}")
    for rank in (1, 2):
        assert np.array_equal(saved(tmp_path, rank, 3), saved(tmp_path, 0, 3))
    assert np.array_equal(saved(tmp_path, 1, 5), saved(tmp_path, 0, 6))
    assert (tmp_path / "0-0-6.txt").read_text() == "0 3 6"
    assert (tmp_path / "0-0-15.txt").read_text() == "0 1 15"
    assert sorted(note.split(";")[0] for note in notes) == [
        f"note: rank {rank} was killed by SIGKILL, and is not started again" for rank in (1, 2)
    ]
