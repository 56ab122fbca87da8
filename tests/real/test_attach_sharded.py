"""Scripts that call ``fully_shard`` themselves: what is printed for them, a strategy's file, and a driver's legs."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections import Counter
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fleetbench.cli.main import main
from fleetbench.cluster import Cluster
from fleetbench.errors import ConfigError, FleetbenchError
from fleetbench.experiment import Experiment
from fleetbench.plan.build import Setting, build_plan
from fleetbench.profile import compute_key
from fleetbench.result import RunResult
from fleetbench.sharding_configs import ShardingConfigs
from fleetbench.strategy import DistributedStrategy
from real.job.script_session import ScriptSession
from real.layer_times import table_of
from real.leg import Leg
from real.processes.diagnosis import LegFailed
from real.profile.costs import points_of_blocks
from real.profile.measuring import profile_script
from tuner.pytorch import in_words_of, page_of
from tuner.simulated.sharded import of_script

SCRIPT = str(Path(__file__).with_name("fsdp_script.py"))
BLOCKS = ("layers.0", "layers.1", "layers.2")
BLOCK, REST = 32 * 64 + 64 + 64 * 32 + 32, 50 * 32 + 32 * 50 + 50
"""Parameters of a block, and of what lies in none."""
OWN = DistributedStrategy(sharding=True, sharding_configs=ShardingConfigs(stage=3, blocks=BLOCKS), broadcast_buffers=False)


def other(**configs: Any) -> DistributedStrategy:
    """The script's own strategy with other fields of ``sharding_configs``."""
    return OWN.replace(sharding_configs=dataclasses.replace(OWN.sharding_configs, **configs))


def collectives(folder: Path) -> list[str]:
    """The collectives of rank 0's last step."""
    return (folder / "counts0").read_text(encoding="ascii").splitlines()


def losses(folder: Path, ranks: int) -> list[list[str]]:
    """Each rank's."""
    return [(folder / f"losses{rank}").read_text(encoding="ascii").split() for rank in range(ranks)]


def launch(kind: str, folder: Path, ranks: int, *words: str) -> int:
    """A launch of eight steps; its exit code."""
    folder.mkdir()
    return main(["launch", *words, "--nproc", str(ranks), SCRIPT, str(folder), kind, "8"])


def legs_of(folder: Path, kind: str, ranks: int = 2) -> ScriptSession:
    """A session of the script, which trains until the session ends."""
    base = Experiment.load(str(resources.files("fleetbench").joinpath("script.toml")))
    return ScriptSession([sys.executable, "-m", "fleetbench", "launch", "--nproc", str(ranks), SCRIPT, str(folder), kind], base)


@pytest.fixture(scope="module")
def driven(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[list[RunResult], list[dict[str, Any]], list[list[str]], Experiment]:
    """Legs of two ranks: as the script is (the first, and two more), without resharding, and layer times; with the losses of all steps."""
    folder = tmp_path_factory.mktemp("driven")
    with legs_of(folder, "plain") as session:
        own, kept = session.experiment.strategy, other(reshard_after_forward=False)
        runs = [session.run(Leg(strategy=one, steps=5, warmup_steps=2)) for one in (own, kept, own)]
        parts = session.run_profile(Leg(strategy=own, steps=4, warmup_steps=2, profile=True))
        runs.append(session.run(Leg(strategy=own, steps=5, warmup_steps=2)))
        return runs, parts, losses(folder, 2), session.experiment


Driven = tuple[list[RunResult], list[dict[str, Any]], list[list[str]], Experiment]


@pytest.mark.sample(4)
def test_the_default_is_the_script(driven: Driven, tmp_path: Path) -> None:
    """Its strategy says what the calls do; losses are those of the script alone, to the bit, also in legs without resharding."""
    _, _, seen, experiment = driven
    assert (experiment.strategy, experiment.run.launcher) == (OWN, "command")
    assert (experiment.cluster.trainers, experiment.workload.optimizer) == (2, "adam")
    assert main(["launch", "--nproc", "2", SCRIPT, str(tmp_path), "plain", "34"]) == 0
    assert [own[:34] for own in seen] == losses(tmp_path, 2)


def test_legs_gather_as_their_strategy_says(driven: Driven) -> None:
    """Seven gathers a step where blocks are gathered again, four where they stay; four scatters; as before after layers were timed."""
    for run, gathers in zip(driven[0], (7, 4, 7, 7), strict=True):
        names = Counter(span.name.split()[0] for span in run.spans)
        assert (names["all_gather"], names["reduce_scatter"]) == (2 * 7 * gathers, 2 * 7 * 4)
        table = run.steps[run.steps["step"] >= 1]
        parts = table[["forward_s", "backward_s", "stall_s", "update_s"]].sum(axis=1) if "stall_s" in table else None
        assert len(table) == 10
        assert parts is None or (parts > 0).all()
    assert [(block.name, block.nbytes) for block in driven[0][0].plan.blocks] == [
        ("", 4 * REST),
        *((name, 4 * BLOCK) for name in BLOCKS),
    ]


def test_layers_are_timed_without_an_exchange(driven: Driven) -> None:
    """Each layer has a forward, each gradient a time; memory is that of all shards together."""
    runs, parts, _, _ = driven
    for part in parts:
        assert [*part["layers"]["layers"]][:3] == ["tokens", "layers.0.up", "layers.0.down"]
        assert all(ready is not None and ready >= 0 for step in part["layers"]["ready"] for ready in step)
        assert len(part["backward"]) == len(part["layers"]["forward"]) >= 3
        assert part["memory"]["parameters"] == part["memory"]["gradients"] == 4 * (3 * BLOCK + REST)
    points = points_of_blocks(runs[0])
    assert [point.nbytes for point in points] == [4 * REST, *[4 * BLOCK] * 3]
    assert all(point.took > 0 for point in points)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["long sums", "short"])
