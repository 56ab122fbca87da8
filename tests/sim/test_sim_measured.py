"""Measured collectives of NCCL: taken as they are, and carried over to other numbers of ranks by laws that hold here exactly."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import tomli_w
from benchmark_outputs import ALL_REDUCE, nccl_tests
from sim_cases import carried_ns, link

from fleetbench.cluster import Measured as Declared
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.measurements import CollectivePoint
from fleetbench.quantities import Bytes, Nanoseconds
from sim.network.links import Links
from sim.network.measured import MeasuredNccl
from sim.run import simulate

SIZES = tuple(2**power for power in range(3, 33))
LEVEL_NS = 31_000


def tree_ns(nodes: int, nbytes: int) -> int:
    """A time that grows by as much for every level of nodes."""
    return 9_000 + nbytes // 50 + int(math.log2(nodes)) * (LEVEL_NS + nbytes // 100)


def ring_ns(nodes: int, nbytes: int) -> int:
    """Steps that take 40 us until 3 MiB, and then 15 us for each."""
    share = nbytes / (4 * nodes)
    return round(2 * (4 * nodes - 1) * max(40_000, 15_000 * share / 2**20))


def links(*declared: Declared, **environment: str) -> Links:
    """Nodes of 4 GPUs with an interface each."""
    return Links(
        trainers_per_node=4,
        nics_per_node=4,
        intra=link(3_600),
        inter=link(200),
        collective="nccl-hopper",
        declared=declared,
        environment=environment,
    )


def declared(nodes: int, took: Callable[[int, int], int], kind: str = "all_reduce") -> Declared:
    """All sizes on so many nodes of 4."""
    points = tuple(CollectivePoint(nbytes=Bytes(nbytes), took=Nanoseconds(took(nodes, nbytes))) for nbytes in SIZES)
    return Declared(kind=kind, trainers=4 * nodes, points=points)  # type: ignore[arg-type]  # one of its kinds


def predicted(nodes: int, own: Links) -> list[float]:
    """Of all sizes on so many nodes."""
    way = MeasuredNccl("all_reduce", range(4 * nodes), own)
    return [float(way.route(nbytes).cost.total_ns) for nbytes in SIZES]


@pytest.mark.parametrize("known", [(2, 4), (1, 4), (4, 8), (2, 64)])
def test_trees_grow_by_what_a_level_adds(known: tuple[int, int]) -> None:
    """On 16 nodes, from two numbers of nodes, the first of which may be one node."""
    own = links(*(declared(nodes, tree_ns) for nodes in known), NCCL_ALGO="Tree")
    assert predicted(16, own) == [pytest.approx(tree_ns(16, nbytes), rel=1e-4) for nbytes in SIZES]


@pytest.mark.parametrize("known", [(2,), (4, 8), (32,)])
def test_steps_of_rings_take_what_they_took_with_as_many_bytes(known: tuple[int, ...]) -> None:
    """On 16 nodes, from others; between two sizes of a step within a twentieth, because the law has a knee."""
    own = links(*(declared(nodes, ring_ns) for nodes in known), NCCL_ALGO="Ring", NCCL_PROTO="Simple")
    assert predicted(16, own)[10:] == [pytest.approx(ring_ns(16, nbytes), rel=0.05) for nbytes in SIZES[10:]]


def test_what_was_measured_is_taken() -> None:
    """Among as many ranks on as many nodes, whatever NCCL's model says; halfway between two sizes, half of each."""
    way = MeasuredNccl("all_reduce", range(16), links(declared(4, ring_ns)))
    assert [way.route(nbytes).cost.total_ns for nbytes in SIZES] == [ring_ns(4, nbytes) for nbytes in SIZES]
    assert way.route(3 * 2**24).cost.total_ns == (ring_ns(4, 2**25) + ring_ns(4, 2**26)) / 2


def experiment(folder: Path, measured: object, trainers: int = 8, collective: str = "nccl-hopper") -> Experiment:
    """One bucket of 16 MiB on one node."""
    layers = [{"name": "block", "params": 2**22, "forward": "100 ns", "backward": "200 ns"}]
    cluster = {"trainers_per_node": trainers, "collective": collective, "intra": {"bandwidth": "450 GB/s", "latency": "0 s"}}
    data = {
        "workload": {"model": "layers", "layers": layers, "steps": 1},
        "cluster": {**cluster, "measured": measured},
        "run": {"warmup_steps": 0},
    }
    (folder / "experiment.toml").write_text(tomli_w.dumps(data), encoding="utf-8")
    return Experiment.load(folder / "experiment.toml")


@pytest.mark.parametrize("collective", ["nccl-hopper", "measured"])
def test_a_log_gives_the_times_of_a_run(tmp_path: Path, collective: str) -> None:
    """The file lies beside the experiment's; a bucket of 16 MiB takes what all_reduce_perf printed, in microseconds with a hundredth."""
    (tmp_path / "perf.log").write_text(nccl_tests(), encoding="utf-8")
    found = experiment(tmp_path, ["perf.log"], collective=collective)
    start, end = carried_ns(simulate(found))["all_reduce 0"]
    assert end - start == pytest.approx(1e9 * ALL_REDUCE.seconds(8, 2**24), abs=10)
    assert Experiment.from_dict(tomllib.loads(found.to_toml())) == found


@pytest.mark.parametrize(
    ("text", "match"), [("no table\n", "is no output of nccl-tests"), (nccl_tests(wrong=3), "holds no correct all-reduce")]
)
def test_other_files_are_refused(tmp_path: Path, text: str, match: str) -> None:
    """With the file's name and a hint."""
    (tmp_path / "perf.log").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"(?s){match}.*HINT|perf\.log.*{match}.*HINT"):
        experiment(tmp_path, "perf.log")
