"""Traces: X that a file recorded, replayed by rank and step."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.stragglers import ONE, SlowRank, Trace, draws

X = [[0.0, 0.25, 0.5], [1.0, 0.125, 0.0]]
"""Of two ranks in three steps; binary fractions, so that nothing is rounded."""


def frame(columns: dict[str, Any] | None = None, steps: tuple[int, ...] = (1, 2, 3)) -> pd.DataFrame:
    """``X`` as a table; ``columns`` stand for ``x``."""
    rows = [(rank, step) for rank in (0, 1) for step in steps]
    index = pd.DataFrame(rows, columns=["rank", "step"])
    return index.assign(**(columns or {"x": np.ravel(X)}))


def written(table: pd.DataFrame, path: Path) -> Trace:
    """A trace of ``table`` as CSV or Parquet, as the path ends."""
    if path.suffix == ".csv":
        table.to_csv(path, index=False)
    else:
        table.to_parquet(path, index=False)
    return Trace(path=str(path))


def replay(entry: Trace, *, trainers: int = 2, first: int = 1, steps: int = 3) -> list[list[float]]:
    """X by rank and step."""
    found: list[list[float]] = (draws([entry], 0, trainers, 1, first, steps) / ONE).tolist()
    return found


@pytest.mark.parametrize("name", ["x.csv", "x.parquet", "x.data"])
def test_x_is_replayed_from_either_format(name: str, tmp_path: Path) -> None:
    """Rank by rank and step by step; rows may come in any order, and the name's ending does not matter."""
    shuffled = frame().sample(frac=1.0, random_state=3)
    assert replay(written(shuffled, tmp_path / name)) == X


@pytest.mark.parametrize(
    "columns",
    [
        {"compute_s": 0.5 * (1 + np.ravel(X))},
        {"forward_s": 0.125 * (1 + np.ravel(X)), "backward_s": 0.375 * (1 + np.ravel(X)), "wait_s": [9.0] * 6},
    ],
)
def test_seconds_of_compute_are_taken_over_the_shortest(columns: dict[str, Any], tmp_path: Path) -> None:
    """X = compute / base - 1, of the file's shortest step or of ``base``; a run's other columns do not count."""
    entry = written(frame(columns), tmp_path / "t.parquet")
    assert replay(entry) == X
    quarter = Trace(path=entry.path, base=250_000_000)  # type: ignore[arg-type]  # numbers of their units
    assert replay(quarter) == (2 * (1 + np.array(X)) - 1).tolist()


def test_longer_runs_start_over_and_warm_up_is_what_stands_before(tmp_path: Path) -> None:
    """Steps -1 to 7 of a trace of three: step 1 is its first one, step 4 too, and step 0 its last one."""
    entry = written(frame(), tmp_path / "t.csv")
    expected = [[row[(step - 1) % 3] for step in range(-1, 8)] for row in X]
    assert expected[1][:3] == [0.125, 0.0, 1.0]
    assert replay(entry, first=-1, steps=9) == expected


def test_sampled_steps_count_by_their_order(tmp_path: Path) -> None:
    """Steps 16, 21 and 404 of a job are the run's 1, 2 and 3; those below 1 are warm-up and left out."""
    assert replay(written(frame(steps=(16, 404, 1204)), tmp_path / "a.csv")) == X
    whole = pd.concat([frame(), frame({"x": [7.0] * 6}, steps=(-2, -1, 0))])
    assert replay(written(whole, tmp_path / "b.csv")) == X


def test_entries_multiply_with_a_trace(tmp_path: Path) -> None:
    """(1 + X) of the trace times the slow rank's factor; fewer trainers than the trace has are its first ones."""
    entry = written(frame(), tmp_path / "t.csv")
    both = draws([entry, SlowRank(ranks=(0,), factor=2.0)], 0, 1, 1, 1, 3) / ONE
    assert both.tolist() == [[2 * (1 + x) - 1 for x in X[0]]]


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    """Nothing of a file is remembered."""
    entry = written(frame(), tmp_path / "t.csv")
    assert replay(entry) == X
    written(frame({"x": [0.5] * 6}), tmp_path / "t.csv")
    assert replay(entry) == [[0.5] * 3] * 2


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (frame().drop(columns="step"), "no column step"),
        (frame().drop(columns="x"), "no x and no seconds"),
        (frame({"x": [-0.1, 0, 0, 0, 0, 0]}), "below 0"),
        (frame({"x": [np.nan, 0, 0, 0, 0, 0]}), "rank 0 in step 1"),
        (frame({"x": ["a", 0, 0, 0, 0, 0]}), "rank 0 in step 1"),
        (frame().iloc[:-1], "rank 1 in step 3"),
        (pd.concat([frame(), frame().iloc[4:5]]), "rank 1 in step 2"),
        (frame().assign(rank=lambda rows: rows["rank"] + 1), "numbered from 0"),
        (frame(steps=(-2, -1, 0)), "no step numbered 1"),
        (frame({"compute_s": [0.0, 1, 1, 1, 1, 1]}), "not above 0"),
    ],
)
def test_a_trace_that_is_none_is_refused(table: pd.DataFrame, said: str, tmp_path: Path) -> None:
    """The error names the entry and the file, and what is wrong with it."""
    entry = written(table, tmp_path / "t.csv")
    with pytest.raises(ConfigError, match=rf"cluster\.stragglers\[0\]\.path: .*{said}(.|\n)*HINT") as caught:
        replay(entry)
    assert str(tmp_path / "t.csv") in str(caught.value)