def test_parameters_and_gradients_travel_in_their_own_types(kind: str, tmp_path: Path) -> None:
    """The plan, and the plan of a profile, gather and scatter as many bytes as the script alone asks torch for."""
    assert launch(kind, tmp_path / "alone", 2) == 0
    asked = Counter[tuple[str, int]]()
    for line in collectives(tmp_path / "alone"):
        name, nbytes, number = line.split()
        asked[name.partition("_")[0], int(nbytes)] += int(number)
    with legs_of(tmp_path, kind) as session:
        own = session.experiment.strategy
        plan = session.run(Leg(strategy=own, steps=4, warmup_steps=2)).plan
        parts = session.run_profile(Leg(strategy=own, steps=4, warmup_steps=2, profile=True))
    table = table_of(compute_key(session.experiment, own), parts)
    again = build_plan(own, table.by_readiness(), Setting(trainers=2, trainers_per_node=2))
    for one in (plan, again):
        told = Counter[tuple[str, int]]()
        for block in one.blocks:
            told["all", block.nbytes] += 1 + block.regathers + (block is one.blocks[-1])  # torch frees the last one, too
        for operation in one.exchange:
            told["reduce", operation.nbytes // 2] += 1
        assert told == asked


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "strategy", "kind"),
    [
        (2, other(reshard_after_forward=False), "plain"),
        (4, other(reshard_after_forward=False, sharding_degree=2), "plain"),
        (2, OWN.replace(bf16_allreduce=True), "short sums"),
    ],
)
def test_printed_lines_gather_and_train_as_they_say(
    ranks: int, strategy: DistributedStrategy, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the script's place they train as the script, or as one that passes a wire itself; blocks that stay are gathered once."""
    (printed,) = re.findall(r"```python\n(.*?)```", page_of(strategy, OWN, "USE it: 1.2x"), re.DOTALL)[:1]
    assert launch(kind, tmp_path / "own", ranks) == 0
    monkeypatch.setenv("PRINTED_LINES", printed)
    assert launch("plain", tmp_path / "printed", ranks) == 0
    if kind == "short sums":
        assert collectives(tmp_path / "printed") == collectives(tmp_path / "own")
    else:
        gathers = [line.split() for line in collectives(tmp_path / "printed") if line.startswith("all_gather")]
        assert {int(nbytes): int(number) for _, nbytes, number in gathers if number != "0"} == {4 * BLOCK: 3, 4 * REST: 1}
    values = [[float.fromhex(each) for rank in losses(tmp_path / name, ranks) for each in rank] for name in ("own", "printed")]
    np.testing.assert_allclose(*values, rtol=0 if ranks == 2 else 1e-4)  # sums of four are rounded in another order


@pytest.mark.slow
def test_a_wire_is_given_to_the_calls_of_another_launch(tmp_path: Path) -> None:
    """A driver's leg gives what a script does that calls ``MixedPrecisionPolicy(reduce_dtype)`` itself."""
    assert launch("short sums", tmp_path / "itself", 2) == 0
    with legs_of(tmp_path, "plain") as session:
        session.run(Leg(strategy=OWN, steps=4, warmup_steps=2))
        run = session.run(Leg(strategy=OWN.replace(bf16_allreduce=True), steps=4, warmup_steps=2))
    assert {operation.wire_dtype for operation in run.plan.exchange} == {"bfloat16"}
    for own, expected in zip(losses(tmp_path, 2), losses(tmp_path / "itself", 2), strict=True):
        last = own[len(own) - own[::-1].index(expected[0]) - 1 :]  # the steps of the last launch, which is another one's
        assert last[:5] == expected[:5]


def test_a_file_is_for_distributed_data_parallel(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A strategy's file is not applied to a script that calls ``fully_shard``: arguments do the same, and the error says so."""
    OWN.save(tmp_path / "recommended.toml")
    words = ("--strategy", str(tmp_path / "recommended.toml"), "--log-dir", str(tmp_path / "log"))
    assert launch("plain", tmp_path / "file", 2, *words) != 0
    said = capfd.readouterr().err + "".join(log.read_text(encoding="utf-8") for log in tmp_path.glob("log/*"))
    assert "the script calls fully_shard" in said


@pytest.mark.slow
def test_a_mesh_of_the_scripts_own_is_its_degree(tmp_path: Path) -> None:
    """It stays beside the calls without one: the strategy says its ranks, so that no other degree is tried."""
    with legs_of(tmp_path, "mesh") as session:
        assert session.experiment.strategy == other(sharding_degree=2)


def test_gathers_on_streams_are_not_profiled() -> None:
    """A script of NCCL is refused by name, before a leg."""
    asked = Experiment.from_dict({"run": {"backend": "nccl", "device": "cuda", "launcher": "command"}, "cluster": {"trainers_per_node": 2}})
    session: Any = SimpleNamespace(experiment=asked.replace(strategy=OWN))
    with pytest.raises(ConfigError, match="profile and tune need gloo") as refused:
        profile_script(session, seconds=1.0, stragglers=True)
    assert "tune --simulate-only" in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("together", "makes several modules one unit"),
        pytest.param("mixed", "trains beside models of DistributedDataParallel", marks=pytest.mark.slow),
        pytest.param("first", "is FSDP1", marks=pytest.mark.slow),
    ],
)
def test_what_is_not_driven(kind: str, what: str, tmp_path: Path) -> None:
    """A driver hears why."""
    with pytest.raises(FleetbenchError, match=what), legs_of(tmp_path, kind):
        pass


