"""Formats of numbers in reports and answers: each with its unit and as many digits as a reader needs."""

from collections.abc import Mapping
from typing import Any

from fleetbench.config import flat

NONE = "–"  # noqa: RUF001  # an en dash stands for a missing number in a table
_MOST_LISTED = 4
"""Largest number of items of a setting that a line lists."""
_PREFIXES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_RATES = ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s"))


def milliseconds(value_s: float | None, *, sign: bool = False) -> str:
    """Format seconds as milliseconds, without the unit: ``12.3``, ``1.234``; with ``sign`` ``+12.3``."""
    return NONE if value_s is None else f"{value_s * 1e3:{'+' if sign and value_s > 0 else ''},.{_decimals(value_s * 1e3)}f}"


def seconds(value_s: float | None) -> str:
    """Format seconds with the unit that suits their size."""
    if value_s is None:
        return NONE
    scale, unit = next(((scale, unit) for scale, unit in _PREFIXES if abs(value_s) >= scale), _PREFIXES[1])
    return f"{value_s / scale:,.{_decimals(value_s / scale)}f} {unit}"


def percent(share: float | None, *, sign: bool = False) -> str:
    """Format a share as per cent: ``4.2 %``, with ``sign`` ``+4.2 %``."""
    return NONE if share is None else f"{100 * share:{'+' if sign else ''}.1f} %"


def size(nbytes: float | None) -> str:
    """Format bytes with a decimal prefix."""
    if nbytes is None:
        return NONE
    for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(nbytes) >= scale:
            return f"{nbytes / scale:.{_decimals(nbytes / scale)}f} {unit}"
    return f"{nbytes:.0f} B"


def rate(bits_per_s: float | None) -> str:
    """Format bits per second with a decimal prefix."""
    if bits_per_s is None:
        return NONE
    scale, unit = next((each for each in _RATES if bits_per_s >= each[0]), _RATES[-1])
    return f"{bits_per_s / scale:.4g} {unit}"


def ratio(value: float | None) -> str:
    """Format a factor: ``1.234x``."""
    return NONE if value is None else f"{value:.3f}x"


def number(value: Any) -> str:
    """Format any value of a summary: integers in full, other numbers to five digits."""
    if value is None:
        return NONE
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.5g}"


def changes(data: Mapping[str, Any]) -> str:
    """Describe a strategy's changes in one line."""
    return ", ".join(f"{key} = {_setting(value)}" for key, value in flat(data)) or "Fleet's defaults"


def _setting(value: Any) -> str:
    if isinstance(value, list | tuple) and len(value) > _MOST_LISTED:
        return f"[{value[0]}, ..., {value[-1]}] ({len(value)})"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _decimals(value: float) -> int:
    if value == 0:
        return 0
    return next((digits for limit, digits in ((100, 1), (1, 2)) if abs(value) >= limit), 3)
