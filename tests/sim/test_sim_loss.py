"""Losses on the simulator's clock: what virtual trainers have learnt decides K, and says when the target is reached."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from learning_cases import cases
from sim_cases import with_profile
from tuner_fakes import profiled_experiment

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.plan.layers import Gradient, Layer, LayerTable
from fleetbench.profile import Profile, compute_key
from fleetbench.quantities import Nanoseconds
from sim.learning.virtual_training import train
from sim.many.seeds import OverSeeds, over_seeds
from sim.many.sweep import sweep
from sim.run import simulate

STEP_NS = 300


def _experiment(name: str, **workload: Any) -> Experiment:
    """A case of two trainers whose every step computes 300 ns."""
    experiment = cases(2)[name]
    experiment = experiment.replace(workload=dataclasses.replace(experiment.workload, **workload))
    gradient = Gradient(name="all.weight", numel=100, dtype="float64", ready=Nanoseconds(200))
    layer = Layer(name="all", gradients=(gradient,), forward=Nanoseconds(100), backward=Nanoseconds(200))
    table = LayerTable(key=compute_key(experiment), layers=(layer,), buffers_nbytes=0)  # type: ignore[arg-type]  # a plain 0
    cluster = dataclasses.replace(experiment.cluster, intra=experiment.cluster.inter)
    return with_profile(experiment.replace(cluster=cluster), Profile(machine="by hand", created="2026-01-01", tables=(table,)))


@pytest.mark.sample(3)
@pytest.mark.parametrize("engine", ["vector", "reference"])
@pytest.mark.parametrize(
    "name", ["adaptive, fleet", "adaptive, paper", "adaptive, document", "adaptive, qsr", "merge and adaptive", "merge, drop"]
)
def test_the_clock_decides_as_the_training(name: str, engine: Any) -> None:
    """Without a declared loss or epoch: rounds end where they ended in the training, and the table has every trainer's losses."""
    experiment = _experiment(name, steps=40)
    learnt = train(experiment)
    table = simulate(experiment, learnt=learnt, engine=engine).steps.sort_values(["rank", "step"])
    assert len(set(learnt.local_steps)) > 1
    for rank in (0, 1):
        own = table[table["rank"] == rank]
        assert own["local_steps"].fillna(0).tolist() == [length or 0 for length in learnt.local_steps]
        np.testing.assert_array_equal(own["loss"], learnt.losses[:, rank])
    assert not np.array_equal(learnt.losses[:, 0], learnt.losses[:, 1])


