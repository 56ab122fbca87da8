"""Output of nccl-tests: only runs of correct all-reduces are read; against the closed forms that it was printed from."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from benchmark_outputs import ALL_REDUCE, OTHERS, PREFIXES, SIZES, VERSIONS, Collective, behind, nccl_tests

from fleetbench.errors import ConfigError
from tuner.calibrate.cells import Cell, read_cells


def read(folder: Path, text: str, notes: list[str] | None = None) -> tuple[Cell, ...]:
    """The measurements of a file with this text."""
    path = folder / "output.log"
    path.write_text(text, encoding="utf-8", newline="")
    return read_cells(path, ([] if notes is None else notes).append)


def assert_all_reduces(cells: tuple[Cell, ...], n: int) -> None:
    """Each size once, in the time in place, of ``n`` ranks."""
    assert [(cell.all_reduce_bytes, cell.ranks) for cell in cells] == [(nbytes, n) for nbytes in SIZES]
    for cell, nbytes in zip(cells, SIZES, strict=True):
        assert cell.seconds == pytest.approx(ALL_REDUCE.seconds(n, nbytes), rel=2e-3)


@pytest.mark.parametrize("version", VERSIONS)
def test_all_reduces_are_read_after_every_prefix(tmp_path: Path, version: str) -> None:
    """In every version all sizes, in the time in place, of 2, 3, 8 and 64 ranks, without a note."""
    for n, prefix in product((2, 3, 8, 64), PREFIXES):
        notes: list[str] = []
        assert_all_reduces(read(tmp_path, behind(prefix, nccl_tests(version, n=n)), notes), n)
        assert notes == []


@pytest.mark.parametrize("collective", OTHERS, ids=lambda one: one.name)
def test_no_other_collective_is_an_all_reduce(tmp_path: Path, collective: Collective) -> None:
    """In any version, of any number of ranks, checked or not, with large sizes or small."""
    for version, n, is_checked, sizes in product(VERSIONS, (2, 3, 8), (True, False), (SIZES, SIZES[:2])):
        with pytest.raises(ConfigError, match="no correct all-reduce") as refused:
            read(tmp_path, nccl_tests(version, collective, n, sizes, is_checked=is_checked))
        assert refused.value.hint


@pytest.mark.parametrize("version", VERSIONS)
def test_of_several_collectives_the_all_reduces_are_read(tmp_path: Path, version: str) -> None:
    """Among the others, with and without names; the note counts what was left out."""
    notes: list[str] = []
    runs = [*OTHERS[:4], ALL_REDUCE, *OTHERS[4:]]
    assert_all_reduces(read(tmp_path, "".join(nccl_tests(version, one) for one in runs), notes), 8)
    (note,) = notes
    counts = [int(part.split()[0]) for part in note.partition(": ")[2].split("; ")]
    assert sum(counts) == len(OTHERS) * len(SIZES)


def test_wrong_sums_are_left_out(tmp_path: Path) -> None:
    """With a run that is right, a note counts them."""
    for version in VERSIONS:
        with pytest.raises(ConfigError, match="whose sums were wrong"):
            read(tmp_path, nccl_tests(version, wrong=42))
        notes: list[str] = []
        assert_all_reduces(read(tmp_path, nccl_tests(version) + nccl_tests(version, wrong=42), notes), 8)
        assert notes == [f"left out of {tmp_path / 'output.log'}: {len(SIZES)} rows whose sums were wrong"]


def test_all_reduces_that_are_none_of_all_ranks_are_refused(tmp_path: Path) -> None:
    """Eight groups at once, one rank per process without MPI, a list of ranks that was cut, and no time of the collective."""
    lines = nccl_tests(n=64).splitlines()
    cut = "\n".join(line for line in lines if "Rank" not in line or "Rank  0" in line or "Rank 63" in line)
    for text in (nccl_tests(n=16, num_groups=8), nccl_tests("2.10", n=1) * 2, cut):
        with pytest.raises(ConfigError, match="no correct all-reduce"):
            read(tmp_path, text)
    with pytest.raises(ConfigError, match="HINT"):
        read(tmp_path, nccl_tests(time_column="cputime"))


def test_options_of_the_program_change_nothing(tmp_path: Path) -> None:
    """A suffix of its name, time stamps, statistics of iterations, no check, and lines of NCCL_DEBUG among the rows."""
    for text in (
        nccl_tests(suffix="_mpi"),
        nccl_tests(timestamps=True),
        nccl_tests("2.19.6", per_iteration=True),
        nccl_tests(is_checked=False),
        nccl_tests().replace("#\n", "node-a:17:18 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC\n"),
    ):
        assert_all_reduces(read(tmp_path, text), 8)