def test_libraries_are_told_in_their_words() -> None:
    """As Trainer and Accelerate take it; a module of Lightning's calls ``fully_shard`` itself."""
    remedy = "fully_shard(..., reshard_after_forward=False)"
    assert in_words_of("Trainer", remedy).endswith('fsdp_config={..., "fsdp_version": 2, "reshard_after_forward": False})')
    assert in_words_of("Accelerate", remedy) == "FullyShardedDataParallelPlugin(..., fsdp_version=2, reshard_after_forward=False)"
    assert in_words_of("Lightning", remedy) == remedy
    page = page_of(other(sharding_degree=4), OWN, "USE it: 1.2x")
    assert "dp_shard_size=4" in page
    assert "ModelParallelStrategy" in page


def test_the_strategies_that_are_tried() -> None:
    """Each degree that divides the ranks, with and without resharding; a script's own degree and number of neighbours stay beside these."""

    def tried(own: DistributedStrategy, trainers: int, nodes: int = 1) -> list[tuple[int, bool | int]]:
        asked = Experiment(name="asked", cluster=Cluster(nodes=nodes, trainers_per_node=trainers // nodes), strategy=own)
        found = [one.sharding_configs for one in of_script(asked)]
        return [(one.sharding_degree, one.reshard_after_forward) for one in found]

    assert tried(OWN, 4) == [(0, True), (0, False), (2, True), (2, False)]
    assert tried(OWN, 2) == [(0, True), (0, False)]
    assert tried(OWN, 4, nodes=2) == [(0, True), (0, False), (0, 2), (2, True), (2, False)]
    assert tried(other(sharding_degree=4), 4) == [(4, True), (4, False)]
    assert tried(other(sharding_degree=2, reshard_after_forward=False), 4) == [(2, False), (2, True)]
    assert tried(other(reshard_after_forward=2), 4) == [(0, 2), (0, True), (0, False), (2, True), (2, False)]


@pytest.mark.slow
def test_legs_of_replicas_start_the_script_again(tmp_path: Path) -> None:
    """On four ranks a shard group of two has its own launch, whose mesh is checked there; a mesh of the script's own stays."""
    with legs_of(tmp_path, "plain", 4) as session:
        run = session.run(Leg(strategy=other(sharding_degree=2), steps=4, warmup_steps=2))
        assert run.plan.shard_ranks == 2
        assert Counter(span.name.split()[0] for span in run.spans)["all_gather"] == 4 * 6 * 7
    with legs_of(tmp_path, "hybrid", 4) as session:
        assert session.experiment.strategy == other(sharding_degree=2)
    with legs_of(tmp_path, "unseeded", 4) as session, pytest.raises(LegFailed, match="ranks begin from different parameters"):
        session.run(Leg(strategy=other(sharding_degree=2), steps=4, warmup_steps=2))
