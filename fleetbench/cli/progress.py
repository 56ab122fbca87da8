"""Progress on stderr, only from rank 0: bars on a terminal, and a line for each finished stage of a tuning."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fleetbench.cli.output import say

if TYPE_CHECKING:
    from rich.progress import TaskID

Steps = Callable[[int, int], None]
"""Callback that takes how many items are done, and how many there are."""
Stages = Callable[[str, int, int], None]
"""Callback that takes a stage's name, how many items are done, and how many there are."""


@contextmanager
def steps(description: str) -> Iterator[Steps | None]:
    """Show one bar, and yield the callback that advances it; see ``stages``."""
    with stages() as advance:
        yield None if advance is None else lambda done, total: advance(description, done, total)


@contextmanager
def stages() -> Iterator[Stages | None]:
    """Show one bar per stage, in the order in which stages report, and yield the callback that advances them.

    The callback is None if stderr is no terminal, and on other ranks than 0.
    """
    if os.environ.get("RANK", "0") != "0" or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        known: dict[str, TaskID] = {}

        def advance(stage: str, done: int, total: int) -> None:
            if stage not in known:
                known[stage] = bars.add_task(stage, total=total)
            bars.update(known[stage], completed=done, total=total)

        yield advance


@contextmanager
def numbered(*names: str) -> Iterator[Stages | None]:
    """Print a line for each finished stage, such as ``[2/4] search 83 strategies ..... 31 s``.

    A terminal also shows a bar. ``names`` are the first words of the stages, in order. Reports of an earlier or
    unknown stage count for the current one.
    """
    if os.environ.get("RANK", "0") != "0":
        yield None
        return
    under_way, title, begin_s = -1, "", 0.0

    def end() -> None:
        if under_way >= 0:
            say(f"{title + ' ':.<{_TITLE}} {time.monotonic() - begin_s:.0f} s")

    with stages() as bars:

        def advance(stage: str, done: int, total: int) -> None:
            nonlocal under_way, title, begin_s
            word = stage.partition(" ")[0].strip(":")
            number = names.index(word) if word in names else -1
            if number > under_way:
                end()
                under_way, begin_s = number, time.monotonic()
            if number == under_way:
                title = f"[{number + 1}/{len(names)}] {stage}"
            if bars is not None:
                bars(f"[{under_way + 1}/{len(names)}] {stage}", done, total)

        yield advance
        end()


_TITLE = 36
"""Width of a stage's title including its dots, in columns."""
