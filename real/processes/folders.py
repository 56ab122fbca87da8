"""Temporary folders that say whose they are: the next start removes what a killed or failed process has left."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fleetbench.config import decode, encode
from fleetbench.errors import ConfigError
from real.processes.place import Place

PREFIX = "fleetbench-"
OWNER = "owner.json"
"""File of such a folder that names the process that made it."""


def make_folder(within: Path | None = None) -> Path:
    """Make a folder that only this user may enter, below ``within`` or the temporary folder, and sweep there before."""
    root = Path(tempfile.gettempdir()) if within is None else within
    sweep(root)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
    (folder / OWNER).write_text(json.dumps(encode(Place.here())), encoding="utf-8")
    return folder


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that is removed on the way out."""
    folder = make_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sweep(root: Path) -> None:
    """Remove this user's folders below ``root`` whose processes have ended, but those of other machines, which cannot be seen."""
    here = Place.here()
    for path in root.glob(f"{PREFIX}*/{OWNER}"):
        owner = _owner(path)
        if owner is not None and owner.shares_numbers(here) and not owner.lives():
            shutil.rmtree(path.parent, ignore_errors=True)


def _owner(path: Path) -> Place | None:
    """Who made a folder; none where it, or the file that says so, is a link or not this user's, or cannot be read."""
    try:
        if any(found.is_symlink() or found.lstat().st_uid != os.geteuid() for found in (path.parent, path)):
            return None
        return decode(json.loads(path.read_text(encoding="utf-8")), Place, str(path))
    except (OSError, ValueError, ConfigError):
        return None
