"""Progress on stderr: none where stderr is no terminal, or where this process is not rank 0."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

Steps = Callable[[int, int], None]
"""Told how many of how many are done."""
Stages = Callable[[str, int, int], None]
"""The same, with the stage's name first."""


def wanted() -> bool:
    """Whether somebody watches."""
    return sys.stderr.isatty() and os.environ.get("RANK", "0") == "0"


@contextmanager
def steps(description: str) -> Iterator[Steps | None]:
    """One bar; yields its callback, or none where nobody watches."""
    with stages() as advance:
        yield None if advance is None else lambda done, total: advance(description, done, total)


@contextmanager
def stages() -> Iterator[Stages | None]:
    """A bar a stage, in the order in which stages report; yields the callback, or none."""
    if not wanted():
        yield None
        return
    with _bars() as bars:
        known: dict[str, TaskID] = {}

        def advance(stage: str, done: int, total: int) -> None:
            if stage not in known:
                known[stage] = bars.add_task(stage, total=total)
            bars.update(known[stage], completed=done, total=total)

        yield advance


def _bars() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)
