"""Sharded training on the simulated clock: timelines worked out on paper, bytes by the formula, and both engines on random experiments.

Links of 8 Gbit/s carry one byte a nanosecond. Among two trainers a gather and a reduce-scatter of S bytes take 10 + S / 2 ns each.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from engine_cases import agree, sharded_case_of
from sim_cases import carried_ns, in_ns, layered, link

from fleetbench.quantities import Nanoseconds
from fleetbench.result import RunResult
from fleetbench.stragglers import SlowRank
from fleetbench.workload import HostWork
from sim.run import Engine, simulate

THREE = [(250, 100, 200), (500, 300, 400), (250, 200, 300)]
"""Layers of 1000, 2000 and 1000 bytes, whose gather takes 510, 1010 and 510 ns; in all 600 ns forward and 900 backward."""
ENGINES: tuple[Engine, ...] = ("reference", "vector")


def run(configs: dict[str, Any], engine: Engine, also: dict[str, Any] | None = None, **options: Any) -> RunResult:
    """A sharded run whose collectives follow one another, as NCCL's on one communicator do."""
    strategy = {"fuse_all_reduce_ops": True, "sharding": True, "sharding_configs": configs} | (also or {})
    return simulate(layered(THREE, strategy=strategy, backend="nccl", **{"inter": link(8, 10), **options}), engine=engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_stage_3_gathers_each_block_before_its_forward_and_its_backward(engine: Engine) -> None:
    """While a block computes, the next is on its way; the last block stays.

    Forward: layer0 gathered 0 to 510, computed to 610; layer1 gathered to 1520, computed to 1820; layer2 gathered to 2030, computed to
    2230. Backward: layer2 is there, and computed to 2530, while layer1 is gathered to 3240 and computed to 3640; layer2's gradient is
    scattered from 3240 to 3750, then layer0 gathered to 4260 and computed to 4460. Gradients of layer1 are scattered to 5270, and those of
    layer0 to 5780, which the update waits for.
    """
    found = run({"stage": 3}, engine)
    assert in_ns(found, "forward_s") == [600] * 2
    assert in_ns(found, "backward_s") == [900] * 2
    assert in_ns(found, "exposed_comm_s") == [5780 - 1500] * 2
    assert found.summary.wall_s == pytest.approx(5780e-9)
    waits = [(span.start_ns, span.start_ns + span.duration_ns) for span in found.spans if span.rank == 0 and span.name == "wait"]
    assert sorted(waits) == [
        *((0, 510), (610, 1520), (1820, 2030), (2530, 3240)),
        *((3640, 3750), (3750, 4260)),  # for the scatter of layer2, which has the one buffer; then for layer0
        *((4460, 5270), (5270, 5780)),
    ]
    scattered = [span.start_ns + span.duration_ns for span in found.spans if span.rank == 0 and span.name.startswith("reduce_scatter")]
    assert sorted(scattered) == [3750, 5270, 5780]
    assert found.summary.bytes_sent_per_trainer == 2000 + 2000 + 1500  # gathered, scattered, and layers 0 and 1 gathered again


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("configs", [{"stage": 1}, {"stage": 2}, {"stage": 3, "reshard_after_forward": False}])
def test_what_stays_gathered_is_gathered_once(configs: dict[str, Any], engine: Engine) -> None:
    """The forward is as in stage 3 to 2230; the backward waits for no gather, and gradients are scattered to 3040, 4050, 4560."""
    found = run(configs, engine)
    assert in_ns(found, "exposed_comm_s") == [4560 - 1500] * 2
    assert {name: end for name, (_, end) in carried_ns(found).items() if name.startswith("reduce_scatter")} == {
        "reduce_scatter 0": 3040,
        "reduce_scatter 1": 4050,
        "reduce_scatter 2": 4560,
    }
    assert found.summary.bytes_sent_per_trainer == 2000 + 2000


@pytest.mark.parametrize("engine", ENGINES)
def test_the_backward_waits_for_scatters_of_gloo(engine: Engine) -> None:
    """There are no streams: 2230 as above, layer2 to 2530, its scatter to 3040, layer1 to 3440 and 4450, layer0 to 4650 and 5160."""
    strategy = {"fuse_all_reduce_ops": True, "sharding": True, "sharding_configs": {"stage": 2}}
    found = simulate(layered(THREE, strategy=strategy, backend="gloo", inter=link(8, 10)), engine=engine)
    assert in_ns(found, "backward_s") == [900] * 2
    assert in_ns(found, "exposed_comm_s") == [5160 - 1500] * 2


@pytest.mark.parametrize("engine", ENGINES)
def test_shards_meet_their_replicas(engine: Engine) -> None:
    """Four trainers in two groups of two (HSDP): each shard of 500 bytes is averaged over two replicas, in 20 + 500 ns.

    Ranks 0 and 1 are a node, whose links carry 10 bytes a nanosecond without latency: a gather of 1000 bytes takes 50 ns.
    """
    strategy = {"fuse_all_reduce_ops": True, "sharding": True, "sharding_configs": {"stage": 3, "sharding_degree": 2}}
    options: dict[str, Any] = {"nodes": 2, "trainers_per_node": 2, "intra": link(80), "inter": link(8, 10), "nics_per_node": 2}
    found = simulate(layered(THREE[:1], strategy=strategy, backend="nccl", **options), engine=engine)
    times = carried_ns(found)
    assert times["all_gather 0"] == (0, 50)
    assert times["reduce_scatter 0"] == (350, 400)
    assert times["all_reduce 0"] == (400, 400 + 520)
    assert in_ns(found, "exposed_comm_s") == [50 + 50 + 520] * 4


@pytest.mark.parametrize("engine", ENGINES)
def test_workers_of_two_trainers_meet_at_the_end_of_a_round(engine: Engine) -> None:
    """Nodes of two trainers are workers, which meet after two updates: the steps above without all-reduces, then a shard's, of 520 ns.

    A step takes 50 + 100 + 200 + 50 ns, and with a merge of 90 ns, of which a shard is a half, the round 800 + 520 + 45.
    """
    diloco = {"localsgd": True, "localsgd_configs": {"k_steps": 2, "outer_lr": 0.5}}
    strategy = {"fuse_all_reduce_ops": True, "sharding": True, "sharding_configs": {"stage": 3, "sharding_degree": 2}, **diloco}
    options: dict[str, Any] = {"nodes": 2, "trainers_per_node": 2, "intra": link(80), "inter": link(8, 10), "nics_per_node": 2}
    also = {"host": HostWork(merge=Nanoseconds(90))}
    found = simulate(layered(THREE[:1], strategy=strategy, backend="nccl", steps=2, also=also, **options), engine=engine)
    assert found.summary.wall_s == pytest.approx((800 + 520 + 45) * 1e-9)
    assert in_ns(found, "exposed_comm_s") == [100, 100 + 520] * 4
    assert found.summary.bytes_sent_per_trainer == 2 * (500 + 500) + 500


@pytest.mark.parametrize("engine", ENGINES)
def test_a_late_rank_is_waited_for_at_the_gate(engine: Engine) -> None:
    """Rank 1 joins the step's first gather with rank 0, and computes twice as long: what rank 0 waits for it is wait, not exposed."""
    found = run({"stage": 2}, engine, stragglers=(SlowRank(ranks=(1,), factor=2.0),))
    wait, exposed, compute = (in_ns(found, name) for name in ("wait_s", "exposed_comm_s", "forward_s"))
    assert compute == [600, 1200]
    assert [bool(own) for own in wait] == [True, False]
    ends = [(wait[rank] or 0) + (exposed[rank] or 0) + 1500 * (rank + 1) for rank in range(2)]
    assert ends[0] == ends[1]


@pytest.mark.parametrize(
    "seeds",
    [range(25), pytest.param(range(25, 200), marks=pytest.mark.slow), pytest.param(range(200, 1000), marks=pytest.mark.whole)],
    ids=str,
)
def test_engines_agree_on_sharded_strategies(seeds: range) -> None:
    """Random stages, degrees, blocks, clusters and workloads: equal to the nanosecond, or both refuse alike."""
    ways: Counter[str] = Counter()
    for seed in seeds:
        try:
            ways[agree(sharded_case_of(seed)).partition(":")[0]] += 1
        except BaseException as error:
            error.add_note(f"experiment: sharded_case_of({seed})")
            raise
    assert ways["vector"] >= len(seeds) * 0.2
