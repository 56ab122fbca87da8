"""Workers of several trainers, a site each: one round worked out by hand, on both engines, and what does not fit."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from engine_cases import Case, agree, workers_case_of
from sim_cases import in_ns, layered, link

from fleetbench.cluster import Site
from fleetbench.errors import ConfigError
from sim.run import Engine, simulate

SITES = {"nodes": 4, "inter": link(8), "sites": (Site(nodes=2, up=link(0.8, 1_000), count=2),)}


def round_of_two(**configs: Any) -> Any:
    """Two sites of two nodes of a trainer, 10 ns a byte between them and 2000 ns of latency; a bucket of 1200 bytes."""
    strategy = {"localsgd": True, "localsgd_configs": {"k_steps": 2, "outer_momentum": 0.9, "worker_trainers": 2, **configs}}
    return layered([(300, 100, 200)], steps=2, strategy=strategy, **SITES)


@pytest.mark.parametrize("engine", ["reference", "vector"])
def test_a_round_by_hand(engine: Engine) -> None:
    """Steps of 300 ns and an all-reduce within of 2 x 600 ns; then rings 0-2 and 1-3 average 600 bytes each, and sites gather 600 ns.

    A ring has two messages of 3000 ns, which take turns on the sites' link: 3000 to 6000, 6000 to 9000, 9000 to 12,000 and 12,000 to
    15,000; the last one has come after 2000 more.
    """
    result = simulate(round_of_two(), engine=engine)
    assert in_ns(result, "start_s") == [0, 1_500] * 4
    spans = [(span.name, span.start_ns, span.start_ns + span.duration_ns) for span in result.spans if span.rank == 0]
    assert [one for one in spans if one[0].startswith("all_")] == [
        ("all_reduce 0", 300, 1_500),
        ("all_reduce 0", 1_800, 3_000),
        ("all_reduce 0", 3_000, 14_000),
        ("all_gather 0", 17_000, 17_600),
    ]
    assert result.summary.wall_s == pytest.approx(17_600e-9)
    assert result.summary.num_syncs == 1


def test_a_fragment_travels_beside_steps_within() -> None:
    """Set out after the first update, it hides the second step with its exchange within: all is over 1500 ns earlier."""
    experiment = round_of_two(overlap_steps=1)
    result = simulate(experiment, engine="reference")
    assert agree(Case(experiment=experiment)).startswith("reference")  # steps within share links with what is in flight
    assert result.summary.wall_s == pytest.approx(16_100e-9)
    within = [span for span in result.spans if span.rank == 3 and span.name == "all_reduce 0" and span.duration_ns == 1_200]
    assert [span.start_ns for span in within] == [300, 1_800]


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 60), marks=pytest.mark.slow)], ids=str)
def test_engines_agree_on_workers(seeds: range) -> None:
    """Random experiments: equal to the nanosecond, or refused alike."""
    ways: Counter[str] = Counter()
    for seed in seeds:
        try:
            ways[agree(workers_case_of(seed)).partition(":")[0]] += 1
        except BaseException as error:
            error.add_note(f"experiment: workers_case_of({seed})")
            raise
    assert ways["vector"] >= len(seeds) / 2


@pytest.mark.parametrize(("trainers", "hint"), [(3, "one of 1, 2"), (4, "one of 1, 2"), (8, "one of 1, 2")])
def test_workers_are_two_or_more_of_as_many_trainers(trainers: int, hint: str) -> None:
    """Otherwise the error says which numbers do."""
    with pytest.raises(ConfigError, match="worker_trainers") as refused:
        round_of_two(worker_trainers=trainers)
    assert refused.value.hint == hint
