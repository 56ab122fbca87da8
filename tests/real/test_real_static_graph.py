"""A static graph: what DDP's ``static_graph`` trains, ``strategy.static_graph`` trains to the same end."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import Arrays, run_ranks
from static_rank import CASES

RANK = Path(__file__).with_name("static_rank.py")
REFUSED = ("changes", "joins")
LOOSE = {"merge": 1e-12, "merge, fused": 1e-12, "fused": 1e-12, "FP16": 1e-5}
"""Where sums, products or types are rounded in another order."""


@pytest.fixture(scope="module")
def found() -> list[Arrays]:
    """What both ranks found of every case."""
    return run_ranks(RANK, 2)


@pytest.mark.parametrize("case", [name for name in CASES if name not in REFUSED])
def test_a_static_graph_trains_as_under_ddp(found: list[Arrays], case: str) -> None:
    """A parameter that is reached twice has its whole gradient, and one that is never reached has no weight decay."""
    for rank in found:
        assert rank[f"{case}/off"] == pytest.approx(0.0, abs=LOOSE.get(case, 0.0))
        assert rank[f"{case}/moved"] > 0.01


def test_a_graph_that_changes_is_an_error(found: list[Arrays]) -> None:
    """On every rank, in the step in which it changes: by torch, which knows the graph."""
    for rank in found:
        assert "training graph has changed" in str(rank["changes/raised"])


def test_uneven_inputs_are_refused(found: list[Arrays]) -> None:
    """A trainer without data would miss the backward that counts."""
    for rank in found:
        assert "model.join: cannot take part in the first backward" in str(rank["joins/refused"])
