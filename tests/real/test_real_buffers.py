"""Buffers under local steps: statistics are averaged where that is asked for, counts are the largest, and all others stay."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from buffers_rank import CHANGES
from processes import run_ranks

RANK = Path(__file__).with_name("buffers_rank.py")


@pytest.mark.parametrize("how", ["average", "local"])
def test_statistics_are_averaged_and_counts_are_the_largest(how: str) -> None:
    """Complex numbers, masks, words of bits and what the model gets later are each rank's own, whatever is averaged.

    The plan, whose bytes the simulator takes and the engine tells, counts what is averaged, in the type in which it is.
    """
    one, other = run_ranks(RANK, 2, how)
    for name in ("numbers", "halves", "1.running_mean", "1.running_var"):
        assert np.array_equal(one[name], other[name]) == (how == "average"), name
    assert [int(rank["1.num_batches_tracked"].real) for rank in (one, other)] == ([26, 26] if how == "average" else [15, 26])
    for place, name in enumerate(("numbers", "halves", "rotations", "mask", "bits", "words", "flag", "count"), start=1):
        own = [
            (place + 2) * (1 if name != "rotations" else 1j),
            (place + 12) * (1 if name != "rotations" else 1j),
        ]
        own = [1, 1] if name in ("mask", "flag") else own
        if how == "average":
            own = {
                "numbers": [sum(own) / 2] * 2,
                "halves": [sum(own) / 2] * 2,
                "count": [max(own, key=abs)] * 2,
            }.get(name, own)
        assert [np.unique(rank[name]).tolist() for rank in (one, other)] == [[own[0]], [own[1]]], name
    for rank in (one, other):  # of two ranks each sends as much as an all-reduce carries
        assert rank["bytes told"] == rank["bytes handed over"] > 0
    assert "later" not in one
    assert np.unique(other["later"]) == 22  # the tenth, in the third step, on rank 1


@pytest.mark.parametrize("change", CHANGES)
def test_a_buffer_whose_shape_has_changed_is_named(change: str) -> None:
    """It is an error on the rank that has it, before any number of it is sent; where ranks still begin, on all of them."""
    one, other = run_ranks(RANK, 2, change)
    where = "the model: differs between rank 0 and rank 1" if change == "before the optimizer" else "buffer numbers: has changed its shape"
    assert str(other["error"]).startswith(where), other["error"]
    assert "numbers" in str(other["error"])
    assert (str(one["error"]) == str(other["error"])) == (change == "before the optimizer")
