"""``fleetbench tune --simulate-only``: what it prints, what it writes, and what it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from fleetbench.strategy import DistributedStrategy

Files = Callable[..., Path]
TWO = ("--set", "cluster.nodes=2", "--set", 'cluster.inter={ bandwidth = "8 Gbit/s", latency = "1 ms" }')
FAR = ("--set", "cluster.inter.latency=10 ms")
BUCKETS = (
    "--set",
    "strategy.fuse_all_reduce_ops=true",
    "--set",
    "strategy.fuse_grad_count=1",
    "--set",
    "strategy.fuse_grad_size_in_MB=1e-6",
)


def test_it_prints_an_answer_and_writes_a_strategy(command: Callable, experiment: Files, tmp_path: Path) -> None:
    """The last lines are the answer and its file, which a script can load."""
    priced = ("--set", "tune.price_per_trainer_hour=3")
    ended = command("tune", experiment(), *TWO, *FAR, *BUCKETS, *priced, "--simulate-only", "--out", tmp_path / "runs")
    assert ended.code == 0, ended.err
    assert "1e+06 samples take" in ended.out
    assert "a day costs 144" in ended.out
    assert "; without stragglers and jitter compute takes " in ended.out
    assert " --what-if\n" in ended.out
    answer, place = ended.out.strip().splitlines()[-2:]
    assert answer.startswith("SIMULATED, declared compute: use ")
    assert "outside of this answer: tensor, pipeline, context and expert parallelism" in ended.out
    path = Path(place.removeprefix("recommendation: "))
    assert path.read_text(encoding="utf-8").splitlines()[0] == f"# {answer}"
    DistributedStrategy.load(path)
    data = json.loads((path.parent / "recommendation.json").read_text(encoding="utf-8"))
    assert data["simulated"]
    assert data["low"] < data["speedup"] < data["high"]


def test_a_sweep_prints_a_table_and_draws_a_picture(command: Callable, experiment: Files, tmp_path: Path) -> None:
    """With a row a size, and money where there is a price."""
    price = ("--set", "tune.price_per_trainer_hour=2", "--set", "tune.samples=1e9")
    out = ("--out", tmp_path / "runs")
    ended = command("tune", experiment(), *TWO, *price, "--simulate-only", "--sweep", "cluster.nodes=1,2,4", "--json", *out)
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert [size["trainers"] for size in found["sizes"]] == [1, 2, 4]
    first = found["sizes"][0]
    assert first["cost"] == pytest.approx(first["days"] * 24 * 2)
    (picture,) = (tmp_path / "runs").glob("*/sizes.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = command("tune", experiment(), *TWO, *price, "--simulate-only", "--sweep", "cluster.nodes=1,2", *out).out
    assert "cost is of 1e+09 samples at 2 an hour and trainer" in printed
    assert "unknown" in printed
    assert re.search(r"note: at cluster\.nodes = 1: \d+ of \d+ combinations are not simulated", printed)


def test_reference_points_tell_where_the_target_is_reached_first(command: Callable, experiment: Files, tmp_path: Path) -> None:
    """Four times the batch takes ten times the samples: one trainer is there first, and cheapest."""
    points = "tune.reference_points=[{batch_size=32,samples=1e6,runs=9},{batch_size=128,samples=1e7,runs=9}]"
    asked = ("--simulate-only", "--sweep", "cluster.nodes=1,2,4", "--set", points, "--set", "tune.price_per_trainer_hour=2")
    ended = command("tune", experiment(), *TWO, *asked, "--out", tmp_path / "runs")
    assert ended.code == 0, ended.err
    assert "soonest at the target: cluster.nodes = 1, in " in ended.out
    assert "cheapest at the target: cluster.nodes = 1, in " in ended.out
    assert "samples to target are by tune.reference_points" in ended.out.replace("the target", "target")


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("--sweep", "cluster.nodes=1,2"), "--simulate-only"),
        (("--simulate-only", "--", "python", "train.py"), "--simulate-only"),
        (("--simulate-only", "--workdir", "here"), "--workdir"),
        (("--simulate-only", "--sweep", "cluster.nodes"), "--sweep"),
        (("--simulate-only", "--sweep", "cluster.nodes=0,1"), "cluster.nodes=0"),
        (("--simulate-only", *("--sweep", "run.seed=1,2") * 3), "run.seed=1,2"),
        (("--simulate-only", "--set", "tune.samples=0"), "samples"),
        (("--simulate-only", "--set", "tune.price_per_trainer_hour=-1"), "price_per_trainer_hour"),
    ],
)
def test_bad_usage_is_refused_by_name(arguments: tuple[str, ...], names: str, command: Callable, experiment: Files, tmp_path: Path) -> None:
    """Exit code 2, and a hint."""
    ended = command("tune", experiment(), "--out", tmp_path / "runs", *arguments)
    assert ended.code == 2
    assert names in ended.err
    assert "HINT" in ended.err


def test_a_model_without_layer_times_is_refused(command: Callable, tmp_path: Path) -> None:
    """Nothing is measured."""
    ended = command("tune", "--simulate-only", "--out", tmp_path / "runs")
    assert ended.code == 2
    assert "workload.profile" in ended.err
    assert not (tmp_path / "runs").exists()
