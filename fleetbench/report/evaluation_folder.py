"""The folder of an evaluation: its vectors, what was evaluated, and with what."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fleetbench.digests import MANIFEST, digests_of, sealed_json, write_whole
from fleetbench.environment import RECORDED
from fleetbench.errors import EnvironmentLacks
from fleetbench.experiment import Experiment
from fleetbench.report.vector_comparison import VectorComparison
from fleetbench.store import commit, machine, new_run_id, versions
from fleetbench.vector_files import FILE
from real.evaluation.evaluation import Evaluated

_SCHEMA = 1


def save_evaluation(experiment: Experiment, root: Path, write: Callable[[Path], Evaluated]) -> tuple[Path, dict[str, Any]]:
    """Make a folder below ``root``, let ``write`` put the vectors into it, and describe them; the folder and its summary.

    The manifest comes last, and nothing stays of a folder that is not finished.
    """
    digest, run_id = experiment.digest(), new_run_id()
    folder = root / f"{experiment.name}-evaluate-{digest}-{run_id}"
    existed = root.exists()
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise EnvironmentLacks(f"cannot be made: {error.strerror}", str(folder), hint="choose another folder by --out") from None
    try:
        evaluated = write(folder / FILE)
        summary = _summary(experiment, digest, run_id, evaluated)
        experiment.save(folder / "experiment.toml")
        write_whole(folder / "summary.json", json.dumps(summary, indent=1))
        write_whole(folder / MANIFEST, sealed_json({**_manifest(run_id, evaluated), "files": digests_of(folder)}))
    except BaseException:  # a Ctrl-C too leaves no half of it
        shutil.rmtree(folder, ignore_errors=True)
        if not existed:
            with contextlib.suppress(OSError):  # somebody else has written there meanwhile
                root.rmdir()
        raise
    return folder, summary


def store_comparison(folder: Path, comparison: VectorComparison) -> None:
    """Put a comparison beside the vectors. Raises ``EnvironmentLacks`` where the disk refuses."""
    write_whole(folder / "comparison.json", json.dumps(comparison.to_dict(), indent=1))


def _summary(experiment: Experiment, digest: str, run_id: str, evaluated: Evaluated) -> dict[str, Any]:
    known = {
        "schema": _SCHEMA,
        "executor": "evaluate",
        "name": experiment.name,
        "experiment": digest,
        "run_id": run_id,
        "device": experiment.run.device,
        "seed": experiment.run.seed,
        "batch_size": experiment.workload.batch_size,
        "dtype": "float32",
    }
    measured = asdict(evaluated) | {"skipped": list(evaluated.skipped)}
    return known | measured | {"samples_per_s": evaluated.samples / evaluated.wall_s}


def _manifest(run_id: str, evaluated: Evaluated) -> dict[str, Any]:
    return {
        "schema": _SCHEMA,
        "kind": "evaluation",
        "run_id": run_id,
        "host": machine(),
        "versions": versions(),
        "commit": commit(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(RECORDED)},
        "checkpoint": {"path": evaluated.checkpoint, "sha256": evaluated.checkpoint_sha256},
        "host_s": evaluated.wall_s,
    }
