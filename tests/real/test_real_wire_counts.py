"""The published numbers of fused all-reduces of a ResNet-50, counted where they leave for the wire."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import Arrays, run_ranks
from wire_counts_cases import CASES, Published

from resnet50 import resnet50_gradients

pytestmark = pytest.mark.slow  # tests/plan/test_fusion.py has the plan's numbers
RANK = Path(__file__).with_name("wire_counts_rank.py")


@pytest.fixture(scope="module")
def results() -> list[Arrays]:
    """What both ranks saved, all cases from one launch."""
    return run_ranks(RANK, 2)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_step_has_the_published_number_of_all_reduces(results: list[Arrays], case: Published) -> None:
    """Fleet's logs say 5, 6 and 8; that many all-reduces carry every gradient once, each of one type, the same on both ranks."""
    for rank in results:
        sizes, dtypes = rank[f"{case.name}/sizes"], rank[f"{case.name}/dtypes"]
        assert len(sizes) == case.num_all_reduces
        by_dtype: dict[str, int] = {}
        for size, dtype in zip(sizes.tolist(), dtypes.tolist(), strict=True):
            by_dtype[dtype] = by_dtype.get(dtype, 0) + size
        expected: dict[str, int] = {}
        for gradient in resnet50_gradients(half=case.half):
            expected[gradient.dtype] = expected.get(gradient.dtype, 0) + gradient.numel
        assert by_dtype == expected
        assert sizes.tolist() == results[0][f"{case.name}/sizes"].tolist()


def test_the_model_has_the_papers_gradients(results: list[Arrays]) -> None:
    """161 parameters, in the order and of the sizes of the paper's table, and the last layer's is ready first."""
    for case in CASES:
        assert results[0][f"{case.name}/parameters"].tolist() == [gradient.numel for gradient in reversed(resnet50_gradients())]
        if not case.half:  # a group of two types is two buckets
            assert "fc." in str(results[0][f"{case.name}/first"])
