"""Global modes: what a script sets for all of torch does not change how fleet trains its model."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import numpy as np
import pytest
from modes_cases import FAMILIES
from processes import Arrays, run_ranks


@functools.cache
def _results(mode: str) -> list[Arrays]:
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(Path(__file__).with_name("modes_rank.py"), 2, folder, mode)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["bfloat16 on meta", pytest.param("float64 and inference", marks=pytest.mark.slow)])
def test_a_global_mode_changes_no_bit(mode: str, family: str) -> None:
    """A training has the same bits under another default type or device, and with ``inference_mode``."""
    for usual, found in zip(_results("usual"), _results(mode), strict=True):
        assert np.isfinite(usual[f"{family}/history"]).all()
        for name in ("history", "buffers"):
            np.testing.assert_array_equal(found[f"{family}/{name}"], usual[f"{family}/{name}"])
