"""What DDP's Reducer does, the engine does, or refuses on every rank, by name and soon."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from processes import run_ranks, values_of
from reducer_rank import BY_RANK, CASES, RANKS, REFUSED, Found

EXACT = 1e-12
IN_ONE_PROCESS = 45
"""Cases; what gloo leaves behind makes more of them slow."""
RANK = Path(__file__).with_name("reducer_rank.py")
SOON_S = 10.0
"""Half the timeout of a collective."""


def _of(kind: str) -> list[str]:
    return [name for name in CASES if name.startswith(kind)]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, list[Found]]:
    """By case, what each rank found."""
    chosen = [*values_of(request, "case"), "another strategy", "copies"]
    cases: dict[str, list[Found]] = {name: [{} for _ in range(RANKS)] for name in chosen}
    parts = -(-len(chosen) // IN_ONE_PROCESS)
    for part in range(parts):
        for rank, arrays in enumerate(run_ranks(RANK, RANKS, json.dumps(chosen[part::parts]))):
            for key, value in arrays.items():
                name, _, what = key.rpartition("/")
                cases[name][rank][what] = value.item()
    return cases


@pytest.mark.slow
@pytest.mark.parametrize("case", _of("layouts"))
def test_strides_and_types_are_no_matter(found: dict[str, list[Found]], case: str) -> None:
    """Parameters and buffers with gaps, overlaps, and numbers of every kind begin as rank 0's, and train as averages taken by hand."""
    assert [rank["apart"] for rank in found[case]] == ["", ""]
    assert all(rank["off"] < EXACT for rank in found[case])


@pytest.mark.parametrize("case", [name for name in CASES if "hooks" in name])
def test_hooks_of_the_script_come_before_the_exchange(found: dict[str, list[Found]], case: str) -> None:
    """As under DDP, also where they were registered after ``distributed_model``."""
    assert [rank["off"] for rank in found[case]] == [0.0, 0.0]


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", _of("by rank: "))
def test_models_that_differ_by_rank_are_refused(found: dict[str, list[Found]], case: str) -> None:
    """Every rank names the first difference and who has it, at once."""
    for rank in found[case]:
        assert str(rank["refused"]).startswith("the model: differs between rank 0 and rank 1 (got ")
        assert BY_RANK[case.removeprefix("by rank: ")] in str(rank["refused"])
        assert rank["after_s"] < SOON_S


def test_strategies_that_differ_by_rank_are_refused(found: dict[str, list[Found]]) -> None:
    """By the field."""
    for rank in found["another strategy"]:
        assert str(rank["refused"]).startswith("the strategy: differs between rank 0 and rank 1 (got nothing on rank 0, nccl_comm_num = 2")


@pytest.mark.sample(4)
@pytest.mark.parametrize("case", _of("refused: "))
def test_what_cannot_be_right_is_refused(found: dict[str, list[Found]], case: str) -> None:
    """By name, on every rank, at once."""
    for rank in found[case]:
        assert re.match(f"(.*: )?{REFUSED[case.removeprefix('refused: ')][2]}", str(rank.get("refused"))), rank
        assert rank["after_s"] < SOON_S


@pytest.mark.sample(4)
@pytest.mark.parametrize("case", _of("trained: "))
def test_what_is_right_is_trained(found: dict[str, list[Found]], case: str) -> None:
    """Beside what is refused lies what DDP trains, and it is trained to the same end."""
    assert [rank.get("off", rank) for rank in found[case]] == [pytest.approx(0.0, abs=EXACT)] * RANKS


@pytest.mark.parametrize("case", _of("let go"))
def test_folds_that_a_script_lets_go_of_leave_nothing(found: dict[str, list[Found]], case: str) -> None:
    """No model but the last lives on, and there are no more threads, process groups and hooks than after the third."""
    assert found[case] == [{"alive": 1.0, "grown": ""}] * RANKS


def test_copies_of_a_model_know_nothing_of_fleet(found: dict[str, list[Found]]) -> None:
    """State, copies, files, exports and compiled models; ``.module`` is the model, or what the model has by that name."""
    assert found["copies"] == [{"off": 0.0, "named": 1.0}] * RANKS


@pytest.mark.slow
def test_three_trainers_with_uneven_inputs_train_as_under_ddp() -> None:
    """They run out of data one after the other, or two of them at once."""
    chosen = _of("trained: uneven")
    ranks = run_ranks(RANK, 3, json.dumps(chosen))
    offs = {key: [float(rank[key]) for rank in ranks] for key in ranks[0] if key.endswith("/off")}
    assert len(offs) == len(chosen)
    assert offs == {key: [pytest.approx(0.0, abs=EXACT)] * 3 for key in offs}, [key for key in ranks[0] if not key.endswith("/off")]
