"""The host's share of a simulated step: reading that falls behind, results read back, threads without a core.

One trainer computes 100 + 200 ns a step; among two, a gradient of 1000 bytes takes 20 + 1000 ns more at 1 ns a byte.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pandas as pd
import pytest
from sim_cases import assemble, in_ns, layered, link, profiled, with_profile

from fleetbench.measurements import Threads
from fleetbench.quantities import Bytes, Nanoseconds
from fleetbench.result import RunResult
from fleetbench.workload import HostWork, LayerSpec
from sim.run import Engine, simulate

LAYER = [(250, 100, 200)]


def run(host: dict[str, Any], *, steps: int = 12, nodes: int = 1, **options: Any) -> RunResult:
    """A run of declared layers with host work."""
    return simulate(layered(LAYER, nodes=nodes, inter=link(8, 10), steps=steps, also={"host": HostWork(**host)}, **options))


def test_reading_that_falls_behind_sets_the_pace() -> None:
    """A batch in 900 ns by one loader, and steps of 300: each but the first takes 900, of which 600 are other."""
    result = run({"load": 900, "loaders": 1})
    assert in_ns(result, "start_s")[:4] == [0, 1200, 2100, 3000]
    assert in_ns(result, "other_s") == [900] + [600] * 11
    assert result.summary.step_s["p50"] == pytest.approx(900e-9)


@pytest.mark.parametrize("engine", ["reference", "vector"])
@pytest.mark.parametrize(
    "strategy", [{}, {"fuse_all_reduce_ops": True}, {"localsgd": True, "localsgd_configs": {"k_steps": 2, "buffers": "average"}}]
)
def test_what_is_declared_is_as_if_it_were_measured(engine: Engine, strategy: dict[str, Any]) -> None:
    """Several gradients of a layer, its buffers, the update, starting collectives and packing: to the nanosecond."""
    costs = {"update": Nanoseconds(40), "pack": Nanoseconds(30), "merge": Nanoseconds(20)}
    specs = (
        LayerSpec(name="a", tensors=(100, 150), forward=Nanoseconds(100), backward=Nanoseconds(200), buffers=Bytes(24)),
        LayerSpec(name="b", params=70, forward=Nanoseconds(50), backward=Nanoseconds(90), buffers=Bytes(8), repeat=2),
    )
    options: dict[str, Any] = {"inter": link(8, 10), "steps": 5, "strategy": strategy}
    host = HostWork(per_collective=Nanoseconds(5), **costs)
    declared = assemble({"model": "layers", "layers": specs}, also={"host": host}, **options)
    table = {"host_per_collective": Nanoseconds(5), "buffers_nbytes": Bytes(40), **costs}
    measured = [((100, 150), (380, 380), 100, 200), ((70,), (180,), 50, 90), ((70,), (90,), 50, 90)]
    one, other = (simulate(which, engine=engine).steps for which in (declared, with_profile(*profiled(measured, table, **options))))
    pd.testing.assert_frame_equal(one, other)
    assert other["update_s"].max() >= 40e-9


@pytest.mark.parametrize("engine", ["reference", "vector"])
@pytest.mark.parametrize(
    ("every", "expected"), [(3, [0, 0, 0, 50, 0, 0, 50]), (1, [0, *[50] * 5, 100]), (7, [0, 0, 0, 0, 0, 0, 50]), (100, [0] * 7)]
)
def test_results_are_read_back_every_so_many_steps(engine: Engine, every: int, expected: list[int]) -> None:
    """50 ns in front of the step after each n-th, and at the end of the last one where that is an n-th: floor(S / n) times in S steps."""
    what = layered(LAYER, nodes=1, steps=7, also={"host": HostWork(fetch=Nanoseconds(50))}, strategy={"fetch_every_n_steps": every})
    result = simulate(what, engine=engine)
    assert in_ns(result, "other_s") == expected
    assert in_ns(result, "start_s")[-1] == 6 * 300 + sum(expected[:-1])
    assert result.summary.wall_s == pytest.approx((7 * 300 + 7 // every * 50) * 1e-9)
    assert result.summary.skipped == ()


@pytest.mark.parametrize(("cores", "forward_ns"), [(8, 100), (4, 160), (2, 320)])
def test_threads_without_a_core_slow_compute(cores: int, forward_ns: int) -> None:
    """Two trainers of four threads; the profile's two threads took 1.6 times as long, so two cores each do, and one each 3.2."""
    experiment, profile = profiled(
        [([100], [200], 100, 200)], {}, nodes=1, trainers_per_node=2, intra=link(8), cores_per_node=cores, strategy={"thread_num": 4}
    )
    lines = tuple(
        Threads(thread_num=n, step=Nanoseconds(took), compute=Nanoseconds(took), contention=0.0, collective_contention=0.0, unexplained=0.0)
        for n, took in ((1, 960), (2, 480), (4, 300))
    )
    result = simulate(with_profile(experiment, dataclasses.replace(profile, threads=lines, cores=8)))
    assert in_ns(result, "forward_s") == [forward_ns] * 2
    assert in_ns(result, "backward_s") == [2 * forward_ns] * 2
