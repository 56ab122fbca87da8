"""The collective benchmark: its sizes and bandwidths by hand, and its verdicts on broken collectives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from processes import Arrays, run_ranks

from fleetbench.config import decode, encode
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.quantities import Bytes
from real.communication.benchmark import Benchmark, Case, row_of
from real.job.session import Session
from real.leg import Leg

SCRIPT = Path(__file__).parent / "collectives_rank.py"
KINDS = ("all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather")


def case(collective: str = "all_reduce", ranks: int = 4, count: int = 250_000) -> Case:
    """A million bytes, unless said otherwise."""
    return Case(collective=collective, count=count, ranks=ranks)


@pytest.mark.parametrize(
    ("collective", "count", "ranks", "busbw_gb_per_s"),
    [  # a million bytes in a millisecond are 1 GB/s
        ("all_reduce", 250_000, 2, 1.0),
        ("all_reduce", 250_000, 4, 1.5),
        ("all_reduce", 250_000, 8, 1.75),
        ("reduce_scatter", 62_500, 4, 0.75),
        ("all_gather", 62_500, 4, 0.75),
        ("all_gather", 125_000, 2, 0.5),
        ("broadcast", 250_000, 4, 1.0),
        ("reduce", 250_000, 4, 1.0),
    ],
)
def test_bandwidths_are_those_of_the_published_factors(collective: str, count: int, ranks: int, busbw_gb_per_s: float) -> None:
    """2(n-1)/n, (n-1)/n and 1 times the size over the time; what is split has the size of all pieces."""
    found = case(collective, ranks=ranks, count=count)
    assert found.size_bytes == 1_000_000
    assert found.algbw(1e-3) == pytest.approx(1e9)
    assert found.busbw(1e-3) == pytest.approx(busbw_gb_per_s * 1e9)


def test_sizes_are_geometric_and_whole() -> None:
    """4, 16 and 64 bytes are 1, 4 and 16 numbers; of a third each, 1 and 5 numbers, which is 12 and 60 bytes of three ranks."""
    benchmark = Benchmark(kinds=("all_reduce", "all_gather"), min_bytes=Bytes(4), max_bytes=Bytes(70), factor=4)
    assert [(found.collective, found.count, found.size_bytes) for found in benchmark.cases(3)] == [
        ("all_reduce", 1, 4),
        ("all_reduce", 4, 16),
        ("all_reduce", 16, 64),
        ("all_gather", 1, 12),
        ("all_gather", 5, 60),
    ]


def test_a_row_is_of_the_slowest_rank() -> None:
    """Means of 200 and 300 us: the second rank's iterations of 200, 200 and 500 us make the row."""
    parts = [{"times_ns": [100_000, 200_000, 300_000], "wrong": 2}, {"times_ns": [200_000, 200_000, 500_000], "wrong": 1}]
    data = row_of(case(ranks=2), parts)
    assert data["slowest_rank"] == 1
    assert data["time_us"] == pytest.approx(300)
    assert data["rank_mean_us"] == pytest.approx([200, 300])
    assert (data["min_us"], data["max_us"]) == pytest.approx((200, 500))
    assert data["p99_us"] == pytest.approx(494)  # 98 % of the way from the second to the third
    assert data["cv"] == pytest.approx(3**0.5 / 3)
    assert data["algbw_gb_per_s"] == data["busbw_gb_per_s"] == pytest.approx(1e6 / 300e-6 / 1e9)
    assert data["num_wrong"] == 3


def test_one_iteration_has_no_spread() -> None:
    """A standard deviation needs two."""
    assert row_of(case(ranks=1), [{"times_ns": [5], "wrong": 0}])["cv"] is None


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"factor": 1}, "factor"),
        ({"iterations": 0}, "iterations"),
        ({"warmup": -1}, "warmup"),
        ({"min_bytes": Bytes(3)}, "min_bytes"),
        ({"max_bytes": Bytes(1000)}, "max_bytes"),
        ({"kinds": ()}, "kinds"),
        ({"kinds": ("broadcast", "broadcast")}, "kinds"),
    ],
)
def test_what_cannot_be_timed_is_refused_with_a_hint(changes: dict[str, object], where: str) -> None:
    """Each names its field."""
    with pytest.raises(ConfigError) as caught:
        Benchmark(**changes)  # type: ignore[arg-type]  # wrong on purpose
    assert caught.value.where == where
    assert caught.value.hint


