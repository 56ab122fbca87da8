"""What the folder of a profile holds."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import tomli_w

from fleetbench.cluster import Cluster
from fleetbench.config import encode
from fleetbench.experiment import Experiment
from fleetbench.profile import Profile
from fleetbench.result import RunResult
from fleetbench.store import new_folder


def save_profile(experiment: Experiment, profile: Profile, runs: Mapping[str, RunResult], root: Path) -> Path:
    """Write a profile below ``root``; its folder.

    ``experiment.toml`` is what was profiled, ``profile.toml`` and ``cluster.toml`` what was measured, and the file that
    ``Profile.experiment_file`` names is the experiment with both, for `fleetbench sim`.
    """
    with new_folder(experiment, "profile", root) as (folder, _):
        experiment.save(folder / "experiment.toml")
        profile.save(folder / "profile.toml")
        workload = dataclasses.replace(experiment.workload, profile="profile.toml")
        measured = experiment.replace(workload=workload, cluster=measured_cluster(experiment.cluster, profile))
        measured.save(folder / profile.experiment_file)
        (folder / "cluster.toml").write_text(tomli_w.dumps({"cluster": encode(measured.cluster)}), encoding="utf-8")
        steps_of(runs).to_parquet(folder / "steps.parquet", index=False)
    return folder


def measured_cluster(cluster: Cluster, profile: Profile) -> Cluster:
    """The cluster as `sim` is to believe it: with the measured link, and measured stragglers before declared ones."""
    changes: dict[str, Any] = {}
    if profile.communication is not None:
        measured = dataclasses.replace(profile.communication.link, payload=True)  # headers are not taken off what was measured
        changes["inter" if profile.communication.between == "nodes" else "intra"] = measured
    if profile.stragglers is not None:
        changes["stragglers"] = (*profile.stragglers.entries, *cluster.stragglers)
    return dataclasses.replace(cluster, **changes)


def steps_of(runs: Mapping[str, RunResult]) -> pd.DataFrame:
    """The steps of every leg, with its name in front."""
    parts = [run.steps.assign(leg=name) for name, run in runs.items()]
    table = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame({"leg": []})
    return table[["leg", *(column for column in table.columns if column != "leg")]]
