"""Real servers and trainers, and virtual ones that follow their recorded order, end with the same parameters."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from served_cases import ASYNCHRONOUS, CLICKS, DIGITS, PAIRS, SYNCHRONOUS, geo_sgd, merging, order_of, served
from server_job import Job, job, together
from torch import nn

from fleetbench.experiment import Experiment
from fleetbench.plan.replay import Recording
from fleetbench.workloads.data.data import Reader, open_batches, prepare
from fleetbench.workloads.models.registry import build_model, loss_of
from fleetbench.workloads.training import make_optimizer, sampler_of, set_learning_rate
from real.servers.served_training import ServedTraining
from sim.learning.served import Played, ServedReplay, served_job

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own sparse gradients do not opt


class OneAfterTheOther:
    """Held while a trainer computes, and while its sender does what it decides; a recording says in which order that was.

    Without it a sender's installs meet a forward half way, and no order of theirs says which parameters it has read.
    """

    def __init__(self, training: ServedTraining) -> None:
        sender = training._sender
        assert sender is not None
        self._lock = threading.Lock()
        sender._decide = self._guarded(sender._decide)  # type: ignore[method-assign]  # while it runs, not before
        self._await_word = sender.await_word
        sender.await_word = self._waiting  # type: ignore[method-assign]  # as above

    def _guarded(self, decide: Callable[..., None]) -> Callable[..., None]:
        def decided(event: Any) -> None:
            with self._lock:
                decide(event)

        return decided

    def _waiting(self) -> Any:
        held = self._lock.locked() and self._owner == threading.get_ident()
        if held:
            self.__exit__()
        try:
            return self._await_word()
        finally:
            if held:
                self.__enter__()

    _owner = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._owner = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._owner = 0
        self._lock.release()


def _trained(experiment: Experiment, model: nn.Module, batches: Reader, running: Job, rank: int, recordings: list[Recording]) -> None:
    """One trainer's whole training, as ``fleetbench real`` does it; adds what its roles were told."""
    workload = experiment.workload
    optimizer = make_optimizer(model, workload)
    training = running.trainer(rank, model, optimizer, experiment.strategy)
    whole = training.rules.mode == "geo_sgd"  # there the update is the trainer's own
    guard = OneAfterTheOther(training)
    for position in range(workload.steps):
        optimizer.zero_grad()
        set_learning_rate(optimizer, workload, position + 1)
        inputs, labels = batches.batch(position)
        with guard:
            loss_of(workload.model)(model(inputs), labels).backward()
            if whole:
                optimizer.step()
        if not whole:
            optimizer.step()
    training.finish()
    recordings += training.recordings()


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("workload", "strategy"),
    [
        pytest.param(DIGITS, ASYNCHRONOUS, id="sgd"),
        pytest.param({**DIGITS, "optimizer": "adam", "lr": 0.01}, ASYNCHRONOUS, id="adam"),
        pytest.param({**DIGITS, "optimizer": "momentum"}, merging(3), id="merged"),
        pytest.param({**CLICKS, "optimizer": "adagrad"}, ASYNCHRONOUS, id="rows, adagrad"),
        pytest.param(PAIRS, ASYNCHRONOUS, id="rows alone"),
        pytest.param(DIGITS, geo_sgd(4), id="geo_sgd"),
        pytest.param(DIGITS, ASYNCHRONOUS | {"lr_scale": 1.5}, id="scaled rate"),
        pytest.param(DIGITS, geo_sgd(4) | {"lr_scale": 1.5}, id="geo_sgd, scaled rate"),
        pytest.param(CLICKS, geo_sgd(4), id="geo_sgd, rows"),
        pytest.param(CLICKS, SYNCHRONOUS, id="synchronous"),
    ],
)
def test_virtual_trainers_end_where_real_ones_do(workload: dict[str, Any], strategy: dict[str, Any], tmp_path: Path) -> None:
    """Three trainers and two servers, in float64, in the order that their roles recorded: all parameters, to 1e-10."""
    decay = [{"step": 20, "factor": 0.3}]
    experiment = served({**workload, "steps": 40, "lr_decay": decay}, strategy)
    prepare(experiment.workload, experiment.run.seed, tmp_path / "real")
    recordings: list[Recording] = []
    own, data = experiment.workload, tmp_path / "real"  # models are built here: threads would share torch's generator
    models = [build_model(own.model, own.model_options, own.dtype, experiment.run.seed) for _ in range(3)]
    readers = [open_batches(own, data, sampler_of(experiment, data, 3, rank)) for rank in range(3)]  # nor parse threads well
    with job(2, 3) as running:

        def work(rank: int) -> None:
            _trained(experiment, models[rank], readers[rank], running, rank, recordings)

        together(*[lambda rank=rank: work(rank) for rank in range(3)])
        running.reports()
        roles = [thread.server.role for thread in running.threads]
        recordings += [role.recording() for role in roles if role is not None]
        dense = running.dense()
        tables = [running.table(number) for number in range(sum(name in str(workload["model"]) for name in ("wide", "2vec")) * 2)]
    order = order_of(recordings)
    replay = ServedReplay(experiment, Played(served_job(experiment), order), tmp_path / "virtual")
    begun = replay.evaluated().clone()
    replay.run()
    virtual = torch.cat([torch.from_numpy(shard.dense) for shard in replay.servers])
    near = {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(virtual, dense, **near)
    torch.testing.assert_close(replay.held()[1], tables, **near)
    assert (replay.evaluated() - begun).abs().max() > 1e-2
    ranks = [act.of for act in order.acts if act.role == "server" and act.rank == 0 and act.kind in ("update", "accumulate")]
    if strategy != SYNCHRONOUS:
        assert ranks != sorted(ranks, key=lambda rank: rank or 0), "trainers took turns"
