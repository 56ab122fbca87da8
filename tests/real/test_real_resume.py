"""Resume: a training that goes on from a checkpoint, in other processes, is the one that was never interrupted."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import training_problem as problem
from processes import Arrays, run_ranks, values_of
from resume_cases import CASES, STEPS, Case, cases

RANK = Path(__file__).with_name("resume_rank.py")
TRIED = [(ranks, case) for ranks in (2, 3) for case in cases(ranks)]
LOOKED_AT = (
    *("Local SGD", "loss scale", "adaptive", "fragment in flight", "outer optimizer"),
    *("synchronous, a scaler of the script's", "synchronous, a step that a scaler leaves out"),
)
SAMPLE = [case for number, case in enumerate(CASES) if number % 5 == 0 or case.name in LOOKED_AT]
"""What ``make test`` trains, on two ranks; ``make test-all`` trains every case."""


def _every(*, tried: Sequence[tuple[int, Case]] = TRIED) -> pytest.MarkDecorator:
    marked = [
        pytest.param(ranks, case, id=f"{ranks}-{case.name}", marks=[pytest.mark.slow] * (ranks > 2 or case not in SAMPLE))
        for ranks, case in tried
    ]
    return pytest.mark.parametrize(("ranks", "case"), marked)


PARAMETERS = problem.flat(problem.model("float64", "normed")).numel()


class Runs:
    """What ``ranks`` trainers found of these cases, uninterrupted and resumed; ``folder`` has their checkpoints."""

    def __init__(self, ranks: int, names: str, folder: Path) -> None:
        self.ranks, self.names = ranks, names
        self.folder = folder
        self.whole = run_ranks(RANK, ranks, "train", str(folder), names)

    @functools.cached_property
    def resumed(self) -> list[Arrays]:
        """What other processes made of the checkpoints."""
        return run_ranks(RANK, self.ranks, "resume", str(self.folder), self.names)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Runs]:
    """The runs of a number of ranks."""
    names = json.dumps(sorted({case.name for case in (*values_of(request, "case"), *SAMPLE)}))
    return functools.cache(lambda ranks: Runs(ranks, names, tmp_path_factory.mktemp(f"by{ranks}")))


@pytest.fixture(scope="module")
def anew(runs: Callable[[int], Runs]) -> list[Arrays]:
    """What two trainers made of what three had saved."""
    return run_ranks(RANK, 2, "again", str(runs(3).folder), "[]")


def _equal(one: Arrays, first: str, other: Arrays, second: str, case: Case) -> None:
    """Bit by bit, every step after the save and the end of training."""
    keys = [f"step {number}" for number in range(STEPS - case.saved)] + ["end"]
    for key in keys:
        np.testing.assert_array_equal(one[f"{first}{case.name}/{key}"], other[f"{second}{case.name}/{key}"], err_msg=key)


@_every()
def test_resumed_is_uninterrupted(runs: Callable[[int], Runs], ranks: int, case: Case) -> None:
    """Parameters, buffers, optimizer state, learning rate, updates and loss scale of every later step are the same bits on every rank."""
    for whole, resumed in zip(runs(ranks).whole, runs(ranks).resumed, strict=True):
        _equal(resumed, "", whole, "disturbed ", case)


@_every(tried=[(ranks, case) for ranks, case in TRIED if not case.measures])
def test_a_save_does_not_disturb(runs: Callable[[int], Runs], ranks: int, case: Case) -> None:
    """Whoever saves again and again, within a round or a merge, trains on to the same bits as whoever never does."""
    for whole in runs(ranks).whole:
        _equal(whole, "disturbed ", whole, "", case)


@_every(tried=[(ranks, case) for ranks, case in TRIED if not case.measures and not case.skips])
@pytest.mark.parametrize("moment", ["epoch ended", "synchronized"])
def test_a_loaded_training_is_read_before_it_goes_on(runs: Callable[[int], Runs], ranks: int, case: Case, moment: str) -> None:
    """Saving, ending an epoch and synchronizing directly after a load give what they give without the load."""
    for whole, resumed in zip(runs(ranks).whole, runs(ranks).resumed, strict=True):
        np.testing.assert_array_equal(resumed[f"{case.name}/{moment}"], whole[f"{case.name}/{moment}"])


@_every()
def test_the_plan_is_the_saved_one(runs: Callable[[int], Runs], ranks: int, case: Case) -> None:
    """Buckets follow the order in which gradients came in the first process, not in the one that resumes."""
    for whole, resumed in zip(runs(ranks).whole, runs(ranks).resumed, strict=True):
        assert resumed[f"{case.name}/plan"] == whole[f"disturbed {case.name}/plan"]


def test_the_cases_are_what_they_say(runs: Callable[[int], Runs]) -> None:
    """A save within a round finds trainers that differ, and one at its end trainers that agree; a loss scale has moved."""
    first, second = runs(2).whole
    within, at_end = (f"{name}/step {STEPS - 7}" for name in ("Local SGD", "synchronous"))
    assert not np.array_equal(first[within][:PARAMETERS], second[within][:PARAMETERS])
    np.testing.assert_array_equal(first[at_end][:PARAMETERS], second[at_end][:PARAMETERS])
    assert first[f"loss scale/step {STEPS - 6}"][-4] == 128.0 * 2.0 * 0.8  # three good steps, and an overflow
    assert first["synchronous, a scaler of the script's/end"][-2] == 64.0 * 2 ** (STEPS // 3)
    assert first["synchronous, a step that a scaler leaves out/end"][-1] == STEPS - 1
    assert first["adaptive/end"][-1] == STEPS


@pytest.mark.slow
def test_a_round_that_is_open_is_saved_as_its_average(runs: Callable[[int], Runs], anew: list[Arrays]) -> None:
    """The model of a checkpoint within a round is the mean of the trainers' parameters, which another number of trainers begins with."""
    within = f"Local SGD/step {STEPS - 7}"
    mean = np.mean([whole[within][:PARAMETERS] for whole in runs(3).whole], axis=0)
    for found in anew:
        np.testing.assert_allclose(found["Local SGD/parameters"], mean, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_another_number_of_trainers_is_refused(anew: list[Arrays]) -> None:
    """Unless they may begin again, and the error says so."""
    for found in anew:
        (text,) = found["refused"]
        assert "saved by 3, here 2" in text
        assert "resynchronize=True" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Local SGD", "merge of 4, two of them in the sum", "adaptive", "fragment in flight", "outer optimizer"])
def test_other_trainers_begin_anew_alike(anew: list[Arrays], name: str) -> None:
    """They hold the same bits at the beginning, statistics and momentum included, train on, and agree at the end."""
    first, second = anew
    np.testing.assert_array_equal(first[f"{name}/begin"], second[f"{name}/begin"])
    np.testing.assert_array_equal(first[f"{name}/end"], second[f"{name}/end"])
    assert not np.array_equal(first[f"{name}/parameters"], first[f"{name}/end"])


@pytest.mark.slow
def test_a_sum_that_is_dropped_is_said(anew: list[Arrays]) -> None:
    """Gradients of trainers that are gone are not merged with anybody's; a warning counts them, and only where there are any."""
    for found in anew:
        assert found["merge of 4, two of them in the sum/warned"] == 1
        assert found["Local SGD/warned"] == 0


@pytest.mark.slow
def test_a_round_of_an_outer_optimizer_that_is_dropped_is_said(anew: list[Arrays]) -> None:
    """Trainers begin again from Theta, without what each of the old ones had updated since."""
    for found in anew:
        assert found["outer optimizer/warned"] == found["fragment in flight/warned"] == 1


@pytest.mark.slow
def test_another_strategy_is_refused_or_begins_anew(anew: list[Arrays]) -> None:
    """The error names the fields; begun again, the new strategy counts the updates: 7 steps were 3 merges of 2; then those of the rest."""
    for found in anew:
        (text,) = found["another strategy refused"]
        assert "localsgd: saved True, here False" in text
        assert found["updates"] == 3 + (STEPS - 7) // 2
    np.testing.assert_array_equal(anew[0]["another strategy"], anew[1]["another strategy"])


@pytest.mark.slow
def test_what_one_rank_cannot_do_is_an_error_on_all(anew: list[Arrays]) -> None:
    """Other folders, a disk that takes nothing and a damaged part end on every rank, in words; nothing has been loaded then."""
    first, second = anew
    assert "rank 1 saves to another folder" in str(first["elsewhere"])
    assert "rank 1 saves to another folder" in str(second["elsewhere"])
    assert "cannot be written" in str(first["blocked"])
    assert "rank 0 could not do its part" in str(second["blocked"])
    assert "rank 1 could not do its part" in str(first["damaged"])
    assert "its digest differs" in str(second["damaged"])
    assert not first["changed"]
    assert not second["changed"]


@pytest.mark.slow
def test_some_of_a_model_is_the_same_on_every_rank(anew: list[Arrays]) -> None:
    """Rank 0's is taken, buffers and all; files that differ are refused, and change nothing."""
    first, second = anew
    np.testing.assert_array_equal(first["partly, some"], second["partly, some"])
    for found in anew:
        assert "rank 1 loads other tensors" in str(found["other files"])
        assert not found["other files changed"]
