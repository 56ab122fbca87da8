from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetbench import quantities as q
from fleetbench.errors import ConfigError

COUNTS = st.integers(min_value=0, max_value=2**63 - 1)


@pytest.mark.parametrize(
    ("text", "nanoseconds"),
    [
        ("3 us", 3_000),
        ("2.5 ms", 2_500_000),
        ("0.1s", 100_000_000),
        ("1e-3 s", 1_000_000),
        ("2 min", 120 * 10**9),
        ("1 h", 3600 * 10**9),
        ("1_000 ns", 1_000),
    ],
)
def test_durations_are_integer_nanoseconds(text: str, nanoseconds: int) -> None:
    """A duration is held to the nanosecond, whatever its unit."""
    assert q.parse_duration(text) == nanoseconds


@pytest.mark.parametrize(
    ("text", "count"),
    [("32 MB", 32 * 10**6), ("32 MiB", 32 * 2**20), ("1 kB", 1000), ("1 KiB", 1024), ("1.5 GB", 15 * 10**8), ("7 B", 7)],
)
def test_mega_is_decimal_and_mebi_binary(text: str, count: int) -> None:
    """MB is 10^6 and MiB is 2^20."""
    assert q.parse_size(text) == count


@pytest.mark.parametrize(
    ("text", "bits_per_second"),
    [
        ("25 Gbit/s", 25 * 10**9),
        ("25 Gb/s", 25 * 10**9),
        ("300 GB/s", 8 * 300 * 10**9),
        ("1 MiB/s", 8 * 2**20),
        ("200 Mbit/s", 2 * 10**8),
    ],
)
def test_bits_and_bytes_are_told_apart(text: str, bits_per_second: int) -> None:
    """A byte per second is eight bits per second; a small b is a bit."""
    assert q.parse_bandwidth(text) == bits_per_second


def test_bits_may_be_spelled_bps_and_case_tells_bits_from_bytes() -> None:
    """``Gbps`` and ``Gb/s`` are bits, ``GB/s`` bytes; ``gb/s`` may be either, and is refused."""
    assert q.parse_bandwidth("25 Gbps") == q.parse_bandwidth("25Gb/s") == q.parse_bandwidth("25 Gbit/s") == 25 * 10**9
    assert q.parse_bandwidth("25 GB/s") == 200 * 10**9
    with pytest.raises(ConfigError, match="not a bandwidth"):
        q.parse_bandwidth("25 gb/s")


@given(COUNTS)
def test_durations_round_trip(value: int) -> None:
    """Any number of nanoseconds is written as text that reads back as itself."""
    assert q.parse_duration(q.format_duration(value)) == value


@given(st.integers(min_value=1, max_value=2**63 - 1))
def test_bandwidths_round_trip(value: int) -> None:
    """Any number of bits per second is written as text that reads back as itself."""
    assert q.parse_bandwidth(q.format_bandwidth(value)) == value


@pytest.mark.parametrize("text", ["3 furlongs", "25 Gbit", "25", "Gbit/s", "", "fast", "1 2 Gbit/s", "25 gigabit/s", "1e999999999 Gbit/s"])
def test_a_wrong_unit_names_the_right_ones(text: str) -> None:
    """What is no bandwidth is refused with the text, an example and the units."""
    with pytest.raises(ConfigError) as error:
        q.parse_bandwidth(text)
    assert repr(text) in str(error.value)
    assert "HINT" in str(error.value)
    assert "Gbit/s" in str(error.value)


@pytest.mark.parametrize("value", [25, 2.5, True, None, ["25 Gbit/s"]])
def test_a_bare_number_is_refused(value: object) -> None:
    """A quantity without a unit is refused, because its unit would be a guess."""
    with pytest.raises(ConfigError, match="needs a unit"):
        q.parse_bandwidth(value)
