"""Written files notice damage; what an older version wrote still opens, with a warning."""

from __future__ import annotations

import gzip
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fleetbench.digests import read_json, sealed_json
from fleetbench.errors import ConfigError, EnvironmentLacks
from fleetbench.experiment import Experiment
from fleetbench.store import load_run, save_run
from fleetbench.strategy import DistributedStrategy
from fleetbench.timeline import Span, read_timeline, write_timeline
from fleetbench.traces import read_table
from fleetbench.vectors import read_vectors, write_vectors
from sim.run import simulate

STRATEGY = DistributedStrategy(localsgd=True, localsgd_configs={"k_steps": 16}, nccl_comm_num=2, sync_nccl_allreduce=False)  # type: ignore[arg-type]  # a table


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A stored run of two trainers."""
    workload = {"model": "layers", "steps": 3, "layers": [{"name": "a", "params": 1000, "forward": "1 ms", "backward": "2 ms"}]}
    cluster = {"trainers_per_node": 2, "intra": {"bandwidth": "1 Gbit/s"}}
    experiment = Experiment.from_dict({"workload": workload, "cluster": cluster})
    path = save_run(simulate(experiment), tmp_path).path
    assert path is not None
    return path


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a file can be made or emptied, and nothing can be written into it."""
    whole = Path.open

    def full(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        opened = whole(self, mode, *args, **kwargs)
        if "w" in mode:
            opened.close()
            raise OSError(28, "No space left on device")
        return opened

    monkeypatch.setattr(Path, "open", full)


def test_a_strategy_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    """However much of it is left, it is no other strategy."""
    path = tmp_path / "s.toml"
    STRATEGY.save(path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match="HINT"):
            DistributedStrategy.load(path)


def test_a_strategy_file_that_was_edited_says_what_to_remove(tmp_path: Path) -> None:
    """Without its first line an edited file is a user's own, and is read."""
    path = tmp_path / "s.toml"
    STRATEGY.save(path)
    path.write_text(path.read_text().replace("k_steps = 16", "k_steps = 8"))
    with pytest.raises(ConfigError, match=r"digest differs\nHINT: remove the line after editing"):
        DistributedStrategy.load(path)
    path.write_text(path.read_text().partition("\n")[2])
    assert DistributedStrategy.load(path).local_steps == 8


def test_a_strategy_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills up leaves the older file, nothing beside it, and an error of the environment."""
    path = tmp_path / "s.toml"
    DistributedStrategy().save(path)

    fill_disk(monkeypatch)
    with pytest.raises(EnvironmentLacks, match="No space left"):
        STRATEGY.save(path)
    assert [item.name for item in tmp_path.iterdir()] == ["s.toml"]
    assert DistributedStrategy.load(path) == DistributedStrategy()


def test_writers_of_one_file_do_not_get_in_each_others_way(tmp_path: Path) -> None:
    """Four threads save their strategies again and again: none fails, and the file is always one of them, whole."""
    path = tmp_path / "shared.toml"
    own = [DistributedStrategy(nccl_comm_num=number) for number in (1, 2, 3, 4)]
    own[0].save(path)

    def save(strategy: DistributedStrategy) -> None:
        for _ in range(50):
            strategy.save(path)
            assert DistributedStrategy.load(path) in own

    with ThreadPoolExecutor() as pool:
        for saved in [pool.submit(save, strategy) for strategy in own]:
            saved.result()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["summary.json", "plan.json", "steps.parquet", "timeline.json.gz", "experiment.toml", "manifest.json"])
def test_a_run_of_which_a_digit_changed_is_refused(run: Path, name: str) -> None:
    """The last bit of a byte in the middle of any of its files."""
    whole = bytearray((run / name).read_bytes())
    digits = [place for place, byte in enumerate(whole) if chr(byte).isdigit()]
    whole[digits[len(digits) // 2]] ^= 1
    (run / name).write_bytes(whole)
    with pytest.raises(ConfigError, match=name):
        load_run(run)


def test_a_table_that_lost_rows_is_refused(run: Path) -> None:
    """It is a table still, and nothing in it is wrong."""
    steps = pd.read_parquet(run / "steps.parquet")
    steps.iloc[: len(steps) // 2].to_parquet(run / "steps.parquet", index=False)
    with pytest.raises(ConfigError, match=r"steps\.parquet"):
        load_run(run)


def test_a_run_that_the_disk_refuses_leaves_nothing(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever stores it: the error is one of the environment, which names the folder."""
    result = load_run(run)
    fill_disk(monkeypatch)
    with pytest.raises(EnvironmentLacks, match=r"full.*No space left"):
        save_run(result, tmp_path / "full")
    assert not (tmp_path / "full").exists()


@pytest.mark.parametrize("kind", ["run", "trace", "vectors"])
def test_a_table_that_fits_no_memory_is_not_read(kind: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small Parquet file may hold billions of rows; the error says how many, and what they would take."""
    vectors, trace = tmp_path / "vectors.parquet", tmp_path / "trace.parquet"
    write_vectors(vectors, ["a", "b"], np.ones((2, 3), dtype=np.float32))
    pd.DataFrame({"rank": [0] * 500_000, "step": range(1, 500_001), "x": [0.0] * 500_000}).to_parquet(trace)
    read = {"run": lambda: load_run(run), "trace": lambda: read_table(trace, "x"), "vectors": lambda: read_vectors(vectors)}[kind]
    read()
    free = {"run": 100, "trace": 10_000_000, "vectors": 100}[kind]
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=free))
    with pytest.raises(EnvironmentLacks, match=r"rows of \d+ columns take .* GiB of memory"):
        read()


def test_a_timeline_is_decompressed_up_to_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kilobyte of gzip may hold a megabyte, and no run writes more events than the bound has room for."""
    path = tmp_path / "timeline.json.gz"
    write_timeline(path, [Span(1000, "communication 7", "all_reduce 1000", 10**15 + number, 10**12) for number in range(1000)])
    assert len(gzip.decompress(path.read_bytes())) < 300 * 1000
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * 100_000 + b"]}"))
    assert read_timeline(path) == ()
    monkeypatch.setattr("fleetbench.timeline._MOST_BYTES", 100_000)
    with pytest.raises(ConfigError, match="more than 100,000 bytes when it is decompressed"):
        read_timeline(path)


def test_a_run_without_digests_is_refused(run: Path) -> None:
    """Of the files, of the manifest, or of both."""
    manifest = read_json((run / "manifest.json").read_text())
    files = manifest.pop("files")
    for damaged in (json.dumps(manifest), json.dumps({**manifest, "files": files}), sealed_json(manifest)):
        (run / "manifest.json").write_text(damaged)
        with pytest.raises(ConfigError, match="digests are missing"):
            load_run(run)


def test_a_file_of_a_run_is_checked_wherever_it_is_read(run: Path) -> None:
    """Its experiment by itself, though somebody removed the line with its digest."""
    path = run / "experiment.toml"
    assert Experiment.load(path).workload.steps == 3
    path.write_text(path.read_text().partition("\n")[2].replace("steps = 3", "steps = 4"))
    with pytest.raises(ConfigError, match="change a copy"):
        Experiment.load(path)
    (run / "manifest.json").write_text('{"short_name": "somebody else\'s"}')
    assert Experiment.load(path).workload.steps == 4
