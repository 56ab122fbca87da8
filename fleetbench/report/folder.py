"""Folder of a profile: the files that it holds."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from fleetbench.cluster import Cluster
from fleetbench.experiment import Experiment
from fleetbench.profile import Profile
from fleetbench.result import RunResult
from fleetbench.store import new_folder


def save_profile(experiment: Experiment, profile: Profile, runs: Mapping[str, RunResult], root: Path) -> Path:
    """Write a profile into a new folder below ``root``, and return the folder.

    ``experiment.toml`` is the profiled experiment, ``profile.toml`` has the measurements. The file named by
    ``Profile.experiment_file`` is the experiment with both, for ``fleetbench sim``.
    """
    with new_folder(experiment, "profile", root) as (folder, _):
        experiment.save(folder / "experiment.toml")
        profile.save(folder / "profile.toml")
        workload = dataclasses.replace(experiment.workload, profile="profile.toml")
        measured = experiment.replace(workload=workload, cluster=measured_cluster(experiment.cluster, profile))
        measured.save(folder / profile.experiment_file)
        steps_of(runs).to_parquet(folder / "steps.parquet", index=False)
    return folder


def measured_cluster(cluster: Cluster, profile: Profile) -> Cluster:
    """Return the cluster with the profile's link, and with its fitted stragglers before the declared ones."""
    changes: dict[str, Any] = {}
    if profile.communication is not None:
        measured = dataclasses.replace(profile.communication.link, payload=True)  # headers are already subtracted from a measured bandwidth
        changes["inter" if profile.communication.between == "nodes" else "intra"] = measured
    if profile.stragglers is not None:
        changes["stragglers"] = (*profile.stragglers.entries, *cluster.stragglers)
    return dataclasses.replace(cluster, **changes)


def steps_of(runs: Mapping[str, RunResult]) -> pd.DataFrame:
    """Return the steps of all legs, with the leg's name as the first column."""
    parts = [run.steps.assign(leg=name) for name, run in runs.items()]
    table = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame({"leg": []})
    return table[["leg", *(column for column in table.columns if column != "leg")]]
