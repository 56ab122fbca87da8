"""How numbers are spelled."""

from __future__ import annotations

import pytest

from fleetbench import units


@pytest.mark.parametrize(
    ("value_s", "text"),
    [(0.0123456, "12.35 ms"), (0.1234, "123.4 ms"), (2.5, "2.50 s"), (0.00004, "40.00 us"), (0.0, "0 ms"), (None, "–")],  # noqa: RUF001  # the dash of a missing number
)
def test_seconds_choose_the_unit_that_a_reader_expects(value_s: float | None, text: str) -> None:
    """A time keeps three or four digits and says its unit."""
    assert units.seconds(value_s) == text


def test_an_error_keeps_its_sign() -> None:
    """A simulated time that is too short shows as minus."""
    assert units.percent(-0.0123, sign=True) == "-1.2 %"
    assert units.percent(0.05, sign=True) == "+5.0 %"
    assert units.percent(0.05) == "5.0 %"
