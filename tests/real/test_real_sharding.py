"""Sharded training equals DDP and one process, asks for the collectives of its stage, and refuses the rest."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import training_problem
from processes import Arrays, forked_launches, run_ranks
from sharding_cases import DDP, ON_FOUR, ON_TWO, OVERFLOW, SAVED, STEPS, WORKERS, Case, joint_training, workers_training

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.profile import compute_key
from fleetbench.sharding_configs import ShardingConfigs
from fleetbench.strategy import DistributedStrategy
from real.job.launcher import launch_script
from real.job.session import Session
from real.leg import Leg
from real.profile.measuring import measure_profile
from tuner.tune import tune

RANK, SCRIPT = (Path(__file__).with_name(name) for name in ("sharding_rank.py", "sharded_lines.py"))


@functools.cache
def _launch(ranks: int, *what: str) -> list[Arrays]:
    return run_ranks(RANK, ranks, *(what or ("train",)))


def _of(name: str, what: str = "history", ranks: int = 2) -> npt.NDArray[np.generic]:
    return _launch(ranks)[0][f"{name}/{what}"]


@pytest.mark.sample(13)
@pytest.mark.parametrize(
    ("ranks", "case"),
    [
        *(pytest.param(ranks, case, id=f"{ranks} {case.name}") for ranks in (2, 4) for case in DDP),
        *(pytest.param(2, case, id=f"2 {case.name}") for case in ON_TWO),
        *(pytest.param(4, case, id=f"4 {case.name}") for case in ON_FOUR),
    ],
)
def test_equals_one_process(ranks: int, case: Case) -> None:
    """All ranks together hold the parameters of one process on the joint batch, and had its losses."""
    results = _launch(ranks)
    parameters, losses = joint_training(case, ranks)
    for rank in results:
        np.testing.assert_allclose(rank[f"{case.name}/history"], parameters.numpy(), rtol=1e-12, atol=1e-13)
    found = np.mean([rank[f"{case.name}/losses"] for rank in results], axis=0)
    np.testing.assert_allclose(found, losses.numpy(), rtol=1e-12)


@pytest.mark.parametrize(
    ("ranks", "case", "expected"),
    [
        (2, "stage 1", (4, 4, 0)),
        (2, "stage 2", (4, 4, 0)),
        (2, "stage 3", (6, 4, 0)),
        (2, "stage 1, merge", (4, 4, 0)),
        (2, "stage 2, merge", (4, 12, 0)),
        (2, "stage 3, merge", (18, 12, 0)),
        (4, "hybrid, True", (6, 4, 4)),
        (4, "hybrid 3, merge", (18, 12, 4)),
    ],
)
def test_asks_for_the_collectives_of_its_stage(ranks: int, case: str, expected: tuple[int, int, int]) -> None:
    """Gathers, reduce-scatters and all-reduces of one update: of three blocks, and of what lies outside."""
    assert tuple(_of(case, "counts", ranks)) == expected


def test_buffers_are_rank_0s() -> None:
    """Batch-norm statistics that each rank has moved are rank 0's before the next forward, as under DDP."""
    np.testing.assert_allclose(_of("normed"), _of("ddp normed"), rtol=1e-12, atol=1e-13)
    first, second = (rank["normed/buffers"] for rank in _launch(2))
    assert np.array_equal(first, second)
    assert np.abs(first[1:]).max() > 0


def test_a_small_wire_is_fsdps() -> None:
    """A 16-bit wire gives the parameters of ``fully_shard`` with that reduce type, to the bit."""
    assert np.array_equal(_of("bf16 wire"), _of("by hand"))
    assert np.abs(_of("bf16 wire") - _of("float32")).max() > 1e-6


def test_parameters_in_16_bits_are_fsdps() -> None:
    """``param_dtype`` gives the parameters of ``fully_shard`` with that type under autocast, to the bit; its sums are of FP32."""
    assert np.array_equal(_of("bf16 parameters"), _of("bf16 parameters by hand"))
    way = np.abs(_of("float32")[-1] - _of("float32")[0]).max()
    assert 0 < np.abs(_of("bf16 parameters") - _of("float32")).max() < 0.05 * way


