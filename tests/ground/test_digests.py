"""Files are written whole or not at all, and folders of runs notice damage."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fleetbench.digests import read_json, sealed_json
from fleetbench.errors import ConfigError, EnvironmentLacks
from fleetbench.experiment import Experiment
from fleetbench.store import load_run, save_run
from fleetbench.strategy import DistributedStrategy
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


def test_a_strategy_file_may_be_edited(tmp_path: Path) -> None:
    """A changed file is another strategy."""
    path = tmp_path / "s.toml"
    STRATEGY.save(path)
    path.write_text(path.read_text().replace("k_steps = 16", "k_steps = 8"))
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


def test_a_run_without_digests_is_refused(run: Path) -> None:
    """Of the files, of the manifest, or of both."""
    manifest = read_json((run / "manifest.json").read_text())
    files = manifest.pop("files")
    for damaged in (json.dumps(manifest), json.dumps({**manifest, "files": files}), sealed_json(manifest)):
        (run / "manifest.json").write_text(damaged)
        with pytest.raises(ConfigError, match=r"manifest\.json.*(digest|files)"):
            load_run(run)
