"""Assumptions: the experiment with its bandwidth, latency, stragglers or compute changed by a factor.

What a profile measured is changed in a copy of it, and what the file declares in the file; all else, draws among it, stays.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from fleetbench.cluster import Cluster, Link
from fleetbench.experiment import Experiment
from fleetbench.plan.layers import Layer, LayerTable
from fleetbench.profile import Profile, name_profile, profile_of
from fleetbench.quantities import BitsPerSecond, Nanoseconds
from fleetbench.stragglers import Empirical, Episode, Jitter, NodeShock, SlowNode, SlowRank, Straggler, Trace

NAMES = ("bandwidth", "latency", "stragglers", "compute")
FACTORS = (0.5, 2.0)
JITTER = Jitter()
"""What is assumed in turn where no stragglers are declared."""
Known = TypeVar("Known", Link, Link | None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """One changed assumption."""

    name: str
    """Such as ``bandwidth x 0.5``."""
    experiment: Experiment


def assumptions(experiment: Experiment, folder: Path) -> tuple[list[Assumed], list[str]]:
    """Each assumption halved and doubled, and what cannot be. Copies of the profile are written to ``folder``."""
    found: list[Assumed] = []
    notes: list[str] = []
    for name in NAMES:
        if name == "stragglers" and not _has_stragglers(experiment.cluster):
            cluster = dataclasses.replace(experiment.cluster, stragglers=(JITTER,))
            found.append(Assumed(name=f"jitter of mean {JITTER.mean:g}", experiment=experiment.replace(cluster=cluster)))
            continue
        if name in ("bandwidth", "latency") and experiment.cluster.trainers == 1 and not experiment.cluster.servers:
            continue
        if name in ("bandwidth", "latency") and experiment.cluster.collective == "measured":
            notes.append(f'{name} is not varied: cluster.collective = "measured" takes what was measured')
            continue
        if name == "stragglers" and any(isinstance(entry, Trace) for entry in experiment.cluster.stragglers):
            notes.append("recorded traces of stragglers are not scaled")
        found += [Assumed(name=f"{name} x {factor:g}", experiment=changed(experiment, name, factor, folder)) for factor in FACTORS]
    return found, notes


def changed(experiment: Experiment, name: str, factor: float, folder: Path) -> Experiment:
    """The experiment with one of ``NAMES`` changed by a factor."""
    if name == "stragglers":
        return experiment.replace(cluster=_with_stragglers(experiment.cluster, factor))
    profile = profile_of(experiment)
    if profile is not None:
        profile = _with_tables(profile, factor) if name == "compute" else _with_communication(profile, name, factor)
        experiment = name_profile(experiment, profile, folder / f"{name}_x{factor:.6g}.toml")
    if name == "compute":
        return _with_layers(experiment, factor)
    return experiment.replace(cluster=_with_links(experiment.cluster, name, factor))


def _has_stragglers(cluster: Cluster) -> bool:
    return bool(cluster.stragglers) or any(override.slowdown > 1 for override in cluster.node_overrides)


def _with_stragglers(cluster: Cluster, factor: float) -> Cluster:
    overrides = tuple(
        dataclasses.replace(own, slowdown=1 + (own.slowdown - 1) * factor) if own.slowdown > 1 else own for own in cluster.node_overrides
    )
    return dataclasses.replace(cluster, stragglers=tuple(_slower(entry, factor) for entry in cluster.stragglers), node_overrides=overrides)


def _slower(entry: Straggler, factor: float) -> Straggler:
    """The entry with ``factor`` times its X."""
    if isinstance(entry, Jitter | NodeShock):
        return dataclasses.replace(entry, mean=entry.mean * factor)
    if isinstance(entry, SlowRank | SlowNode | Episode):
        return dataclasses.replace(entry, factor=1 + (entry.factor - 1) * factor)
    if isinstance(entry, Empirical):
        return dataclasses.replace(entry, values=tuple(value * factor for value in entry.values))
    return entry


def _with_links(cluster: Cluster, name: str, factor: float) -> Cluster:
    overrides = tuple(
        dataclasses.replace(own, intra=_link(own.intra, name, factor), inter=_link(own.inter, name, factor))
        for own in cluster.node_overrides
    )
    return dataclasses.replace(
        cluster, intra=_link(cluster.intra, name, factor), inter=_link(cluster.inter, name, factor), node_overrides=overrides
    )


def _link(link: Known, name: str, factor: float) -> Known:
    if link is None:
        return link
    if name == "latency":
        return dataclasses.replace(link, latency=_scaled(link.latency, factor))
    limit = None if link.flow_limit is None else BitsPerSecond(max(1, round(link.flow_limit * factor)))
    return dataclasses.replace(link, bandwidth=BitsPerSecond(max(1, round(link.bandwidth * factor))), flow_limit=limit)


def _with_communication(profile: Profile, name: str, factor: float) -> Profile:
    known = profile.communication
    if known is None:
        return profile
    in_flight = tuple(_link(link, name, factor) for link in known.in_flight)
    return dataclasses.replace(profile, communication=dataclasses.replace(known, link=_link(known.link, name, factor), in_flight=in_flight))


def _with_layers(experiment: Experiment, factor: float) -> Experiment:
    layers = tuple(
        dataclasses.replace(spec, forward=_scaled(spec.forward, factor), backward=_scaled(spec.backward, factor))
        for spec in experiment.workload.layers
    )
    return experiment.replace(workload=dataclasses.replace(experiment.workload, layers=layers))


def _with_tables(profile: Profile, factor: float) -> Profile:
    return dataclasses.replace(profile, tables=tuple(_table(table, factor) for table in profile.tables))


def _table(table: LayerTable, factor: float) -> LayerTable:
    def layer(own: Layer) -> Layer:
        gradients = tuple(dataclasses.replace(gradient, ready=_scaled(gradient.ready, factor)) for gradient in own.gradients)
        forward, backward = _scaled(own.forward, factor), _scaled(own.backward, factor)
        return dataclasses.replace(own, gradients=gradients, forward=forward, backward=backward)

    local = None if table.local_update is None else _scaled(table.local_update, factor)
    return dataclasses.replace(table, layers=tuple(map(layer, table.layers)), update=_scaled(table.update, factor), local_update=local)


def _scaled(duration: Nanoseconds, factor: float) -> Nanoseconds:
    return Nanoseconds(round(duration * factor))
