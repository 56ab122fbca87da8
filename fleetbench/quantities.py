"""Quantities with units: a user writes ``"25 Gbit/s"``, and the code holds an integer.

A quantity is an ``int`` or ``float`` with its own type name (a ``NewType``). Only this module parses and
formats its text. Bits and bytes are distinct (``b``/``bit`` against ``B``), MB is 10^6 and MiB is 2^20.
"""

import re
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any, NewType

from fleetbench.errors import ConfigError

Nanoseconds = NewType("Nanoseconds", int)
Bytes = NewType("Bytes", int)
BitsPerSecond = NewType("BitsPerSecond", int)
PerStep = NewType("PerStep", float)
Steps = NewType("Steps", float)

MIB = 2**20
LARGEST = 2**63 - 1
"""Largest value of a 64-bit counter of nanoseconds, bytes or bits."""

_DURATIONS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1, "min": 60 * 10**9, "h": 3600 * 10**9}
_DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_SIZES = {f"{prefix}B": scale for prefix, scale in (_DECIMAL | _BINARY).items()}
_BANDWIDTHS = {f"{prefix}{bit}": scale for bit in ("bit/s", "b/s", "bps") for prefix, scale in _DECIMAL.items()} | {
    f"{size}/s": 8 * scale for size, scale in _SIZES.items()
}
_PER_STEP = {"/step": 1}
_STEPS = {"steps": 1, "step": 1}

_QUANTITY = re.compile(r"\s*([+-]?(?:\d[\d_]*)(?:\.\d+)?(?:[eE][+-]?\d{1,2})?)\s*(\S+)\s*", re.ASCII)


def _parse(text: object, units: dict[str, int], kind: str, example: str, number: Callable[[Fraction], float] = round) -> Any:
    if not isinstance(text, str):
        raise ConfigError(f"a {kind} needs a unit", value=repr(text), hint=f'write it as text, for example "{example}"')
    match = _QUANTITY.fullmatch(text)
    unit = "" if match is None else match[2]
    if match is None or unit not in units:
        known = " ".join(units)
        raise ConfigError(f"not a {kind}", value=repr(text), hint=f'for example "{example}"; units: {known}')
    value = Fraction(match[1].replace("_", "")) * units[unit]
    if not 0 <= value <= LARGEST:
        raise ConfigError(f"a {kind} cannot be negative, or more than 64 bits count", value=repr(text), hint=f'for example "{example}"')
    return number(value)


def _format(value: int, units: dict[str, int], preferred: tuple[str, ...]) -> str:
    """Format ``value`` exactly, in the first preferred unit that needs at most three decimals."""
    for unit in preferred:
        thousandths, rest = divmod(value * 1000, units[unit])
        if thousandths >= 1000 and rest == 0:
            whole, decimals = divmod(thousandths, 1000)
            return f"{whole}.{decimals:03d}".rstrip("0").rstrip(".") + f" {unit}"
    return f"{value} {preferred[-1]}"


format_duration = partial(_format, units=_DURATIONS, preferred=("s", "ms", "us", "ns"))
"""Format integer nanoseconds as text that parses back to the same integer."""
format_size = partial(_format, units=_SIZES, preferred=("GB", "MB", "kB", "B"))
"""Format bytes as text that parses back to the same integer."""
format_bandwidth = partial(_format, units=_BANDWIDTHS, preferred=("Gbit/s", "Mbit/s", "kbit/s", "bit/s"))
"""Format bits per second as text that parses back to the same integer."""


parse_duration = partial(_parse, units=_DURATIONS, kind="duration", example="2.5 ms")
"""Parse ``"2.5 ms"`` into integer nanoseconds."""
parse_size = partial(_parse, units=_SIZES, kind="size", example="32 MB")
"""Parse ``"32 MB"`` into bytes."""
parse_bandwidth = partial(_parse, units=_BANDWIDTHS, kind="bandwidth", example="25 Gbit/s")
"""Parse ``"25 Gbit/s"`` or ``"300 GB/s"`` into bits per second."""
parse_per_step = partial(_parse, units=_PER_STEP, kind="rate", example="0.01 /step", number=float)
"""Parse ``"0.01 /step"`` into a probability per step."""
parse_steps = partial(_parse, units=_STEPS, kind="number of steps", example="20 steps", number=float)
"""Parse ``"20 steps"`` into a (mean) number of steps."""


def format_per_step(value: float) -> str:
    """Format a probability per step."""
    return f"{value!r} /step"


def format_steps(value: float) -> str:
    """Format a number of steps."""
    return f"{value:.12g} steps" if float(f"{value:.12g}") == value else f"{value!r} steps"


def counted(number: int, noun: str) -> str:
    """Format a count with its noun: ``1 trainer``, ``1,200 trainers``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def hours_or_days(hours: float) -> str:
    """Format the length of a training run: ``13.2 h``, and from two days on ``2.5 days``."""
    return f"{hours:.3g} h" if hours < 48 else f"{hours / 24:,.1f} days"
