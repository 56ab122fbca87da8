"""The "DistributedStrategy Overview" box that a run prints at its start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fleetbench.strategy import DistributedStrategy


def overview(strategy: DistributedStrategy, environment: Mapping[str, Any] | None = None) -> str:
    """A box of text: the distributed environment, and what differs from Fleet's defaults."""
    rows = [(key, str(value)) for key, value in (environment or {}).items()]
    changed = list(_flat(strategy.changes()))
    sections = [("Distributed environment", rows)] if rows else []
    sections.append(("DistributedStrategy Overview", changed or [("all fields", "at Fleet's defaults")]))
    left = max(len(key) for _, lines in sections for key, _ in lines)
    right = max(len(value) for _, lines in sections for _, value in lines)
    width = max(left + right + 3, max(len(title) for title, _ in sections))
    rule = "+" + "-" * (width + 2) + "+"
    lines = [rule]
    for title, entries in sections:
        lines += [f"| {title:^{width}} |", rule]
        lines += [f"| {key:<{left}}   {value:<{width - left - 3}} |" for key, value in entries]
        lines.append(rule)
    return "\n".join(lines)


def _flat(data: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in data.items():
        if isinstance(value, Mapping):
            rows += _flat(value, f"{prefix}{key}.")
        else:
            rows.append((prefix + key, str(value)))
    return rows
