"""Benchmarks' output: its correct all-reduces alone are read; against the closed forms that it was printed from."""

from __future__ import annotations

import gzip
import json
from itertools import cycle, product
from pathlib import Path

import pytest
from benchmark_outputs import (
    ALL_REDUCE,
    OTHERS,
    PREFIXES,
    SIZES,
    VERSIONS,
    Collective,
    behind,
    nccl_json,
    nccl_tests,
    osu,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleetbench.errors import ConfigError
from tuner.calibrate.cells import Cell, read_cells


def read(folder: Path, text: str, notes: list[str] | None = None) -> tuple[Cell, ...]:
    """The measurements of a file with this text."""
    path = folder / "output.log"
    path.write_text(text, encoding="utf-8", newline="")
    return read_cells(path, ([] if notes is None else notes).append)


def assert_all_reduces(cells: tuple[Cell, ...], n: int | None, sizes: tuple[int, ...] = SIZES) -> None:
    """Each size once, in the time in place, of ``n`` ranks."""
    assert [(cell.all_reduce_bytes, cell.ranks) for cell in cells] == [(nbytes, n) for nbytes in sizes]
    for cell, nbytes in zip(cells, sizes, strict=True):
        assert cell.seconds == pytest.approx(ALL_REDUCE.seconds(n or 8, nbytes), rel=2e-3)


@pytest.mark.sample(5)
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("prefix", PREFIXES)
def test_all_reduces_are_read_behind_every_prefix(tmp_path: Path, version: str, prefix: str) -> None:
    """In every version all sizes, in the time in place, of 2, 3, 8 and 64 ranks, without a note."""
    for n in (2, 3, 8, 64):
        notes: list[str] = []
        assert_all_reduces(read(tmp_path, behind(prefix, nccl_tests(version, n=n)), notes), n)
        assert notes == []


@pytest.mark.parametrize("collective", OTHERS, ids=lambda one: one.name)
def test_no_other_collective_is_an_all_reduce(tmp_path: Path, collective: Collective) -> None:
    """In any version, of any number of ranks, checked or not, with large sizes or small; nor in JSON."""
    prefix = cycle(PREFIXES)
    for version, n, is_checked, sizes in product(VERSIONS, (2, 3, 8), (True, False), (SIZES, SIZES[:2])):
        text = behind(next(prefix), nccl_tests(version, collective, n, sizes, is_checked=is_checked))
        with pytest.raises(ConfigError, match="no correct all-reduce") as refused:
            read(tmp_path, text)
        assert refused.value.hint
    with pytest.raises(ConfigError, match=f"of {collective.name}"):
        read(tmp_path, nccl_json(collective))


@pytest.mark.parametrize("version", VERSIONS)
def test_of_several_collectives_the_all_reduces_are_read(tmp_path: Path, version: str) -> None:
    """In any place among the others, with and without names; the note counts what was left out."""
    for place in (0, 4, len(OTHERS)):
        runs = [*OTHERS[:place], ALL_REDUCE, *OTHERS[place:]]
        notes: list[str] = []
        assert_all_reduces(read(tmp_path, "".join(nccl_tests(version, one) for one in runs), notes), 8)
        (note,) = notes
        counts = [int(part.split()[0]) for part in note.partition(": ")[2].split("; ")]
        assert sum(counts) == len(OTHERS) * len(SIZES)


def test_wrong_sums_are_left_out(tmp_path: Path) -> None:
    """By row since 2.13, by the run before, and in JSON; with a run that is right, a note counts them."""
    for version in VERSIONS:
        with pytest.raises(ConfigError, match="whose sums were wrong"):
            read(tmp_path, nccl_tests(version, wrong=42))
        notes: list[str] = []
        assert_all_reduces(read(tmp_path, nccl_tests(version) + nccl_tests(version, wrong=42), notes), 8)
        assert notes == [f"left out of {tmp_path / 'output.log'}: {len(SIZES)} rows whose sums were wrong"]
    with pytest.raises(ConfigError, match="whose sums were wrong"):
        read(tmp_path, nccl_json(wrong=3))
    with pytest.raises(ConfigError, match="whose sums were wrong"):
        read(tmp_path, osu(validated="Fail"))


def test_all_reduces_that_are_none_of_all_ranks_are_refused(tmp_path: Path) -> None:
    """Eight groups at once, one rank a process without MPI, and the host's time of a call."""
    for text, why in (
        (nccl_tests(n=16, num_groups=8), "8 groups at once"),
        (nccl_json(n=16, num_groups=2), "2 groups at once"),
        (nccl_tests("2.10", n=1) + nccl_tests("2.10", n=1), "of one rank"),
        (nccl_tests(time_column="cputime"), "without a time of the collective"),
    ):
        with pytest.raises(ConfigError, match=why):
            read(tmp_path, text)


def test_json_of_nccl_tests_is_read(tmp_path: Path) -> None:
    """With several GPUs a process, of which it names the first alone; with times and nothing else; gzip."""
    assert_all_reduces(read(tmp_path, nccl_json()), 8)
    data = json.loads(nccl_json())
    data["config"] |= {"ngpus": 4, "devices": data["config"]["devices"][::4]}
    assert_all_reduces(read(tmp_path, json.dumps(data)), 8)
    for result in data["results"]:
        result["in_place"] = {"time": result["in_place"]["time"]}
    del data["config"]
    assert_all_reduces(read(tmp_path, json.dumps(data)), None)
    (tmp_path / "out.json.gz").write_bytes(gzip.compress(nccl_json().encode()))
    assert_all_reduces(read_cells(tmp_path / "out.json.gz"), 8)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_osu_allreduce_is_read(tmp_path: Path, prefix: str) -> None:
    """Its average, with and without other columns; not that of other collectives, nor of one without a title."""
    longest = osu("NCCL Allreduce", full=True, validated="Pass")
    notes: list[str] = []
    for text in (osu(), osu("MPI Allreduce"), osu(full=True), osu(validated="Pass"), longest):
        assert_all_reduces(read(tmp_path, behind(prefix, text), notes), None)
        assert "does not say how many ranks" in notes.pop()
    assert_all_reduces(read(tmp_path, behind(prefix, osu("MPI Allgather") + osu()), notes), None)
    assert "6 rows of allgather" in notes[0]
    for text in (osu("MPI Reduce_scatter"), osu().replace("# OSU MPI-CUDA Allreduce Latency Test v7.4", "")):
        with pytest.raises(ConfigError, match="no correct all-reduce"):
            read(tmp_path, behind(prefix, text))


RUNS = [(version, one) for version in VERSIONS for one in (ALL_REDUCE, *OTHERS)]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_output_gives_no_wrong_time(tmp_path: Path, data: st.DataObject) -> None:
    """Runs in any order, with lines missing, cut off, doubled or between others: an error, or right rows."""
    runs = data.draw(st.lists(st.sampled_from(RUNS), min_size=1, max_size=3))
    prefix = data.draw(st.sampled_from(list(PREFIXES)))
    lines = [line for version, one in runs for line in behind(prefix, nccl_tests(version, one)).splitlines()]
    for _ in range(data.draw(st.integers(0, 4))):
        place, length = data.draw(st.integers(0, len(lines) - 1)), data.draw(st.integers(0, 20))
        kind = data.draw(st.sampled_from(["drop", "cut", "double", "noise"]))
        part = lines[place : place + length]
        if kind == "cut":
            part = [line[: data.draw(st.integers(0, len(line)))] for line in part[:1]] + part[1:]
        elif kind == "noise":
            part = [data.draw(st.text(max_size=40)), *part]
        lines[place : place + length] = [] if kind == "drop" else part * 2 if kind == "double" else part
        lines = lines or [""]
    try:
        cells = read(tmp_path, "\n".join(lines))
    except ConfigError:
        return
    assert any(one is ALL_REDUCE for _, one in runs)
    for cell in cells:
        assert cell.all_reduce_bytes is not None
        assert cell.seconds == pytest.approx(ALL_REDUCE.seconds(8, cell.all_reduce_bytes), rel=2e-3)
