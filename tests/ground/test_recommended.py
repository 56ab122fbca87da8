from __future__ import annotations

from pathlib import Path

import pytest

from fleetbench.errors import ConfigError
from fleetbench.recommended import VARIABLE, folder_of, keep, key_of, text_of
from fleetbench.strategy import DistributedStrategy

GRADIENTS = [("first.weight", 12, "float32"), ("first.bias", 4, "float32")]


def key(**changes: object) -> str:
    """The key of a small workload, with something changed."""
    known = {"gradients": GRADIENTS, "trainers": 8, "trainers_per_node": 4, "device": "cuda"} | changes
    gradients = known.pop("gradients")
    return key_of(gradients, **known)  # type: ignore[arg-type]  # of several types


@pytest.mark.parametrize(
    "change",
    [
        {"trainers": 16},
        {"trainers_per_node": 8},
        {"device": "cpu"},
        {"gradients": [("first.weight", 13, "float32"), GRADIENTS[1]]},
        {"gradients": [*GRADIENTS, ("last", 1, "float32")]},
        {"gradients": [("first.weight", 12, "bfloat16"), GRADIENTS[1]]},
    ],
)
def test_another_workload_or_cluster_has_another_key(change: dict[str, object]) -> None:
    """Trainers, their nodes, the device, and each gradient's name, size and type count; not their order, which a profile has by layer."""
    assert key() == key() == key(gradients=GRADIENTS[::-1])
    assert key(**change) != key()
    assert len(key()) == 16


def test_what_is_kept_is_found(tmp_path: Path) -> None:
    """A newer recommendation replaces the older one; the file is a strategy file, headed by its verdict."""
    folder = tmp_path / "below"
    keep(folder, key(), DistributedStrategy(nccl_comm_num=2), "KEEP DEFAULT: no")
    path = keep(folder, key(), DistributedStrategy(localsgd=True), "USE localsgd = true: 1.20x\nwith a second line")
    assert text_of(folder, key()).splitlines()[:2] == ["# USE localsgd = true: 1.20x", "# with a second line"]
    assert DistributedStrategy.load(path) == DistributedStrategy(localsgd=True)
    assert DistributedStrategy.parse(text_of(folder, key()), "here") == DistributedStrategy(localsgd=True)
    assert [item.name for item in folder.iterdir()] == [f"{key()}.toml"]


def test_none_for_this_workload_is_an_error_that_says_where_it_looked(tmp_path: Path) -> None:
    """Others are counted, because a model or a number of trainers that changed is what happens."""
    keep(tmp_path, key(), DistributedStrategy(), "KEEP DEFAULT: no")
    with pytest.raises(ConfigError, match="1 for others") as caught:
        text_of(tmp_path, key(trainers=2))
    assert str(tmp_path) in str(caught.value)
    with pytest.raises(ConfigError, match="0 for others"):
        text_of(tmp_path / "nowhere", key())


def test_the_environment_names_the_folder() -> None:
    """Otherwise it lies beside the runs."""
    assert folder_of({VARIABLE: "/shared/recommended"}) == Path("/shared/recommended")
    assert folder_of({}) == Path("runs/recommended")
