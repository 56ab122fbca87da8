"""What goes to stdout (results) and to stderr (all else).

A reader that leaves early (``fleetbench sim | head -1``) ends the printing, not the command.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

WIDTH = 120
"""Columns of a table where stdout is no terminal."""


def emit(text: str) -> None:
    """Print one result on stdout."""
    try:
        print(text, flush=True)  # noqa: T201  # this is the one place that prints results
    except BrokenPipeError:
        _reader_left()


def emit_table(table: RenderableType) -> None:
    """Print a rich table on stdout, with colours where it is a terminal."""
    from rich.console import Console

    terminal = sys.stdout.isatty()
    console = Console(file=io.StringIO(), force_terminal=terminal, width=None if terminal else WIDTH)
    console.print(table)
    emit(console.file.getvalue().rstrip("\n"))  # type: ignore[attr-defined]  # the StringIO given above


def echo(data: bytes) -> None:
    """Pass a worker's output through to stdout as it comes."""
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        _reader_left()


def flush() -> None:
    """Flush stdout, whether or not somebody still reads it."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _reader_left()


def say(text: str) -> None:
    """Print a message, a note or an error on stderr."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201  # this is the one place that prints messages


def _reader_left() -> None:
    """Send what is still printed to nowhere, so that the interpreter's own flush at exit succeeds."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