@pytest.mark.parametrize(("case", "merge"), [("amp fp16", 1), ("amp fp16, merge", 2)])
def test_an_overflow_on_one_rank_skips_the_update_on_all(case: str, merge: int) -> None:
    """The last rank overflows in one step: nothing moves in that update; the first one is near FP32's."""
    history = _of(case)
    moved = [not np.array_equal(after, before) for before, after in itertools.pairwise(history)]
    assert moved == [step != OVERFLOW for step in range(2 * merge, STEPS + 1, merge)]
    assert np.isfinite(history).all()
    if merge == 1:
        way = np.abs(_of("float32")[-1] - _of("float32")[0]).max()
        assert np.abs(history[0] - _of("float32")[0]).max() < 0.01 * way


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", WORKERS, ids=lambda case: case.name)
def test_workers_of_several_trainers_train_as_their_loops_written_out(case: Case) -> None:
    """Each shard group updates alone; in the end all hold what the loops of all workers in one process agree on."""
    agreed, first = workers_training(case, 4)
    size = case.configs["sharding_degree"]
    for rank, found in enumerate(_launch(4)):
        np.testing.assert_allclose(found[f"{case.name}/agreed"], agreed.numpy(), rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(found[f"{case.name}/history"][0], first[rank // size].numpy(), rtol=1e-12, atol=1e-13)


@pytest.mark.slow
def test_workers_resume_with_their_outer_momentum(tmp_path: Path) -> None:
    """To the bit, between two rounds alone; workers of another size begin from the same model."""
    for rank in _launch(4, "workers", str(tmp_path)):
        assert np.array_equal(rank["loaded"], rank["went on"])
        assert "middle of a round of local steps" in str(rank["refused"])
        assert 0 < np.abs(rank["loaded by four"] - rank["loaded"]).max() < 0.5
    first, second, *_ = _launch(4, "workers", str(tmp_path))
    assert not np.array_equal(first["single"], second["single"])
    assert np.array_equal(first["larger"], first["single"])  # of one worker, and not rows of two


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Arrays]]:
    """The folder of the saves of two trainers, and how these trained on."""
    folder = str(tmp_path_factory.mktemp("saves"))
    return folder, _launch(2, "save", folder)


@pytest.mark.sample(9)
def test_a_resumed_training_is_the_same_to_the_bit(saves: tuple[str, list[Arrays]]) -> None:
    """As many trainers, the same strategy: parameters at the end are those of the training that went on."""
    folder, went_on = saves
    for rank, other in zip(_launch(2, "load", folder), went_on, strict=True):
        for case in SAVED:
            assert np.array_equal(rank[f"{case.name} from {case.name}"], other[case.name]), case.name


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_other_trainers_and_other_stages_go_on(saves: tuple[str, list[Arrays]], ranks: int) -> None:
    """Shards are cut anew: other stages go on from a save of stage 3, and four trainers from that of two."""
    folder, went_on = saves
    results = _launch(ranks, "load", folder)
    for name, found in results[0].items():
        for rank in results[1:]:
            assert np.array_equal(rank[name], found), name
        if ranks == 2:
            np.testing.assert_allclose(found, went_on[0][name.partition(" from ")[0]], rtol=1e-12, atol=1e-13)


REFUSED = {
    "optimizer before": "make the optimizer after fleet.distributed_model",
    "second optimizer": "second optimizer of a sharded model",
    "whole optimizer": "treats parameters as one",
    "tied blocks": "blocks.0.wide.weight",
    "sparse": "table.weight",
    "degree": "one of 1, 2",
    "join": "fleet.join",
    "inference": "get_model_state_dict",
    "experts": "got no gradient in this step",
    "frozen later": "was frozen or unfrozen after",
    "replaced": "head.weight: was replaced after",
    "moved": "was moved or converted",
    "save in a merge": "gradients wait for more",
    "own state": "is not sharded as its parameter",
    "tuning": "neither profiled nor tuned",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_refused_by_name(name: str) -> None:
    """The error names what, where and a way out, on every rank."""
    for rank in _launch(2, "refusals"):
        assert REFUSED[name] in str(rank[name])
        assert "HINT" in str(rank[name])


def test_a_script_is_sharded_by_its_strategy_file(tmp_path: Path) -> None:
    """Launched on two ranks, the four lines give one process's result on the joint batch."""
    configs = ShardingConfigs(stage=3)
    DistributedStrategy(sharding=True, sharding_configs=configs).save(tmp_path / "strategy.toml")
    with forked_launches():
        command = [str(SCRIPT), str(tmp_path / "out"), str(tmp_path / "strategy.toml")]
        assert launch_script(2, command, log_dir=tmp_path / "log", echo=lambda _: None)
    momentum = training_problem.optimizer_of("momentum")
    expected = training_problem.joint_training(2, "float64", momentum)[-1].numpy()
    for rank in range(2):
        found = np.load(tmp_path / f"out.{rank}.npz")["parameters"]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def test_an_experiment_trains_shards_as_it_trains_the_whole_model() -> None:
    """All losses of ``fleetbench real`` are in every bit those without sharding, leg after leg of one launch."""
    workload = {"model": "mlp", "data": "synthetic", "steps": 6, "target_loss": 0.1, "eval_every": 2, "optimizer": "momentum", "lr": 0.1}
    experiment = Experiment.from_dict({"workload": workload, "cluster": {"trainers_per_node": 2}})
    strategies = [
        DistributedStrategy(),
        *(DistributedStrategy(sharding=True, sharding_configs=ShardingConfigs(stage=stage)) for stage in (3, 1)),
    ]
    with Session(experiment) as session:
        runs = [session.run(Leg(strategy=own, steps=6, start="initial", evaluate=True)) for own in (*strategies, strategies[0])]
    assert len({run.held_out for run in runs}) == 1
    assert len(runs[0].held_out) == 3
    losses = [run.steps["loss"].tolist() for run in runs]
    assert losses == [losses[0]] * 4
    assert [bool(run.plan.blocks) for run in runs] == [False, True, True, False]


def test_an_experiment_is_profiled_whole() -> None:
    """Its layers are those without sharding, so that ``real`` and ``sim`` of stage 3 have their times."""
    workload = {"model": "mlp", "data": "synthetic", "steps": 6}
    experiment = Experiment.from_dict({"workload": workload, "cluster": {"trainers_per_node": 2}})
    sharded = experiment.replace(strategy=DistributedStrategy(sharding=True, sharding_configs=ShardingConfigs(stage=3)))
    taken = measure_profile(sharded, seconds=0.2)
    table = next(table for table in taken.profile.tables if table.key == compute_key(sharded))
    assert table.forward_ns > 0
    assert table.update > 0
    assert not any(run.plan.blocks for run in taken.runs.values())


def test_a_tuning_refuses_sharding(tmp_path: Path) -> None:
    """Its next leg would need the model whole."""
    experiment = Experiment(strategy=DistributedStrategy(sharding=True))
    with pytest.raises(ConfigError, match="leaves no model that the next leg could train"):
        tune(experiment, out=tmp_path)
