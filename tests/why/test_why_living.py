"""A living DDP: its buckets are predicted, and its settings change between two steps without a change of what it learns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from processes import run_ranks


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """What two ranks have found."""
    return [json.loads(str(rank["found"])) for rank in run_ranks(Path(__file__).with_name("living_rank.py"), 2)]


@pytest.mark.slow
def test_buckets_are_those_that_torch_makes(found: list[dict[str, Any]]) -> None:
    """At five caps, the default among them, each bucket has the bytes that torch's Reducer says."""
    for case in found[0]["buckets"]:
        assert case["own"] == case["torch"], case


def test_changes_of_settings_leave_training_as_it_is(found: list[dict[str, Any]]) -> None:
    """Losses are equal to the bit on two ranks, and the last change is back at the script's own settings."""
    for rank in found:
        assert rank["changed"] == rank["plain"]


def test_a_backward_within_the_forward_ends_it(found: list[dict[str, Any]]) -> None:
    """What comes after it in the forward, such as the update, is neither."""
    for rank in found:
        assert all(0 < took_ns < 50_000_000 for took_ns in rank["within_ns"])
