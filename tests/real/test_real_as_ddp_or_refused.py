"""Random loops under random strategies train as DistributedDataParallel and the written-out algorithms do, or are refused on every rank.

A fixed fifty, or hundred, of the campaign in reports/as_ddp_or_refused, which draws its cases from the same seed.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from random_cases import KNOWN, Case, documented, draw
from random_pool import Pool, Verdict

SEED = 1
# fmt: off
FIFTY = (
    0, 21, 34, 44, 54, 124, 128, 183, 254, 255, 278, 279, 308, 312, 341, 350, 356, 411, 488, 489,
    583, 590, 612, 630, 694, 700, 749, 786, 876, 895, 903, 929, 937, 1004, 1123, 1212, 1214, 1223, 1310, 1313,
    1351, 1381, 1630, 1639, 1673, 1695, 1760, 1811, 1863, 1939,
)
OTHERS = (
    13, 24, 28, 37, 45, 51, 65, 74, 78, 79, 85, 86, 99, 104, 108, 109, 122, 132, 139, 168,
    213, 300, 303, 311, 319, 371, 502, 576, 578, 634, 640, 645, 664, 685, 698, 738, 832, 938, 1036, 1134,
    1145, 1172, 1176, 1177, 1181, 1202, 1221, 1550, 1606, 1761,
)
# fmt: on
"""Together two of each combination that was wrong once, and what covers most pairs of features: ``campaign.py --choose``.

Of them fifty with one of each combination and as many pairs as fifty can have; ``make test SLOW=--whole`` trains the others too.
"""


@pytest.fixture(scope="module", params=[FIFTY, pytest.param(OTHERS, marks=pytest.mark.whole)], ids=["fifty", "others"])
def verdicts(request: pytest.FixtureRequest) -> dict[int, Verdict]:
    """Of these cases, from one pool of ranks."""
    with Pool() as pool:
        return {index: pool.judge(draw(SEED, index)) for index in request.param}


@pytest.mark.timeout(400)  # half a minute on a quiet machine
def test_a_loop_trains_as_its_truth_or_is_refused(verdicts: dict[int, Verdict]) -> None:
    """Every case's parameters are the truth's after every step on both ranks, or both ranks end with an error of fleetbench."""
    assert [f"{verdict} {draw(SEED, index)}" for index, verdict in verdicts.items() if verdict.fails] == []


def test_what_is_refused_is_announced(verdicts: dict[int, Verdict]) -> None:
    """A refusal is one that the documents name for such a loop and strategy; seventeen cases at least are trained."""
    refused = {index: verdict.reason for index, verdict in verdicts.items() if verdict.kind == "refused"}
    assert [f"{reason} {draw(SEED, index)}" for index, reason in refused.items() if not documented(draw(SEED, index), reason)] == []
    assert len(refused) <= 33


@pytest.mark.parametrize(("indices", "of_each", "num_pairs"), [(FIFTY, 1, 2100), (FIFTY + OTHERS, 2, 2400)], ids=["fifty", "hundred"])
def test_they_have_what_was_wrong_once(indices: tuple[int, ...], of_each: int, num_pairs: int) -> None:
    """So many cases of every combination that the campaign has found a defect in, and so many pairs of features."""
    cases = [draw(SEED, index) for index in indices]
    assert len(set(indices)) == len(indices) == 50 * of_each
    assert {name: sum(concerns(case) for case in cases) >= of_each for name, concerns in KNOWN.items()} == dict.fromkeys(KNOWN, True)
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
