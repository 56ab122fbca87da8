"""Compute: where layer times come from when nothing runs, and whether they fit into memory."""

from __future__ import annotations

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.hardware.gpus import gpu_named
from fleetbench.plan.combination import Combination
from fleetbench.profile import profile_of
from fleetbench.workload import LAYERS

OUTSIDE = (
    "outside of this answer: sharded optimizers, tensor and pipeline parallelism; every trainer holds the whole model, its gradients and "
    "its optimizer's state"
)


def check_compute(experiment: Experiment) -> None:
    """Raise ``ConfigError`` where the experiment does not tell its layer times: nothing is measured here."""
    workload = experiment.workload
    if workload.model != LAYERS and workload.profile is None:
        hint = "name a workload.profile, such as `fleetbench profile` writes on one such machine; or declare workload.layers"
        raise ConfigError("the model's layer times are not known, and --simulate-only measures nothing", "workload.profile", hint=hint)


def says(experiment: Experiment) -> str:
    """Where the layer times of an experiment with known compute come from, in words."""
    profile = profile_of(experiment)
    if profile is None:
        return "declared compute"
    if profile.estimated is None:
        return "measured compute"
    return f"estimated compute (within {100 * profile.estimated:.0f} % in 90 % of cases)"


def fits(experiment: Experiment) -> bool | None:
    """Whether a trainer's memory suffices, with the copies that local steps keep; none where its need or the GPU is not known."""
    profile, gpu = profile_of(experiment), experiment.cluster.gpu
    if profile is None or profile.memory is None or gpu is None:
        return None
    needed = profile.memory.peak + Combination.of(experiment.strategy).num_copies * profile.memory.parameters
    return needed <= gpu_named(gpu, "cluster.gpu").memory


def samples_and_tokens(experiment: Experiment, step_s: float) -> tuple[float, float | None]:
    """Of all trainers together, a second; tokens where ``workload.data_options`` says how many a sample has."""
    samples_per_s = experiment.cluster.trainers * experiment.workload.batch_size / step_s
    length = experiment.workload.data_options.get("length")
    return samples_per_s, samples_per_s * length if isinstance(length, int) else None
