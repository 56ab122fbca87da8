"""Sessions: one launch runs many legs, and what the ranks wrote becomes a result."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from sim_cases import with_profile

from fleetbench.experiment import Experiment
from fleetbench.plan.layers import Gradient, Layer, LayerTable
from fleetbench.plan.training import family
from fleetbench.profile import Profile, compute_key
from fleetbench.quantities import Nanoseconds
from fleetbench.strategy import DistributedStrategy
from fleetbench.target import crossing
from fleetbench.workloads.data.data import held_out, open_batches, prepare
from fleetbench.workloads.models.registry import build_model, loss_of
from fleetbench.workloads.training import HeldOut, sampler_of
from real.job.session import Session
from real.leg import Leg
from real.profile.measuring import take_profile

STEPS = 24


@pytest.fixture(scope="module")
def experiment() -> Experiment:
    """A small network on the digits, two trainers, trainer 1 always 4 times as slow."""
    return Experiment.from_dict(
        {
            "name": "session",
            "workload": {
                "model": "digits_mlp",
                "model_options": {"hidden": 128},
                "steps": STEPS,
                "batch_size": 16,
                "lr": 0.5,
                "target_loss": 1.0,
                "eval_every": 4,
            },
            "cluster": {"trainers_per_node": 2, "stragglers": [{"kind": "slow_rank", "ranks": [1], "factor": 4.0}]},
            "strategy": {"fuse_grad_size_in_MB": 0.05},
            "tune": {"thread_num": [1]},
        }
    )


@pytest.fixture(scope="module")
def profile(experiment: Experiment) -> Profile:
    """Measured here and now, in short legs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("real.profile.measuring.STEPS", 30)
        patch.setattr("real.profile.measuring.Legs.run.__defaults__", (30,))
        return take_profile(experiment)


@pytest.fixture(scope="module")
def session(experiment: Experiment, profile: Profile) -> Iterator[Session]:
    """One launch for all tests of this module."""
    with Session(with_profile(experiment, profile)) as launched:
        yield launched


LOCAL = DistributedStrategy(localsgd=True, localsgd_configs={"k_steps": 4}, fuse_grad_size_in_MB=0.05)  # type: ignore[arg-type]  # tables are decoded


def test_profile_names_every_layer_and_gradient(experiment: Experiment, profile: Profile) -> None:
    """The table has the network's three linear layers, in forward order, with all of their parameters."""
    (table,) = profile.tables
    assert table.key == compute_key(experiment)
    assert [layer.name for layer in table.layers] == ["1", "3", "5"]
    shapes = {gradient.name: gradient.numel for layer in table.layers for gradient in layer.gradients}
    assert shapes == {"1.weight": 64 * 128, "1.bias": 128, "3.weight": 128 * 128, "3.bias": 128, "5.weight": 1280, "5.bias": 10}
    ready = [gradient.ready for gradient in table.by_readiness()]
    assert ready == sorted(ready)
    assert ready[0] > 0
    assert ready[-1] <= table.backward_ns
    assert profile.communication is not None
    assert profile.communication.link.bandwidth > 0


def test_records_add_up_and_replay(session: Session, experiment: Experiment) -> None:
    """Steps are contiguous, warm-up steps are in the table only, and the recorded events give the recorded operations."""
    result = session.run(Leg(strategy=experiment.strategy, steps=STEPS, warmup_steps=3, record=True))
    table = result.steps
    assert sorted(set(table["step"])) == list(range(-2, STEPS + 1))
    parts = table[["forward_s", "backward_s", "wait_s", "exposed_comm_s", "update_s", "other_s"]]
    assert (parts.to_numpy() >= -1e-9).all()
    for _, rank in table.groupby("rank"):
        ends = (rank["start_s"] + parts.loc[rank.index].sum(axis=1)).to_numpy()
        np.testing.assert_allclose(ends[:-1], rank["start_s"].to_numpy()[1:], atol=1e-6)
    assert result.summary.steps == STEPS
    assert result.summary.num_syncs == STEPS
    num_bytes = sum(bucket.nbytes for bucket in result.plan.buckets)
    assert result.summary.bytes_sent_per_trainer == STEPS * num_bytes  # 2 (P - 1) / P of S, for P = 2
    assert len(result.recordings) == 2
    for recording in result.recordings:
        strategy = family(experiment.strategy, result.plan)
        assert recording.replayed(strategy) == [ops for _, _, ops in recording.log]
    assert [op for _, _, ops in result.recordings[0].log for op in ops] == [op for _, _, ops in result.recordings[1].log for op in ops]


