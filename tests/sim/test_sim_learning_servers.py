"""Virtual trainers of parameter servers: they follow an order as a loop written here does, and the simulator's clock decides that order."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from served_cases import ASYNCHRONOUS, CLICKS, DIGITS, PAIRS, SYNCHRONOUS, geo_sgd, merging, served
from torch import nn

from fleetbench.errors import ConfigError
from fleetbench.workloads.data.data import open_batches, prepare
from fleetbench.workloads.models.registry import build_model
from fleetbench.workloads.training import sampler_of
from sim.learning.served import Played, ServedReplay, served_job
from sim.learning.trajectory import key_of
from sim.learning.virtual_training import train
from sim.run import simulate
from sim.servers.simulate import execute

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own sparse gradients do not opt
EXACT = {"rtol": 1e-10, "atol": 1e-12}


@pytest.mark.sample(2)
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_synchronous_servers_train_as_one_process(optimizer: str, tmp_path: Path) -> None:
    """By the mean of three gradients; losses and evaluations are those of collective synchronous training."""
    experiment = served({**DIGITS, "optimizer": optimizer, "lr": 0.01}, SYNCHRONOUS)
    replay = ServedReplay(experiment, Played.of(experiment), tmp_path / "replay")
    found = replay.run()
    workload = experiment.workload
    prepare(workload, experiment.run.seed, tmp_path)
    batches = [open_batches(workload, tmp_path, sampler_of(experiment, tmp_path, 3, rank)) for rank in range(3)]
    model = build_model(workload.model, workload.model_options, workload.dtype, experiment.run.seed)
    kinds = {"sgd": torch.optim.SGD, "momentum": torch.optim.SGD, "adam": torch.optim.Adam}
    plain = kinds[optimizer](model.parameters(), lr=0.01, **({"momentum": 0.9} if optimizer == "momentum" else {}))
    losses = []
    for step in range(workload.steps):
        plain.zero_grad()
        own = [nn.functional.cross_entropy(model(inputs), labels) for inputs, labels in (one.batch(step) for one in batches)]
        (sum(own) / 3).backward()  # type: ignore[union-attr]  # of three
        plain.step()
        losses.append([loss.item() for loss in own])
    torch.testing.assert_close(replay.evaluated(), torch.cat([value.detach().reshape(-1) for value in model.parameters()]), **EXACT)
    np.testing.assert_allclose(found.losses, losses, rtol=1e-10)
    collective = train(experiment.replace(strategy=type(experiment.strategy)(), cluster=dataclasses.replace(experiment.cluster, servers=0)))
    np.testing.assert_allclose(found.held_out, collective.held_out, rtol=1e-10)
    assert found.final_loss == pytest.approx(collective.final_loss, rel=1e-10)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("workload", "strategy"), [(DIGITS, ASYNCHRONOUS), (DIGITS, merging(3)), (CLICKS, ASYNCHRONOUS), (PAIRS, geo_sgd(4))]
)
def test_the_clock_decides_what_is_learnt(workload: dict[str, Any], strategy: dict[str, Any]) -> None:
    """The simulation has the training's losses, its final loss and the time of its target; another link gives another training."""
    experiment = served(workload, strategy)
    found = train(experiment)
    target = sorted(loss for _, loss in found.held_out)[-2]
    aimed = experiment.replace(workload=dataclasses.replace(experiment.workload, target_loss=target))
    result = simulate(aimed, learnt=found)
    steps = result.steps
    for rank in range(3):
        np.testing.assert_array_equal(steps[steps["rank"] == rank].sort_values("step")["loss"], found.losses[:, rank])
    reached = found.crossing(target)
    begin = steps["start_s"].min()
    if reached is None:
        assert result.summary.time_to_target_s is None
    else:
        own = steps[steps["step"] == reached.step]
        parts = ["read_s", "forward_s", "backward_s", "wait_s", "exposed_comm_s", "update_s", "other_s"]
        ends = own["start_s"] - begin + own[[name for name in parts if name in own]].sum(axis=1)
        assert result.summary.time_to_target_s == pytest.approx(ends.max(), rel=1e-3)
    assert result.summary.final_loss == found.final_loss
    assert result.summary.loss_from == "virtual trainers"
    assert not {"workload.target_loss", "workload.data"} & {entry["what"] for entry in result.summary.skipped}
    slower = experiment.replace(
        cluster=dataclasses.replace(experiment.cluster, inter=dataclasses.replace(experiment.cluster.inter, bandwidth=10**6))
    )
    assert train(slower).final_loss != found.final_loss
    with pytest.raises(ConfigError, match="belongs to another training"):
        simulate(slower, learnt=found)


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("strategy", [SYNCHRONOUS, ASYNCHRONOUS, geo_sgd(3)])
def test_a_training_that_ends_at_its_target_is_the_whole_ones_beginning(strategy: dict[str, Any]) -> None:
    """Evaluations up to the third at or below it, and the same crossing; a target that is not reached cuts nothing."""
    experiment = served({**DIGITS, "steps": 24, "eval_every": 2}, strategy)
    whole = train(experiment)
    target = whole.held_out[4][1]
    first = next(step for step, loss in whole.held_out if loss <= target)
    cut = train(experiment, until=target)
    assert cut.held_out == whole.held_out[: len(cut.held_out)]
    assert first + 4 <= cut.held_out[-1][0] < 24
    assert cut.crossing(target) == whole.crossing(target) is not None
    assert train(experiment, until=0.0).held_out == whole.held_out


