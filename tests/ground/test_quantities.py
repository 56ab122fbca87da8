from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetbench import quantities as q
from fleetbench.cluster import Link
from fleetbench.config import decode
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


@pytest.mark.parametrize("prefix", ["k", "M", "G", "T"])
def test_usual_spellings_of_a_bandwidth_are_read(prefix: str) -> None:
    """By hand: bits are ``bps`` and ``bit/s`` in any prefix's case, bytes are eight times as much, and ``gb/s`` may be either."""
    bits = 25 * 10 ** {"k": 3, "M": 6, "G": 9, "T": 12}[prefix]
    for own in (prefix.lower(), prefix.upper()):
        for unit in ("bps", "bit/s", "bits/s", "Bit/s", "bit/sec"):
            assert q.parse_bandwidth(f"25{own}{unit}") == q.parse_bandwidth(f"25 {own}{unit}") == bits
        for unit in ("Bps", "B/s", "byte/s", "Bytes/s", "B/sec"):
            assert q.parse_bandwidth(f"25 {own}{unit}") == 8 * bits
    for ambiguous in {f"25 {prefix.lower()}b/s", f"25 {prefix}BPS"} - {"25 kb/s"}:
        with pytest.raises(ConfigError, match="not a bandwidth"):
            q.parse_bandwidth(ambiguous)


def test_microseconds_are_read_as_they_are_printed() -> None:
    """Both characters that stand for micro."""
    assert q.parse_duration("3 \N{MICRO SIGN}s") == q.parse_duration("3\N{GREEK SMALL LETTER MU}s") == 3_000


def test_rates_and_steps() -> None:
    """Rates per step and numbers of steps are plain numbers with a unit."""
    assert q.parse_per_step("0.01 /step") == 0.01
    assert q.parse_steps("20 steps") == 20.0
    assert q.parse_steps("1 step") == 1.0


@given(COUNTS)
def test_durations_round_trip(value: int) -> None:
    """Any number of nanoseconds is written as text that reads back as itself."""
    assert q.parse_duration(q.format_duration(value)) == value


@given(COUNTS)
def test_sizes_round_trip(value: int) -> None:
    """Any number of bytes is written as text that reads back as itself."""
    assert q.parse_size(q.format_size(value)) == value


@given(st.integers(min_value=1, max_value=2**63 - 1))
def test_bandwidths_round_trip(value: int) -> None:
    """Any number of bits per second is written as text that reads back as itself."""
    assert q.parse_bandwidth(q.format_bandwidth(value)) == value


@given(st.floats(min_value=1e-30, max_value=1.0))
def test_rates_round_trip(value: float) -> None:
    """Any probability is written as text that reads back as itself."""
    assert q.parse_per_step(q.format_per_step(value)) == value


@given(st.floats(min_value=1.0, max_value=1e12))
def test_numbers_of_steps_round_trip(value: float) -> None:
    """Any number of steps is written as text that reads back as itself."""
    assert q.parse_steps(q.format_steps(value)) == value


@pytest.mark.parametrize(
    ("value", "text"),
    [(25 * 10**9, "25 Gbit/s"), (2_500_000_000, "2.5 Gbit/s"), (10**19, "10000000000 Gbit/s"), (1, "1 bit/s")],
)
def test_text_is_what_a_person_would_write(value: int, text: str) -> None:
    """The largest unit that needs no more than three decimals is chosen."""
    assert q.format_bandwidth(value) == text


def test_sizes_and_durations_are_written_in_decimal_units() -> None:
    """32 MiB is no round number of MB, and is written exactly all the same."""
    assert q.format_size(32 * 10**6) == "32 MB"
    assert q.format_size(3 * 10**9) == "3 GB"
    assert q.format_size(32 * 2**20) == "33554.432 kB"
    assert q.format_duration(2_500_000) == "2.5 ms"
    assert q.format_duration(0) == "0 ns"


@pytest.mark.parametrize("text", ["3 furlongs", "25 Gbit", "25", "Gbit/s", "", "fast", "1 2 Gbit/s", "25 gigabit/s", "1e999999999 Gbit/s"])
def test_a_wrong_unit_names_the_right_ones(text: str) -> None:
    """What is no bandwidth is refused with the text, an example and the units."""
    with pytest.raises(ConfigError) as error:
        q.parse_bandwidth(text)
    assert repr(text) in str(error.value)
    assert "HINT" in str(error.value)
    assert "Gbit/s" in str(error.value)


@pytest.mark.parametrize("text", ["-3 Gbit/s", "0 Gbit/s", "0.1 bit/s"])
def test_a_bandwidth_is_above_zero(text: str) -> None:
    """A link without bandwidth cannot carry anything."""
    with pytest.raises(ConfigError):
        decode({"bandwidth": text}, Link, "link")


@pytest.mark.parametrize("value", [25, 2.5, True, None, ["25 Gbit/s"]])
def test_a_bare_number_is_refused(value: object) -> None:
    """A quantity without a unit is refused, because its unit would be a guess."""
    with pytest.raises(ConfigError, match="needs a unit"):
        q.parse_bandwidth(value)


def test_what_64_bits_cannot_count_is_refused() -> None:
    """A duration beyond 292 years would overflow the simulator's clock."""
    assert q.parse_duration("9_223_372_036 s") > 0
    with pytest.raises(ConfigError, match="64 bits"):
        q.parse_duration("9_223_372_037 s")


@pytest.mark.parametrize(("number", "text"), [(0, "0 trainers"), (1, "1 trainer"), (2, "2 trainers"), (1200, "1,200 trainers")])
def test_one_thing_is_no_plural(number: int, text: str) -> None:
    """And thousands are told apart."""
    assert q.counted(number, "trainer") == text


@pytest.mark.parametrize(
    ("hours", "text"), [(0.25, "0.25 h"), (5.312, "5.31 h"), (47.9, "47.9 h"), (48, "2.0 days"), (36_000, "1,500.0 days")]
)
def test_a_training_takes_hours_or_days(hours: float, text: str) -> None:
    """Days from the second one on."""
    assert q.hours_or_days(hours) == text
