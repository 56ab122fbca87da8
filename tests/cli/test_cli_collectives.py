"""``fleetbench profile --collectives`` with the launch replaced: what it asks for, prints and returns."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Self

import pytest

from fleetbench.cli import collectives
from fleetbench.errors import ConfigError, GateFailed
from fleetbench.experiment import Experiment
from real.communication.benchmark import Benchmark, Measured

HEADER = ["size", "count", "time", "algbw", "busbw", "#wrong", "min", "max", "p99", "cv"]
UNITS = ["(B)", "(elements)", "(us)", "(GB/s)", "(GB/s)", "", "(us)", "(us)", "(us)", "(%)"]


def _options(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    collectives.add_options(parser)
    return argparse.Namespace(**vars(parser.parse_args(given)), json=False)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("┃│").replace("┃", "│").split("│")]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Replace the launch: two iterations of 90 and 110 us, and so many wrong elements in the last row."""

    def replace(wrong: int = 0, foreign_cores: float | None = None) -> None:
        class Replaced:
            """Stands for a launch."""

            def __init__(self, _experiment: Experiment) -> None:
                self.foreign_cores = foreign_cores

            def __enter__(self) -> Self:
                return self

            def __exit__(self, *_: object) -> None:
                return

            def run_collectives(self, benchmark: Benchmark, _progress: object) -> Measured:
                """Both ranks of every case."""
                part = {"times_ns": [90_000, 110_000], "wrong": 0}
                parts = [part for _ in benchmark.cases(2)]
                skipped = [{"what": "cluster.inter", "why": "launcher local cannot realise it on one machine"}]
                return Measured(ranks=[parts, [*parts[:-1], part | {"wrong": wrong}]], skipped=skipped, testbed=None)

        monkeypatch.setattr("real.job.session.Session", Replaced)

    return replace


@pytest.fixture
def two() -> Experiment:
    """Two trainers."""
    return Experiment.from_dict({"name": "two", "cluster": {"trainers_per_node": 2}})


def test_a_table_has_nccl_tests_columns(timed: Callable[[int], None], two: Experiment, capsys: pytest.CaptureFixture[str]) -> None:
    """A megabyte in 100 us is 10 GB/s; of 90 and 110 us the 99th percentile is 109.8, and the spread 14.1 %."""
    timed(0)
    options = _options("--kinds", "all_reduce,all_gather", "--min-bytes", "1 MB", "--max-bytes", "1000000")
    assert collectives.run(options, two) == 0
    lines = capsys.readouterr().out.splitlines()
    tables = [number for number, line in enumerate(lines) if line.startswith(("all_reduce: ", "all_gather: "))]
    assert lines[tables[0]].rstrip() == "all_reduce: 2 ranks, gloo, launcher local"
    assert [_cells(line) for line in lines[tables[0] + 2 : tables[0] + 4]] == [HEADER, UNITS]
    assert _cells(lines[tables[0] + 5]) == [
        "1000000", "250000", "100.0", "10", "10", "0", "90.00", "110.0", "109.8", "14.1",
    ]  # fmt: skip
    assert _cells(lines[tables[1] + 5])[:5] == ["1000000", "125000", "100.0", "10", "5"]
    assert "wrong results: 0 elements" in lines
    assert "SKIPPED cluster.inter: launcher local cannot realise it on one machine" in lines


def test_json_has_every_iteration(timed: Callable[[int], None], two: Experiment, capsys: pytest.CaptureFixture[str]) -> None:
    """With --json alone on stdout."""
    timed(0)
    options = _options("--kinds", "broadcast")
    options.json = True
    collectives.run(options, two)
    data = json.loads(capsys.readouterr().out)
    assert (data["name"], data["trainers"], data["backend"], data["launcher"]) == ("two", 2, "gloo", "local")
    assert [row["size_bytes"] for row in data["rows"]] == [2**exponent for exponent in range(10, 23, 2)]
    assert data["rows"][0]["samples_us"] == pytest.approx([90, 110])
    assert data["rows"][0]["algbw_gb_per_s"] == pytest.approx(1024 / 100e-6 / 1e9)


@pytest.mark.parametrize(("cores", "said"), [(None, False), (0.1, False), (0.5, True)])
def test_a_busy_machine_is_said(
    timed: Callable[..., None], two: Experiment, capsys: pytest.CaptureFixture[str], cores: float | None, said: bool
) -> None:
    """On stderr, and in the JSON."""
    timed(0, cores)
    options = _options("--kinds", "broadcast")
    options.json = True
    collectives.run(options, two)
    printed = capsys.readouterr()
    assert ("busy machine: other programs computed on 0.5 cores" in printed.err) == said
    assert json.loads(printed.out)["foreign_cores"] == cores


def test_wrong_results_end_with_an_error(timed: Callable[[int], None], two: Experiment, capsys: pytest.CaptureFixture[str]) -> None:
    """After the table, which shows them."""
    timed(7)
    with pytest.raises(GateFailed, match="7 elements"):
        collectives.run(_options("--kinds", "reduce", "--max-bytes", "1024"), two)
    printed = capsys.readouterr().out
    assert "wrong results: 7 elements" in printed
    assert any(_cells(line)[5:6] == ["7"] for line in printed.splitlines())


def test_every_option_reaches_the_benchmark() -> None:
    """Lists by commas, sizes with units or in bytes, numbers."""
    given = "--kinds all_reduce --factor 2 --warmup 0 --iterations 7"
    options = _options(*given.split(), "--min-bytes", "2 KiB", "--max-bytes", "1 MB")
    assert collectives.benchmark_of(options) == Benchmark(
        kinds=("all_reduce",),
        min_bytes=2048,  # type: ignore[arg-type]  # bytes
        max_bytes=1_000_000,  # type: ignore[arg-type]  # bytes
        factor=2,
        warmup=0,
        iterations=7,
    )
    assert collectives.benchmark_of(_options()) == Benchmark()


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--min-bytes", "8K", "KiB"),
        ("--min-bytes", "-4", "KiB"),
        ("--min-bytes", "0", "4 bytes or more"),
        ("--max-bytes", "100", "from small to large"),
        ("--kinds", "alltoall", "all_reduce"),
        ("--kinds", "", "default"),
        ("--factor", "1", "default"),
    ],
)
def test_wrong_options_are_named_with_a_hint(option: str, value: str, said: str) -> None:
    """The error names the option as it is written, and says what would do."""
    with pytest.raises(ConfigError) as caught:
        collectives.benchmark_of(_options(f"{option}={value}"))
    assert (caught.value.where or "").startswith(option)
    assert said in (caught.value.hint or "")
