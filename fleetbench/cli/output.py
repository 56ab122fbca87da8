"""What goes to stdout (results) and to stderr (all else).

Names that a user or a file gives are printed as they are: nothing in them is markup, and control characters are spelled out.
A reader that leaves early (``fleetbench sim | head -1``) ends the printing, not the command.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from fleetbench.errors import EnvironmentLacks, printable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

WIDTH = 120
"""Columns of a table where stdout is no terminal."""


def emit(text: str) -> None:
    """Print one result on stdout."""
    _print(printable(text))


def emit_table(table: RenderableType) -> None:
    """Print a rich table on stdout, with colours where it is a terminal."""
    from rich.console import Console

    class Plain(Console):
        """Titles, headings and cells hold names of others."""

        def render_str(self, text: str, **options: Any) -> Text:
            """Render any string of a table."""
            return super().render_str(printable(text, lines=False), **options)

    terminal, shown = sys.stdout.isatty(), io.StringIO()
    console = Plain(file=shown, force_terminal=terminal, width=None if terminal else WIDTH, markup=False, emoji=False)
    console.print(table)
    _print(shown.getvalue().rstrip("\n"))


def columns() -> int:
    """Width of the terminal, in columns; where stdout is no terminal, that of a table."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH


def new_table(title: str, *columns: str, left: Collection[str] = (), show_header: bool = True) -> Table:
    """A table without rows: the first column and those of ``left`` hold text, the others numbers."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", caption_justify="left", show_header=show_header)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 or column in left else "right", overflow="fold")  # no name is cut
    return table


def echo(data: bytes) -> None:
    """Pass a worker's output through to stdout as it comes."""
    with _to_stdout():
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


def flush() -> None:
    """Flush stdout, whether or not somebody still reads it."""
    with _to_stdout():
        sys.stdout.flush()


def say(text: str) -> None:
    """Print a message, a note or an error on stderr."""
    print(printable(text), file=sys.stderr, flush=True)  # noqa: T201  # this is the one place that prints messages


def replace_unprintable() -> None:
    """From now on print a question mark for each character that stdout's encoding lacks."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        is_utf8 = sys.stdout.encoding.lower().replace("-", "") == "utf8"
        sys.stdout.reconfigure(errors="surrogateescape" if is_utf8 else "replace")


def _print(text: str) -> None:
    with _to_stdout():
        print(text, flush=True)  # noqa: T201  # this is the one place that prints results


@contextlib.contextmanager
def _to_stdout() -> Iterator[None]:
    """Send what is still printed to nowhere where the reader has left; raise ``EnvironmentLacks`` where stdout takes nothing more."""
    try:
        yield
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the interpreter's own flush at exit succeeds
        if not isinstance(error, BrokenPipeError):
            hint = "what was stored is in the run's folder"
            raise EnvironmentLacks(f"cannot be written: {error.strerror}", "stdout", hint=hint) from None
