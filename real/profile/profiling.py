"""Profiling: a profile for whoever needs layer times and has none, taken once and kept."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path

from fleetbench.config import encode
from fleetbench.experiment import Experiment
from fleetbench.profile import Profile, compute_key
from fleetbench.store import machine, versions
from fleetbench.strategy import DistributedStrategy
from fleetbench.workload import LAYERS
from real.emulated.support import with_compute
from real.profile.measuring import Progress, Wanted, measure_profile

_METHOD = 5
"""Of measuring: profiles that were stored by an older one are taken again."""


def ensure_profile(experiment: Experiment, root: Path, *, progress: Progress | None = None) -> Experiment:
    """The experiment with ``workload.profile`` filled in: the file it names, a stored one, or a new one.

    Profiles are stored below ``root / "profiles"`` under a hash of all that changes compute; one of a busy machine
    lies beside them, and serves once.
    A table of layers needs none, and is returned as it is.
    """
    if experiment.workload.model == LAYERS or experiment.workload.profile is not None:
        return experiment
    folder = root / "profiles"
    computing = with_compute(experiment)
    name = _name(computing)
    path = (folder / f"{name}.toml").resolve()
    if not path.exists():
        profile = take_profile(computing, progress=progress)
        folder.mkdir(parents=True, exist_ok=True)
        if profile.busy:
            path = path.with_name(f"{name}.busy.toml")
        profile.save(path)
    return experiment.replace(workload=dataclasses.replace(experiment.workload, profile=str(path)))


def take_profile(experiment: Experiment, *, progress: Progress | None = None) -> Profile:
    """Measure every thread count that ``tune`` may search and the strategy's own."""
    return measure_profile(experiment, Wanted(thread_counts=searched_threads(experiment)), progress=progress).profile


def searched_threads(experiment: Experiment) -> tuple[int, ...]:
    """The strategy's own, and those of ``tune.thread_num`` for which there are cores; synchronised batch norm allows one alone."""
    strategy = experiment.strategy
    cores = (os.cpu_count() or 1) // experiment.cluster.trainers_per_node
    searched = () if strategy.sync_batch_norm else experiment.tune.thread_num
    return tuple(sorted({strategy.thread_num, *(number for number in searched if number <= cores)}))


def doubled_threads(strategy: DistributedStrategy, cores: int) -> tuple[int, ...]:
    """1, 2, 4, ... as far as ``cores`` go, and the strategy's own; synchronised batch norm allows one count alone."""
    own = strategy.thread_num
    if strategy.sync_batch_norm:
        return (own,)
    return tuple(sorted({own, *(2**power for power in range(max(1, cores).bit_length()))}))


def _name(experiment: Experiment) -> str:
    keys = [compute_key(experiment, experiment.strategy.replace(thread_num=number)) for number in searched_threads(experiment)]
    what = {"method": _METHOD, "tables": keys, "backend": experiment.run.backend, "machine": machine(), "torch": versions()["torch"]}
    if experiment.run.launcher == "testbed":  # whose links are the experiment's, and everybody else's the machine's
        what["links"] = encode(dataclasses.replace(experiment.cluster, stragglers=()))
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]
