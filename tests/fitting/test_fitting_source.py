"""Stragglers of what ran already: runs and tables of steps."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sim_cases import layered, link

from fleetbench.errors import ConfigError
from fleetbench.fitting.stragglers import compute_times, fit_source
from fleetbench.store import save_run
from fleetbench.stragglers import Jitter, SlowRank
from sim.run import simulate


def test_the_slow_worker_of_a_table_is_fitted(tmp_path: Path) -> None:
    """Rank 1 of three, by its factor; rows come in any order."""
    generator = np.random.default_rng(4)
    times = np.array([[1.0], [2.0], [1.0]]) * (1 + 0.05 * generator.gamma(2.0, 1.0, (3, 40)))
    rows = [{"rank": rank, "step": 10 + 7 * step, "compute_s": times[rank, step]} for rank in range(3) for step in range(40)]
    pd.DataFrame(rows).sample(frac=1.0, random_state=1).to_csv(tmp_path / "t.csv", index=False)
    assert compute_times(tmp_path / "t.csv")[0] == pytest.approx(times)
    fit = fit_source(tmp_path / "t.csv")
    slow = next(entry for entry in fit.entries if isinstance(entry, SlowRank))
    assert (slow.ranks, slow.factor) == ((1,), pytest.approx(2.0, rel=0.03))
    assert fit.base * 1e-9 == pytest.approx(1.0, rel=0.05)


def test_a_run_is_fitted_by_its_folder_or_its_table(tmp_path: Path) -> None:
    """A simulated run of two nodes: its warm-up does not count, and its slow rank is found."""
    stragglers = (Jitter(distribution="exponential", mean=0.1), SlowRank(ranks=(3,), factor=1.4))
    links = {"intra": link(80), "inter": link(80)}
    experiment = layered([(1, 1_000_000, 2_000_000)], trainers_per_node=2, **links, stragglers=stragglers, steps=80, warmup_steps=4)
    run = save_run(simulate(experiment, timeline=False), tmp_path)
    assert run.path is not None
    times_s, _ = compute_times(run.path)
    assert times_s.shape == (4, 80)
    fit = fit_source(run.path)
    assert [entry.kind for entry in fit.entries] == ["slow_rank", "blocks"]
    assert fit.base * 1e-9 == pytest.approx(0.003, rel=0.02)
    assert (compute_times(run.path / "steps.parquet")[0] == times_s).all()


GOOD = [{"rank": 0, "step": 1, "compute_s": 1.0}, {"rank": 0, "step": 2, "compute_s": 1.0}]


@pytest.mark.parametrize(
    "rows",
    [
        [{"rank": 0, "step": 1, "duration": 1.0}],
        [{"rank": 1, "step": 1, "compute_s": 1.0}],
        [{"rank": 0, "step": 0, "compute_s": 1.0}],
        [{"rank": 0, "step": 1, "compute_s": 0.0}],
        [{"rank": 0, "step": 1, "compute_s": "long"}],
        [*GOOD, GOOD[0]],
        [*GOOD, {"rank": 1, "step": 1, "compute_s": 1.0}],
        [*GOOD, {"rank": None, "step": 1, "compute_s": 1.0}],
        [*GOOD, {"rank": 1, "step": "two", "compute_s": 1.0}],
    ],
)
@pytest.mark.parametrize("name", ["t.csv", "t.parquet"])
def test_a_table_that_lacks_something_is_refused(rows: list[dict[str, object]], name: str, tmp_path: Path) -> None:
    """A column, a rank, a counted step, time itself, a number, one row per rank and step; the error names the file."""
    table = pd.DataFrame(rows)
    if name.endswith("csv"):
        table.to_csv(tmp_path / name, index=False)
    else:
        table.astype({column: str for column in table if table[column].dtype == object}).to_parquet(tmp_path / name)
    with pytest.raises(ConfigError, match=rf"--from: .*{name}(.|\n)*HINT"):
        compute_times(tmp_path / name)


def test_other_files_and_folders_are_refused(tmp_path: Path) -> None:
    """A folder without a run, binary data, Parquet and gzip that end early, an empty file, and none."""
    for content in (b"PAR1 and then nothing", b"\xff\xfe\x00\x01" * 20, b"\x1f\x8b and then nothing", b""):
        (tmp_path / "t").write_bytes(content)
        with pytest.raises(ConfigError, match=r"--from: .*(.|\n)*HINT"):
            compute_times(tmp_path / "t")
    for path in (tmp_path / "none", tmp_path / "t" / "none", "/dev/zero"):
        with pytest.raises(ConfigError, match=r"--from: .*(.|\n)*HINT"):
            compute_times(path)
    (tmp_path / "t").unlink()
    with pytest.raises(ConfigError, match="is no run folder"):
        compute_times(tmp_path)


def test_a_table_may_be_compressed_and_have_other_columns(tmp_path: Path) -> None:
    """As gzip under any name, with a byte-order mark and spaces after commas; warm-up steps do not count."""
    text = "\ufeff" + pd.DataFrame([{"rank": 0, "step": -1, "compute_s": 9.0}, *GOOD]).assign(wait_s=3.0).to_csv().replace(",", ", ")
    (tmp_path / "t").write_bytes(gzip.compress(text.encode()))
    assert compute_times(tmp_path / "t")[0].tolist() == [[1.0, 1.0]]
