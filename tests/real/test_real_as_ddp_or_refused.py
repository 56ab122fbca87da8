"""Random loops under random strategies train as DistributedDataParallel and the written-out algorithms do, or are refused on every rank.

A fixed sample of the campaign in reports/as_ddp_or_refused, which draws its cases from the same seeds.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from random_cases import KNOWN, Case, documented, draw
from random_pool import Pool, Verdict

# fmt: off
FIRST = (
    0, 21, 34, 44, 54, 183, 254, 278, 308, 350, 411, 488, 583, 590, 749, 786, 876, 895, 929, 937,
    1004, 1123, 1212, 1214, 1310, 1313, 1381, 1630, 1695, 1863,
)
SECOND = (
    18, 22, 36, 50, 59, 82, 85, 86, 95, 122, 124, 128, 158, 201, 214, 220, 224, 229, 244, 254,
    259, 283, 292, 294, 299, 398, 399, 452, 475, 616, 863, 962, 1111, 1386, 1495,
)
THIRD = (4, 43, 51, 67, 71, 73, 74, 284)
OTHERS = (
    13, 24, 28, 37, 45, 51, 65, 74, 78, 79, 85, 86, 99, 104, 108, 109, 122, 124, 128, 132,
    139, 168, 213, 255, 279, 300, 303, 311, 312, 319, 341, 356, 371, 489, 502, 576, 578, 612, 630, 634,
    640, 645, 664, 685, 694, 698, 700, 738, 832, 903, 938, 1036, 1134, 1145, 1172, 1176, 1177, 1181, 1202, 1221,
    1223, 1351, 1550, 1606, 1639, 1673, 1760, 1761, 1811, 1939,
)
FEW = (
    *((1, index) for index in (21, 54, 183, 254, 278, 350, 786, 876, 895, 937, 1212, 1310, 1381, 1863)),
    *((2, index) for index in (18, 22, 36, 86, 122, 128, 158, 214, 224, 229, 254, 259, 299, 452, 1111)),
    (3, 71),
)
# fmt: on
"""Of seeds 1 and 2 one of each combination that was wrong once, and what covers most pairs of features; of seed 3, two optimizers; and
others of seed 1.

Case 398 of seed 2 leaves one rank with an exchange that the other never joins: 399 comes after it.

``make test`` trains few of them, ``make test-all`` the sample, and ``make test SLOW=--whole`` the others, too.
"""
SAMPLE = (*((1, index) for index in FIRST), *((2, index) for index in SECOND), *((3, index) for index in THIRD))
WHOLE = (*SAMPLE, *((1, index) for index in OTHERS))
Verdicts = dict[tuple[int, int], Verdict]


PARTS = [
    pytest.param(FEW, id="few"),
    pytest.param([case for case in SAMPLE if case not in FEW], id="sample", marks=pytest.mark.slow),
    pytest.param(WHOLE[len(SAMPLE) :], id="others", marks=pytest.mark.whole),
]


@pytest.fixture(scope="module", params=PARTS)
def verdicts(request: pytest.FixtureRequest) -> Verdicts:
    """Of these cases, from one pool of ranks."""
    with Pool() as pool:
        return {case: pool.judge(draw(*case)) for case in request.param}


@pytest.mark.timeout(400)  # half a minute on a quiet machine
def test_a_loop_trains_as_its_truth_or_is_refused(verdicts: Verdicts) -> None:
    """Every case's parameters are the truth's after every step on both ranks, or both ranks end with an error of fleetbench."""
    assert [f"{verdict} {draw(*case)}" for case, verdict in verdicts.items() if verdict.fails] == []


def test_what_is_refused_is_announced(verdicts: Verdicts) -> None:
    """A refusal is one that the documents name for such a loop and strategy; half of the cases at least are trained."""
    refused = {case: verdict.reason for case, verdict in verdicts.items() if verdict.kind == "refused"}
    assert [f"{reason} {draw(*case)}" for case, reason in refused.items() if not documented(draw(*case), reason)] == []
    assert len(refused) <= len(verdicts) / 2


@pytest.mark.parametrize(("chosen", "num_pairs"), [(FEW, 1700), (SAMPLE, 2350), (WHOLE, 2900)], ids=["few", "sample", "whole"])
def test_they_have_what_was_wrong_once(chosen: tuple[tuple[int, int], ...], num_pairs: int) -> None:
    """A case of every combination that the campaign has found a defect in, and so many pairs of features."""
    cases = [draw(*case) for case in chosen]
    assert len(set(chosen)) == len(chosen)
    assert [name for name, concerns in KNOWN.items() if not any(map(concerns, cases))] == []
    pairs = {pair for case in cases for pair in itertools.combinations(sorted(case.features()), 2)}
    assert len(pairs) >= num_pairs


def test_a_wrong_end_is_a_failure() -> None:
    """The verdict is none of the good ones where the ranks end differently, where a rank hangs or dies, or where parameters are off."""
    with _Told() as pool:
        pool.told = [[{"end": "refused", "what": "a: b"}, {"end": "refused", "what": "a: b"}]]
        assert not pool.judge(Case()).fails
        for one, other, kind in (
            ("refused", "lost", "one rank"),
            ("trained", "lost", "one rank"),
            ("trained", "refused", "one rank"),
            ("raised", "raised", "raised"),
            ("refused", "died", "died"),
            ("trained", "hangs", "hangs"),
        ):
            pool.told = [[{"end": one, "what": "x"}, {"end": other, "what": "y"}]]
            verdict = pool.judge(Case())
            assert verdict.fails, (one, other)
            assert verdict.kind == kind
        for offs, kind in (((0.0, 0.0), "equal"), ((0.0, 1e-6), "differs"), ((float("inf"), 0.0), "differs")):
            pool.told = [[{"end": "trained"}, {"end": "trained"}], [{"off": off, "truths": 0.0} for off in offs]]
            assert pool.judge(Case()).kind == kind
        pool.told = [[{"end": "trained"}, {"end": "trained"}], [{"off": 0.0, "truths": 1e-3}, {"off": 0.0}]]
        assert pool.judge(Case()).kind == "truths differ"


class _Told(Pool):
    """A pool without ranks, whose answers a test tells."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[list[dict[str, Any]]] = []

    def _start(self) -> None:
        pass

    def _order(self, order: dict[str, Any]) -> list[dict[str, Any]]:  # noqa: ARG002  # whatever is asked
        return self.told.pop(0)
