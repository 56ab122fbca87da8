"""A script of DistributedDataParallel that is attached trains as alone, or as with the four lines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from plain_loops import LOOPS
from processes import Arrays, run_ranks

HERE = Path(__file__).parent
PLAIN, FOUR_LINES, ATTACHED = HERE / "plain_loops.py", HERE / "four_line_loops.py", HERE / "attached.py"
LOCAL = "localsgd = true\nlocalsgd_configs = { k_steps = 4 }"
MERGED = "gradient_merge = true\ngradient_merge_configs = { k_steps = 2 }"


@pytest.fixture(scope="module")
def alone() -> list[Arrays]:
    """What the script does without fleetbench, by rank."""
    return run_ranks(PLAIN, 2, *LOOPS)


def attached(folder: Path, strategy: str | None, *loops: str) -> list[Arrays]:
    """The script under a strategy, or with nothing ordered."""
    file = folder / "strategy.toml"
    file.write_text(strategy or "")
    (folder / "job").mkdir()
    return run_ranks(ATTACHED, 2, str(folder / "job"), "-" if strategy is None else str(file), str(PLAIN), *loops)


def assert_equal(found: list[Arrays], expected: list[Arrays]) -> None:
    """To the last bit, on every rank."""
    for rank, (own, other) in enumerate(zip(found, expected, strict=True)):
        for name in own:
            np.testing.assert_array_equal(own[name], other[name], err_msg=f"{name} on rank {rank}")


@pytest.mark.sample(3)
@pytest.mark.parametrize("strategy", [None, "fuse_grad_size_in_MB = 0.001", "nccl_comm_num = 2\nsync_nccl_allreduce = false"])
def test_training_is_that_of_the_script_alone(strategy: str | None, alone: list[Arrays], tmp_path: Path) -> None:
    """Losses, parameters, buffers and what evaluations see are the same in every loop."""
    assert_equal(attached(tmp_path, strategy, *LOOPS), alone)
    assert (tmp_path / "job" / "attached").exists() == (strategy is not None), "the engine has trained, or did nothing"


@pytest.mark.sample(2)
@pytest.mark.parametrize("strategy", [LOCAL, MERGED])
def test_training_under_a_strategy_is_that_of_the_four_lines(strategy: str, tmp_path: Path) -> None:
    """Where the strategy changes training, also in loops whose closure makes the step."""
    (tmp_path / "four_lines.toml").write_text(strategy)
    expected = run_ranks(FOUR_LINES, 2, str(tmp_path / "four_lines.toml"))
    found = attached(tmp_path, strategy, "Plain", "Early", "Closure")
    assert_equal([{name: own[name] for name in ("Plain", "Early")} for own in found], expected)
    for own in found:
        np.testing.assert_array_equal(own["Closure"][1:12:2], own["Plain"][:6])
