"""Random loops under random strategies train as DistributedDataParallel and the written-out algorithms do, or are refused on every rank.

A fixed hundred of the campaign in reports/as_ddp_or_refused, which draws its cases from the same seed.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from random_cases import KNOWN, Case, documented, draw
from random_pool import Pool, Verdict

SEED = 1
# fmt: off
HUNDRED = (
    0, 13, 21, 24, 28, 34, 37, 44, 45, 51, 54, 65, 74, 78, 79, 85, 86, 99, 104, 108,
    109, 122, 124, 128, 132, 139, 168, 183, 213, 254, 255, 278, 279, 300, 303, 308, 311, 312, 319, 341,
    350, 356, 371, 411, 488, 489, 502, 576, 578, 583, 590, 612, 630, 634, 640, 664, 685, 694, 698, 700,
    738, 749, 786, 832, 876, 895, 903, 929, 937, 938, 1004, 1036, 1123, 1134, 1145, 1172, 1176, 1177, 1181, 1202,
    1212, 1214, 1221, 1223, 1310, 1313, 1351, 1381, 1550, 1606, 1630, 1639, 1673, 1695, 1760, 1761, 1811, 1863, 1939, 645,
)
# fmt: on
"""Two of each combination that was wrong once, and what covers most pairs of features: ``campaign.py --choose``."""


@pytest.fixture(scope="module")
def verdicts() -> dict[int, Verdict]:
    """Of all cases, from one pool of ranks."""
    with Pool() as pool:
        return {index: pool.judge(draw(SEED, index)) for index in HUNDRED}


@pytest.mark.timeout(400)  # a minute on a quiet machine
def test_a_loop_trains_as_its_truth_or_is_refused(verdicts: dict[int, Verdict]) -> None:
    """Every case's parameters are the truth's after every step on both ranks, or both ranks end with an error of fleetbench."""
    assert [f"{verdict} {draw(SEED, index)}" for index, verdict in verdicts.items() if verdict.fails] == []


def test_what_is_refused_is_announced(verdicts: dict[int, Verdict]) -> None:
    """A refusal is one that the documents name for such a loop and strategy; forty cases at least are trained."""
    refused = {index: verdict.reason for index, verdict in verdicts.items() if verdict.kind == "refused"}
    assert [f"{reason} {draw(SEED, index)}" for index, reason in refused.items() if not documented(draw(SEED, index), reason)] == []
    assert len(refused) <= 60


def test_the_hundred_have_what_was_wrong_once() -> None:
    """At least two cases of every combination that the campaign has found a defect in, and 1,500 pairs of features."""
    cases = [draw(SEED, index) for index in HUNDRED]
    assert len(set(HUNDRED)) == 100
    assert {name: sum(concerns(case) for case in cases) >= 2 for name, concerns in KNOWN.items()} == dict.fromkeys(KNOWN, True)
    pairs = {pair for case in cases for pair in itertools.combinations(sorted(case.features()), 2)}
    assert len(pairs) >= 1500


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