@pytest.mark.alone
def test_injected_stragglers_are_seen_where_they_were_put(experiment: Experiment) -> None:
    """Trainer 1 computes three profiled times longer than trainer 0, and trainer 0 is the one that waits; by a profile of 6 ms."""
    gradient = Gradient(name="all.weight", numel=100, ready=Nanoseconds(4_000_000))
    layer = Layer(name="all", gradients=(gradient,), forward=Nanoseconds(2_000_000), backward=Nanoseconds(4_000_000))
    table = LayerTable(key=compute_key(experiment), layers=(layer,))
    by_hand = Profile(machine="by hand", created="2026-01-01", tables=(table,))
    with Session(with_profile(experiment, by_hand)) as session:
        result = session.run(Leg(strategy=experiment.strategy, steps=STEPS))
    counted = result.steps[result.steps["step"] >= 1].assign(compute_s=lambda frame: frame["forward_s"] + frame["backward_s"])
    by_rank = counted.groupby("rank")[["compute_s", "wait_s"]].median()
    added = 3 * (table.forward_ns + table.backward_ns) * 1e-9
    assert by_rank.loc[1, "compute_s"] > 0.9 * added
    assert by_rank.loc[1, "compute_s"] > by_rank.loc[0, "compute_s"] + 0.4 * added
    assert by_rank.loc[0, "wait_s"] > by_rank.loc[1, "wait_s"]


def test_local_sgd_meets_on_schedule_and_sends_less(session: Session) -> None:
    """K = 4 averages at 1, 5, 9, ...: six rounds of 24 steps, and once more at the end of training."""
    result = session.run(Leg(strategy=LOCAL, steps=STEPS, record=True))
    first = result.steps[(result.steps["rank"] == 0) & (result.steps["step"] >= 1)]
    closed = first.dropna(subset=["local_steps"]).set_index("step")["local_steps"].to_dict()
    assert closed == {1: 1, 5: 4, 9: 4, 13: 4, 17: 4, 21: 4, 24: 3}
    num_bytes = sum(bucket.nbytes for bucket in result.plan.buckets)
    assert result.summary.bytes_sent_per_trainer == 7 * num_bytes
    assert first[first["step"].isin([2, 3, 4])]["exposed_comm_s"].sum() == 0


def test_a_leg_with_a_seed_has_its_initial_parameters_and_its_order_of_the_same_data(
    session: Session, experiment: Experiment, tmp_path: Path
) -> None:
    """The first step's loss is that of a model and a batch made here, of data that are split as ever; without a seed all is as before."""
    leg = Leg(strategy=experiment.strategy, steps=3, warmup_steps=0, start="initial", evaluate=True)
    plain, other, again = (session.run(dataclasses.replace(leg, seed=seed)) for seed in (None, 5, experiment.run.seed))
    assert plain.steps["loss"].tolist() == again.steps["loss"].tolist()
    prepare(experiment.workload, experiment.run.seed, tmp_path)
    seeded = experiment.replace(run=dataclasses.replace(experiment.run, seed=5))
    workload = experiment.workload
    model = build_model(workload.model, workload.model_options, workload.dtype, 5)
    inputs, labels = held_out(tmp_path)
    accuracy = HeldOut(build_model(workload.model, workload.model_options, workload.dtype, 0), tmp_path, loss_of(workload.model))
    loss, share = accuracy.loss_and_accuracy(torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]))
    assert (loss, share) == (
        pytest.approx(loss_of(workload.model)(model(inputs), labels).item(), rel=1e-5),
        (model(inputs).argmax(1) == labels).double().mean().item(),
    )
    for rank in range(2):
        inputs, labels = open_batches(workload, tmp_path, sampler_of(seeded, tmp_path, 2, rank)).batch(0)
        found = other.steps[(other.steps["rank"] == rank) & (other.steps["step"] == 1)]["loss"].item()
        assert found == pytest.approx(loss_of(workload.model)(model(inputs), labels).item(), rel=1e-5)


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("strategy", [DistributedStrategy(), LOCAL], ids=["synchronous", "local SGD"])
def test_a_leg_to_the_target_ends_there(experiment: Experiment, session: Session, strategy: DistributedStrategy) -> None:
    """It evaluates as it trains, and has the crossing and the losses of the leg that trains on; the next leg starts over as ever."""
    whole = Leg(strategy=strategy, steps=60, start="initial", evaluate=True)
    on, early, again = (session.run(leg) for leg in (whole, dataclasses.replace(whole, ends_at_target=True), whole))
    reached, every = on.summary.steps_to_target, experiment.workload.eval_every
    assert early.summary.steps_to_target == reached
    assert early.summary.time_to_target_s is None
    assert any(entry["what"] == "time_to_target_s" for entry in early.summary.skipped)
    assert reached is not None
    last = math.ceil(reached / every) * every + 2 * every  # two more evaluations confirm it
    assert early.summary.steps == early.experiment.workload.steps == last < 60
    trained = on.steps[on.steps["step"] <= last]
    assert early.steps["loss"].tolist() == trained["loss"].tolist()
    assert again.steps["loss"].tolist() == on.steps["loss"].tolist()
    assert [step for step, _ in on.held_out] == list(range(every, 61, every))
    assert early.held_out == on.held_out[: len(early.held_out)]
    crossed = crossing(on.held_out, experiment.workload.target_loss)
    assert crossed is not None
    assert crossed.smooth == reached, "a run keeps what decided about its target"