def test_more_trainers_than_the_trace_has_are_refused(tmp_path: Path) -> None:
    """A rank that nobody recorded is not on time, it is unknown."""
    with pytest.raises(ConfigError, match="none for rank 2"):
        replay(written(frame(), tmp_path / "t.csv"), trainers=3)


def test_a_base_above_the_shortest_time_is_refused(tmp_path: Path) -> None:
    """X would be negative."""
    entry = written(frame({"compute_s": 0.5 * (1 + np.ravel(X))}), tmp_path / "t.csv")
    with pytest.raises(ConfigError, match="shorter than base"):
        replay(Trace(path=entry.path, base=600_000_000))  # type: ignore[arg-type]  # numbers of their units


def test_a_timeline_is_no_trace(tmp_path: Path) -> None:
    """Neither as JSON nor packed."""
    line = b'[{"name": "forward", "ts": 0.1}' + b', {"name": "backward", "ts": 0.2}' * 200 + b"]"
    for content in (line, gzip.compress(line), gzip.compress(line)[:-9]):
        (tmp_path / "timeline.json.gz").write_bytes(content)
        with pytest.raises(ConfigError, match=r"stragglers\[0\]"):
            replay(Trace(path=str(tmp_path / "timeline.json.gz")))


def test_binary_rubbish_is_no_trace(tmp_path: Path) -> None:
    """Neither Parquet nor CSV: an error and no traceback."""
    for content in (b"PAR1 and then nothing", b"\xff\xfe\x00\x01" * 20, b"\x1f\x8b and then nothing", b""):
        (tmp_path / "t").write_bytes(content)
        with pytest.raises(ConfigError, match=r"stragglers\[0\]\.path"):
            replay(Trace(path=str(tmp_path / "t")))


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_what_pandas_and_people_write_is_read(ends: str, tmp_path: Path) -> None:
    """A column that numbers rows, spaces after commas, Windows' ends of lines, a byte-order mark; as gzip under any name."""
    text = "\ufeff" + frame().to_csv(lineterminator=ends).replace(",", ", ")
    (tmp_path / "t.csv").write_text(text, encoding="utf-8", newline="")
    (tmp_path / "t.gz").write_bytes(gzip.compress(text.encode()))
    assert replay(Trace(path=str(tmp_path / "t.csv"))) == replay(Trace(path=str(tmp_path / "t.gz"))) == X


def test_a_file_names_its_trace_relative_to_itself(tmp_path: Path) -> None:
    """And the content of the trace is part of the experiment's hash."""
    written(frame(), tmp_path / "t.csv")
    (tmp_path / "e.toml").write_text('[cluster]\nnodes = 2\n[[cluster.stragglers]]\nkind = "trace"\npath = "t.csv"\n', encoding="utf-8")
    experiment = Experiment.load(tmp_path / "e.toml")
    (entry,) = experiment.cluster.stragglers
    assert isinstance(entry, Trace)
    assert replay(entry) == X
    before = experiment.digest()
    written(frame({"x": [0.5] * 6}), tmp_path / "t.csv")
    assert experiment.digest() != before


@pytest.mark.parametrize("text", ["rank,step,x\na,1,0.5\nb,1,0.5\n", "rank,step,x\n0,1,0.5\n,1,0.5\n", "rank,step,x\n0,1,0.5\n0,two,0.5\n"])
def test_a_row_without_a_rank_or_a_step_is_not_left_out(text: str, tmp_path: Path) -> None:
    """What is no number is said, whether it is one row's or all of them."""
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ConfigError, match="that is no number"):
        replay(Trace(path=str(tmp_path / "t.csv")))
