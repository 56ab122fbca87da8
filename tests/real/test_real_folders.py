"""Temporary folders, and who removes them."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

from fleetbench.config import encode
from real.processes.place import OWNER, Place, make_folder, sweep


def _folder(root: Path, name: str, **owner: object) -> Path:
    """A folder of this process; ``owner`` changes what it says of whose it is."""
    folder = root / f"fleetbench-{name}"
    folder.mkdir()
    (folder / OWNER).write_text(json.dumps(encode(dataclasses.replace(Place.here(), **owner))))  # type: ignore[arg-type]  # fields of any type
    return folder


def test_only_folders_of_ended_processes_are_swept(tmp_path: Path) -> None:
    """Not a living process's, another machine's or container's, one without an owner, a link, or another name's."""
    dead = {"pid": 2**22 + 1, "started": 1}
    gone = [_folder(tmp_path, "dead", **dead), _folder(tmp_path, "reused", started=1)]  # a number that another process has now
    stays = [_folder(tmp_path, "alive"), _folder(tmp_path, "far", boot="x", **dead), _folder(tmp_path, "container", namespace="x", **dead)]
    for name, text in (("bare", None), ("damaged", "{"), ("odd", "[]")):
        folder = tmp_path / f"fleetbench-{name}"
        folder.mkdir()
        if text is not None:
            (folder / OWNER).write_text(text)
        stays.append(folder)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    stays.append(_folder(elsewhere, "linked", **dead))
    (tmp_path / "fleetbench-link").symlink_to(stays[-1])
    other = tmp_path / "other-name"
    _folder(tmp_path, "x", **dead).rename(other)
    sweep(tmp_path)
    assert not any(folder.exists() for folder in gone)
    assert all(folder.exists() for folder in (*stays, other, tmp_path / "fleetbench-link"))


def test_the_next_start_removes_what_a_killed_process_left(tmp_path: Path) -> None:
    """Its folder is for its user alone while it lives."""
    program = "from real.processes.place import make_folder; import os; print(make_folder(), flush=True); os.kill(os.getpid(), 9)"
    killed = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    left = Path(killed.stdout.strip())
    assert left.is_dir()
    assert stat.S_IMODE(left.stat().st_mode) == 0o700
    folder = make_folder(tmp_path)
    assert list(tmp_path.iterdir()) == [folder]
