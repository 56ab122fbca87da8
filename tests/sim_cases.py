"""Experiments built in code: tables of layers whose times and sizes a test can add up by hand."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from fleetbench.cluster import Cluster, Link
from fleetbench.experiment import Experiment, Run
from fleetbench.plan.layers import Gradient, Layer, LayerTable
from fleetbench.profile import Profile, compute_key, name_profile
from fleetbench.quantities import BitsPerSecond, Nanoseconds
from fleetbench.result import RunResult
from fleetbench.strategy import DistributedStrategy
from fleetbench.workload import LayerSpec, Workload


def link(gbit_per_s: float, latency_ns: int = 0) -> Link:
    """A link by its payload; 8 Gbit/s carry one byte a nanosecond."""
    return Link(bandwidth=BitsPerSecond(round(gbit_per_s * 10**9)), latency=Nanoseconds(latency_ns), payload=True)


def layered(layers: Sequence[tuple[int, int, int]], **options: Any) -> Experiment:
    """Layers of ``(params, forward_ns, backward_ns)``; see ``assemble`` for the options."""
    specs = tuple(
        LayerSpec(name=f"layer{index}", params=params, forward=Nanoseconds(forward), backward=Nanoseconds(backward))
        for index, (params, forward, backward) in enumerate(layers)
    )
    return assemble({"model": "layers", "layers": specs}, **options)


def profiled(
    layers: Sequence[tuple[Sequence[int], Sequence[int], int, int]], table: dict[str, Any], **options: Any
) -> tuple[Experiment, Profile]:
    """A model with a profile: layers of ``(numels, readies_ns, forward_ns, backward_ns)`` and the rest of its table."""
    experiment = assemble({"model": "mlp"}, **options)
    measured = tuple(
        Layer(
            name=f"layer{index}",
            gradients=tuple(
                Gradient(name=f"layer{index}.p{number}", numel=numel, ready=Nanoseconds(ready))
                for number, (numel, ready) in enumerate(zip(numels, readies, strict=True))
            ),
            forward=Nanoseconds(forward),
            backward=Nanoseconds(backward),
        )
        for index, (numels, readies, forward, backward) in enumerate(layers)
    )
    tables = (LayerTable(key=compute_key(experiment), layers=measured, **table),)
    return experiment, Profile(machine="by hand", created="2026-01-01", tables=tables)


def with_profile(experiment: Experiment, profile: Profile) -> Experiment:
    """The experiment that names a profile: a file that is there as long as this process."""
    path = Path(_folder().name) / f"{sha256(repr(profile).encode()).hexdigest()}.toml"
    return name_profile(experiment, profile, path)


@functools.cache
def _folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory()


def assemble(
    workload: dict[str, Any],
    *,
    also: dict[str, Any] | None = None,
    steps: int = 1,
    warmup_steps: int = 0,
    seed: int = 0,
    strategy: dict[str, Any] | None = None,
    nodes: int = 2,
    backend: Literal["gloo", "nccl"] = "gloo",
    **cluster: Any,
) -> Experiment:
    """Two nodes of one trainer, every gradient in a bucket of its own, one step and no warm-up where not said otherwise.

    ``also`` holds more of the workload.
    """
    return Experiment(
        name="by-hand",
        workload=Workload(**workload, **(also or {}), steps=steps),
        cluster=Cluster(nodes=nodes, **cluster),
        strategy=DistributedStrategy.from_dict({"fuse_all_reduce_ops": False} | (strategy or {})),
        run=Run(seed=seed, warmup_steps=warmup_steps, backend=backend, device="cuda" if backend == "nccl" else "cpu"),
    )


def carried_ns(result: RunResult, rank: int = 0) -> dict[str, tuple[int, int]]:
    """Start and end of every collective of a rank, by its name; names must differ."""
    spans = [span for span in result.spans if span.rank == rank and span.stream.startswith("communication")]
    assert len({span.name for span in spans}) == len(spans)
    return {span.name: (span.start_ns, span.start_ns + span.duration_ns) for span in spans}


def in_ns(result: RunResult, column: str) -> list[int | None]:
    """A column of a run's steps in nanoseconds, in order of rank and step; none where it is null."""
    values = result.steps[column]
    return [None if null else round(value * 1e9) for value, null in zip(values, values.isna(), strict=True)]
