"""Compute: where layer times come from when nothing runs: declared, measured, or estimated from a GPU's data sheet."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.hardware.gpus import GPUS, gpu_named
from fleetbench.profile import Profile, name_profile, profile_of
from fleetbench.workload import LAYERS

ESTIMATE = "fleetbench.estimate"
"""Where ``estimated_profile`` is."""
OUTSIDE = (
    "outside of this answer: sharded optimizers, tensor and pipeline parallelism; every trainer holds the whole model, its gradients and "
    "its optimizer's state"
)


def with_compute(experiment: Experiment, folder: Path) -> Experiment:
    """The experiment with its layer times known; estimated ones are written to ``folder``.

    Raises ``ConfigError`` where nothing tells them.
    """
    workload, gpu = experiment.workload, experiment.cluster.gpu
    if workload.model == LAYERS or workload.profile is not None:
        return experiment
    if gpu is None:
        hint = f"set cluster.gpu, one of {', '.join(GPUS)}, to estimate them; or name a workload.profile; or declare workload.layers"
        raise ConfigError("the model's layer times are not known, and --simulate-only measures nothing", "workload.profile", hint=hint)
    profile = _estimated(experiment)
    folder.mkdir(parents=True, exist_ok=True)
    return name_profile(experiment, profile, folder / "profile.toml")


def _estimated(experiment: Experiment) -> Profile:
    try:
        estimate = import_module(ESTIMATE)
    except ModuleNotFoundError as error:
        if error.name != ESTIMATE:
            raise
        hint = "take workload.profile from `fleetbench estimate` of a version that has it; or declare workload.layers"
        raise ConfigError("this version estimates no compute", "workload.profile", hint=hint) from None
    found: Profile = estimate.estimated_profile(experiment)
    return found


def says(experiment: Experiment) -> str:
    """Where the layer times of an experiment with known compute come from, in words."""
    profile = profile_of(experiment)
    if profile is None:
        return "declared compute"
    if profile.estimated is None:
        return "measured compute"
    return f"estimated compute (within {100 * profile.estimated:.0f} % in 90 % of cases)"


def fits(experiment: Experiment) -> bool | None:
    """Whether a trainer's memory suffices; none where its need or the GPU is not known."""
    profile, gpu = profile_of(experiment), experiment.cluster.gpu
    if profile is None or profile.memory is None or gpu is None:
        return None
    return profile.memory.peak <= gpu_named(gpu, "cluster.gpu").memory
