"""Assumptions: the experiment with its bandwidth, latency, stragglers or compute changed by a factor.

Measured times are changed in a copy of the profile, declared ones in the experiment. Everything else stays
the same, including random draws.
"""

import dataclasses
from pathlib import Path
from typing import Any, TypeVar

from fleetbench.config import Config
from fleetbench.experiment import Experiment
from fleetbench.profile import name_profile, profile_of
from fleetbench.stragglers import Jitter
from tuner.notes import Note, left_out

FIELDS = {
    "bandwidth": ("bandwidth", "flow_limit"),
    "latency": ("latency",),
    "stragglers": ("mean", "factor", "slowdown", "values"),
    "compute": ("forward", "backward", "ready", "update", "local_update", "resume"),
}
"""Names of the fields that each assumption scales, in links, stragglers, layers and layer tables."""
RATIOS = ("factor", "slowdown")
"""Fields of which only the excess over 1 is scaled: twice a slowdown of 1.5 is 2."""
FACTORS = (0.5, 2.0)
JITTER = Jitter()
"""Stragglers that are assumed if the experiment declares none, instead of scaled ones."""
Value = TypeVar("Value")


def assumptions(experiment: Experiment, folder: Path) -> tuple[dict[str, Experiment], list[Note]]:
    """Return the experiment with each assumption halved and doubled, and notes about those that are not varied.

    Experiments are returned by a name such as ``bandwidth x 0.5``. Changed copies of the profile are written
    to ``folder``.
    """
    found: dict[str, Experiment] = {}
    notes: list[Note] = []
    cluster = experiment.cluster
    for name in FIELDS:
        if name == "stragglers" and not (cluster.stragglers or any(override.slowdown > 1 for override in cluster.node_overrides)):
            found[f"jitter of mean {JITTER.mean:g}"] = experiment.replace(cluster=dataclasses.replace(cluster, stragglers=(JITTER,)))
            continue
        if name in ("bandwidth", "latency") and cluster.trainers == 1 and not cluster.servers:
            continue
        if name in ("bandwidth", "latency") and cluster.collective == "measured":
            notes.append(left_out(name, "is not varied", 'cluster.collective = "measured" takes what was measured'))
            continue
        if name == "latency" and cluster.collective.startswith("nccl-"):
            notes.append(left_out("latency of NCCL's own model", "is not varied", "the file does not declare it"))
        found |= {f"{name} x {factor:g}": changed(experiment, name, factor, folder) for factor in FACTORS}
    return found, notes


def changed(experiment: Experiment, name: str, factor: float, folder: Path) -> Experiment:
    """Return the experiment with the assumption ``name``, one of ``FIELDS``, scaled by a factor."""
    if name != "stragglers" and (profile := profile_of(experiment)) is not None:
        experiment = name_profile(experiment, scaled(profile, name, factor), folder / f"{name}_x{factor:.6g}.toml")
    if name == "compute":
        return experiment.replace(workload=scaled(experiment.workload, name, factor))
    return experiment.replace(cluster=scaled(experiment.cluster, name, factor))


def scaled(value: Value, name: str, factor: float) -> Value:
    """Return a config, or a tuple of them, with an assumption's fields scaled, in nested configs, too."""
    held: Any = value
    if isinstance(held, tuple):
        return tuple(scaled(item, name, factor) for item in held)  # type: ignore[return-value]  # a tuple like it
    if not isinstance(held, Config):
        return value
    new = {}
    for field in dataclasses.fields(held):  # type: ignore[arg-type]  # Config's subclasses are dataclasses
        old = getattr(held, field.name)
        new[field.name] = _times(field.name, old, factor) if field.name in FIELDS[name] else scaled(old, name, factor)
    return dataclasses.replace(held, **new)  # type: ignore[type-var,return-value]  # as above


def _times(name: str, value: Any, factor: float) -> Any:
    if value is None:
        return None
    if isinstance(value, tuple):
        return tuple(_times(name, item, factor) for item in value)
    if name in RATIOS:
        return 1 + (value - 1) * factor if value > 1 else value
    return max(round(value * factor), min(value, 1)) if isinstance(value, int) else value * factor
