"""Compute: where layer times come from when nothing runs, and whether they fit into memory."""

from __future__ import annotations

from pathlib import Path

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


def with_compute(experiment: Experiment, out: Path) -> Experiment:
    """The experiment with its layer times known: as declared, from its profile, or estimated for its ``cluster.gpu``, below ``out``.

    Raises ``ConfigError`` where nothing tells them, for nothing is measured here.
    """
    workload, gpu = experiment.workload, experiment.cluster.gpu
    if workload.model == LAYERS or workload.profile is not None:
        return experiment
    if gpu is not None:
        from real.estimate.step import estimated

        return estimated(experiment, gpu, out)
    hint = "estimate them: fleetbench estimate EXPERIMENT.toml --gpu H100; name a cluster.gpu; or a workload.profile that was measured"
    raise ConfigError("the model's layer times are not known, and --simulate-only measures nothing", "workload.profile", hint=hint)


def says(experiment: Experiment) -> str:
    """Where the layer times of an experiment with known compute come from, in words."""
    profile = profile_of(experiment)
    return "declared compute" if profile is None else profile.compute


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
