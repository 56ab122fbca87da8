"""Folder: where what a command has found is kept, complete or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fleetbench.digests import MANIFEST, digests_of, sealed_json, write_whole
from fleetbench.environment import RECORDED
from fleetbench.errors import EnvironmentLacks
from fleetbench.experiment import Experiment
from fleetbench.store import commit, machine, new_run_id, versions

SCHEMA = 1


@contextlib.contextmanager
def new_folder(experiment: Experiment, kind: str, root: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """A folder below ``root``, to be filled, and its manifest, to be added to, which is written last.

    After an error nothing of it is left. Raises ``EnvironmentLacks`` where it cannot be made.
    """
    run_id, existed = new_run_id(), root.exists()
    folder = root / f"{experiment.name}-{kind}-{experiment.digest()}-{run_id}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise EnvironmentLacks(f"cannot be made: {error.strerror}", str(folder), hint="choose another folder by --out") from None
    manifest = {
        "schema": SCHEMA,
        "kind": kind,
        "run_id": run_id,
        "host": machine(),
        "versions": versions(),
        "commit": commit(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(RECORDED)},
    }
    try:
        yield folder, manifest
        write_whole(folder / MANIFEST, sealed_json({**manifest, "files": digests_of(folder)}))
    except BaseException:  # a Ctrl-C too leaves no half of it
        shutil.rmtree(folder, ignore_errors=True)
        if not existed:
            with contextlib.suppress(OSError):  # somebody else has written there meanwhile
                root.rmdir()
        raise