def test_a_benchmark_travels_to_the_workers() -> None:
    """A leg that is written and read is the same leg, odd sizes included."""
    leg = Leg(steps=3, collectives=Benchmark(min_bytes=Bytes(1027), max_bytes=Bytes(2**20 + 1)))
    assert decode(encode(leg), Leg, "leg") == leg


@pytest.fixture(scope="module", params=[2, 3], ids=["2-ranks", "3-ranks"])
def measured(request: pytest.FixtureRequest) -> list[Arrays]:
    """What every rank of a launch saved."""
    return run_ranks(SCRIPT, request.param)


def test_every_collective_is_right_and_takes_time(measured: list[Arrays]) -> None:
    """No wrong element in any size; three finite times each."""
    wrong = {name: sum(int(part[name]) for part in measured) for name in measured[0] if name.startswith("wrong/")}
    assert len(wrong) == 3 * 5  # sizes, collectives
    assert not any(wrong.values())
    for part in measured:
        times = np.array([part[name] for name in part if name.startswith("times/")])
        assert times.shape == (len(wrong), 3)
        assert (times > 0).all()
        assert (times < 60e9).all()
        assert sorted(set(part["heard"])) == list(range(1, 16))


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_collective_shows_in_the_column(kind: str, measured: list[Arrays]) -> None:
    """One wrong element counts once; a collective that is left out makes nearly all wrong; mended, it is right again."""
    ranks = len(measured)
    assert sum(int(part[f"has_one_wrong_element/{kind}"]) for part in measured) == 1
    results = {"all_reduce": 1000 * ranks, "reduce": 1000, "broadcast": 1000 * (ranks - 1), "reduce_scatter": 1000 * ranks}
    of_all = results.get(kind, 1000 * ranks * ranks)
    assert 0.9 * of_all <= sum(int(part[f"is_left_out/{kind}"]) for part in measured) <= of_all
    assert sum(int(part[f"mended/{kind}"]) for part in measured) == 0


def test_times_are_the_clocks(measured: list[Arrays]) -> None:
    """A mark between every two iterations, a microsecond apart, which are resolved after the last."""
    for part in measured:
        assert part["clock/times"].tolist() == [1000] * 5
        assert part["clock/resolved"] == 1


@pytest.mark.parametrize("kind", KINDS)
def test_results_are_read_behind_their_waits(kind: str, measured: list[Arrays]) -> None:
    """Where waiting does not block, as on NCCL, nothing is read too early."""
    assert [int(part[f"deferred/{kind}"]) for part in measured] == [0] * len(measured)


@pytest.mark.slow
def test_a_session_times_collectives_and_trains() -> None:
    """One launch: a benchmark, a leg of training after it, and a benchmark again."""
    experiment = Experiment.from_dict({"cluster": {"trainers_per_node": 2}, "workload": {"batch_size": 4}})
    benchmark = Benchmark(kinds=("all_reduce", "all_gather"), min_bytes=Bytes(1024), max_bytes=Bytes(1024), warmup=1, iterations=4)
    told: list[tuple[int, int]] = []

    def listen(done: int, total: int) -> None:
        told.append((done, total))

    with Session(experiment) as session:
        for turn in range(2):
            measured = session.run_collectives(benchmark, listen)
            rows = [row_of(found, [part[number] for part in measured.ranks]) for number, found in enumerate(benchmark.cases(2))]
            assert [row["size_bytes"] for row in rows] == [1024, 1024]
            assert all(len(row["samples_us"]) == 4 and row["num_wrong"] == 0 and 0 < row["time_us"] < 1e7 for row in rows)
            assert measured.skipped == []
            if turn == 0:
                assert session.run(Leg(steps=3, warmup_steps=1)).summary.steps == 3
    assert told[-1] == (2, 2)