def test_the_target_is_reached_at_the_first_of_three() -> None:
    """The time ends with the step of the first of three evaluations in a row at or below the target; where there is none, it is none."""
    experiment = _experiment("local, fleet")
    learnt = train(experiment)
    losses = [loss for _, loss in learnt.held_out]
    target = sorted(losses)[len(losses) // 2]
    hit = next(index for index in range(len(losses) - 2) if max(losses[index : index + 3]) <= target)
    for value, step in ((target, learnt.held_out[hit][0]), (0.0, None)):
        aimed = experiment.replace(workload=dataclasses.replace(experiment.workload, target_loss=value))
        result = simulate(aimed, learnt=learnt)
        parts = ["forward_s", "backward_s", "wait_s", "exposed_comm_s", "update_s", "other_s"]
        counted = result.steps[result.steps["step"].between(1, step or 1)]
        expected = None if step is None else pytest.approx(counted.groupby("rank")[parts].sum().sum(axis=1).max(), rel=1e-6)
        assert result.summary.time_to_target_s == expected
        assert result.summary.final_loss == learnt.final_loss
        assert result.summary.loss_from == "virtual trainers"
        assert "workload.target_loss" not in {entry["what"] for entry in result.summary.skipped}
    assert hit > 0


def test_what_was_learnt_from_something_else_is_refused() -> None:
    """A trajectory of another seed, or of another learning rate, is not this experiment's."""
    experiment = _experiment("synchronous", steps=2)
    learnt = train(experiment)
    for other in (
        experiment.replace(run=dataclasses.replace(experiment.run, seed=6)),
        experiment.replace(workload=dataclasses.replace(experiment.workload, lr=0.3)),
    ):
        with pytest.raises(ConfigError, match="belongs to another training"):
            simulate(other, learnt=learnt)


@pytest.mark.slow
def test_a_sweep_of_the_cluster_trains_once(tmp_path: Path) -> None:
    """Points that differ in the link share a trajectory; a point with another K has its own."""
    trained: list[str] = []
    (tmp_path / "experiment").mkdir()
    profiled_experiment(tmp_path / "experiment").save(tmp_path / "e.toml")

    def load(more: Any) -> Experiment:
        return Experiment.load(tmp_path / "e.toml", ["workload.model_options.hidden=8", "strategy.localsgd=true", *more])

    axes = ["cluster.intra.bandwidth=1 Gbit/s,2 Gbit/s,4 Gbit/s", "strategy.localsgd_configs.k_steps=2,8"]
    table = sweep(_unprofiled(load, tmp_path), axes, learn=partial(train, say=trained.append)).table
    assert len(trained) == 2
    assert trained[0].startswith("2 virtual trainers take ")
    assert table.groupby("strategy.localsgd_configs.k_steps")["final_loss"].nunique().tolist() == [1, 1]
    assert table["final_loss"].nunique() == 2
    assert table.groupby("strategy.localsgd_configs.k_steps")["wall_s"].nunique().tolist() == [3, 3]


def test_a_sweep_of_any_key_says_where_training_diverged(tmp_path: Path) -> None:
    """A learning rate of 1e9 has no held-out loss, one of 0.05 has."""

    def load(more: Any) -> Experiment:
        data = {"model": "mlp", "model_options": {"hidden": 16}, "data": "synthetic", "steps": 32, "lr": float(more[0].partition("=")[2])}
        cluster = {"trainers_per_node": 2, "intra": {"bandwidth": "1 Gbit/s", "latency": "1 us"}}
        return Experiment.from_dict({"workload": data, "cluster": cluster, "run": {"warmup_steps": 0}})

    found = sweep(_unprofiled(load, tmp_path), ["workload.lr=0.05,1e9"], learn=train)
    assert found.note == "the held-out loss is not finite where workload.lr is 1e9: set a lower workload.lr"


def _unprofiled(load: Any, folder: Path) -> Any:
    """The experiments that ``load`` gives, with a profile of their own."""

    def resolved(more: Any) -> Experiment:
        experiment = load(more)
        layer = Layer(
            name="all",
            gradients=(Gradient(name="all.w", numel=9000, ready=Nanoseconds(9)),),
            forward=Nanoseconds(9),
            backward=Nanoseconds(9),
        )
        path = folder / f"{compute_key(experiment)}.toml"
        Profile(machine="none", created="never", tables=(LayerTable(key=compute_key(experiment), layers=(layer,)),)).save(path)
        return experiment.replace(workload=dataclasses.replace(experiment.workload, profile=str(path)))

    return resolved


@pytest.mark.slow
def test_seeds_that_never_arrive_count_as_the_latest() -> None:
    """Every seed trains from parameters of its own; the median is over all runs, and none where fewer than half arrive."""
    experiment = _experiment("local, fleet", steps=30, target_loss=2.2)
    found = over_seeds(experiment, 3, learn=train)
    assert len({summary.final_loss for summary in found.summaries}) == 3
    assert found.intervals["final_loss"].mean == pytest.approx(np.mean([summary.final_loss for summary in found.summaries]))
    first = found.summaries[0]

    def median(*times: float | None) -> tuple[int, float | None]:
        runs = tuple(dataclasses.replace(first, time_to_target_s=time) for time in times)
        several = OverSeeds(experiment=experiment, seeds=tuple(range(len(times))), summaries=runs)
        return several.num_reached, several.median_to_target_s

    assert median(3.0, 1.0, 2.0) == (3, 2.0)
    assert median(None, 1.0, 2.0) == (2, 2.0)
    assert median(None, None, 1.0) == (1, None)
    assert median(None, None, 1.0, 4.0) == (2, 4.0)  # half of them have arrived then
