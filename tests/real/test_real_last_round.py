"""The end of a script whose last local steps were not averaged: rank 0 says that the ranks' models differ."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import Ended, run_each_end

from fleetbench.errors import WorkerFailed
from real.job.launcher import launch_script

BEGIN = """
import os, sys, torch
from fleetbench import DistributedStrategy, fleet
def train(steps, **configs):
    fleet.init(DistributedStrategy(localsgd=True, localsgd_configs={"k_steps": 4, **configs}), timeout_s=60)
    model = fleet.distributed_model(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(steps):
        model(torch.ones(2, 4) * fleet.worker_index()).sum().backward(); optimizer.step(); optimizer.zero_grad()
"""
DILOCO = "outer_lr=0.7, outer_momentum=0.9"
FRAGMENTS = f"{DILOCO}, fragments=2, overlap_steps=1"
ROUND = "the script ends in the middle of a round"


def _ends(end: str, folder: Path, ranks: int = 2) -> list[Ended]:
    both = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "FLEETBENCH_STORE": str(folder / "store")}
    return run_each_end(BEGIN, [f"os.environ.update({both}, RANK='{rank}', LOCAL_RANK='{rank}')\n{end}" for rank in range(ranks)], folder)


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("end", ["train(7)", f"train(7, {DILOCO})", f"train(5, {FRAGMENTS})"], ids=["Local SGD", "DiLoCo", "fragments"])
def test_a_round_that_the_script_leaves_open_is_said_once(end: str, tmp_path: Path) -> None:
    """On rank 0, with what to call; the script still ends well."""
    first, second = _ends(end, tmp_path)
    assert (first.code, second.code) == (0, 0), (first.err, second.err)
    assert first.err.count(ROUND) == 1, first.err
    assert "fleet.synchronize()" in first.err
    assert ROUND not in second.err


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("end", "code"),
    [("train(7); fleet.synchronize()", 0), ("train(5)", 0), (f"train(8, {DILOCO})", 0), ("train(7); raise ValueError('planned')", 1)],
    ids=["synchronized", "after an averaging", "after an outer step", "an exception"],
)
def test_nothing_is_said_of_ranks_that_agree_or_fail(end: str, code: int, tmp_path: Path) -> None:
    """Trainers whose last step was followed by an averaging hold one model; an exception has words of its own."""
    for ended in _ends(end, tmp_path):
        assert (ended.code, ROUND in ended.err) == (code, False), ended.err


def test_nothing_is_said_to_a_trainer_alone(tmp_path: Path) -> None:
    """It has nobody to differ from."""
    (ended,) = _ends("train(7)", tmp_path, ranks=1)
    assert (ended.code, ROUND in ended.err) == (0, False), ended.err


@pytest.mark.slow
def test_it_is_said_after_the_scripts_own_group_is_destroyed(tmp_path: Path) -> None:
    """As many scripts end."""
    first, _ = _ends("train(7); torch.distributed.destroy_process_group()", tmp_path)
    assert (first.code, first.err.count(ROUND)) == (0, 1), first.err


@pytest.mark.slow
@pytest.mark.usefixtures("forked_launches")
def test_a_rank_that_synchronizes_alone_names_those_that_do_not_come(tmp_path: Path) -> None:
    """Its average would otherwise be of this step and of a later one of theirs."""
    script = tmp_path / "alone.py"
    script.write_text(
        "import torch\nfrom fleetbench import DistributedStrategy, fleet\n"
        "fleet.init(DistributedStrategy(localsgd=True, localsgd_configs={'k_steps': 4}), timeout_s=3)\n"
        "model = fleet.distributed_model(torch.nn.Linear(4, 1))\n"
        "optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))\n"
        "for step in range(1, 30):\n"
        "    model(torch.ones(2, 4)).sum().backward(); optimizer.step(); optimizer.zero_grad()\n"
        "    if fleet.is_first_worker() and step % 5 == 0: fleet.synchronize()\n"
    )
    with pytest.raises(WorkerFailed, match=r"fleet.synchronize: not every trainer came.*Ranks? 1"):
        launch_script(2, [str(script)], log_dir=tmp_path / "log", echo=lambda _: None)
    assert "take it out of `if fleet.is_first_worker():`" in (tmp_path / "log" / "workerlog.0").read_text()
