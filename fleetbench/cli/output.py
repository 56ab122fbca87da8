"""Output to stdout (results) and to stderr (everything else).

Names given by a user or a file are printed as they are: they are never markup, and control characters are
escaped. A reader that closes the pipe early (``fleetbench sim | head -1``) ends the printing, not the
command.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fleetbench.errors import printable
from fleetbench.units import NONE

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

WIDTH = 120
"""Width of a table in columns if stdout is no terminal."""


def emit(text: str) -> None:
    """Print one result on stdout."""
    _print(printable(text))


def emit_table(table: RenderableType) -> None:
    """Print a rich table on stdout, in colour if it is a terminal."""
    from rich.console import Console

    class Plain(Console):
        """Console for titles, headings and cells that contain user-given names."""

        def render_str(self, text: str, **options: Any) -> Text:
            """Render a string of a table, with control characters escaped."""
            return super().render_str(printable(text, lines=False), **options)

    terminal, shown = sys.stdout.isatty(), io.StringIO()
    console = Plain(file=shown, force_terminal=terminal, width=None if terminal else WIDTH, markup=False, emoji=False)
    console.print(table)
    _print(shown.getvalue().rstrip("\n"))


def columns() -> int:
    """Return the width of the terminal in columns, or ``WIDTH`` if stdout is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH


def new_table(title: str, *columns: str, left: Collection[str] = (), show_header: bool = True) -> Table:
    """Return a table without rows. The first column and those in ``left`` hold text, the others numbers."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", caption_justify="left", show_header=show_header)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 or column in left else "right", overflow="fold")  # no name is cut
    return table


def table_of(title: str, rows: Sequence[Mapping[str, str | None]], left: Collection[str] = ()) -> Table:
    """Return a table of rows by column. A column without any value is left out."""
    names = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    table = new_table(title, *names, left=left)
    for row in rows:
        table.add_row(*(row[name] or NONE for name in names))
    return table


def echo(data: bytes) -> None:
    """Write a worker's output to stdout unchanged."""
    with _to_stdout():
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


def flush() -> None:
    """Flush stdout, even if its reader is gone."""
    with _to_stdout():
        sys.stdout.flush()


def say(text: str) -> None:
    """Print a message, a note or an error on stderr."""
    print(printable(text), file=sys.stderr, flush=True)  # noqa: T201  # this is the one place that prints messages


def _print(text: str) -> None:
    with _to_stdout():
        print(text, flush=True)  # noqa: T201  # this is the one place that prints results


@contextlib.contextmanager
def _to_stdout() -> Iterator[None]:
    """End the printing if the reader has left, or if stdout cannot take more, such as a file on a full disk."""
    try:
        yield
    except BrokenPipeError:
        _reader_left()
    except OSError:
        _reader_left()
        raise


def _reader_left() -> None:
    """Discard further output, so that the interpreter's own flush at exit succeeds."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