def test_a_limit_holds_while_the_order_is_still_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training has not begun when it ends it."""
    monkeypatch.setattr("sim.learning.virtual_training.ServedReplay", lambda *_: pytest.fail("trained"))

    def ends() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        train(served(DIGITS, ASYNCHRONOUS), look=ends)


def test_messages_are_as_large_as_the_data_make_them(tmp_path: Path) -> None:
    """A look-up names the rows that a server holds of a batch, and a push brings them: 4 bytes a row and 8 a number, counted here."""
    experiment = served({**PAIRS, "steps": 3}, ASYNCHRONOUS)
    job = served_job(experiment)
    prepare(experiment.workload, experiment.run.seed, tmp_path)
    for rank in range(3):
        batches = open_batches(experiment.workload, tmp_path, sampler_of(experiment, tmp_path, 3, rank))
        for step in range(3):
            words, _ = batches.batch(step)
            tables = [set(words[:, 0].tolist()), set(words[:, 1:].flatten().tolist())]
            for server in range(2):
                nums = [sum(row % 2 == server for row in rows) for rows in tables]
                asked = [job.traffic.looked_up(server, rank, step, number) for number in range(2)]
                assert asked == [(4 * num, 4 * 8 * num) for num in nums]
                assert job.traffic.pushed(server, [(rank, step, 1)]) == sum(nums) * (4 + 4 * 8)
    both = [
        words
        for step in range(2)
        for words in [open_batches(experiment.workload, tmp_path, sampler_of(experiment, tmp_path, 3, 1)).batch(step)[0]]
    ]
    joint = torch.cat(both)
    num = sum(row % 2 == 0 for row in set(joint[:, 0].tolist())) + sum(row % 2 == 0 for row in set(joint[:, 1:].flatten().tolist()))
    assert job.traffic.pushed(0, [(1, 0, 2)]) == num * 36
    seen = execute(job)
    first = [record for record in seen.records if record.step == 1]
    assert len({record.bytes_sent for record in first}) > 1


def test_weight_decay_on_rows_is_refused() -> None:
    """As real servers refuse it."""
    with pytest.raises(ConfigError, match=r"workload\.weight_decay"):
        train(served({**CLICKS, "weight_decay": 0.1}, ASYNCHRONOUS))
    assert key_of(served(DIGITS, ASYNCHRONOUS)) != key_of(served(DIGITS, SYNCHRONOUS))
