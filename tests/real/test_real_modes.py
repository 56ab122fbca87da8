"""Global modes: what a script sets for all of torch changes nothing of a training under fleet that names its own types and devices."""

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


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["bfloat16 on meta", "float64 and inference"])
def test_a_global_mode_changes_no_bit(mode: str, family: str) -> None:
    """Under another default type or device, and with evaluations in ``inference_mode``, a training has the bits that it has without."""
    for usual, found in zip(_results("usual"), _results(mode), strict=True):
        assert np.isfinite(usual[f"{family}/history"]).all()
        for name in ("history", "buffers"):
            np.testing.assert_array_equal(found[f"{family}/{name}"], usual[f"{family}/{name}"])
