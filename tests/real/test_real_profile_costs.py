"""Costs read off runs: simulated runs of the legs stand for real ones, because what is to be found is known there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from sim_cases import link, with_profile

from fleetbench.cluster import Link
from fleetbench.experiment import Experiment
from fleetbench.measurements import CollectivePoint
from fleetbench.plan.layers import Gradient, Layer, LayerTable, scaled
from fleetbench.profile import Communication, Profile, compute_key
from fleetbench.quantities import Bytes, Nanoseconds
from fleetbench.result import RunResult
from fleetbench.strategy import DistributedStrategy
from real.profile import measuring as profile_legs
from real.profile.costs import (
    closing,
    exchanges,
    fit_points,
    link_of_two,
    points_of,
    quantising,
    settled,
    slowdowns_of,
    start_times,
    starts_of,
    with_averaging,
)
from sim.run import simulate

US = 1_000
MS = 1_000_000
SIZES = (400_000, 300_000, 5_000, 250_000, 50_000, 350_000, 200, 300_000)
"""Elements of eight layers, in forward order."""


def experiment(stragglers: tuple[dict[str, object], ...] = (), optimizer: str = "sgd", steps: int = 12) -> Experiment:
    """Two trainers of one node, and a model that only its table describes."""
    cluster = {
        "trainers_per_node": 2,
        "intra": {"bandwidth": "1 Gbit/s", "latency": "200 us", "payload": True},
        "stragglers": list(stragglers),
    }
    workload = {"model": "mlp", "steps": steps, "optimizer": optimizer}
    return Experiment.from_dict({"workload": workload, "cluster": cluster, "run": {"warmup_steps": 3}})


def table(**costs: object) -> LayerTable:
    """4 ms forward and 9 ms backward a layer, each with one gradient that is ready with it."""
    layers = tuple(
        Layer(
            name=f"l{index}",
            gradients=(Gradient(name=f"l{index}.w", numel=numel, ready=Nanoseconds(9 * MS * (len(SIZES) - index))),),
            forward=Nanoseconds(4 * MS),
            backward=Nanoseconds(9 * MS),
        )
        for index, numel in enumerate(SIZES)
    )
    return LayerTable(key=compute_key(experiment()), layers=layers, **costs)  # type: ignore[arg-type]  # its other fields


COSTS = {
    "update": Nanoseconds(3 * MS),
    "local_update": Nanoseconds(4 * MS),
    "read": Nanoseconds(2 * MS),
    "merge": Nanoseconds(5 * MS),
    "host_per_collective": Nanoseconds(60 * US),
    "pack": Nanoseconds(7 * MS),
    "contention": 0.4,
    "collective_contention": 0.7,
}


@pytest.fixture
def run() -> Callable[..., RunResult]:
    """Simulate a leg with all of these costs."""

    def simulated(
        strategy: DistributedStrategy, given: Experiment | None = None, in_flight: tuple[Link, ...] = (), quantise: int = 0
    ) -> RunResult:
        made = (given or experiment()).replace(strategy=strategy)
        communication = Communication(
            backend="gloo", trainers=2, link=link(1, 200 * US), in_flight=in_flight, quantise=Nanoseconds(quantise)
        )
        profile = Profile(
            machine="", created="", tables=(dataclasses.replace(table(**COSTS), key=compute_key(made)),), communication=communication
        )
        return simulate(with_profile(made, profile))

    return simulated


PLAIN = DistributedStrategy()


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_link_is_that_of_the_runs(run: Callable[..., RunResult], optimizer: str) -> None:
    """1 Gbit/s and 200 us among two: points lie on the line, of all gradients but the first of a queue, and of their sum."""
    given = experiment(optimizer=optimizer)
    points = points_of(run(profile_legs.whole(PLAIN), given), run(profile_legs.queued(PLAIN, optimizer), given))
    assert [point.nbytes for point in points] == [*sorted(4 * numel for numel in SIZES[:-1]), 4 * sum(SIZES)]
    for point in points:
        assert point.took == pytest.approx(400 * US + point.nbytes * 8, abs=2)
    found = fit_points(points, 2)
    assert found.link.latency == pytest.approx(200 * US, abs=2)
    assert found.link.bandwidth == pytest.approx(1e9, rel=1e-4)


def test_a_slow_rank_does_not_make_collectives_longer(run: Callable[..., RunResult]) -> None:
    """Rank 1 takes half as long again: what counts begins when the rank that came last is there."""
    slow = experiment(({"kind": "slow_rank", "ranks": [1], "factor": 1.5},))
    result = run(profile_legs.whole(PLAIN), slow)
    np.testing.assert_allclose(exchanges(result), (400 * US + 4 * sum(SIZES) * 8) * 1e-9, rtol=1e-6)
    ranks = result.steps.groupby("rank")["wait_s"].median()
    assert ranks[0] > 10 * ranks[1]


def _point(nbytes: int, took_ns: float) -> CollectivePoint:
    return CollectivePoint(nbytes=Bytes(nbytes), took=Nanoseconds(round(took_ns)))


def test_starting_a_bucket_costs_what_it_was_given(run: Callable[..., RunResult]) -> None:
    """60 us a collective and 7 ms for copying all bytes, from one bucket and from several."""
    whole, several = run(profile_legs.whole(PLAIN)), run(profile_legs.several(PLAIN, table()))
    assert len(several.plan.buckets) > 3
    assert {bucket: len(times) for bucket, times in start_times(whole).items()} == {0: 2 * 12}  # warm-up steps are left out
    starts = starts_of(whole, several)
    assert starts.per_collective_s == pytest.approx(60e-6, rel=0.01)
    assert starts.pack_s == pytest.approx(7e-3, rel=0.01)
    assert sum(starts.of(several.plan)) == pytest.approx(7e-3 + len(several.plan.buckets) * 60e-6, rel=0.01)


def test_a_settled_table_has_the_times_of_training(run: Callable[..., RunResult]) -> None:
    """A table measured 10 % too long comes back to what training takes, without the copying that ends its backward."""
    longer = dataclasses.replace(
        table(), layers=tuple(dataclasses.replace(layer, forward=Nanoseconds(round(layer.forward * 1.1))) for layer in table().layers)
    )
    found = settled(longer, run(profile_legs.whole(PLAIN)))
    assert [layer.forward for layer in found.layers] == [4 * MS] * 8
    assert found.backward_ns == pytest.approx(72 * MS, abs=20)
    assert (found.update, found.read) == (3 * MS, 2 * MS)


def test_slowdowns_are_those_of_the_runs(run: Callable[..., RunResult]) -> None:
    """Compute 0.4 and transfers 0.7 slower beside each other, found within 0.05 with the link as it is."""
    whole, several = run(profile_legs.whole(PLAIN)), run(profile_legs.several(PLAIN, table()))
    hockney = fit_points([_point(size, 400 * US + 8 * size) for size in (10_000, 100_000, 1_000_000)], 2)
    found = slowdowns_of(table(), several, starts_of(whole, several), hockney)
    assert found.compute == pytest.approx(0.4, abs=0.05)
    assert found.collective == pytest.approx(0.7, abs=0.05)
    assert found.error < 0.01


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_an_averaging_costs_what_it_was_given(run: Callable[..., RunResult], optimizer: str) -> None:
    """A local update of 4 ms, and 5 ms more after every second step; starting the collectives is not counted twice."""
    averaged = run(profile_legs.averaged(PLAIN, optimizer, 2), experiment(optimizer=optimizer))
    assert len(closing(averaged)) == 2 * 7  # after the first step, every second one, and the last
    found = with_averaging(table(host_per_collective=COSTS["host_per_collective"]), averaged)
    assert found.local_update == 4 * MS
    assert found.merge == pytest.approx(5 * MS, rel=0.005)
    assert found.local_compute == 1.0


def cooled(averaged: RunResult) -> RunResult:
    """The run with the first three steps after each averaging longer by 30, 20 and 10 ms."""
    steps, since = averaged.steps.copy(), 3
    for index in steps.sort_values(["rank", "step"]).index:
        steps.loc[index, "backward_s"] += (0.030, 0.020, 0.010, 0.0)[min(since, 3)]
        since = 0 if pd.notna(steps.loc[index, "local_steps"]) else since + 1
    return dataclasses.replace(averaged, steps=steps)


@pytest.mark.parametrize(("synchronous", "share"), [(1.25, 0.8), (1.0, 1.0), (0.9, 1.0)])
def test_the_steps_after_an_exchange_are_told_from_the_others_of_a_round(
    run: Callable[..., RunResult], synchronous: float, share: float
) -> None:
    """Rounds of eight steps of 104 ms, the first three with 60 ms more together, beside synchronous steps of so many times as much."""
    averaged = run(profile_legs.averaged(PLAIN, "sgd", 8), experiment(steps=40))
    whole = scaled(table(host_per_collective=COSTS["host_per_collective"]), synchronous, synchronous)
    found = with_averaging(whole, cooled(averaged))
    assert found.local_compute == pytest.approx(share, abs=1e-4)
    assert found.resume == pytest.approx(60 * MS, rel=1e-3)
    assert found.merge == pytest.approx(5 * MS, rel=0.005)


@pytest.mark.sample(3)
@pytest.mark.parametrize("gbit", [1.0, 0.5, 0.8])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_two_in_flight_see_what_they_were_given(run: Callable[..., RunResult], gbit: float, backend: str) -> None:
    """From one queue, or from one on each of two communicators: each one's bandwidth within 6 %.

    Latencies that hardly meet stay what they are alone.
    """
    given = experiment()
    given = given.replace(run=dataclasses.replace(given.run, backend=backend, device="cuda" if backend == "nccl" else "cpu"))
    two = run(profile_legs.queued_in_twos(PLAIN, "sgd", backend), given, (link(gbit, 200 * US),))
    assert {operation.communicator for operation in two.plan.exchange} == ({0} if backend == "gloo" else {0, 1})
    hockney = fit_points([_point(size, 400 * US + 8 * size) for size in (10_000, 100_000, 1_000_000)], 2)
    (found,) = link_of_two(two, hockney)
    assert found.latency == pytest.approx(200 * US, rel=0.05)
    assert found.bandwidth == pytest.approx(gbit * 1e9, rel=0.06)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("optimizer", "given"), [("sgd", 20 * MS), ("adam", 3 * MS), ("sgd", 0)])
def test_quantising_costs_what_it_was_given(run: Callable[..., RunResult], optimizer: str, given: int) -> None:
    """For 10^6 bytes in INT8, whatever else an exchange takes."""
    quantised = run(profile_legs.quantised(PLAIN), experiment(optimizer=optimizer), quantise=given)
    assert {operation.wire_dtype for operation in quantised.plan.exchange} == {"int8"}
    points = points_of(run(profile_legs.whole(PLAIN)), run(profile_legs.queued(PLAIN, "sgd")))
    assert quantising(quantised, fit_points(points, 2)) == pytest.approx(given, rel=0.01, abs=0.1 * MS)


@pytest.mark.parametrize("unused", [False, True])
def test_every_leg_of_a_profile_handles_the_parameters_that_the_script_leaves_out(unused: bool) -> None:
    """A script that needs ``find_unused_parameters`` passes none of them without it."""
    own = DistributedStrategy(find_unused_parameters=unused, fp16_allreduce=True)
    legs = (
        profile_legs.measured_part(own),
        profile_legs.whole(own),
        profile_legs.several(own, table()),
        profile_legs.averaged(own, "sgd", 8),
        profile_legs.queued(own, "sgd"),
        profile_legs.queued_in_twos(own, "sgd", "gloo"),
        profile_legs.quantised(own),
    )
    assert [leg.find_unused_parameters for leg in legs] == [unused] * len(legs)
