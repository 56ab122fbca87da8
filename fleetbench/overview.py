"""The "DistributedStrategy Overview" box that a run prints at its start."""

from collections.abc import Mapping
from typing import Any

from fleetbench.config import flat
from fleetbench.errors import printable
from fleetbench.strategy import DistributedStrategy


def overview(strategy: DistributedStrategy | None, environment: Mapping[str, Any] | None = None) -> str:
    """Return a box of text with the distributed environment and the strategy's changes from Fleet's defaults.

    ``strategy`` is None if only the script knows it.
    """
    rows = [(key, str(value)) for key, value in (environment or {}).items()]
    sections = [("Distributed environment", rows)] if rows else []
    sections.append(("DistributedStrategy Overview", _strategy_rows(strategy)))
    left = max(len(key) for _, lines in sections for key, _ in lines)
    right = max(len(value) for _, lines in sections for _, value in lines)
    width = max([left + right + 3, *(len(title) for title, _ in sections)])
    rule = "+" + "-" * (width + 2) + "+"
    lines = [rule]
    for title, entries in sections:
        lines += [f"| {title:^{width}} |", rule]
        lines += [f"| {key:<{left}}   {value:<{width - left - 3}} |" for key, value in entries]
        lines.append(rule)
    return "\n".join(printable(line, lines=False) for line in lines)


def _strategy_rows(strategy: DistributedStrategy | None) -> list[tuple[str, str]]:
    if strategy is None:
        return [("strategy", "what the script gives to fleet.init")]
    rows = [(key, str(value)) for key, value in flat(strategy.changes())] or [("all fields", "at Fleet's defaults")]
    if strategy.nccl_comm_num > 1 and strategy.sync_nccl_allreduce:
        rows.append(("note", "communicators do not overlap while sync_nccl_allreduce is on"))
    return rows
