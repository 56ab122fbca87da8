"""Findings: what ``fleetbench doctor`` has seen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

GIB = 2**30


@dataclass(slots=True)
class Findings:
    """Facts by section, what could not be looked at, and what will get in the way."""

    sections: dict[str, dict[str, str]] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"sections": self.sections, "skipped": self.skipped, "warnings": self.warnings}
