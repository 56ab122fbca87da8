from __future__ import annotations

from fleetbench.overview import overview
from fleetbench.strategy import DistributedStrategy


def test_the_box_shows_what_is_switched_on() -> None:
    """Every changed field stands in the box with its value, and no other; all lines are of one width."""
    strategy = DistributedStrategy().replace(localsgd=True, localsgd_configs={"k_steps": 4}, fuse_grad_size_in_MB=16)
    lines = overview(strategy, {"trainers": 8, "rank": 3}).splitlines()
    assert len({len(line) for line in lines}) == 1
    rows = [line.strip("| ").split() for line in lines if "  " in line.strip("| ")]
    assert rows == [
        ["trainers", "8"],
        ["rank", "3"],
        ["fuse_grad_size_in_MB", "16.0"],
        ["localsgd", "True"],
        ["localsgd_configs.k_steps", "4"],
    ]
    assert sum("DistributedStrategy Overview" in line for line in lines) == 1


def test_the_box_of_the_defaults_says_so() -> None:
    """A default strategy has an overview too."""
    assert "at Fleet's defaults" in overview(DistributedStrategy())


def test_communicators_that_cannot_overlap_are_pointed_out() -> None:
    """Several communicators with one bucket in flight change nothing, and the box says it."""
    assert "do not overlap" in overview(DistributedStrategy(nccl_comm_num=2))
    assert "do not overlap" not in overview(DistributedStrategy(nccl_comm_num=2, sync_nccl_allreduce=False))
