"""Store: folders of results below ``--out``.

A folder counts only once it has a manifest, which is written last and holds the digests of all files.
"""

import contextlib
import dataclasses
import functools
import glob
import json
import os
import platform
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import pandas as pd

from fleetbench.digests import MANIFEST, digests_of, read_manifest, reading, sealed_json, write_whole
from fleetbench.environment import RECORDED
from fleetbench.errors import ConfigError, EnvironmentLacks
from fleetbench.experiment import Experiment
from fleetbench.plan.build import Plan
from fleetbench.result import SCHEMA, STEPS_FILE, RunResult, Summary, no_steps, runs_table
from fleetbench.timeline import TIMELINE_FILE, write_timeline

_PACKAGES = ("fleetbench", "numpy", "optuna", "pandas", "pyarrow", "scikit-learn", "scipy", "simpy", "torch")
_TESTBED = "testbed.json"
_AGAIN = "run the experiment again"
_ELSEWHERE = "choose another folder by --out"


def new_run_id() -> str:
    """Return an identifier for a run: the time, and eight random digits."""
    return f"{datetime.now(UTC):%Y%m%d%H%M%S}-{secrets.token_hex(4)}"


@contextlib.contextmanager
def new_folder(experiment: Experiment, kind: str, root: Path, run_id: str | None = None) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Create a folder below ``root``, and yield it with its manifest, for the caller to fill and to extend.

    The manifest is written last. After an error the folder is removed. Raises ``EnvironmentLacks`` if it
    cannot be created.
    """
    run_id, existed = run_id or new_run_id(), root.exists()
    folder = root / f"{experiment.name}-{kind}-{experiment.digest()}-{run_id}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise EnvironmentLacks(f"cannot be made: {error.strerror}", str(folder), hint=_ELSEWHERE) from None
    here = {name: value for name, value in os.environ.items() if name.startswith(RECORDED)}
    manifest = {
        "schema": SCHEMA,
        "kind": kind,
        "run_id": run_id,
        "host": machine(),
        "versions": versions(),
        "commit": commit(),
        "environment": dict(sorted((here | experiment.run.environment).items())),  # the experiment's variables override the shell's
    }
    try:
        yield folder, manifest
        write_whole(folder / MANIFEST, sealed_json({**manifest, "files": digests_of(folder)}))
    except BaseException:  # a Ctrl-C, too, must not leave a partial folder
        shutil.rmtree(folder, ignore_errors=True)
        if not existed:
            with contextlib.suppress(OSError):  # another process has written there in the meantime
                root.rmdir()
        raise


def save_run(result: RunResult, root: str | Path) -> RunResult:
    """Write a run below ``root``, and return it with its path. Raises ``EnvironmentLacks`` if writing fails."""
    summary = result.summary
    try:
        with new_folder(result.experiment, summary.executor, Path(root), summary.run_id) as (path, manifest):
            result.experiment.save(path / "experiment.toml")
            (path / "plan.json").write_text(json.dumps(result.plan.to_dict(), indent=1), encoding="utf-8")
            if len(result.steps):
                result.steps.to_parquet(path / STEPS_FILE, index=False)
            write_timeline(path / TIMELINE_FILE, result.spans)
            (path / "summary.json").write_text(summary.to_json(), encoding="utf-8")
            if result.testbed is not None:
                (path / _TESTBED).write_text(json.dumps(result.testbed, indent=1), encoding="utf-8")
            manifest |= {
                "plan": result.plan.digest,
                "host_s": result.host_s,
                "peak_bytes": list(result.peak_bytes),
                "held_out": result.held_out,
            }
    except OSError as error:
        raise EnvironmentLacks(f"cannot be written: {error.strerror or error}", str(root), hint=_ELSEWHERE) from None
    return dataclasses.replace(result, path=path)


def load_run(path: str | Path) -> RunResult:
    """Read a complete run.

    Raises ``ConfigError`` for a folder that is no complete run, or has changed since it was written.
    """
    path = Path(path)
    if not (path / MANIFEST).is_file():
        hint = "runs are below ./runs, or where --out said"
        raise ConfigError("no complete run: there is no manifest.json, which is written last", str(path), hint=hint)
    if not (path / "summary.json").is_file():
        raise ConfigError("holds no run", str(path), hint="of a profile, name measured.toml or estimated.toml to `fleetbench sim`")
    manifest = read_manifest(path, _AGAIN)
    with reading(path, _AGAIN):
        if manifest["schema"] != SCHEMA:
            raise ConfigError("not a schema of this version", str(path), repr(manifest["schema"]), f"this version reads schema {SCHEMA}")
        summary = Summary.load(path / "summary.json")
        has_steps = STEPS_FILE not in {entry["what"] for entry in summary.skipped}
        return RunResult(
            experiment=Experiment.load(path / "experiment.toml"),
            summary=summary,
            steps=pd.read_parquet(path / STEPS_FILE) if has_steps else no_steps(),
            plan=Plan.from_dict(json.loads((path / "plan.json").read_text(encoding="utf-8"))),
            host_s=manifest["host_s"],
            testbed=json.loads((path / _TESTBED).read_text(encoding="utf-8")) if (path / _TESTBED).is_file() else None,
            peak_bytes=tuple(manifest.get("peak_bytes", ())),
            held_out=tuple((step, loss) for step, loss in manifest.get("held_out", ())),
            path=path,
        )


def load_runs(pattern: str) -> pd.DataFrame:
    """Return the summaries of all complete runs whose folders match, such as ``runs/*``; see ``runs_table``.

    Other folders are ignored. Raises ``ConfigError`` if no run matches, or if a run has changed since it was
    written.
    """
    found = [Path(name) for name in sorted(glob.glob(pattern))]  # noqa: PTH207  # an absolute pattern, too
    runs = {path.name: load_run(path) for path in found if (path / MANIFEST).is_file() and (path / "summary.json").is_file()}
    if not runs:
        raise ConfigError("no complete run matches", "load_runs", repr(pattern), "runs are below ./runs, or where --out said")
    return runs_table(runs)


def machine() -> dict[str, Any]:
    """Return the processor, cores and operating system of this host."""
    return {"processor": _processor(), "cores": os.cpu_count(), "system": f"{platform.system()} {platform.release()}"}


def _processor() -> str:
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
        return found[1] if found else platform.machine()
    return platform.processor() or platform.machine()


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that a result depends on."""
    found = {"python": sys.version.split()[0]}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


@functools.cache  # of the code that runs: what is checked out later is not loaded
def commit() -> str | None:
    """Return the commit of the checkout that this package runs from; None if it was installed."""
    here = Path(__file__).resolve().parent.parent
    if not (here / ".git").exists():
        return None
    try:
        found = subprocess.run(["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)  # noqa: S607  # git of the user's path
    except OSError:
        return None
    return found.stdout.strip() or None
