"""Which files a user's script wrote while it was measured: it really runs, and saves what it saves."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fleetbench.cli.output import say
from fleetbench.quantities import counted

_MOST_ENTRIES = 100_000
"""Looked at; a folder with more is one of data."""
_SHOWN = 10
_OURS = (".git", "__pycache__", "workerlog.", "serverlog.")
"""How names begin that are of version control, Python or a launcher."""
_PROTECTION = (
    "let the script save nothing, or elsewhere, where FLEETBENCH_TUNING is in its environment, "
    "or start it in a folder of its own with --workdir DIR"
)


@contextmanager
def telling(folder: Path, out: Path) -> Iterator[None]:
    """Say first that the script writes below ``folder``, and after the ``with``, however it ends, which files it has written.

    ``out``: where this command's own results go.
    """
    say(f"note: the script really runs, over and over, and writes what it writes, in {folder}: {_PROTECTION}")
    begin_ns = time.time_ns()
    try:
        yield
    finally:
        found = sorted(_changed_since(begin_ns, folder, out.resolve()))
        if found:
            names = ", ".join(str(path.relative_to(folder)) for path in found[:_SHOWN])
            more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            say(f"note: {counted(len(found), 'file')} in {folder} {'was' if len(found) == 1 else 'were'} written meanwhile: {names}{more}")


def _changed_since(begin_ns: int, folder: Path, out: Path) -> Iterator[Path]:
    num = 0
    for at, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(_OURS) and Path(at, name) != out]
        for name in files:
            num += 1
            if num > _MOST_ENTRIES:
                return
            path = Path(at, name)
            if not name.startswith(_OURS) and path.is_file() and path.stat().st_mtime_ns >= begin_ns:
                yield path
